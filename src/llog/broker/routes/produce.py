"""Records of many partitions in, offsets or an error for each out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from llog.batch.columns import byte_size
from llog.broker.auto_creation import AutoCreation
from llog.broker.batching import BatchingProducer, Part
from llog.broker.http.messages import ProduceItem, columns_in
from llog.broker.http.problems import error_of
from llog.broker.metrics import Metrics
from llog.engines.port import AppendResult
from llog.errors import LlogError, PartitionNotInitialized
from llog.model import TopicPartition, check_topic_name


class ProduceService:
    def __init__(self, creation: AutoCreation, producer: BatchingProducer, metrics: Metrics) -> None:
        self._creation = creation
        self._producer = producer
        self._metrics = metrics
        self._known: set[TopicPartition] = set()
        self._making = asyncio.Lock()

    async def produce(self, items: Sequence[ProduceItem]) -> list[dict[str, Any]]:
        """One answer per item, in their order: partitions are appended to independently."""
        checked = [_checked(item) for item in items]
        results = iter(await self.append([part for part in checked if isinstance(part, Part)]))
        outcomes = [next(results) if isinstance(part, Part) else part for part in checked]
        return [self._answer(item, outcome) for item, outcome in zip(items, outcomes, strict=True)]

    def _answer(self, item: ProduceItem, outcome: AppendResult | LlogError) -> dict[str, Any]:
        answer: dict[str, Any] = {"topic": item.topic, "partition": item.partition}
        if isinstance(outcome, LlogError):
            self._metrics.errors[outcome.code] += 1
            return answer | {"error": error_of(outcome)}
        return answer | {"start_offset": outcome.start_offset, "end_offset": outcome.end_offset}

    async def append(self, parts: Sequence[Part]) -> list[AppendResult | LlogError]:
        """The offsets of each part, once its records are durable, or its error.

        Topics and partitions that are missing and may be made are made first, so that all parts leave together.
        """
        results = await self._append(parts)
        # Deleted since it was known, so nothing was appended: the write makes it again, as any first write does.
        again = [place for place, part in enumerate(parts) if _is_missing(results[place]) and part.tp in self._known]
        self._known.difference_update(parts[place].tp for place in again)
        for place, result in zip(again, await self._append([parts[place] for place in again]), strict=True):
            results[place] = result
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, AppendResult):
                self._metrics.produced_records += part.columns.count
                self._metrics.produced_bytes += byte_size(part.columns)
        return results

    async def _append(self, parts: Sequence[Part]) -> list[AppendResult | LlogError]:
        refused = await self._make(part.tp for part in parts)
        going = [part for part in parts if part.tp not in refused] if refused else parts
        outcomes: Iterator[AppendResult | LlogError]
        try:
            outcomes = iter(await self._producer.append(going) if going else ())
        except LlogError as error:
            outcomes = repeat(error)
        return [refused[part.tp] if part.tp in refused else next(outcomes) for part in parts]

    async def _make(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, LlogError]:
        """Makes the partitions that are missing; returns the error of each that could not be made."""
        unknown = set(tps) - self._known
        if not unknown:
            return {}
        async with self._making:  # requests come in order
            unknown -= self._known
            refused = await self._creation.make(unknown)
            self._known |= unknown - refused.keys()
        return refused


def _checked(item: ProduceItem) -> Part | LlogError:
    try:
        return Part(TopicPartition(check_topic_name(item.topic), item.partition), columns_in(item.records))
    except LlogError as error:
        return error


def _is_missing(result: AppendResult | LlogError) -> bool:
    return isinstance(result, PartitionNotInitialized)
