"""The port to a linearizable, versioned, ordered key-value store.

Semantics every adapter keeps, proved by one conformance suite:

- A store may spread its keys over shards. The keys of one partition, those with the same `partition_prefix`, share a
  shard; any other key stands alone.
- Every successful put gives its key a version that is higher than all before it and is not reused after a delete. No
  other key of the same partition ever gets that version; a key elsewhere may.
- Keys are compared as UTF-8 bytes. Portable ranges stay within one directory with zero-padded numbers, or below one
  prefix ending in "/".
- A write that returned is durable, and every conditional write after it, of any process, meets it. So does every read,
  except that a server that lost its charge while it was paused may answer old reads for a moment after it wakes. A
  decision that rests on *not* having seen something must confirm its reads first (`begin_reads`).
- A write that raised `StoreUnavailable` did not happen; one that raised `OutcomeUnknown` may have happened, or may yet.
- An ephemeral key belongs to the session of the store object that put it. It is gone when that store is closed, or the
  session timeout after its process died.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from llog.errors import InvalidArgument, LlogError, VersionMismatch

T = TypeVar("T")

ABSENT: Final = -1
"""Expected version of a key that must not exist."""

KEY_BYTES_MAX: Final = 2048
VALUE_BYTES_MAX: Final = 4 << 20

_PARTITION: Final = re.compile(r".*?/partitions/[0-9]+/")


class Entry(NamedTuple):
    key: str
    value: bytes
    version: int


class Put(msgspec.Struct, frozen=True, gc=False):
    """A conditional put: `expected` is a version, ABSENT, or None for unconditional."""

    key: str
    value: bytes
    expected: int | None = None


class Watch(Protocol):
    """An endless iterator over the changes below a prefix; see `MetaStore.watch`."""

    def __aiter__(self) -> Watch: ...

    async def __anext__(self) -> None: ...

    async def confirm(self) -> None:
        """Returns once every change that was committed before the call, by any process, is delivered.

        A wait for the next item that was under way has then ended, and the next call of `anext` returns at once, unless
        the item was taken already. Raises `StoreUnavailable` if the store cannot tell.
        """
        ...


class Reads(Protocol):
    """The reads that a store object has answered since `MetaStore.begin_reads`."""

    async def confirm(self) -> None:
        """Raises `StaleReads` unless each of these reads saw every write that had returned when the read began.

        Any other `StoreUnavailable` says that the store cannot tell now.
        """
        ...


class FreshReads:
    """The `Reads` of a store that answers no read from an old state."""

    def __init__(self, check_open: Callable[[], None]) -> None:
        self._check_open = check_open

    async def confirm(self) -> None:
        self._check_open()


class MetaStore(Protocol):
    async def get(self, key: str) -> Entry | None: ...

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """What `get` returns for each key, in their order, in few round trips. Not one moment's: others may write
        meanwhile.
        """
        ...

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        """The new version; raises `VersionMismatch` and changes nothing if `expected` does not hold."""
        ...

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        """Independent conditional puts; one result each. Those of one partition are applied in this order and durable
        together.

        Not atomic as a whole: one that does not match changes nothing and stops none of the others. After
        `OutcomeUnknown`, each partition may have any number of its puts applied, from the first one on.
        """
        ...

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        """Whether there was such a key; raises `VersionMismatch` if it had another version than expected."""
        ...

    async def delete_range(self, start: str, end: str) -> None:
        """Deletes every key in [start, end)."""
        ...

    async def floor(self, key: str) -> Entry | None:
        """The entry with the highest key <= `key`: check that it is one of yours.

        Over the whole store, or, if `key` belongs to a partition, over what shares a shard with it.
        """
        ...

    async def ceiling(self, key: str) -> Entry | None:
        """The entry with the lowest key >= `key`, as `floor` finds it: check that it is one of yours."""
        ...

    async def range(self, start: str, end: str, limit: int) -> list[Entry]:
        """At most `limit` entries of [start, end), in order. Page on from the last key + "\\x00".

        The entries of one partition are one moment's; those of several may be of different moments.
        """
        ...

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        """As `range`, without the values."""
        ...

    async def begin_reads(self) -> Reads:
        """Begins to note which servers answer this object's reads, so that `Reads.confirm` can vouch for them."""
        ...

    def watch(self, prefix: str) -> Watch:
        """Yields after keys below `prefix` changed, from any process; several changes may come as one.

        It may also yield without a change: look, do not count. Cancelling the wait for an item leaves the watch usable.
        The first item comes at once, so that what happened before the watch began is not missed.
        """
        ...

    async def check(self) -> None:
        """`StoreUnavailable` if the store cannot be reached, or a write would fail as far as can be told without
        one.
        """
        ...

    async def close(self) -> None:
        """Ends the session: its ephemeral keys vanish. Idempotent."""
        ...


