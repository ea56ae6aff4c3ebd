"""Topics and partitions that a write creates because they are missing, as far as LLOG_AUTO_CREATE allows it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
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

    async def create_missing(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, Topic | LlogError]:
        """Create the missing ones of these partitions, all of a topic in one step.

        Returns the topic of each partition, or the error of one that does not exist afterwards.
        """
        by_topic: dict[str, set[int]] = {}
        for tp in tps:
            by_topic.setdefault(tp.topic, set()).add(tp.partition)
        try:
            topics = await self._catalog.find(sorted(by_topic))
        except LlogError as error:
            return dict.fromkeys(tps, error)
        outcomes: dict[TopicPartition, Topic | LlogError] = {}
        for name, partitions in by_topic.items():
            try:
                topic = await self._create_or_grow(name, topics[name], partitions)
            except LlogError as error:
                outcomes |= {TopicPartition(name, number): error for number in partitions}
                continue
            for number in partitions:
                exists = number < topic.partitions
                outcomes[TopicPartition(name, number)] = topic if exists else self._missing(topic, number)
        return outcomes

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
    """Appends through the batching producers that `choose_producer` names for topics, after creating what is
    missing.
    """

    def __init__(
        self, creation: AutoCreation, choose_producer: Callable[[Topic], BatchingProducer], metrics: Metrics
    ) -> None:
        self._creation = creation
        self._choose_producer = choose_producer
        self._metrics = metrics
        self._producers: dict[TopicPartition, BatchingProducer] = {}
        """The producers of the partitions that existed when this broker last appended to them."""
        self._creating = asyncio.Lock()
        self._in_line: Counter[TopicPartition] = Counter()
        """How many requests of each partition create partitions or wait for that. Later ones must not overtake them."""

    async def append(self, parts: Sequence[Part]) -> list[Outcome]:
        """Return the offsets of each part, once its records are durable, or its error.

        Missing topics and partitions that may be created are created first, so that all parts leave together.
        """
        outcomes = await self._append(parts)
        # Of a partition that was deleted since it was seen, nothing was appended: the write creates it again, as any
        # first write does.
        again = [
            index
            for index, outcome in enumerate(outcomes)
            if isinstance(outcome, PartitionNotInitialized) and parts[index].tp in self._producers
        ]
        if again:
            for index in again:
                self._producers.pop(parts[index].tp, None)
            for index, outcome in zip(again, await self._append([parts[index] for index in again]), strict=True):
                outcomes[index] = outcome
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, AppendResult) and not outcome.repeated:
                producer = None if part.producer is None else part.producer.id
                self._metrics.count_produced(part.tp.topic, producer, part.columns.count, byte_size(part.columns))
        return outcomes

    async def find_topics(self, names: Collection[str]) -> dict[str, Topic | LlogError]:
        """Return the topic of each name, created if it is missing and may be, or why there is none."""
        async with self._creating:
            found = await self._creation.create_missing([TopicPartition(name, 0) for name in names])
        return {tp.topic: topic for tp, topic in found.items()}

    async def _append(self, parts: Sequence[Part]) -> list[Outcome]:
        known = {self._producers.get(part.tp) for part in parts} if not self._in_line else set()
        if len(known) == 1 and (only := known.pop()) is not None:  # most often: there is nothing to create or divide
            try:
                return await only.append(parts)
            except LlogError as error:
                return [error] * len(parts)
        producers = await self._find_producers({part.tp for part in parts})
        indexes: dict[BatchingProducer, list[int]] = {}
        outcomes: dict[int, Outcome] = {}
        for index, part in enumerate(parts):
            producer = producers[part.tp]
            if isinstance(producer, LlogError):
                outcomes[index] = producer
            else:
                indexes.setdefault(producer, []).append(index)
        answers = [producer.append([parts[index] for index in own]) for producer, own in indexes.items()]
        for own, answer in zip(indexes.values(), answers, strict=True):
            try:
                outcomes |= zip(own, await answer, strict=True)
            except LlogError as error:
                outcomes |= dict.fromkeys(own, error)
        return [outcomes[index] for index in range(len(parts))]

    async def _find_producers(self, tps: set[TopicPartition]) -> dict[TopicPartition, BatchingProducer | LlogError]:
        """Return the producer of each partition, or why it has none, after creating the partitions that are missing."""
        known = self._producers.keys() & tps
        found: dict[TopicPartition, BatchingProducer | LlogError] = {tp: self._producers[tp] for tp in known}
        if len(found) == len(tps) and self._in_line.keys().isdisjoint(tps):
            return found
        self._in_line.update(tps)
        try:
            async with self._creating:  # keeps the order of the requests
                missing = tps - self._producers.keys()
                created = await self._creation.create_missing(missing) if missing else {}
                for tp, topic in created.items():
                    if isinstance(topic, LlogError):
                        found[tp] = topic
                    else:
                        self._producers[tp] = self._choose_producer(topic)
                return found | {tp: self._producers[tp] for tp in tps - found.keys()}
        finally:
            for tp in tps:
                self._in_line[tp] -= 1
                if not self._in_line[tp]:
                    del self._in_line[tp]


def _limit(partitions: int) -> int:
    return min(partitions + PARTITIONS_AHEAD_MAX, PARTITIONS_MAX)
