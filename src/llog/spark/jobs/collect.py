"""Collects unreferenced blobs by joins of DataFrames, in the order and by the rules of `llog.engines.object.collector`.

Each step ends everywhere before the next one begins, so every frame that a later step relies on is materialized at
once. It is a local checkpoint: if an executor is lost with a part of it, the run fails and deletes nothing, whereas a
plan that is computed again would list or mark at a later time than it should. A task whose reads were stale also fails,
and its rows with it (`llog.engines.object.collection_tasks`). The names of blobs stay on the executors.
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
from llog.engines.object.clocks import Window
from llog.engines.object.collection_tasks import (
    enumerate_partitions,
    raise_all_sink_floors,
    raise_floors_of,
    read_pins,
    referenced_names,
    sink_referenced_names,
)
from llog.engines.object.collector import (
    CollectorOptions,
    CommittableStamps,
    StampRange,
    Waiting,
    begin_collection,
    gap_warning,
    is_candidate,
    list_partitions,
    may_be_named,
    sweep_partition,
)
from llog.engines.object.gaps import Gap, Gaps
from llog.log.catalog import Catalog
from llog.log.keys import CLOCK, ROOT, SINK_BLOBS, TOPICS, WAL, PartitionKeys, directory_name
from llog.log.log import Log, is_remote
from llog.log.opening import collector_options
from llog.log.records import Topic, decode
from llog.runtime import stamp_of
from llog.spark.jobs.tasks import StepResult, check_reachable, chunks, run_tasks, scatter
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


class CollectResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one collection.

    `candidates` are old enough. Of these, `referenced` are in use, `kept` could fill a gap, and `waiting` are held back
    by pins.
    """

    candidates: int
    referenced: int = 0
    waiting: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    kept: int = 0
    gaps: tuple[Gap, ...] = ()


