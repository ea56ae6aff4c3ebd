"""What a write makes that is missing, as LLOG_AUTO_CREATE says: topics, and partitions of those that there are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from llog.api.leaderless import ensure_partition
from llog.errors import LlogError, PartitionNotInitialized, TopicExists, TopicNotFound
from llog.log.catalog import Catalog
from llog.log.records import Topic
from llog.model import PARTITIONS_MAX, TopicPartition

PARTITIONS_AHEAD_MAX: Final = 64
"""Partitions that a write may add with `lazy`, the default: a mistyped number must not make thousands of them."""


class AutoCreation:
    """`policy` is `lazy`, `off`, or how many partitions a new topic gets at least."""

    def __init__(self, catalog: Catalog, policy: str) -> None:
        self._catalog = catalog
        self._policy = policy
        self._partitions_min = int(policy) if policy.isdecimal() else 1

    async def make(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, LlogError]:
        """Makes those that are missing, all of a topic in one step; returns the errors of those that are missing after
        it.
        """
        wanted: dict[str, set[int]] = {}
        for tp in tps:
            wanted.setdefault(tp.topic, set()).add(tp.partition)
        try:
            found = await self._catalog.find(sorted(wanted))
        except LlogError as error:
            return dict.fromkeys(tps, error)
        refused: dict[TopicPartition, LlogError] = {}
        for name, partitions in wanted.items():
            try:
                topic = await self._made(name, found[name], partitions)
                errors = {each: self._missing(topic, each) for each in partitions if each >= topic.partitions}
            except LlogError as error:
                errors = dict.fromkeys(partitions, error)
            refused |= {TopicPartition(name, partition): error for partition, error in errors.items()}
        return refused

    async def _made(self, name: str, found: Topic | LlogError, partitions: Collection[int]) -> Topic:
        """The topic, with those of the partitions that a write may make. `found`: what the catalog had under its
        name.
        """
        if isinstance(found, TopicNotFound):
            if self._policy == "off":
                raise TopicNotFound(f"{found}. A write makes none: LLOG_AUTO_CREATE is off")
            return await self._created(name, partitions)
        if isinstance(found, LlogError):
            raise found
        if self._policy == "lazy":
            wanted = [each for each in partitions if found.partitions <= each < _limit(found.partitions)]
            if wanted:
                await ensure_partition(self._catalog, name, max(wanted))
                return await self._catalog.get(name)
        return found

    async def _created(self, name: str, partitions: Collection[int]) -> Topic:
        limit = _limit(0) if self._policy == "lazy" else PARTITIONS_MAX
        wanted = [each for each in partitions if each < limit]
        if not wanted:
            raise TopicNotFound(
                f"there is no topic {name!r}, and one that a write makes has at most {limit} partitions, so none "
                "has the number "
                f"{min(partitions)}: `llog topics create` makes larger ones"
            )
        try:
            return await self._catalog.create(name, max(self._partitions_min, max(wanted) + 1))
        except TopicExists:
            return await self._made(name, await self._catalog.get(name), partitions)  # somebody else was faster

    def _missing(self, topic: Topic, partition: int) -> LlogError:
        adds = f"at most {PARTITIONS_AHEAD_MAX} beyond those" if self._policy == "lazy" else "none"
        return PartitionNotInitialized(
            f"topic {topic.name!r} has no partition {partition}: it has {topic.partitions}, counted from 0. A "
            f"write adds {adds} "
            f"(LLOG_AUTO_CREATE is {self._policy}): `llog topics add-partitions` adds more"
        )


def _limit(partitions: int) -> int:
    return min(partitions + PARTITIONS_AHEAD_MAX, PARTITIONS_MAX)
