"""The port to the metadata store: a linearizable, versioned and ordered key-value store.

Every adapter keeps these promises, and one conformance suite (`tests/conformance/test_meta.py`) asks each adapter for
them:

- **Shards.** A store may spread its keys over shards. All keys of one partition, which are those with the same
  `partition_prefix`, share a shard. A key outside any partition may be on any shard, apart from its neighbours.
- **Versions.** Each successful put gives its key a version that is higher than every version the key had before, also
  after a delete. Within a partition, no two puts ever get the same version; puts of different partitions may.
- **Order.** Keys sort by their UTF-8 bytes. A portable range stays within one directory of zero-padded numbers, or
  below one prefix that ends in "/".
- **Durability.** When a write returns, it is durable, and every later conditional write of any process is checked
  against it. Every later read sees it, too, with one exception: a server that was replaced while it was paused may
  answer reads from an old state for a moment after it wakes. A caller that acts on *not* having seen a key must
  therefore confirm its reads first (`begin_reads`).
- **Failure.** A write that raises `StoreUnavailable` did not happen and never will. A write that raises
  `OutcomeUnknown` may have happened, or may still happen. A write whose caller was cancelled may do either.
- **Order of calls.** Writes to one partition that one event loop starts one after another, without waiting in between,
  are applied in that order. Ephemeral puts are not ordered with other writes.
- **Sessions.** An ephemeral key belongs to the session of the store object that put it. It disappears when that object
  is closed, or one session timeout after its process died.
- **Closing.** After `close`, every call and every watch raises `StoreUnavailable`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from llog.errors import InvalidArgument, LlogError, VersionMismatch

T = TypeVar("T")

ABSENT: Final = -1
"""The version to expect of a key that must not exist."""

KEY_BYTES_MAX: Final = 2048
VALUE_BYTES_MAX: Final = 4 << 20

_PARTITION: Final = re.compile(r".*?/partitions/[0-9]+/")


class MetaEntry(NamedTuple):
    """A key with its value, and the version of the put that wrote it."""

    key: str
    value: bytes
    version: int


class Put(msgspec.Struct, frozen=True, gc=False):
    """One put of a `put_many`: `expected` is a version, ABSENT, or None for any."""

    key: str
    value: bytes
    expected: int | None = None


Changes = frozenset[str] | None
"""The keys that may have changed; None if any key may have."""


class Watch(Protocol):
    """An endless iterator over the changes below a prefix; see `MetaStore.watch`."""

    def __aiter__(self) -> Watch: ...

    async def __anext__(self) -> Changes: ...

    def take(self) -> Changes:
        """Return what the next item would say now, without waiting: no keys if there is no item.

        A caller that takes an item leaves it to no other: a wait for it may go on, or end with an item without keys.
        """
        ...

    async def confirm(self) -> None:
        """Return once every change that any process committed before this call has been delivered.

        A wait for the next item that was under way has then ended, and the next call of `anext` returns at once, unless
        the item was taken already. Raises `StoreUnavailable` if the store cannot find out.
        """
        ...


class Reads(Protocol):
    """The reads that a store object has answered since `MetaStore.begin_reads`."""

    async def confirm(self) -> None:
        """Return if each of these reads saw every write that had returned when the read began.

        Raises `StaleReads` if some read may have come from an old state: discard what was read and read again. Any
        other `StoreUnavailable` means that the store cannot find out now.
        """
        ...


class FreshReads:
    """The `Reads` of a store that never answers from an old state, so that only a closed store fails to confirm."""

    def __init__(self, check_open: Callable[[], None]) -> None:
        self._check_open = check_open

    async def confirm(self) -> None:
        self._check_open()


class MetaStore(Protocol):
    """A client of a metadata store. The module's docstring has the promises that hold for all operations.

    Every operation raises `StoreUnavailable` if the store cannot be reached in time, and `InvalidArgument` for a key or
    value that is too large or not valid Unicode. An object may belong to the process and the event loop that first use
    it.
    """

    async def get(self, key: str) -> MetaEntry | None:
        """Return the entry of this key, or None."""
        ...

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        """Return what `get` returns for each key, in the order of the keys, in few round trips.

        The entries are not a snapshot: other processes may write between two of them.
        """
        ...

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        """Put the value and return the key's new version.

        Raises `VersionMismatch` and changes nothing if the key does not have the version `expected` (a version, ABSENT,
        or None for any). The newest put of a key decides whether the key is ephemeral, and to whose session it belongs.
        """
        ...

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        """Apply independent conditional puts, and return the new version or the mismatch of each, in their order.

        The puts of one partition are applied in their order and become durable together. The whole is not atomic: a
        put that does not match changes nothing and stops no other put. After `OutcomeUnknown`, each partition may have
        any number of its puts applied, beginning with the first.
        """
        ...

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        """Delete the key, and return whether it existed.

        Raises `VersionMismatch` and changes nothing if the key exists with a version other than `expected`.
        """
        ...

    async def delete_range(self, start: str, end: str) -> None:
        """Delete every key in [start, end).

        Atomic within a partition only: after `OutcomeUnknown`, the keys of some partitions may be deleted and those of
        others not.
        """
        ...

    async def floor(self, key: str) -> MetaEntry | None:
        """Return the entry with the highest key <= `key`, or None.

        If `key` belongs to a partition, the store looks among the keys of its shard, otherwise among all keys. Both
        include keys outside the partition or directory: check that the entry has the prefix that you expect.
        """
        ...

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        """Return what `floor` returns for each key, in the order of the keys, in few round trips.

        Each key belongs to a partition. One server answers the keys of one partition, in their order: a later entry is
        at least as new as an earlier one, even if the server answers from an old state.
        """
        ...

    async def ceiling(self, key: str) -> MetaEntry | None:
        """Return the entry with the lowest key >= `key`, or None; look at its prefix, as with `floor`."""
        ...

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        """Return the first entries of [start, end) in order, at most `limit`. Continue from the last key + "\\x00".

        The entries of one partition are a snapshot; those of different partitions may be of different moments.
        """
        ...

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        """Return the keys of the entries that `range` returns."""
        ...

    async def begin_reads(self) -> Reads:
        """Begin to record which servers answer the reads of this object, so that `Reads.confirm` can vouch for them."""
        ...

    def watch(self, prefix: str) -> Watch:
        """Return an iterator that yields after any process changed keys below `prefix`.

        The first item comes at once, so that no change before the watch is missed. One item may stand for several
        changes, and an item may come without a change: read what you watch, do not count items. An item names every key
        that has changed, or is None where the store does not know them. Cancelling the wait for an item leaves the
        watch usable.
        """
        ...

    async def check(self) -> None:
        """Raise `StoreUnavailable` if the store cannot be reached, or if a write would fail as far as the store can
        find out without writing a key.
        """
        ...

    async def close(self) -> None:
        """End the session, so that its ephemeral keys disappear, and let go of all connections. Idempotent."""
        ...


def check_size(key: str, value: bytes = b"") -> None:
    """Raise `InvalidArgument` for a key or a value that no adapter may store."""
    if len(key) * 4 > KEY_BYTES_MAX or not key.isascii():
        size = _utf8_size(key)
        if size > KEY_BYTES_MAX:
            raise InvalidArgument(f"key {key[:64]!r}... has {size} bytes: at most {KEY_BYTES_MAX} are allowed")
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidArgument(f"the value of {key!r} has {len(value)} bytes: at most {VALUE_BYTES_MAX} are allowed")


def check_puts(puts: Sequence[Put]) -> int:
    """Check every put as `check_size` does, and return the size of all values in bytes."""
    size = 0
    for put in puts:
        check_size(put.key, put.value)
        size += len(put.value)
    return size


def check_bounds(start: str, end: str = "", limit: int = 1) -> None:
    """Raise `InvalidArgument` for invalid bounds or limits of a range.

    A bound may be longer than a key: paging continues from a key + "\\x00".
    """
    _utf8_size(start)
    _utf8_size(end)
    if limit < 1:
        raise InvalidArgument(f"limit is {limit}: it must be 1 or more")


def _utf8_size(key: str) -> int:
    try:
        return len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"key {key[:64]!r} is not valid Unicode: it holds a lone surrogate") from error


def entry_size(entry: MetaEntry | None) -> int:
    """Return the bytes of the entry's value; 0 for None."""
    return 0 if entry is None else len(entry.value)