def collect(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """Run the step `collect`. The option `grace_ms` takes precedence over the setting.

    The runs of one session remember which names wait for which pins.
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
    """Collects one log, any number of times. It may run beside other collectors."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        check_reachable(settings)
        self._spark = spark
        self._settings = settings
        self._waiting = _WaitingNames(spark)

    def collect_once(self, options: CollectorOptions) -> CollectResult:
        settings = self._settings
        run(settings, lambda log: Catalog(log).finish_deletions())
        self._run_on_partitions(run(settings, list_partitions), _sweep)
        window = run(settings, partial(_window, options.grace_ms))
        gaps = Gaps(options.grace_ms)
        prefixes = run(settings, partial(blob_prefixes, window))
        listed = partial(_list, settings, window)
        candidates = _checkpoint(scatter(self._spark, chunks(self._spark, prefixes), listed, _BLOBS))
        count = candidates.count()
        # Leaves the floors alone if everything is in use. This mark decides nothing else.
        suspects = (
            _checkpoint(self._find_unreferenced(candidates, run(settings, list_partitions), gaps))
            if count
            else candidates
        )
        if not count or suspects.isEmpty():
            return CollectResult(candidates=count, referenced=count, gaps=gaps.found)
        enumerated = run(settings, enumerate_partitions)
        ceiling = max(self._run_on_partitions(enumerated, partial(_raise_floors, window)), default=0)
        sinks = run(settings, lambda log: raise_all_sink_floors(log, window, options.sink_open_ms))
        bounds = CommittableStamps(StampRange(window.old_ms, ceiling), sinks)
        closed = suspects.mapInArrow(partial(_without_those_that_may_be_named, bounds), _BLOBS)
        list_unreferenced = _checkpoint(self._find_unreferenced(closed, enumerated, gaps))
        unnamed = list_unreferenced.count()
        if gaps.found:
            list_unreferenced = _checkpoint(list_unreferenced.mapInArrow(partial(_without_kept, gaps), _BLOBS))
        garbage = list_unreferenced.count()
        alive = run(settings, lambda log: read_pins(log, window))
        free, waiting = self._waiting.split(list_unreferenced, alive)
        deleted, size = _sums(free.mapInArrow(partial(_delete, settings), _DELETED))
        return CollectResult(
            candidates=count,
            referenced=count - unnamed,
            waiting=waiting,
            deleted=deleted,
            deleted_bytes=size,
            kept=unnamed - garbage,
            gaps=gaps.found,
        )

    def _find_unreferenced(self, blobs: DataFrame, enumerated: Sequence[PartitionKeys], gaps: Gaps) -> DataFrame:
        """Return the blobs that nothing refers to. The sinks are read to their end before the partitions.

        Names and gaps come from one scan: the gaps are added to `gaps` before this returns.
        """
        in_sinks = _checkpoint(scatter(self._spark, [None], partial(_sink_names, self._settings), _NAMES))
        groups = chunks(self._spark, enumerated, _PARTITIONS_PER_TASK_MIN)
        marked = _checkpoint(scatter(self._spark, groups, partial(_names, self._settings), _MARKED))
        gaps.add(
            [msgspec.json.decode(row[0], type=Gap) for row in marked.where("gap is not null").select("gap").collect()]
        )
        in_partitions = marked.where("gap is null").select("name")
        return blobs.join(in_sinks.unionAll(in_partitions), "name", "left_anti")

    def _run_on_partitions(
        self, enumerated: Sequence[PartitionKeys], work: Callable[[Settings, list[PartitionKeys]], T]
    ) -> list[T]:
        groups = chunks(self._spark, enumerated, _PARTITIONS_PER_TASK_MIN)
        return run_tasks(self._spark, groups, partial(work, self._settings))


class _WaitingNames:
    """The unreferenced names that pins hold back, on the executors, each with the run that first found it.

    All names that one run found first wait for the same pins. So `Waiting` decides about runs as if they were names,
    and the driver knows only the runs.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._rule = Waiting()
        self._runs: list[str] = []
        self._names: DataFrame | None = None
        self._last = 0

    def split(self, list_unreferenced: DataFrame, alive: frozenset[str]) -> tuple[DataFrame, int]:
        """Return the blobs that may be deleted, and the number of those that wait."""
        from pyspark.sql import functions as f

        self._last += 1
        known, self._names = self._names, None  # a failure below makes the next run begin anew
        if known is None:
            self._runs = []
            found = list_unreferenced.withColumn("run", f.lit(str(self._last)))
        else:
            found = list_unreferenced.join(known, "name", "left").withColumn(
                "run", f.coalesce(f.col("run"), f.lit(str(self._last)))
            )
        self._rule.begin_run()
        runs = [*self._runs, str(self._last)]
        free = self._rule.free(runs, alive)
        if len(free) == len(runs):
            return list_unreferenced, 0
        found = _checkpoint(found)
        is_free = f.col("run").isin(free)
        self._runs = [run for run in runs if run not in set(free)]
        self._names = found.where(~is_free).select("name", "run")
        return found.where(is_free).select("name", "size"), self._names.count()


_collectors: dict[tuple[str, Settings], SparkCollector] = {}


async def blob_prefixes(window: Window, log: Log) -> list[str]:
    """Return disjoint prefixes of names, to be listed in parallel, that cover every blob which may be old enough."""
    prefixes = [SINK_BLOBS, CLOCK]
    async for found in scan(log.meta, TOPICS):
        topic = decode(Topic, found.value, found.key)
        # Including deleted topics and earlier incarnations, whose blobs the collector has to find.
        prefixes += [
            f"{ROOT}{directory_name(topic.name, number)}/partitions/" for number in range(1, topic.incarnation + 1)
        ]
    if not is_remote(log.blobs.uri):
        return [WAL, *prefixes]  # on a file system, every listing reads the whole directory
    async for _ in log.blobs.list(WAL, start_after=WAL + _uuid_prefix(f"{window.far_ms:0{_STAMP_DIGITS}x}")):
        return [WAL, *prefixes]  # a clock was far ahead: the range of stamps is too wide to be divided
    async for page in log.blobs.list(WAL):
        oldest = stamp_of(page[0].name)
        return [*(wal_prefixes(oldest, window.old_ms) if oldest is not None else [WAL]), *prefixes]
    return prefixes


def wal_prefixes(oldest_ms: int, limit: int) -> list[str]:
    """Return at most `_PREFIXES_MAX` prefixes that cover the shared blobs stamped from `oldest_ms` up to `limit`.

    The names of shared blobs begin with their stamps.
    """
    for digits in range(_STAMP_DIGITS - 1, 0, -1):
        shift = 4 * (_STAMP_DIGITS - digits)
        first, last = oldest_ms >> shift, (limit - 1) >> shift
        if last - first < _PREFIXES_MAX:
            return [WAL + _uuid_prefix(f"{number:0{digits}x}") for number in range(first, last + 1)]
    return [WAL]


def _uuid_prefix(digits: str) -> str:
    """Return the beginning of a UUID with these digits."""
    return digits if len(digits) <= 8 else f"{digits[:8]}-{digits[8:]}"


def _checkpoint(frame: DataFrame) -> DataFrame:
    """Compute the frame now and keep its rows, so that they are never computed again."""
    return frame.localCheckpoint(eager=True)


def _sums(deleted: DataFrame) -> tuple[int, int]:
    from pyspark.sql import functions as f

    row = deleted.agg(f.coalesce(f.sum("deleted"), f.lit(0)), f.coalesce(f.sum("bytes"), f.lit(0))).collect()[0]
    return int(row[0]), int(row[1])


async def _window(grace_ms: int, log: Log) -> Window:
    return await begin_collection(log, grace_ms)


# --- on executors


def _sweep(settings: Settings, group: list[PartitionKeys]) -> None:
    async def work(log: Log) -> None:
        for keys in group:
            await sweep_partition(log, keys)

    run(settings, work)


def _raise_floors(window: Window, settings: Settings, group: list[PartitionKeys]) -> int:
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
    return _name_batches(settings, sink_referenced_names)


def _names(settings: Settings, group: list[PartitionKeys]) -> Iterator[pa.RecordBatch]:
    """Yield the names of the blobs that these partitions refer to, and then their gaps."""
    gaps = Gaps()
    for batch in _name_batches(settings, lambda log: referenced_names(log, group, gaps)):
        yield batch.append_column("gap", pa.nulls(batch.num_rows, pa.string()))
    encoded = [msgspec.json.encode(gap).decode() for gap in gaps.found]
    yield pa.record_batch([pa.nulls(len(encoded), pa.string()), pa.array(encoded, pa.string())], names=["name", "gap"])


def _name_batches(settings: Settings, found: Callable[[Log], AsyncIterator[str]]) -> Iterator[pa.RecordBatch]:
    for names in iterate(settings, lambda log: _pages(found(log))):
        yield pa.record_batch([pa.array(names, pa.string())], names=["name"])


async def _pages(names: AsyncIterator[str]) -> AsyncIterator[list[str]]:
    """Yield the names in pages, each name once in a page: neighbouring entries are often in one blob."""
    page: dict[str, None] = {}
    async for name in names:
        page[name] = None
        if len(page) >= _NAMES_PER_BATCH:
            yield list(page)
            page = {}
    if page:
        yield list(page)


def _without_those_that_may_be_named(
    bounds: CommittableStamps, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
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
