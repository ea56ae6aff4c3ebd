"""SlateDB behind what a keyed log needs of it: the only module that knows its binding.

On `file://` SlateDB writes without fsync: what it calls durable survives the death of every process, not a power cut.
In a bucket it is as durable as the bucket.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from llog.base.durable import REMEDIES, OpenedFile, make_library_directory
from llog.base.lockfile import DIRECTORY_ID, LOCK_AMONG_OTHERS
from llog.config import SETTINGS, Settings
from llog.config.loading import load_settings
from llog.config.locations import parse_address
from llog.errors import (
    ConfigurationError,
    InconsistentReadState,
    InvalidArgument,
    KeyedLogNotFound,
    LlogError,
    MissingExtra,
    StoreUnavailable,
    WriterFenced,
    WrongStore,
)
from llog.keyed import fast_bytes, fast_filter
from llog.keyed.encoding import filter_length
from llog.keyed.model import StorageConfig

try:
    import slatedb.uniffi as slate
except ImportError as error:
    raise MissingExtra("keyed logs need SlateDB: pip install 'leaderless-log[keyed]'") from error

OPEN_LIMIT_S: Final = 20.0
EXIT_LIMIT_S: Final = 5.0
OPEN_ATTEMPTS: Final = 10
READ_AHEAD_BYTES: Final = 1 << 20
PAGE_ROWS_MAX: Final = 1024
_CHECKPOINT_LIFETIME_MS: Final = 600_000
_READER_MEMORY_BYTES: Final = 64 << 20
_FILTER_BITS: Final = 10
_NAME_WRONG: Final = re.compile(r"""[^ -}]|[\\{}^%`\[\]"<>#|*?]|(?<![^/])\.\.?(?![^/])""")
"""What SlateDB writes otherwise than it was said, and differently in manifests and tables: the log would lie elsewhere,
in two places.
"""

_writing: dict[int, tuple[int, Any]] = {}
"""Databases open for writing, by identity, each with the process that opened it: see `_let_go`."""
_writers: set[int] = set()
"""Processes (this one, and those it was forked from) that have opened a database for writing."""

# Databases in memory live as long as the process, so that whoever opens the same name there meets the same log.
_memory: dict[str, Any] = {}


class Place(NamedTuple):
    """Where a database is."""

    url: str
    path: str
    store: Any
    local: bool
    directory: Path | None = None
    """Of this machine, if it is one."""


class Row(NamedTuple):
    key: bytes
    value: bytes


def locate(url: str, settings: Settings | None) -> Place:
    """`ConfigurationError` if the address is none of memory://, file:// and s3://. Nothing is contacted."""
    variable = SETTINGS["blobs"].variable
    try:
        scheme, authority, path, _ = parse_address("blobs", url)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace(variable, "the address of the keyed log")) from error
    if scheme == "memory":
        if authority not in _memory:
            _memory[authority] = slate.ObjectStore.resolve("memory:///")
        return Place(url, "log", _memory[authority], True)
    if scheme == "file":
        path = os.path.realpath(path)
        if Path(path).exists() and not Path(path).is_dir():
            raise WrongStore(f"{url} is a file, not a directory: a keyed log has a directory of its own")
        return Place(url, _checked(url, path), slate.ObjectStore.resolve("file:///"), True, Path(path))
    if scheme != "s3":
        raise ConfigurationError(
            f"the address of the keyed log is {url!r}: it must start with memory://, file:// or s3://"
        )
    with _telling(url, opening=True):
        return Place(url, _checked(url, path) or "log", _bucket(authority, settings or load_settings()), False)


def _checked(url: str, path: str) -> str:
    if wrong := _NAME_WRONG.search(path):
        raise ConfigurationError(
            f"the address of the keyed log is {url!r}, that is {path!r}: SlateDB cannot store under a name with "
            f"{wrong[0]!r}, only "
            "with letters from a to z, digits, spaces, and - _ . , + = : @ and the like"
        )
    return path


def _bucket(name: str, settings: Settings) -> Any:
    endpoint, secret, token = settings.s3_endpoint_url, settings.s3_secret_access_key, settings.s3_session_token
    options = {
        "aws_bucket_name": name,
        "aws_endpoint": endpoint,
        "aws_region": settings.s3_region_name,
        "aws_access_key_id": settings.s3_access_key_id,
        "aws_secret_access_key": secret and secret.value,
        "aws_session_token": token and token.value,
        "aws_allow_http": "true" if endpoint and endpoint.startswith("http://") else None,
    }
    builder = slate.ObjectStoreBuilder.from_env(slate.ObjectStoreType.S3)
    for option, value in options.items():
        if value is not None:
            builder.with_config(option, value)
    return builder.build()


class _LogKeys(slate.PrefixExtractor):  # type: ignore[misc]  # the binding has no types
    """Tells SlateDB's filters which part of a key is looked for: everything up to the log key's terminator."""

    def name(self) -> str:
        return "llog-log-key-1"  # stored in every table, must be kept stable

    def prefix_len(self, target: Any) -> int | None:
        return filter_length(target.key if target.is_POINT() else target.prefix) or None


def _filters(config: StorageConfig) -> list[Any]:
    if not config.key_filter:
        return [slate.FilterPolicy.bloom(_FILTER_BITS)]
    options = slate.BloomFilterOptions(bits_per_key=_FILTER_BITS, whole_key_filtering=False)
    extractor = _LogKeys()
    fast_filter.install(extractor, filter_length)
    return [slate.FilterPolicy.bloom_with_options(options, extractor)]


async def exists(place: Place) -> bool:
    """Whether there is a database. `WrongStore` if there is something else instead: it is nobody's to mix with."""
    admin = slate.AdminBuilder(place.path, place.store).build()
    with _telling(place.url, opening=True):
        if await _soon(admin.read_manifest(None), place.url) is not None:
            return True
        listed = await _soon(admin.delete_db(False), place.url)  # False: a dry run that lists what lies there
        found = [each for each in listed if os.path.basename(each) not in (LOCK_AMONG_OTHERS, DIRECTORY_ID)]
        # What lies there may be a database that was made between the two looks.
        if found and await _soon(admin.read_manifest(None), place.url) is not None:
            return True
    if found:
        raise WrongStore(f"{place.url} holds {found[0]!r} and more, but no database: use an address with nothing in it")
    return False


async def open_database(place: Place, config: StorageConfig) -> Database:
    """Opens for writing, which fences whoever wrote before. Makes the database if there is none."""
    fast_bytes.install()
    recorder = slate.DefaultMetricsRecorder()
    if place.directory is not None:
        await asyncio.to_thread(make_log_directory, place.url, place.directory)
    with _telling(place.url, opening=True):
        for attempt in range(OPEN_ATTEMPTS):
            builder = slate.DbBuilder(place.path, place.store)
            builder.with_settings(_settings(place, config))
            builder.with_filter_policies(_filters(config))
            builder.with_sst_block_size(slate.SstBlockSize.BLOCK16_KIB)
            builder.with_metrics_recorder(recorder)
            try:
                opened = await _soon(builder.build(), place.url)
                break
            except slate.Error.Data as error:
                # Somebody else made the database, or took it over, at the same moment: look again at what is there now.
                if "already exists" not in error.message or attempt == OPEN_ATTEMPTS - 1:
                    raise
    _writing[id(opened)] = (os.getpid(), opened)
    _writers.add(os.getpid())
    return Database(opened, place, recorder)


def make_log_directory(url: str, directory: Path) -> None:
    try:
        make_library_directory(directory)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "check its file system")
        raise StoreUnavailable(f"{url}: cannot make its directory ({error.strerror}): {remedy}") from error


async def open_view(place: Place, config: StorageConfig, *, once: bool = False) -> Database:
    """Opens for reading; follows the writer. `once` is for a single look, which leaves nothing behind."""
    fast_bytes.install()
    recorder = slate.DefaultMetricsRecorder()
    builder = slate.DbReaderBuilder(place.path, place.store)
    builder.with_filter_policies(_filters(config))
    builder.with_metrics_recorder(recorder)
    builder.with_reader_mode(slate.ReaderMode.FOLLOW_LATEST() if once else slate.ReaderMode.MANAGED_CHECKPOINT())
    builder.with_options(
        slate.ReaderOptions(
            manifest_poll_interval_ms=_ms(refresh_interval(place, config)),
            checkpoint_lifetime_ms=_CHECKPOINT_LIFETIME_MS,
            max_memtable_bytes=_READER_MEMORY_BYTES,
            skip_wal_replay=False,
        )
    )
    with _telling(place.url, opening=True):
        return Database(await _soon(builder.build(), place.url), place, recorder)


def refresh_interval(place: Place, config: StorageConfig) -> timedelta:
    return config.refresh_interval or timedelta(milliseconds=50 if place.local else 1000)


def _settings(place: Place, config: StorageConfig) -> Any:
    """What keeps stalls and memory small under a steady load; measured by bench/keyed.py."""
    flush = config.flush_interval or timedelta(milliseconds=5 if place.local else 50)
    settings = slate.Settings.default()
    for option, value in (
        ("flush_interval", f'"{_ms(flush)}ms"'),
        ("max_unflushed_bytes", str(config.unflushed_bytes_max)),
        ("l0_sst_size_bytes", str(config.table_bytes)),
        ("l0_max_ssts", "64"),
        ("l0_max_ssts_per_key", "64"),
        ("min_filter_keys", "1"),
        ("compactor_options.poll_interval", '"500ms"'),
        ("compactor_options.worker.compactions_poll_interval", '"500ms"'),
        ("compactor_options.worker.min_filter_keys", "1"),
    ):
        settings.set(option, value)
    return settings


class Rows:
    """Rows of a range as of one moment, in order."""

    def __init__(self, iterator: Any, where: str) -> None:
        self._iterator = iterator
        self._where = where

    async def page(self, most: int) -> list[Any]:
        """The next rows, each with `key` and `value`; fewer than `most` at the end."""
        with _telling(self._where):
            rows: list[Any] = await self._iterator.next_batch(most)
        return rows

    async def first(self) -> Row | None:
        with _telling(self._where):
            row = await self._iterator.next()
        return None if row is None else Row(row.key, row.value)


class Database:
    """An open database, for writing or only for reading."""

    def __init__(self, opened: Any, place: Place, recorder: Any) -> None:
        self._opened = opened
        self._recorder = recorder
        self.file = None if place.directory is None else OpenedFile(place.directory)
        self.where = place.url

    async def get(self, key: bytes) -> bytes | None:
        with _telling(self.where):
            value: bytes | None = await self._opened.get(key)
        return value

    async def rows(self, start: bytes, end: bytes | None, *, durable: bool = True, last_first: bool = False) -> Rows:
        with _telling(self.where):
            options = _scan_options(durable, last_first)
            return Rows(await self._opened.scan_with_options(_range(start, end), options), self.where)

    async def rows_of(
        self,
        prefix: bytes,
        start: bytes | None = None,
        end: bytes | None = None,
        *,
        durable: bool = True,
        last_first: bool = False,
    ) -> Rows:
        """Rows whose key is `prefix` and something from `start` up to `end`. Tables whose filter lacks the prefix are
        not read.
        """
        with _telling(self.where):
            options = _scan_options(durable, last_first)
            return Rows(await self._opened.scan_prefix_with_options(prefix, _range(start, end), options), self.where)

    async def write(self, batch: Any) -> Any:
        """All of the batch or none. Only `durable` of what this returns tells that it stays: a fenced writer's write
        returns, too.
        """
        with _telling(self.where):
            self.check()
            return await self._opened.write(batch)

    async def durable(self, handle: Any) -> None:
        with _telling(self.where):
            await handle.await_durable()
        self.check()

    def check(self) -> None:
        """`StoreUnavailable` if the log's directory is gone. SlateDB would write on into a new one, which holds no
        log.
        """
        if self.file is not None:
            self.file.check()

    def durable_write(self) -> int:
        """The number (`seqnum` of what `write` returns) of the last write that is durable."""
        return int(self._opened.status().durable_seq)

    async def flush(self) -> None:
        with _telling(self.where):
            await self._opened.flush()

    async def settle(self) -> None:
        """Puts everything that is in memory into tables."""
        with _telling(self.where):
            await self._opened.flush_with_options(slate.FlushOptions(flush_type=slate.FlushType.MEM_TABLE))

    async def close(self) -> None:
        """`WriterFenced` if what was not yet durable is lost."""
        if self.file is not None and not self.file.is_in_place():
            _writing.pop(id(self._opened), None)  # it would leave in a new directory what it has in memory
            return
        with _telling(self.where):
            try:
                await self._opened.shutdown()
            except slate.Error.Closed as error:
                if error.reason == slate.CloseReason.FENCED:
                    raise
            finally:
                _writing.pop(id(self._opened), None)

    def metrics(self) -> dict[str, int]:
        """SlateDB's own counters and gauges by name and labels."""
        found = {}
        for metric in self._recorder.snapshot():
            if not metric.value.is_histogram():
                labels = ",".join(f"{label.key}={label.value}" for label in metric.labels)
                found[f"{metric.name}{{{labels}}}" if labels else metric.name] = metric.value[0]
        return found


def new_batch() -> Any:
    """Takes `put(key, value)` and `delete(key)`, and is used up by one write."""
    return slate.WriteBatch()


def _range(start: bytes | None, end: bytes | None) -> Any:
    return slate.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)


def _scan_options(durable: bool, last_first: bool) -> Any:
    return slate.ScanOptions(
        durability_filter=slate.DurabilityLevel.REMOTE if durable else slate.DurabilityLevel.MEMORY,
        dirty=False,
        read_ahead_bytes=READ_AHEAD_BYTES,
        cache_blocks=True,
        max_fetch_tasks=4,
        order=slate.IterationOrder.DESCENDING if last_first else slate.IterationOrder.ASCENDING,
    )


def _ms(interval: timedelta) -> int:
    return max(1, round(interval.total_seconds() * 1000))


def _let_go() -> None:
    """Ends databases that a program leaves open when it ends, and SlateDB's calls of Python before that is gone."""

    async def end(opened: Any) -> None:
        with suppress(slate.Error, slate.InternalError, TimeoutError):
            options = slate.CloseOptions(flush_type=slate.FlushType.WAL)
            await asyncio.wait_for(opened.shutdown_with_options(options), EXIT_LIMIT_S)

    for pid, opened in list(_writing.values()):
        if pid == os.getpid():
            asyncio.run(end(opened))
    if os.getpid() in _writers:
        fast_filter.hush(EXIT_LIMIT_S)


atexit.register(_let_go)


async def _soon(answer: Any, where: str) -> Any:
    """SlateDB tries for ever to reach a bucket; whoever opens wants to know."""
    try:
        return await asyncio.wait_for(answer, OPEN_LIMIT_S)
    except TimeoutError:
        raise StoreUnavailable(
            f"{where} could not be opened within {OPEN_LIMIT_S:.0f} s: check the address, the credentials and the "
            "network"
        ) from None


@contextmanager
def _telling(where: str, *, opening: bool = False) -> Iterator[None]:
    """SlateDB's errors as those of llog."""
    try:
        yield
    except slate.Error as error:
        raise _told(where, error, opening) from error
    except slate.InternalError as error:
        raise StoreUnavailable(f"{where}: SlateDB failed: {str(error).partition(chr(10))[0]}") from error


def _told(where: str, error: Any, opening: bool) -> LlogError:
    message = str(getattr(error, "message", error)).partition("\n")[0]
    if isinstance(error, slate.Error.Closed):
        if error.reason == slate.CloseReason.FENCED:
            return WriterFenced(f"{where} was taken over by another writer: open it again to take it back")
        return StoreUnavailable(f"{where} is closed ({message}): open it again")
    if isinstance(error, slate.Error.Data):
        if opening and "failed to find latest" in message:
            return KeyedLogNotFound(f"there is no keyed log at {where}: its writer makes it")
        kind = WrongStore if opening else InconsistentReadState
        return kind(f"{where} cannot be read: {message}")
    if isinstance(error, slate.Error.Invalid):
        return InvalidArgument(f"{where}: SlateDB refused: {message}")
    return StoreUnavailable(f"{where}: {message}")
