"""SlateDB, as far as a keyed log needs it: the only module that uses its binding.

On `file://`, SlateDB writes without fsync: what it calls durable survives the end of every process, but not a power
cut. In a bucket, it is as durable as the bucket.
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
"""Characters that SlateDB changes in names, and differently for manifests and tables: the log would lie in two other
places.
"""

_open_databases: dict[int, tuple[int, Any]] = {}
"""The databases open for writing, by identity, each with the process that opened it: see `_close_at_exit`."""
_writer_pids: set[int] = set()
"""The processes (this one, and those it was forked from) that have opened a database for writing."""

# Databases in memory live as long as the process, so that every opening of a name gets the same log.
_memory: dict[str, Any] = {}


class DatabaseLocation(NamedTuple):
    """The address of a database, resolved."""

    url: str
    path: str
    store: Any
    local: bool
    directory: Path | None = None
    """The database's directory on this machine, if it is in local files."""


class Row(NamedTuple):
    key: bytes
    value: bytes


def locate(url: str, settings: Settings | None) -> DatabaseLocation:
    """Resolve an address without contacting anything. Raises `ConfigurationError` unless it begins with memory://,
    file:// or s3://.
    """
    variable = SETTINGS["blobs"].variable
    try:
        scheme, authority, path, _ = parse_address("blobs", url)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace(variable, "the address of the keyed log")) from error
    if scheme == "memory":
        if authority not in _memory:
            _memory[authority] = slate.ObjectStore.resolve("memory:///")
        return DatabaseLocation(url, "log", _memory[authority], True)
    if scheme == "file":
        path = os.path.realpath(path)
        if Path(path).exists() and not Path(path).is_dir():
            raise WrongStore(f"{url} is a file, not a directory: a keyed log has a directory of its own")
        return DatabaseLocation(url, _check_name(url, path), slate.ObjectStore.resolve("file:///"), True, Path(path))
    if scheme != "s3":
        raise ConfigurationError(
            f"the address of the keyed log is {url!r}: it must start with memory://, file:// or s3://"
        )
    with _translate_errors(url, opening=True):
        return DatabaseLocation(
            url, _check_name(url, path) or "log", _bucket(authority, settings or load_settings()), False
        )


def _check_name(url: str, path: str) -> str:
    if wrong := _NAME_WRONG.search(path):
        raise ConfigurationError(
            f"the address of the keyed log is {url!r}, that is {path!r}: SlateDB cannot store under a name with "
            f"{wrong[0]!r}, only with letters from a to z, digits, spaces, and - _ . , + = : @ and the like"
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


class _LogKeyExtractor(slate.PrefixExtractor):  # type: ignore[misc]  # the binding has no types
    """Gives SlateDB's filters the part of a key that scans look for: everything up to the log key's terminator."""

    def name(self) -> str:
        return "llog-log-key-1"  # stored in every table, must be kept stable

    def prefix_len(self, target: Any) -> int | None:
        return filter_length(target.key if target.is_POINT() else target.prefix) or None


def _filters(config: StorageConfig) -> list[Any]:
    if not config.key_filter:
        return [slate.FilterPolicy.bloom(_FILTER_BITS)]
    options = slate.BloomFilterOptions(bits_per_key=_FILTER_BITS, whole_key_filtering=False)
    extractor = _LogKeyExtractor()
    fast_filter.install(extractor, filter_length)
    return [slate.FilterPolicy.bloom_with_options(options, extractor)]


async def exists(location: DatabaseLocation) -> bool:
    """Whether there is a database. Raises `WrongStore` if other files are there, which a log must not mix with."""
    admin = slate.AdminBuilder(location.path, location.store).build()
    with _translate_errors(location.url, opening=True):
        if await _within_limit(admin.read_manifest(None), location.url) is not None:
            return True
        listed = await _within_limit(admin.delete_db(False), location.url)  # False: a dry run that lists the files
        found = [each for each in listed if os.path.basename(each) not in (LOCK_AMONG_OTHERS, DIRECTORY_ID)]
        # The files may be a database that was created between the two calls.
        if found and await _within_limit(admin.read_manifest(None), location.url) is not None:
            return True
    if found:
        raise WrongStore(
            f"{location.url} holds {found[0]!r} and more, but no database: use an address with nothing in it"
        )
    return False


async def open_database(location: DatabaseLocation, config: StorageConfig) -> Database:
    """Open or create a database for writing, which fences its previous writer."""
    fast_bytes.install()
    recorder = slate.DefaultMetricsRecorder()
    if location.directory is not None:
        await asyncio.to_thread(make_log_directory, location.url, location.directory)
    with _translate_errors(location.url, opening=True):
        for attempt in range(OPEN_ATTEMPTS):
            builder = slate.DbBuilder(location.path, location.store)
            builder.with_settings(_settings(location, config))
            builder.with_filter_policies(_filters(config))
            builder.with_sst_block_size(slate.SstBlockSize.BLOCK16_KIB)
            builder.with_metrics_recorder(recorder)
            try:
                opened = await _within_limit(builder.build(), location.url)
                break
            except slate.Error.Data as error:
                # Another process created the database, or took it over, at the same moment: try again.
                if "already exists" not in error.message or attempt == OPEN_ATTEMPTS - 1:
                    raise
    _open_databases[id(opened)] = (os.getpid(), opened)
    _writer_pids.add(os.getpid())
    return Database(opened, location, recorder)


def make_log_directory(url: str, directory: Path) -> None:
    try:
        make_library_directory(directory)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "check its file system")
        raise StoreUnavailable(f"{url}: cannot make its directory ({error.strerror}): {remedy}") from error


