"""Measures a log: its size and rates, the skew of its partitions, the lag of groups and compaction, and its S3 bill.

Everything but the key counts comes from the metadata (and from 32 bytes of a blob for each partition that begins with a
compacted one). Spark counts the keys through the data source.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from llog.base.units import format_size
from llog.batch.format import HEADER_BYTES, peek
from llog.config import Settings
from llog.engines.object.compaction.plan import read_cursor
from llog.engines.object.reader import EntrySpan, Reader, pending_spans, span_of
from llog.errors import (
    BlobNotFound,
    ConfigurationError,
    CorruptBatch,
    InvalidArgument,
    PartitionNotInitialized,
    TopicNotFound,
)
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.log.catalog import OBJECT, Catalog
from llog.log.inline import is_inline
from llog.log.log import Log
from llog.log.records import Control, IndexEntry, Kind
from llog.model import TopicPartition
from llog.spark.jobs.stats.bill import BillLine, BlobCounts, check_prices, estimate
from llog.spark.jobs.stats.timeline import Timeline
from llog.spark.jobs.tasks import StepResult
from llog.spark.process import run
from llog.stores.meta import scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONCURRENCY: Final = 32
_HOUR_MS: Final = 3_600_000


class PartitionStats(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partition: int
    log_start_offset: int
    next_offset: int
    records: int
    bytes: int
    entries: int
    first_append_ms: int | None
    last_append_ms: int | None
    lag_records: int
    """The number of records that are not compacted yet."""
    lag_entries: int
    lag_bytes: int
    keys: int | None = None
    """The approximate number of distinct keys; None if they were not counted."""


class TopicStats(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partitions: int
    records: int
    bytes: int
    records_per_hour: float | None
    """The rate from the first to the last append; None if these are at the same time."""
    bytes_per_hour: float | None
    record_skew: float | None
    """The size of the largest partition divided by the mean, which is 1 if all are equal. None without records."""
    byte_skew: float | None
    lag_records: int
    keys: int | None = None


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    topic: str
    partition: int
    offset: int
    next_offset: int
    lag: int


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a log. They are not a snapshot: partitions are read one after the other during writes."""

    measured_ms: int
    topics: list[TopicStats]
    partitions: list[PartitionStats]
    groups: list[GroupStats]
    blobs: BlobCounts
    bill: list[BillLine]
    timelines: dict[str, Timeline]
    """The timeline of each topic, all in the same steps."""

    @property
    def records(self) -> int:
        return sum(each.records for each in self.topics)

    @property
    def dollars_month(self) -> float:
        return sum(line.dollars_month for line in self.bill)


class KeyCount(NamedTuple):
    """The distinct keys of a partition, or of a whole topic if `partition` is None: a key may be in several."""

    topic: str
    partition: int | None
    keys: int