def entries_size(entries: Sequence[MetaEntry | None]) -> int:
    """Return the bytes of all values."""
    return sum(len(entry.value) for entry in entries if entry is not None)


def version_mismatch(key: str, expected: int, found: int | None) -> VersionMismatch:
    """Return the error of a conditional write, which every adapter words alike.

    `found` is the key's version, ABSENT, or None if the store does not report it.
    """
    state = "does not exist" if found == ABSENT else f"has version {found}"
    if found is None:
        state = "exists" if expected == ABSENT else "does not exist or has another version"
    wanted = "it was expected not to exist" if expected == ABSENT else f"version {expected} was expected"
    return VersionMismatch(f"key {key!r} {state}, but {wanted}: read it again and decide anew")


def partition_prefix(key: str) -> str | None:
    """Return the prefix up to `/partitions/{number}/` that all keys of one partition share; None for other keys."""
    found = _PARTITION.match(key)
    return None if found is None else found.group()


def prefix_end(prefix: str) -> str:
    """Return the exclusive end of the range of all keys that start with `prefix`, which ends in "/"."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


async def read_confirmed(store: MetaStore, read: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `read` if none of its reads was stale; raise `StaleReads` otherwise."""
    reads = await store.begin_reads()
    result = await read()
    await reads.confirm()
    return result


