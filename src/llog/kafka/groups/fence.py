"""The stored record of a Kafka group, by which at most one broker coordinates the group, whatever the brokers believe.

Two brokers may both believe that they coordinate a group, since their views of the live brokers differ for a while. The
one that put the group's record last is right. A coordinator puts the record, by compare-and-swap, with the number of
every generation before it begins, and before the first commit of a group without members; a commit counts only while
the record still has the version of that put. So generations grow across brokers, and a member of a generation that
another broker has replaced cannot commit.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from llog.errors import OutcomeUnknown, VersionMismatch
from llog.log.cas import Backoff
from llog.log.keys import kafka_group_key
from llog.log.log import Log
from llog.log.records import decode, encode
from llog.stores.meta import ABSENT


class KafkaGroup(msgspec.Struct, frozen=True, kw_only=True):
    generation: int
    """The highest generation that any broker has begun."""
    coordinator: int
    """The id of the broker that put the record, for people who look for it."""


class Fence(NamedTuple):
    """A put of a group's record. It holds until another put gives the record a higher version."""

    generation: int
    version: int


async def raise_fence(log: Log, group: str, coordinator: int, *, begins_generation: bool) -> Fence:
    """Become the only broker that commits for the group; with `begins_generation`, under a generation of its own.

    Raises `StoreUnavailable`, `OutcomeUnknown` or `Contention` if that failed, or may have failed.
    """
    key = kafka_group_key(group)
    backoff = Backoff(log.runtime, f"the record of the Kafka group {group!r}")
    while True:
        found = await log.meta.get(key)
        stored = 0 if found is None else decode(KafkaGroup, found.value, key).generation
        generation = stored + begins_generation
        value = encode(KafkaGroup(generation=generation, coordinator=coordinator))
        try:
            version = await log.meta.put(key, value, expected=ABSENT if found is None else found.version)
        except (VersionMismatch, OutcomeUnknown) as error:
            await backoff.wait(error)
        else:
            return Fence(generation, version)


async def remove_fence(log: Log, group: str, fence: Fence) -> None:
    """Delete the group's record, unless another broker coordinates the group by now."""
    try:
        await log.meta.delete(kafka_group_key(group), expected=fence.version)
    except VersionMismatch:
        pass