async def open_view(location: DatabaseLocation, config: StorageConfig, *, once: bool = False) -> Database:
    """Open a database for reading, following its writer. `once` is for a single read, and leaves no checkpoint
    behind.
    """
    fast_bytes.install()
    recorder = slate.DefaultMetricsRecorder()
    builder = slate.DbReaderBuilder(location.path, location.store)
    builder.with_filter_policies(_filters(config))
    builder.with_metrics_recorder(recorder)
    builder.with_reader_mode(slate.ReaderMode.FOLLOW_LATEST() if once else slate.ReaderMode.MANAGED_CHECKPOINT())
    builder.with_options(
        slate.ReaderOptions(
            manifest_poll_interval_ms=_ms(refresh_interval(location, config)),
            checkpoint_lifetime_ms=_CHECKPOINT_LIFETIME_MS,
            max_memtable_bytes=_READER_MEMORY_BYTES,
            skip_wal_replay=False,
        )
    )
    with _translate_errors(location.url, opening=True):
        return Database(await _within_limit(builder.build(), location.url), location, recorder)


def refresh_interval(location: DatabaseLocation, config: StorageConfig) -> timedelta:
    return config.refresh_interval or timedelta(milliseconds=50 if location.local else 1000)


def _settings(location: DatabaseLocation, config: StorageConfig) -> Any:
    """Return settings that keep stalls and memory small under a steady load; measured by bench/keyed.py."""
    flush = config.flush_interval or timedelta(milliseconds=5 if location.local else 50)
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
    """The rows of a range as of one moment, in order."""

    def __init__(self, iterator: Any, where: str) -> None:
        self._iterator = iterator
        self._where = where

    async def page(self, most: int) -> list[Any]:
        """Return the next rows, each with `key` and `value`; fewer than `most` at the end."""
        with _translate_errors(self._where):
            rows: list[Any] = await self._iterator.next_batch(most)
        return rows

    async def first(self) -> Row | None:
        with _translate_errors(self._where):
            row = await self._iterator.next()
        return None if row is None else Row(row.key, row.value)