async def read_confirming_errors(store: MetaStore, read: Callable[[], Awaitable[T]], *errors: type[LlogError]) -> T:
    """Return the result of `read`, which may come from an old state, but raise one of `errors` only on fresh reads.

    If `read` raises one of them, it is called again, and its second error counts if none of its reads was stale.
    """
    try:
        return await read()
    except errors:
        reads = await store.begin_reads()
    try:
        return await read()
    except errors:
        await reads.confirm()
        raise


async def iterate_confirmed(store: MetaStore, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the items, and raise `StaleReads` in the end if a read behind any of them was stale: then none counts."""
    reads = await store.begin_reads()
    async for item in items:
        yield item
    await reads.confirm()


async def scan(store: MetaStore, prefix: str, *, page: int = 5000) -> AsyncIterator[MetaEntry]:
    """Yield all entries below `prefix` in order, with one page in memory at a time."""
    start, end = prefix, prefix_end(prefix)
    while True:
        entries = await store.range(start, end, page)
        for entry in entries:
            yield entry
        if len(entries) < page:
            return
        start = entries[-1].key + "\x00"


async def scan_keys(store: MetaStore, prefix: str, *, page: int = 5000) -> AsyncIterator[str]:
    """Yield all keys below `prefix` in order, with one page in memory at a time."""
    start, end = prefix, prefix_end(prefix)
    while True:
        keys = await store.keys(start, end, page)
        for key in keys:
            yield key
        if len(keys) < page:
            return
        start = keys[-1] + "\x00"


async def scan_names(store: MetaStore, prefix: str) -> AsyncIterator[str]:
    """Yield the names of the directories right below `prefix`, with one lookup each, however many keys they hold."""
    start, end = prefix, prefix_end(prefix)
    while first := await store.keys(start, end, 1):
        name = first[0].removeprefix(prefix).split("/", 1)[0]
        yield name
        start = prefix_end(f"{prefix}{name}/")
