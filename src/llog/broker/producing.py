"""Records of many partitions in, offsets or an error for each out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from llog.batch.columns import Columns, byte_size
from llog.broker.batching import BatchingProducer
from llog.broker.messages import ProduceItem, columns_in
from llog.broker.metrics import Metrics
from llog.broker.problems import error_of
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound
from llog.leaderless import ensure_partition
from llog.model import TopicPartition, check_topic_name
from llog.partition.catalog import Catalog
from llog.ports import AppendResult

AUTO_PARTITIONS_MAX: Final = 1024
"""A partition beyond it is not made by a mere write: a mistyped number would make a topic that nobody wants."""


class ProduceService:
    def __init__(self, catalog: Catalog, producer: BatchingProducer, metrics: Metrics) -> None:
        self._catalog = catalog
        self._producer = producer
        self._metrics = metrics
        self._known: set[TopicPartition] = set()
        self._making = asyncio.Lock()

    async def produce(self, items: Sequence[ProduceItem]) -> list[dict[str, Any]]:
        """One answer per item, in their order: partitions are appended to independently."""
        return list(await asyncio.gather(*map(self._answer, items)))

    async def _answer(self, item: ProduceItem) -> dict[str, Any]:
        answer: dict[str, Any] = {"topic": item.topic, "partition": item.partition}
        try:
            tp = TopicPartition(check_topic_name(item.topic), item.partition)
            result = await self.append(tp, columns_in(item.records))
        except LlogError as error:
            self._metrics.errors[error.code] += 1
            return answer | {"error": error_of(error)}
        return answer | {"start_offset": result.start_offset, "end_offset": result.end_offset}

    async def append(self, tp: TopicPartition, columns: Columns) -> AppendResult:
        """The offsets of these records, once they are durable; a topic or partition that is missing is made."""
        result = await self._appended(tp, columns)
        self._metrics.produced_records += columns.count
        self._metrics.produced_bytes += byte_size(columns)
        return result

    async def _appended(self, tp: TopicPartition, columns: Columns) -> AppendResult:
        await self._ensure(tp)
        try:
            return await self._producer.append(tp, columns)
        except (TopicNotFound, PartitionNotInitialized):
            # Deleted since it was known, so nothing was appended: the write makes it again, as any first write does.
            self._known.discard(tp)
            await self._ensure(tp)
            return await self._producer.append(tp, columns)

    async def _ensure(self, tp: TopicPartition) -> None:
        if tp in self._known:
            return
        async with self._making:  # waiters come in order, so that two items of one partition keep theirs
            if tp in self._known:
                return
            if tp.partition < AUTO_PARTITIONS_MAX:
                await ensure_partition(self._catalog, tp.topic, tp.partition)
            else:
                await self._catalog.directory(tp)
            self._known.add(tp)
