"""Collection of unreferenced blobs as joins of DataFrames, in the order and by the rules of
`llog.engines.object.collector`.

Each step is done everywhere before the next begins, so every frame that a later step relies on is materialized where it
is made. It is a local checkpoint: should an executor be lost with a part of it, the run fails and deletes nothing,
where a plan that is computed again would list or mark at another time than it should. A task whose reads were stale
fails, too, and its rows with it (`llog.engines.object.collection_tasks`). Names of blobs stay on the executors.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from llog.base.units import format_size
from llog.config import Settings
from llog.engines.object import clocks
from llog.engines.object.clocks import Window
from llog.engines.object.collection_tasks import (
    enumerate_partitions,
    names_in,
    names_in_sinks,
    raise_all_sink_floors,
    raise_floors_of,
    read_pins,
)
from llog.engines.object.collector import (
    Bounds,
    CollectorOptions,
    Span,
    Waiting,
    gap_warning,
    is_candidate,
    may_be_named,
    partitions,
    sweep_partition,
)
from llog.engines.object.gaps import Gap, Gaps
from llog.log.catalog import Catalog
from llog.log.keys import CLOCK, ROOT, SINK_BLOBS, TOPICS, WAL, PartitionKeys, directory_name
from llog.log.log import Log, is_remote
from llog.log.opening import collector_options
from llog.log.records import Topic, decode
from llog.runtime import stamp_of
from llog.spark.jobs.results import StepResult
from llog.spark.jobs.tasks import check_reachable, chunks, run_tasks, scattered
from llog.spark.process import iterate, run
from llog.stores.meta import scan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

_PARTITIONS_PER_TASK_MIN = 16
_NAMES_PER_BATCH = 10_000
_DELETE_PAGE = 1000
_PREFIXES_MAX = 256
_STAMP_DIGITS = 12
_BLOBS = "name string, size bigint"
_NAMES = "name string"
_MARKED = "name string, gap string"
_DELETED = "deleted bigint, bytes bigint"


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """`candidates` are old enough; of those, `referenced` are in use, `kept` could fill a gap, and `waiting` are held
    back by pins.
    """

    candidates: int
    referenced: int = 0
    waiting: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    kept: int = 0
    gaps: tuple[Gap, ...] = ()


def collect(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """The step `collect`. The option `grace_ms` goes before the setting. One session's runs remember which names wait
    for which pins.
    """
    started = time.monotonic()
    chosen = collector_options(settings)
    if options.get("grace_ms") is not None:
        chosen = msgspec.structs.replace(chosen, grace_ms=int(options["grace_ms"]))
    key = (spark.sparkContext.applicationId, settings)
    collector = _collectors.setdefault(key, SparkCollector(spark, settings))
    result = collector.collect_once(chosen)
    warning = gap_warning(result.gaps, result.kept)
    return StepResult(
        name="collect",
        seconds=time.monotonic() - started,
        rows=[
            ("old blobs", f"{result.candidates:,}"),
            ("in use", f"{result.referenced:,}"),
            ("wait for readers", f"{result.waiting:,}"),
            ("deleted", f"{result.deleted:,} ({format_size(result.deleted_bytes)})"),
        ],
        failures=[] if warning is None else [warning],
    )


class SparkCollector:
    """Collects one log, again and again. It may run beside other collectors."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        check_reachable(settings)
        self._spark = spark
        self._settings = settings
        self._waiting = _WaitingNames(spark)

    def collect_once(self, options: CollectorOptions) -> Collected:
        settings = self._settings
        run(settings, lambda log: Catalog(log).finish_deletions())
        self._over(run(settings, partitions), _sweep)
        window = run(settings, partial(_window, options.grace_ms))
        gaps = Gaps(options.grace_ms)
        prefixes = run(settings, partial(blob_prefixes, window))
        listed = partial(_list, settings, window)
        candidates = _fixed(scattered(self._spark, chunks(self._spark, prefixes), listed, _BLOBS))
        count = candidates.count()
        # Saves the floors if everything is in use; decides nothing.
        suspects = _fixed(self._unnamed(candidates, run(settings, partitions), gaps)) if count else candidates
        if not count or suspects.isEmpty():
            return Collected(candidates=count, referenced=count, gaps=gaps.found)
        enumerated = run(settings, enumerate_partitions)
        ceiling = max(self._over(enumerated, partial(_raise, window)), default=0)
        sinks = run(settings, lambda log: raise_all_sink_floors(log, window, options.sink_open_ms))
        bounds = Bounds(Span(window.old_ms, ceiling), sinks)
        closed = suspects.mapInArrow(partial(_without_those_that_may_be_named, bounds), _BLOBS)
        unreferenced = _fixed(self._unnamed(closed, enumerated, gaps))
        unnamed = unreferenced.count()
        if gaps.found:
            unreferenced = _fixed(unreferenced.mapInArrow(partial(_without_kept, gaps), _BLOBS))
        garbage = unreferenced.count()
        alive = run(settings, lambda log: read_pins(log, window))
        free, waiting = self._waiting.split(unreferenced, alive)
        deleted, size = _sums(free.mapInArrow(partial(_delete, settings), _DELETED))
        return Collected(
            candidates=count,
            referenced=count - unnamed,
            waiting=waiting,
            deleted=deleted,
            deleted_bytes=size,
            kept=unnamed - garbage,
            gaps=gaps.found,
        )

    def _unnamed(self, blobs: DataFrame, enumerated: Sequence[PartitionKeys], gaps: Gaps) -> DataFrame:
        """A mark: the blobs that nothing names. What sinks name is read to its end before anything of the partitions.

        Names and gaps are of one scan: the gaps are added to `gaps` before this returns.
        """
        in_sinks = _fixed(scattered(self._spark, [None], partial(_sink_names, self._settings), _NAMES))
        groups = chunks(self._spark, enumerated, _PARTITIONS_PER_TASK_MIN)
        marked = _fixed(scattered(self._spark, groups, partial(_names, self._settings), _MARKED))
        gaps.add(
            [msgspec.json.decode(row[0], type=Gap) for row in marked.where("gap is not null").select("gap").collect()]
        )
        in_partitions = marked.where("gap is null").select("name")
        return blobs.join(in_sinks.unionAll(in_partitions), "name", "left_anti")

    def _over(self, enumerated: Sequence[PartitionKeys], work: Callable[[Settings, list[PartitionKeys]], T]) -> list[T]:
        groups = chunks(self._spark, enumerated, _PARTITIONS_PER_TASK_MIN)
        return run_tasks(self._spark, groups, partial(work, self._settings))


