"""Reads a stream in micro-batches.

Spark's offset is `{"incarnations": {topic: n}, "offsets": {topic: {partition: next offset}}}`. Spark compares offsets
as JSON text, so their keys are sorted. The incarnation distinguishes a topic that was deleted and created again from
one whose records retention has removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from llog.config import Settings
from llog.errors import (
    InvalidArgument,
    LlogError,
    PartitionNotInitialized,
    TopicNotFound,
)
from llog.log.engine import Bounds
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.spark.limits import cut_by_records
from llog.spark.offsets import (
    existing_topics,
    logger,
    lose,
    remaining_topics,
    resolve_offsets,
    selected_partitions,
    selected_topics,
    within_bounds,
)
from llog.spark.options import ReadOptions, read_options
from llog.spark.schema import chosen_columns
from llog.spark.source import run_read
from llog.spark.source_log import Range, SourceLog, SourceTask

T = TypeVar("T")


class StreamPosition(msgspec.Struct, frozen=True):
    """The position of a stream: the next offset of every partition that it knows."""

    offsets: dict[TopicPartition, int]
    incarnations: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        offsets: dict[str, dict[str, int]] = {}
        for tp in sorted(self.offsets):
            offsets.setdefault(tp.topic, {})[str(tp.partition)] = self.offsets[tp]
        return {"incarnations": dict(sorted(self.incarnations.items())), "offsets": offsets}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StreamPosition:
        if value.keys() != {"incarnations", "offsets"}:
            raise InvalidArgument(
                f"the checkpoint holds an offset that is not llog's ({str(value)[:200]}): a stream that read another "
                "source needs a new checkpointLocation"
            )
        offsets = {
            TopicPartition(topic, int(partition)): int(offset)
            for topic, partitions in value["offsets"].items()
            for partition, offset in partitions.items()
        }
        return StreamPosition(offsets, {topic: int(number) for topic, number in value["incarnations"].items()})


class LlogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """The reader of one run of a query. It lives in one process; `read` runs on copies of it in the tasks."""

    def __init__(self, options: dict[str, str], schema: StructType, settings: Settings | None = None) -> None:
        # Spark would hide an error that is raised here behind its own; the first call raises it instead.
        self._options_or_error: ReadOptions | LlogError
        try:
            self._options_or_error = read_options(options, streaming=True, settings=settings)
            self._columns = chosen_columns(schema)
        except LlogError as error:
            self._options_or_error = error
        self._initial: StreamPosition | None = None
        self._target: dict[TopicPartition, int] | None = None
        self._last_advance = time.monotonic()
        self._pin: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_initial": None, "_target": None, "_pin": None}

    @property
    def _options(self) -> ReadOptions:
        if isinstance(self._options_or_error, LlogError):
            raise self._options_or_error
        return self._options_or_error

    # --- called by Spark, in the query's own process

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            self._initial = self._run(self._start)
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.offsets_per_trigger_max is not None:
            return ReadMaxRows(options.offsets_per_trigger_max)
        if options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(options.bytes_per_trigger_max)
        if options.offsets_per_trigger_min is not None:
            return ReadMinRows(options.offsets_per_trigger_min)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        position = StreamPosition.from_json(start)
        limited = not isinstance(limit, ReadAllAvailable)
        return self._run(lambda log: self._advance(log, position, limited=limited)).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        try:
            return self._run(self._end).to_json()
        except LlogError:
            return None  # a figure for progress reports only

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._run(self._end).offsets

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[SourceTask]:
        first, last = StreamPosition.from_json(start), StreamPosition.from_json(end)
        return self._run(lambda log: self._plan(log, first, last))

    def commit(self, end: dict[str, Any]) -> None:
        group = self._options.group
        if group is None:
            return
        position = StreamPosition.from_json(end)

        try:
            self._run(lambda log: log.commit(group, position.offsets))
        except LlogError as error:
            logger.warning("llog could not publish the progress of group %s: %s", group, error)

    def read(self, partition: SourceTask) -> Iterator[pa.RecordBatch]:
        return partition.read(self._options, self._columns)

    # --- the implementation

    def _run(self, use: Callable[[SourceLog], Coroutine[Any, Any, T]]) -> T:
        return run_read(self._options, use, patiently=True)

    async def _start(self, log: SourceLog) -> StreamPosition:
        options = self._options
        topics = await selected_topics(log, options.selection)
        bounds = await log.bounds(selected_partitions(options.selection, topics))
        starts = await resolve_offsets(log, options.start, bounds, is_start=True)
        for tp, offset in starts.items():
            if offset > bounds[tp].next_offset:
                raise InvalidArgument(
                    f"the stream is to start at offset {offset} of {tp}, beyond its end {bounds[tp].next_offset}"
                )
        return StreamPosition(starts, _incarnations(topics))

    async def _end(self, log: SourceLog) -> StreamPosition:
        topics, bounds = await self._current(log, StreamPosition({}, {}))
        return StreamPosition({tp: b.next_offset for tp, b in bounds.items()}, _incarnations(topics))

    async def _advance(self, log: SourceLog, position: StreamPosition, *, limited: bool) -> StreamPosition:
        """Return how far the next batch may go from `position`."""
        topics, current = await self._current(log, position)
        starts, ends = {}, {}
        for tp, bounds in current.items():
            same = position.incarnations.get(tp.topic) in (None, topics[tp.topic].incarnation)
            # A partition that is new to the stream is read from its log start: its records came after the stream began.
            starts[tp] = position.offsets.get(tp, bounds.log_start_offset) if same else bounds.log_start_offset
            end = bounds.next_offset
            if starts[tp] > end:
                self._lose(
                    f"the stream is at offset {starts[tp]} of {tp}, beyond its next offset {end}: was the metadata "
                    "restored from a backup?"
                )
            if self._target is not None:
                end = min(end, self._target.get(tp, starts[tp]))
            ends[tp] = max(starts[tp], end)
        if limited:
            ends = await self._apply_limits(log, starts, ends)
        if any(ends[tp] > starts[tp] for tp in ends):
            self._last_advance = time.monotonic()
        return StreamPosition(ends, _incarnations(topics))

    async def _current(
        self, log: SourceLog, position: StreamPosition
    ) -> tuple[dict[str, Topic], dict[TopicPartition, Bounds]]:
        """Return the topics that are read now and their bounds.

        If a topic is deleted between the two requests, start again with those that remain.
        """
        selection = self._options.selection
        while True:
            topics = await self._topics(log, position)
            try:
                return topics, await log.bounds(selected_partitions(selection, topics))
            except (TopicNotFound, PartitionNotInitialized):
                if await remaining_topics(log, selection) == topics:
                    raise

    async def _topics(self, log: SourceLog, position: StreamPosition) -> dict[str, Topic]:
        """Return the topics that are read now. A topic that was deleted or created again since `position` is a loss."""
        topics = await remaining_topics(log, self._options.selection)
        for name, incarnation in position.incarnations.items():
            if name not in topics:
                self._lose(f"topic {name!r} was deleted while it was read")
            elif topics[name].incarnation != incarnation:
                self._lose(f"topic {name!r} was deleted and created again while it was read")
        return topics

    def _lose(self, what: str) -> None:
        lose(what, fail=self._options.fail_on_data_loss)

    async def _apply_limits(
        self, log: SourceLog, starts: Mapping[TopicPartition, int], ends: dict[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        options = self._options
        available = sum(ends[tp] - starts[tp] for tp in ends)
        waited_ms = (time.monotonic() - self._last_advance) * 1000
        least = options.offsets_per_trigger_min
        if (
            least is not None
            and available < least
            and waited_ms < options.trigger_delay_ms_max
            and self._target is None
        ):
            return dict(starts)
        if options.offsets_per_trigger_max is not None:
            ends = cut_by_records(starts, ends, options.offsets_per_trigger_max)
        if options.bytes_per_trigger_max is not None:
            ends = await log.cut_by_bytes(
                starts, ends, options.bytes_per_trigger_max, fail_on_data_loss=options.fail_on_data_loss
            )
        return ends

    async def _plan(self, log: SourceLog, first: StreamPosition, last: StreamPosition) -> Sequence[SourceTask]:
        pin = await log.pin("spark stream")
        await log.release(self._pin)
        self._pin = pin
        ranges, topics = await self._ranges(log, first, last)
        return await log.plan(ranges, topics, self._options, pin=pin)

    async def _ranges(
        self, log: SourceLog, first: StreamPosition, last: StreamPosition
    ) -> tuple[list[Range], dict[str, Topic]]:
        """Return the ranges from `first` to `last` that exist, and their topics."""
        topics = await existing_topics(log, sorted(last.incarnations))
        topics = {name: topic for name, topic in topics.items() if topic.incarnation == last.incarnations[name]}
        current = await log.bounds([tp for tp in last.offsets if tp.topic in topics])
        ranges: list[Range] = []
        for tp, stop in last.offsets.items():
            topic = topics.get(tp.topic)
            if topic is None:
                self._lose(f"topic {tp.topic!r} was deleted before its records up to {stop} of {tp} were read")
                continue
            bounds = current[tp]
            known = first.incarnations.get(tp.topic) in (None, topic.incarnation)
            start = first.offsets.get(tp, bounds.log_start_offset) if known else bounds.log_start_offset
            if start > stop:
                raise InvalidArgument(
                    f"the stream would go back from offset {start} to {stop} of {tp}: is the checkpoint another's?"
                )
            wanted = Range(tp, start, stop)
            ranges.append(within_bounds(wanted, bounds, fail_on_data_loss=self._options.fail_on_data_loss))
        return ranges, {tp.topic: topics[tp.topic] for tp, _, _ in ranges}


def _incarnations(topics: Mapping[str, Topic]) -> dict[str, int]:
    return {name: topic.incarnation for name, topic in topics.items()}
