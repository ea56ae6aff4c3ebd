"""Open a log from settings: both stores, and the options of engines and upkeep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from llog.base.lockfile import WorkerAddress
from llog.batch.format import Codec
from llog.config import SETTINGS, Settings
from llog.config.locations import NO_BLOBS, parse_address
from llog.engines.disk.options import SEGMENT_BYTES_MAX, Fsync, SegmentOptions
from llog.engines.disk.segment_pool import SegmentPool
from llog.engines.object.collector import CollectorOptions
from llog.engines.object.compaction.compactor import CompactorOptions
from llog.engines.registry import all_engines
from llog.engines.rocksdb.handle import RocksHandle
from llog.errors import ConfigurationError, InvalidArgument, LlogError, LogNotFound, StoreUnavailable, WrongStore
from llog.log.engine import Engine, OnCommit, WriterOptions
from llog.log.inline import AppendCounts, InlineLimits
from llog.log.keys import LOG_ID
from llog.log.log import Log, check_format, tie_together
from llog.log.owners import Owners
from llog.runtime import Runtime, SystemRuntime
from llog.stores.addresses import Address
from llog.stores.blobs import BlobStore
from llog.stores.blobs_by_uri import BlobsByUri
from llog.stores.meta import MetaStore
from llog.stores.prefixed import PrefixedMetaStore
from llog.stores.registry import BLOBS, blob_adapter, meta_adapter


async def open_log(
    settings: Settings,
    *,
    runtime: Runtime | None = None,
    is_broker: bool = False,
    address: str | None = None,
    worker: WorkerAddress | None = None,
    reads_only: bool = False,
) -> Log:
    """Open both stores and check that they belong together. An error names the setting that caused it.

    A broker sets `is_broker`, `address` if others can reach it there, and `worker` if it shares that address. With
    `reads_only`, the settings need not name a blob store: blobs are read from the addresses in the metadata.

    Open the log in the process that uses it (after any fork) and on its event loop; close it with `close_log`.
    """
    meta_address, blobs_address = addresses(settings)
    if blobs_address is None and not reads_only:
        raise ConfigurationError(
            f"LLOG_META is {settings.meta}, and no setting says where its blobs are: set LLOG_S3_BUCKET=bucket or "
            "LLOG_BLOBS=s3://bucket/prefix. Only readers work without it"
        )
    with _blaming("meta", settings.meta):
        meta = await _open_meta(meta_address, settings)
    try:
        with _blaming("blobs", settings.blobs):
            blobs = (
                blob_adapter(blobs_address.scheme).open(blobs_address, settings)
                if blobs_address
                else _blobs_by_uri(settings)
            )
        runtime = runtime or SystemRuntime()
        owners = Owners(
            meta,
            runtime,
            address=address,
            is_broker=is_broker,
            worker=worker,
            renew_ms=max(1, settings.session_timeout_ms // 3),
        )
        log = Log(meta, blobs, runtime, _engines(settings, runtime, owners), owners)
        try:
            with _blaming("meta", settings.meta):
                if blobs_address is None and await meta.get(LOG_ID) is None:
                    raise _log_not_found(settings)
                await check_format(log)
            if blobs_address is not None:
                with _blaming("blobs", settings.blobs):
                    await tie_together(log)
        except BaseException:
            await blobs.close()
            raise
    except BaseException:
        await meta.close()
        raise
    return log


async def close_log(log: Log) -> None:
    """End the session and release disk topics, tables, connections and threads. Idempotent."""
    async with AsyncExitStack() as closing:  # closes the last one first, and all of them if one raises
        closing.push_async_callback(log.blobs.close)
        closing.push_async_callback(log.meta.close)
        if log.owners is not None:
            closing.push_async_callback(log.owners.close)
        for engine in reversed(list(log.engines.values())):
            closing.push_async_callback(engine.close)


@asynccontextmanager
async def opened_log(
    settings: Settings,
    *,
    runtime: Runtime | None = None,
    is_broker: bool = False,
    address: str | None = None,
    worker: WorkerAddress | None = None,
    reads_only: bool = False,
) -> AsyncIterator[Log]:
    log = await open_log(
        settings, runtime=runtime, is_broker=is_broker, address=address, worker=worker, reads_only=reads_only
    )
    try:
        yield log
    finally:
        await close_log(log)


@asynccontextmanager
async def opened_owners(settings: Settings, *, runtime: Runtime | None = None) -> AsyncIterator[Owners]:
    """Open only the owners of a log, without its blob store; raise `LogNotFound` if the log does not exist."""
    await asyncio.to_thread(require_log, settings)
    without_blobs = msgspec.structs.replace(settings, blobs=NO_BLOBS, s3_bucket=None)
    async with opened_log(without_blobs, runtime=runtime, reads_only=True) as log:
        assert log.owners is not None
        yield log.owners


def log_exists(settings: Settings) -> bool:
    """Return whether the log exists, without creating it as opening would. May block for a moment."""
    meta, _ = addresses(settings)
    adapter = meta_adapter(meta.scheme)
    if adapter.is_local and not settings.root_prefix:
        return adapter.exists(meta)
    with _blaming("meta", settings.meta):
        return adapter.has_key(meta, settings, f"{settings.root_prefix}/{LOG_ID}".lstrip("/"))


def require_log(settings: Settings) -> None:
    """Raise `LogNotFound` if the log does not exist: a command that only reads must not create it, as `open_log`
    would.
    """
    if not log_exists(settings):
        raise _log_not_found(settings)


def _log_not_found(settings: Settings) -> LogNotFound:
    return LogNotFound(
        f"LLOG_META is {settings.meta}: there is no log. Check LLOG_META and LLOG_DATA_DIR; the first write to a log "
        "creates it"
    )


def writer_options(
    settings: Settings, *, on_commit: OnCommit | None = None, counts: AppendCounts | None = None
) -> WriterOptions:
    return WriterOptions(
        codec=Codec(settings.codec), on_commit=on_commit, inline=inline_limits(settings), counts=counts
    )


def inline_limits(settings: Settings) -> InlineLimits:
    return InlineLimits(
        group_bytes_max=settings.inline_max_bytes, partition_bytes_max=settings.inline_partition_max_bytes
    )


def segment_options(settings: Settings) -> SegmentOptions:
    return SegmentOptions(
        segment_bytes=min(settings.segment_bytes, SEGMENT_BYTES_MAX),
        segment_ms=settings.segment_ms,
        index_interval_bytes=settings.segment_index_bytes,
        index_interval_records=settings.segment_index_records or None,
        frame_bytes=settings.segment_frame_bytes,
        fsync=Fsync(settings.segment_fsync),
        fsync_interval_ms=settings.segment_fsync_interval_ms,
        ahead_bytes=settings.segment_ahead_bytes,
        codec=Codec(settings.codec),
    )


def compactor_options(settings: Settings) -> CompactorOptions:
    return CompactorOptions(
        codec=Codec(settings.codec),
        holder=settings.compactor_id or settings.client_name,
        max_offsets=settings.compactor_max_offsets_per_run,
        merge_offsets_max=settings.compactor_max_offsets_per_run,
        max_bytes=settings.compactor_max_bytes_per_run,
    )


def collector_options(settings: Settings) -> CollectorOptions:
    return CollectorOptions(grace_ms=settings.collect_grace_ms)


def addresses(settings: Settings) -> tuple[Address, Address | None]:
    """Return the addresses of metadata and blobs; that of blobs is below LLOG_ROOT_PREFIX, or None if the metadata
    holds it.

    Raises `ConfigurationError` if one store would outlive the other: that would lose acknowledged records.
    """
    meta = parse_address("meta", settings.meta)
    if settings.blobs == NO_BLOBS:
        return meta, None
    blobs = parse_address("blobs", settings.blobs).below(settings.root_prefix)
    if (meta.scheme == "memory") != (blobs.scheme == "memory"):
        raise ConfigurationError(
            f"LLOG_META is {settings.meta} and LLOG_BLOBS is {settings.blobs}: one would be lost with this process "
            "and the other kept. Use memory:// for both or for neither"
        )
    return meta, blobs


async def _open_meta(address: Address, settings: Settings) -> MetaStore:
    store = await meta_adapter(address.scheme).open(address, settings)
    return PrefixedMetaStore(store, settings.root_prefix + "/") if settings.root_prefix else store


def _blobs_by_uri(settings: Settings) -> BlobsByUri:
    def open_bucket(url: str) -> BlobStore:
        scheme = url.partition("://")[0]
        if scheme not in BLOBS or not (adapter := blob_adapter(scheme)).in_bucket:
            raise ConfigurationError(f"the metadata names blobs in {url}, which is not a store that llog knows")
        return adapter.open(parse_address("blobs", url), settings)

    return BlobsByUri(open_bucket)


def _engines(settings: Settings, runtime: Runtime, owners: Owners) -> dict[str, Engine]:
    """Return all engines; each opens and creates files only when one of its topics or tables is opened."""
    segments = rocks = None
    if settings.segments_dir is not None:
        segments = SegmentPool(Path(settings.segments_dir), segment_options(settings), runtime, owners)
    if settings.rocksdb_dir is not None:
        rocks = RocksHandle(Path(settings.rocksdb_dir), runtime, owners)
    return all_engines(segments, rocks)


@contextmanager
def _blaming(field: str, value: str) -> Iterator[None]:
    """Prefix the errors of a store with its setting and value, so that the reader knows which setting to change."""
    try:
        yield
    except (StoreUnavailable, WrongStore, ConfigurationError) as error:
        raise type(error)(_blame(field, value, error)) from error
    except InvalidArgument as error:
        raise ConfigurationError(_blame(field, value, error)) from error


def _blame(field: str, value: str, error: LlogError) -> str:
    return f"{SETTINGS[field].variable} is {value}: {error}"