class _WaitingNames:
    """Unreferenced names that pins hold back, on the executors, each with the run that first found it.

    All names first found by one run wait for the same pins. So `Waiting` decides about runs as if they were names, and
    only they are known to the driver.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._rule = Waiting()
        self._runs: list[str] = []
        self._names: DataFrame | None = None
        self._last = 0

    def split(self, unreferenced: DataFrame, alive: frozenset[str]) -> tuple[DataFrame, int]:
        """The blobs that may go, and how many wait."""
        from pyspark.sql import functions as f

        self._last += 1
        known, self._names = self._names, None  # anew, if this fails
        if known is None:
            self._runs = []
            found = unreferenced.withColumn("run", f.lit(str(self._last)))
        else:
            found = unreferenced.join(known, "name", "left").withColumn(
                "run", f.coalesce(f.col("run"), f.lit(str(self._last)))
            )
        self._rule.begin_run()
        runs = [*self._runs, str(self._last)]
        free = self._rule.free(runs, alive)
        if len(free) == len(runs):
            return unreferenced, 0
        found = _fixed(found)
        is_free = f.col("run").isin(free)
        self._runs = [run for run in runs if run not in set(free)]
        self._names = found.where(~is_free).select("name", "run")
        return found.where(is_free).select("name", "size"), self._names.count()


_collectors: dict[tuple[str, Settings], SparkCollector] = {}


async def blob_prefixes(window: Window, log: Log) -> list[str]:
    """Prefixes of names that together cover every blob which may be old enough: disjoint, to be listed at a time."""
    prefixes = [SINK_BLOBS, CLOCK]
    async for found in scan(log.meta, TOPICS):
        topic = decode(Topic, found.value, found.key)
        # Deleted topics and earlier incarnations, too: what is left of them is what a collector is for.
        prefixes += [
            f"{ROOT}{directory_name(topic.name, number)}/partitions/" for number in range(1, topic.incarnation + 1)
        ]
    if not is_remote(log.blobs.uri):
        return [WAL, *prefixes]  # every listing reads the whole directory
    async for _ in log.blobs.list(WAL, start_after=WAL + _dashed(f"{window.far_ms:0{_STAMP_DIGITS}x}")):
        return [WAL, *prefixes]  # a clock was far ahead: the stamps are too far apart to be divided
    async for page in log.blobs.list(WAL):
        oldest = stamp_of(page[0].name)
        return [*(wal_prefixes(oldest, window.old_ms) if oldest is not None else [WAL]), *prefixes]
    return prefixes


def wal_prefixes(oldest_ms: int, limit: int) -> list[str]:
    """At most so many prefixes that cover the shared blobs stamped from `oldest_ms` up to `limit`: names begin with
    their stamps.
    """
    for digits in range(_STAMP_DIGITS - 1, 0, -1):
        shift = 4 * (_STAMP_DIGITS - digits)
        first, last = oldest_ms >> shift, (limit - 1) >> shift
        if last - first < _PREFIXES_MAX:
            return [WAL + _dashed(f"{number:0{digits}x}") for number in range(first, last + 1)]
    return [WAL]


def _dashed(digits: str) -> str:
    """The start of a UUID with these digits."""
    return digits if len(digits) <= 8 else f"{digits[:8]}-{digits[8:]}"


def _fixed(frame: DataFrame) -> DataFrame:
    """The frame as it is now, computed once and never again."""
    return frame.localCheckpoint(eager=True)


def _sums(deleted: DataFrame) -> tuple[int, int]:
    from pyspark.sql import functions as f

    row = deleted.agg(f.coalesce(f.sum("deleted"), f.lit(0)), f.coalesce(f.sum("bytes"), f.lit(0))).collect()[0]
    return int(row[0]), int(row[1])


async def _window(grace_ms: int, log: Log) -> Window:
    return await clocks.window(log, grace_ms)


# --- on executors


def _sweep(settings: Settings, group: list[PartitionKeys]) -> None:
    async def work(log: Log) -> None:
        for keys in group:
            await sweep_partition(log, keys)

    run(settings, work)


def _raise(window: Window, settings: Settings, group: list[PartitionKeys]) -> int:
    return run(settings, lambda log: raise_floors_of(log, group, window))


def _list(settings: Settings, window: Window, prefixes: list[str]) -> Iterator[pa.RecordBatch]:
    for prefix in prefixes:
        for page in iterate(settings, lambda log, prefix=prefix: log.blobs.list(prefix)):  # type: ignore[misc]
            found = [info for info in page if is_candidate(info, window)]
            if found:
                yield pa.record_batch(
                    [pa.array([info.name for info in found]), pa.array([info.size for info in found], pa.int64())],
                    names=["name", "size"],
                )


def _sink_names(settings: Settings, _: None) -> Iterator[pa.RecordBatch]:
    return _batches(settings, names_in_sinks)


def _names(settings: Settings, group: list[PartitionKeys]) -> Iterator[pa.RecordBatch]:
    """What these partitions name, and then their gaps."""
    gaps = Gaps()
    for batch in _batches(settings, lambda log: names_in(log, group, gaps)):
        yield batch.append_column("gap", pa.nulls(batch.num_rows, pa.string()))
    told = [msgspec.json.encode(gap).decode() for gap in gaps.found]
    yield pa.record_batch([pa.nulls(len(told), pa.string()), pa.array(told, pa.string())], names=["name", "gap"])


def _batches(settings: Settings, found: Callable[[Log], AsyncIterator[str]]) -> Iterator[pa.RecordBatch]:
    for names in iterate(settings, lambda log: _paged(found(log))):
        yield pa.record_batch([pa.array(names, pa.string())], names=["name"])


async def _paged(names: AsyncIterator[str]) -> AsyncIterator[list[str]]:
    """In pages, each name once in a page: neighbouring entries often lie in one blob."""
    page: dict[str, None] = {}
    async for name in names:
        page[name] = None
        if len(page) >= _NAMES_PER_BATCH:
            yield list(page)
            page = {}
    if page:
        yield list(page)


def _without_those_that_may_be_named(bounds: Bounds, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        closed = [not may_be_named(name, bounds) for name in batch.column("name").to_pylist()]
        yield batch.filter(pa.array(closed, pa.bool_()))


def _without_kept(gaps: Gaps, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        free = [not gaps.keeps(name) for name in batch.column("name").to_pylist()]
        yield batch.filter(pa.array(free, pa.bool_()))


def _delete(settings: Settings, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for first in range(0, batch.num_rows, _DELETE_PAGE):
            page = batch.slice(first, _DELETE_PAGE)
            names = page.column("name").to_pylist()
            run(settings, lambda log, names=names: log.blobs.delete_many(names))  # type: ignore[misc]
            sizes = sum(page.column("size").to_pylist())
            yield pa.record_batch(
                [pa.array([len(names)], pa.int64()), pa.array([sizes], pa.int64())], names=["deleted", "bytes"]
            )
