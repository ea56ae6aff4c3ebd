"""Reads from the stores: tasks carry byte ranges of blobs, which a pin protects from the collector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from llog.engines.object.reader import Reader
from llog.errors import OffsetOutOfRange, PartitionNotInitialized, TopicNotFound, WrongEngine
from llog.groups.groups import Groups
from llog.log.catalog import OBJECT, Catalog
from llog.log.engine import Bounds
from llog.log.log import Log
from llog.log.pins import pin, release
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.spark.fetcher import PIN_LEASE_MS, fetch_ranges
from llog.spark.limits import cut_by_bytes
from llog.spark.options import ReadOptions
from llog.spark.planner import ReadTask, plan_tasks, read_bounds
from llog.spark.process import iterate
from llog.spark.schema import to_arrow
from llog.spark.source_log import Range


class StoredTask(ReadTask):
    """See `SourceTask`."""

    def read(self, options: ReadOptions, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        batches = iterate(
            options.settings,
            lambda log: fetch_ranges(log, self.ranges, pin=self.pin, fail_on_data_loss=options.fail_on_data_loss),
            reads_only=True,
        )
        for located, batch in batches:
            yield to_arrow(batch, columns, located.topic.timestamp_type)


class StoredLog:
    """See `SourceLog`. Topics of engines other than `object` have no blobs; they are read through a broker."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._catalog = Catalog(log)

    async def topic(self, name: str) -> Topic:
        return await self._catalog.get(name)

    async def topics(self) -> list[Topic]:
        return await self._catalog.topics()

    def check_readable(self, topic: Topic) -> None:
        if topic.engine != OBJECT:
            raise WrongEngine(
                f"topic {topic.name!r} is of engine {topic.engine!r}: its records are files of one machine. Give "
                "the option broker with the address of the broker that runs there, such as http://host:8080"
            )

    async def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        return await read_bounds(self._log, partitions)

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int) -> int:
        return await Reader(self._log).offset_for_time(tp, timestamp_ms)

    def now_ms(self) -> int:
        return self._log.runtime.now_ms()

    async def pin(self, owner: str) -> str | None:
        return await pin(self._log, owner, PIN_LEASE_MS)

    async def release(self, pin: str | None) -> None:
        if pin is not None:
            await release(self._log, pin)

    async def plan(
        self, ranges: Sequence[Range], topics: Mapping[str, Topic], options: ReadOptions, *, pin: str | None
    ) -> list[StoredTask]:
        tasks = await plan_tasks(
            self._log,
            ranges,
            topics,
            pin=pin,
            task_bytes_max=options.partition_bytes_max,
            min_tasks=options.min_partitions,
            fail_on_data_loss=options.fail_on_data_loss,
        )
        return [StoredTask(task.ranges, task.pin) for task in tasks]

    async def cut_by_bytes(
        self,
        starts: Mapping[TopicPartition, int],
        ends: dict[TopicPartition, int],
        bytes_max: int,
        *,
        fail_on_data_loss: bool,
    ) -> dict[TopicPartition, int]:
        return await cut_by_bytes(self._log, starts, ends, bytes_max, fail_on_data_loss=fail_on_data_loss)

    async def commit(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        groups = Groups(self._log)
        for tp, offset in offsets.items():
            try:
                await (await groups.partition(group, tp)).commit(offset)
            except (TopicNotFound, PartitionNotInitialized, OffsetOutOfRange):
                continue  # the topic was deleted meanwhile