def check(key: str, value: bytes = b"") -> None:
    """Refuses what no adapter may store: `InvalidArgument`."""
    if len(key) * 4 > KEY_BYTES_MAX or not key.isascii():
        size = _utf8_size(key)
        if size > KEY_BYTES_MAX:
            raise InvalidArgument(f"key {key[:64]!r}... has {size} bytes: at most {KEY_BYTES_MAX} are allowed")
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidArgument(f"the value of {key!r} has {len(value)} bytes: at most {VALUE_BYTES_MAX} are allowed")


def checked_size(puts: Sequence[Put]) -> int:
    """The bytes of all these values; `InvalidArgument` if one of the puts is not to be stored."""
    size = 0
    for put in puts:
        check(put.key, put.value)
        size += len(put.value)
    return size


def check_bounds(start: str, end: str = "", limit: int = 1) -> None:
    """Bounds may be longer than a key: paging goes on from a key + "\\x00"."""
    _utf8_size(start)
    _utf8_size(end)
    if limit < 1:
        raise InvalidArgument(f"limit {limit} asks for nothing: it must be 1 or more")


def _utf8_size(key: str) -> int:
    try:
        return len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"key {key[:64]!r} is not valid Unicode: it holds a lone surrogate") from error


def mismatch(key: str, expected: int, found: int | None) -> VersionMismatch:
    """The error of a conditional write, worded alike by every adapter; `found` may be ABSENT, or None if the store does
    not say.
    """
    state = "does not exist" if found == ABSENT else f"has version {found}"
    if found is None:
        state = "exists" if expected == ABSENT else "does not exist or has another version"
    wanted = "it was expected not to exist" if expected == ABSENT else f"version {expected} was expected"
    return VersionMismatch(f"key {key!r} {state}, but {wanted}: read it again and decide anew")


def partition_prefix(key: str) -> str | None:
    """The prefix up to `/partitions/{number}/` that the keys of one partition share; None for a key of no partition."""
    found = _PARTITION.match(key)
    return None if found is None else found.group()


def after(prefix: str) -> str:
    """The lowest key above every key that starts with `prefix`, which ends in "/"."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


async def confirmed(store: MetaStore, read: Callable[[], Awaitable[T]]) -> T:
    """The result of `read`, of whose reads none was stale; raises `StaleReads` otherwise."""
    reads = await store.begin_reads()
    result = await read()
    await reads.confirm()
    return result


async def certain(store: MetaStore, read: Callable[[], Awaitable[T]], *refusals: type[LlogError]) -> T:
    """The result of `read`, which may be old. A refusal is not: it is raised after a second look, if no read of that
    one was stale.
    """
    try:
        return await read()
    except refusals:
        reads = await store.begin_reads()
    try:
        return await read()
    except refusals:
        await reads.confirm()
        raise


async def all_confirmed(store: MetaStore, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The items; if a read behind them was stale, the iteration ends with `StaleReads` and none of them counts."""
    reads = await store.begin_reads()
    async for item in items:
        yield item
    await reads.confirm()


async def scan(store: MetaStore, prefix: str, *, page: int = 5000) -> AsyncIterator[Entry]:
    """All entries below `prefix` in order, one page in memory at a time."""
    start, end = prefix, after(prefix)
    while True:
        entries = await store.range(start, end, page)
        for entry in entries:
            yield entry
        if len(entries) < page:
            return
        start = entries[-1].key + "\x00"


async def scan_keys(store: MetaStore, prefix: str, *, page: int = 5000) -> AsyncIterator[str]:
    """All keys below `prefix` in order, one page in memory at a time."""
    start, end = prefix, after(prefix)
    while True:
        keys = await store.keys(start, end, page)
        for key in keys:
            yield key
        if len(keys) < page:
            return
        start = keys[-1] + "\x00"


async def scan_names(store: MetaStore, prefix: str) -> AsyncIterator[str]:
    """What comes right below `prefix` and has keys below it: one lookup each, however many those are."""
    start, end = prefix, after(prefix)
    while found := await store.keys(start, end, 1):
        name = found[0].removeprefix(prefix).split("/", 1)[0]
        yield name
        start = after(f"{prefix}{name}/")