def stats(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """Run the step `stats`.

    It takes the options `to` and `plot` (directories), `keys` (`no` skips reading the records) and `price.NAME`.
    """
    started = time.monotonic()
    count_keys = _should_count_keys(options)
    prices = {name.removeprefix("price."): _price(name, text) for name, text in options.items() if "." in name}
    measured = run(settings, lambda log: gather(log, prices=prices))
    if count_keys:
        measured = with_keys(measured, count_distinct_keys(spark, settings, [each.topic for each in measured.topics]))
    for option, write in (("to", _write), ("plot", _plot)):
        if options.get(option):
            write(measured, Path(options[option]))
    lag = sum(each.lag_records for each in measured.partitions)
    return StepResult(
        name="stats",
        seconds=time.monotonic() - started,
        rows=[
            ("topics", f"{len(measured.topics):,}"),
            ("partitions", f"{len(measured.partitions):,}"),
            ("records", f"{measured.records:,}"),
            ("bytes", format_size(measured.blobs.bytes)),
            ("records not compacted", f"{lag:,}"),
            ("S3 by month", f"${measured.dollars_month:,.2f}"),
        ],
    )


async def gather(log: Log, topic: str | None = None, *, prices: Mapping[str, float] | None = None) -> Stats:
    """Return the statistics of one topic, or of all object topics, without key counts."""
    chosen = check_prices(prices or {})
    catalog = Catalog(log)
    topics = await catalog.topics(OBJECT) if topic is None else [await catalog.get(topic)]
    measured_ms = log.runtime.now_ms()
    totals = _LogTotals()
    partitions: list[PartitionStats] = []
    for each in topics:
        for first in range(0, each.partitions, _CONCURRENCY):
            tps = [TopicPartition(each.name, p) for p in range(first, min(first + _CONCURRENCY, each.partitions))]
            found = await asyncio.gather(*(_partition(log, tp, totals) for tp in tps))
            partitions += [one for one in found if one is not None]
    groups = GroupListing(Groups(log), OBJECT)
    lags = [
        GroupStats(group=name, **msgspec.structs.asdict(lag))
        for name in await groups.names()
        for lag in await groups.lag(name)
        if topic is None or lag.topic == topic
    ]
    blobs = totals.counts()
    return Stats(
        measured_ms=measured_ms,
        topics=[_topic(each.name, [one for one in partitions if one.topic == each.name]) for each in topics],
        partitions=partitions,
        groups=lags,
        blobs=blobs,
        bill=estimate(blobs, gets=_gets(partitions, lags), span_ms=_span_ms(partitions), prices=chosen),
        timelines=totals.timelines(),
    )


def count_distinct_keys(spark: SparkSession, settings: Settings, topics: Sequence[str]) -> list[KeyCount]:
    """Return the number of distinct keys of each topic and partition, to about 5 %. Reads all records once."""
    if not topics:
        return []
    from pyspark.sql.functions import approx_count_distinct

    records = (
        spark.read.format("llog")
        .schema("key binary, topic string, partition int")
        .options(meta=settings.meta, blobs=settings.blobs, subscribe=",".join(topics))
        .load()
    )
    counted = records.rollup("topic", "partition").agg(approx_count_distinct("key").alias("keys")).collect()
    return [KeyCount(row["topic"], row["partition"], row["keys"]) for row in counted if row["topic"] is not None]


def with_keys(measured: Stats, counted: Sequence[KeyCount]) -> Stats:
    """Return the statistics with these key counts; partitions without records have no keys."""
    known = {(each.topic, each.partition): each.keys for each in counted}
    replace = msgspec.structs.replace
    return replace(
        measured,
        topics=[replace(each, keys=known.get((each.topic, None), 0)) for each in measured.topics],
        partitions=[replace(each, keys=known.get((each.topic, each.partition), 0)) for each in measured.partitions],
    )


class _LogTotals:
    """The counts over all partitions, which share blobs."""

    def __init__(self) -> None:
        self._blobs: dict[Kind, set[str]] = {Kind.WAL: set(), Kind.COMPACTED: set()}
        self._bytes = 0
        self._slices = 0
        self._timelines: dict[str, Timeline] = {}

    def add(self, topic: str, spans: Sequence[EntrySpan], first_append_ms: int) -> None:
        timeline = self._timelines.setdefault(topic, Timeline())
        before_ms = first_append_ms
        for span in spans:
            entry = span.entry
            if not is_inline(entry.data_uri):
                self._blobs[entry.kind].add(entry.data_uri)
            self._bytes += entry.byte_length
            self._slices += 1
            last_ms = max(before_ms, entry.max_append_ms)
            from_ms = before_ms if entry.kind is Kind.COMPACTED else last_ms
            timeline.add(from_ms, last_ms, entry.msg_count, entry.byte_length)
            before_ms = last_ms

    def counts(self) -> BlobCounts:
        return BlobCounts(
            shared=len(self._blobs[Kind.WAL]),
            compacted=len(self._blobs[Kind.COMPACTED]),
            bytes=self._bytes,
            slices=self._slices,
        )

    def timelines(self) -> dict[str, Timeline]:
        width_ms = max((each.width_ms for each in self._timelines.values()), default=0)
        for each in self._timelines.values():
            each.widen(width_ms)
        return self._timelines


async def _partition(log: Log, tp: TopicPartition, totals: _LogTotals) -> PartitionStats | None:
    """Return the statistics of a partition, or None if it was deleted meanwhile."""
    try:
        keys, control = await Reader(log).control(tp)
        cursor, _ = await read_cursor(log, tp, keys)
    except (TopicNotFound, PartitionNotInitialized):
        return None
    spans: list[EntrySpan] = []
    async for found in scan(log.meta, keys.index):
        _push(spans, span_of(found), control)
    for span in pending_spans(control):
        if not spans or span.start_offset > spans[-1].end_offset:
            _push(spans, span, control)
    first_ms = await _first_append_ms(log, spans[0].entry) if spans else None
    if first_ms is not None:
        totals.add(tp.topic, spans, first_ms)
    waiting = [span for span in spans if span.entry.kind is Kind.WAL and span.end_offset >= cursor]
    return PartitionStats(
        topic=tp.topic,
        partition=tp.partition,
        log_start_offset=control.log_start_offset,
        next_offset=control.next_offset,
        records=control.next_offset - control.log_start_offset,
        bytes=sum(span.entry.byte_length for span in spans),
        entries=len(spans),
        first_append_ms=first_ms,
        last_append_ms=control.max_append_ms if spans else None,
        lag_records=max(0, control.next_offset - max(cursor, control.log_start_offset)),
        lag_entries=len(waiting),
        lag_bytes=sum(span.entry.byte_length for span in waiting),
    )


def _push(spans: list[EntrySpan], span: EntrySpan, control: Control) -> None:
    """Add a span unless it is trimmed or newer than the control record.

    Spans of a zombie inside a compacted range are removed.
    """
    if control.log_start_offset <= span.end_offset < control.next_offset:
        while spans and spans[-1].start_offset >= span.start_offset:
            spans.pop()
        spans.append(span)


async def _first_append_ms(log: Log, entry: IndexEntry) -> int:
    """Return the time of the first append in an entry. For a compacted entry, only its blob has it."""
    if entry.kind is Kind.WAL:
        return entry.append_ms
    try:
        start = await log.blobs.get_range(log.blob_name(entry.data_uri), entry.byte_offset, HEADER_BYTES)
        return peek(start).append_ms
    except (BlobNotFound, CorruptBatch):
        return entry.append_ms  # `llog verify` reports the damage


def _topic(name: str, partitions: Sequence[PartitionStats]) -> TopicStats:
    records, size = sum(each.records for each in partitions), sum(each.bytes for each in partitions)
    hours = _span_ms(partitions) / _HOUR_MS
    return TopicStats(
        topic=name,
        partitions=len(partitions),
        records=records,
        bytes=size,
        records_per_hour=records / hours if hours else None,
        bytes_per_hour=size / hours if hours else None,
        record_skew=max(each.records for each in partitions) * len(partitions) / records if records else None,
        byte_skew=max(each.bytes for each in partitions) * len(partitions) / size if size else None,
        lag_records=sum(each.lag_records for each in partitions),
    )


def _gets(partitions: Sequence[PartitionStats], lags: Sequence[GroupStats]) -> int:
    readers: dict[str, set[str]] = {}
    for lag in lags:
        readers.setdefault(lag.topic, set()).add(lag.group)
    return sum(each.entries * max(1, len(readers.get(each.topic, ()))) for each in partitions)


def _span_ms(partitions: Sequence[PartitionStats]) -> int:
    first = [each.first_append_ms for each in partitions if each.first_append_ms is not None]
    last = [each.last_append_ms for each in partitions if each.last_append_ms is not None]
    return max(0, max(last) - min(first)) if first and last else 0


def _should_count_keys(options: Mapping[str, Any]) -> bool:
    """Return whether to count keys; raise `ConfigurationError` for an unknown option."""
    unknown = [name for name in options if name not in ("to", "plot", "keys") and not name.startswith("price.")]
    if unknown:
        raise ConfigurationError(f"the step stats has no option {unknown[0]!r}: it has to, plot, keys and price.NAME")
    count_keys = options.get("keys", "yes")
    if count_keys not in ("yes", "no"):
        raise ConfigurationError(f"stats.keys is {count_keys!r}: it must be yes or no")
    return bool(count_keys == "yes")


def _price(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"{name} is {text!r}: it must be a number of dollars") from None


def _write(measured: Stats, directory: Path) -> None:
    from llog.spark.jobs.stats.output import write_parquet

    write_parquet(measured, directory)


def _plot(measured: Stats, directory: Path) -> None:
    from llog.spark.jobs.stats.charts import draw

    draw(measured, directory)