class Database:
    """An open database, for writing or only for reading."""

    def __init__(self, opened: Any, location: DatabaseLocation, recorder: Any) -> None:
        self._opened = opened
        self._recorder = recorder
        self.file = None if location.directory is None else OpenedFile(location.directory)
        self.where = location.url

    async def get(self, key: bytes) -> bytes | None:
        with _translate_errors(self.where):
            value: bytes | None = await self._opened.get(key)
        return value

    async def rows(self, start: bytes, end: bytes | None, *, durable: bool = True, last_first: bool = False) -> Rows:
        with _translate_errors(self.where):
            options = _scan_options(durable, last_first)
            return Rows(await self._opened.scan_with_options(_range(start, end), options), self.where)

    async def rows_with_prefix(
        self,
        prefix: bytes,
        start: bytes | None = None,
        end: bytes | None = None,
        *,
        durable: bool = True,
        last_first: bool = False,
    ) -> Rows:
        """Return the rows whose key is `prefix` followed by bytes from `start` up to `end`. Tables whose filter lacks
        the prefix are not read.
        """
        with _translate_errors(self.where):
            options = _scan_options(durable, last_first)
            return Rows(await self._opened.scan_prefix_with_options(prefix, _range(start, end), options), self.where)

    async def write(self, batch: Any) -> Any:
        """Write all of the batch or none, and return a handle. The write counts only after `await_durable`: a fenced
        writer's write returns, too.
        """
        with _translate_errors(self.where):
            self.check()
            return await self._opened.write(batch)

    async def await_durable(self, handle: Any) -> None:
        with _translate_errors(self.where):
            await handle.await_durable()
        self.check()

    def check(self) -> None:
        """Raise `StoreUnavailable` if the log's directory is gone: SlateDB would go on in a new directory, without the
        log.
        """
        if self.file is not None:
            self.file.check()

    def last_durable_write(self) -> int:
        """Return the number (`seqnum` of a write's handle) of the last durable write."""
        return int(self._opened.status().durable_seq)

    async def flush(self) -> None:
        with _translate_errors(self.where):
            await self._opened.flush()

    async def flush_to_tables(self) -> None:
        """Write everything that is in memory into tables."""
        with _translate_errors(self.where):
            await self._opened.flush_with_options(slate.FlushOptions(flush_type=slate.FlushType.MEM_TABLE))

    async def close(self) -> None:
        """Close the database. Raises `WriterFenced` if writes that were not durable yet are lost."""
        if self.file is not None and not self.file.is_in_place():
            _open_databases.pop(id(self._opened), None)  # closing would write its memory into a new directory
            return
        with _translate_errors(self.where):
            try:
                await self._opened.shutdown()
            except slate.Error.Closed as error:
                if error.reason == slate.CloseReason.FENCED:
                    raise
            finally:
                _open_databases.pop(id(self._opened), None)

    def metrics(self) -> dict[str, int]:
        """Return SlateDB's own counters and gauges by name and labels."""
        found = {}
        for metric in self._recorder.snapshot():
            if not metric.value.is_histogram():
                labels = ",".join(f"{label.key}={label.value}" for label in metric.labels)
                found[f"{metric.name}{{{labels}}}" if labels else metric.name] = metric.value[0]
        return found


def new_batch() -> Any:
    """Return a batch that takes `put(key, value)` and `delete(key)`, for one write."""
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


def _close_at_exit() -> None:
    """Close the databases that a program leaves open at its end, and stop SlateDB's calls into Python."""

    async def end(opened: Any) -> None:
        with suppress(slate.Error, slate.InternalError, TimeoutError):
            options = slate.CloseOptions(flush_type=slate.FlushType.WAL)
            await asyncio.wait_for(opened.shutdown_with_options(options), EXIT_LIMIT_S)

    for pid, opened in list(_open_databases.values()):
        if pid == os.getpid():
            asyncio.run(end(opened))
    if os.getpid() in _writer_pids:
        fast_filter.stop_answering(EXIT_LIMIT_S)


atexit.register(_close_at_exit)


async def _within_limit(answer: Any, where: str) -> Any:
    """Raise `StoreUnavailable` after `OPEN_LIMIT_S`: SlateDB itself tries for ever to reach a bucket."""
    try:
        return await asyncio.wait_for(answer, OPEN_LIMIT_S)
    except TimeoutError:
        raise StoreUnavailable(
            f"{where} could not be opened within {OPEN_LIMIT_S:.0f} s: check the address, the credentials and the "
            "network"
        ) from None


@contextmanager
def _translate_errors(where: str, *, opening: bool = False) -> Iterator[None]:
    """Raise SlateDB's errors as those of llog."""
    try:
        yield
    except slate.Error as error:
        raise _to_llog_error(where, error, opening) from error
    except slate.InternalError as error:
        raise StoreUnavailable(f"{where}: SlateDB failed: {str(error).partition(chr(10))[0]}") from error


def _to_llog_error(where: str, error: Any, opening: bool) -> LlogError:
    message = str(getattr(error, "message", error)).partition("\n")[0]
    if isinstance(error, slate.Error.Closed):
        if error.reason == slate.CloseReason.FENCED:
            return WriterFenced(f"{where} was taken over by another writer: open it again to take it back")
        return StoreUnavailable(f"{where} is closed ({message}): open it again")
    if isinstance(error, slate.Error.Data):
        if opening and "failed to find latest" in message:
            return KeyedLogNotFound(f"there is no keyed log at {where}: its first writer creates it")
        kind = WrongStore if opening else InconsistentReadState
        return kind(f"{where} cannot be read: {message}")
    if isinstance(error, slate.Error.Invalid):
        return InvalidArgument(f"{where}: SlateDB refused: {message}")
    return StoreUnavailable(f"{where}: {message}")
