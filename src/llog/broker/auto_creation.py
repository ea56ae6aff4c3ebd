"""Topics and partitions that a write creates because they are missing, as far as LLOG_AUTO_CREATE allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final

from llog.batch.columns import byte_size
from llog.broker.batching import BatchingProducer, Outcome, Part
from llog.broker.metrics import Metrics
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound
from llog.log.catalog import Catalog
from llog.log.engine import AppendResult
from llog.log.records import Topic
from llog.model import PARTITIONS_MAX, TopicPartition

PARTITIONS_AHEAD_MAX: Final = 64
"""Partitions that a write may add with `lazy`, the default: a mistyped number must not create thousands of them."""


class AutoCreation:
    """Creates what writes need. `policy` is `lazy`, `off`, or the least number of partitions of a new topic."""

    def __init__(self, catalog: Catalog, policy: str) -> None:
        self._catalog = catalog
        self._policy = policy
        self._partitions_min = int(policy) if policy.isdecimal() else 1

    async def create_missing(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, LlogError]:
        """Create the missing ones of these partitions, all of a topic in one step.

        Returns the errors of the partitions that do not exist afterwards.
        """
        by_topic: dict[str, set[int]] = {}
        for tp in tps:
            by_topic.setdefault(tp.topic, set()).add(tp.partition)
        try:
            topics = await self._catalog.find(sorted(by_topic))
        except LlogError as error:
            return dict.fromkeys(tps, error)
        refused: dict[TopicPartition, LlogError] = {}
        for name, partitions in by_topic.items():
            try:
                topic = await self._create_or_grow(name, topics[name], partitions)
                errors = {number: self._missing(topic, number) for number in partitions if number >= topic.partitions}
            except LlogError as error:
                errors = dict.fromkeys(partitions, error)
            refused |= {TopicPartition(name, partition): error for partition, error in errors.items()}
        return refused

    async def _create_or_grow(self, name: str, found: Topic | LlogError, partitions: Collection[int]) -> Topic:
        """Return the topic with those of the partitions that a write may create. `found` is what the catalog has."""
        if isinstance(found, TopicNotFound):
            if self._policy == "off":
                raise TopicNotFound(f"{found}. A write creates none: LLOG_AUTO_CREATE is off")
            return await self._create(name, partitions)
        if isinstance(found, LlogError):
            raise found
        return await self._grow(found, partitions)

    async def _create(self, name: str, partitions: Collection[int]) -> Topic:
        limit = _limit(0) if self._policy == "lazy" else PARTITIONS_MAX
        allowed = [number for number in partitions if number < limit]
        if not allowed:
            raise TopicNotFound(
                f"there is no topic {name!r}, and one that a write creates has at most {limit} partitions, so none "
                f"has the number {min(partitions)}: `llog topics create` creates larger ones"
            )
        count = max(self._partitions_min, max(allowed) + 1)
        topic = await self._catalog.get_or_create(name, count)
        # Another process may have created the topic at the same time, with fewer partitions.
        return topic if topic.partitions >= count else await self._grow(topic, partitions)

    async def _grow(self, topic: Topic, partitions: Collection[int]) -> Topic:
        """Return the topic with those of the partitions that a write may add to it."""
        if self._policy == "lazy":
            allowed = [number for number in partitions if topic.partitions <= number < _limit(topic.partitions)]
            if allowed:
                return await self._catalog.get_or_create_partition(TopicPartition(topic.name, max(allowed)))
        return topic

    def _missing(self, topic: Topic, partition: int) -> LlogError:
        adds = f"at most {PARTITIONS_AHEAD_MAX} beyond those" if self._policy == "lazy" else "none"
        return PartitionNotInitialized(
            f"topic {topic.name!r} has no partition {partition}: it has {topic.partitions}, counted from 0. A "
            f"write adds {adds} (LLOG_AUTO_CREATE is {self._policy}): `llog topics add-partitions` adds more"
        )


class AutoCreatingProducer:
    """Appends through a batching producer, after creating what is missing."""

    def __init__(self, creation: AutoCreation, producer: BatchingProducer, metrics: Metrics) -> None:
        self._creation = creation
        self._producer = producer
        self._metrics = metrics
        self._existing: set[TopicPartition] = set()
        """Partitions that existed when this broker last appended to them."""
        self._creating = asyncio.Lock()

    async def append(self, parts: Sequence[Part]) -> list[Outcome]:
        """Return the offsets of each part, once its records are durable, or its error.

        Missing topics and partitions that may be created are created first, so that all parts leave together.
        """
        outcomes = await self._append(parts)
        # Of a partition that was deleted since it was seen, nothing was appended: the write creates it again, as any
        # first write does.
        again = [
            index
            for index, part in enumerate(parts)
            if isinstance(outcomes[index], PartitionNotInitialized) and part.tp in self._existing
        ]
        self._existing.difference_update(parts[index].tp for index in again)
        for index, outcome in zip(again, await self._append([parts[index] for index in again]), strict=True):
            outcomes[index] = outcome
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, AppendResult):
                self._metrics.produced_records += part.columns.count
                self._metrics.produced_bytes += byte_size(part.columns)
        return outcomes

    async def _append(self, parts: Sequence[Part]) -> list[Outcome]:
        refused = await self._create_missing(part.tp for part in parts)
        accepted = [part for part in parts if part.tp not in refused] if refused else parts
        outcomes: Iterator[Outcome]
        try:
            outcomes = iter(await self._producer.append(accepted) if accepted else ())
        except LlogError as error:
            outcomes = repeat(error)
        return [refused[part.tp] if part.tp in refused else next(outcomes) for part in parts]

    async def _create_missing(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, LlogError]:
        """Create the partitions that are missing; return the error of each that could not be created."""
        unknown = set(tps) - self._existing
        if not unknown:
            return {}
        async with self._creating:  # keeps the order of the requests
            unknown -= self._existing
            refused = await self._creation.create_missing(unknown)
            self._existing |= unknown - refused.keys()
        return refused


def _limit(partitions: int) -> int:
    return min(partitions + PARTITIONS_AHEAD_MAX, PARTITIONS_MAX)
