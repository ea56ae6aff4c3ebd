"""Ways to break groups of Kafka clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups import coordinator, offsets
from llog.kafka.groups.fence import Fence, KafkaGroup
from llog.kafka.groups.group import Group
from llog.kafka.groups.membership import Identity
from llog.kafka.groups.offsets import CommittedOffsets
from llog.log.keys import kafka_group_key
from llog.log.log import Log
from llog.log.records import decode, encode
from llog.sim.mutations.patch import Mutation, Patch
from llog.sim.plan import doubtful_coordinators, old_coordinators
from llog.stores.meta import MetaStore

T = TypeVar("T")


def a_commit_of_any_coordinator_counts(patch: Patch) -> None:
    """Every coordinator takes the group's record for its own."""
    shipped = CommittedOffsets._judge

    async def judge(self: CommittedOffsets, group: str, mine: Fence, *others: Any) -> Any:
        found = await self._log.meta.get(kafka_group_key(group))
        return await shipped(self, group, mine if found is None else Fence(mine.generation, found.version), *others)

    patch.setattr(CommittedOffsets, "_judge", judge)


def a_commit_of_any_generation_counts(patch: Patch) -> None:
    def check_commit(self: Group, identity: Identity, generation: int, now_ms: int) -> ErrorCode:
        return ErrorCode.NONE if identity.member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    patch.setattr(Group, "check_commit", check_commit)


def a_generation_is_put_over_that_of_others(patch: Patch) -> None:
    """The group's record is put without a comparison, so that two brokers may begin the same generation."""

    async def raise_fence(log: Log, group: str, coordinator: int, *, begins_generation: bool) -> Fence:
        found = await log.meta.get(kafka_group_key(group))
        before = 0 if found is None else decode(KafkaGroup, found.value, found.key).generation
        record = KafkaGroup(generation=before + begins_generation, coordinator=coordinator)
        return Fence(record.generation, await log.meta.put(kafka_group_key(group), encode(record)))

    patch.setattr(coordinator, "raise_fence", raise_fence)


def a_coordinator_trusts_old_reads(patch: Patch) -> None:
    """What is committed, and whether another broker coordinates the group, is read without a confirmation."""

    async def unconfirmed(store: MetaStore, read: Callable[[], Awaitable[T]]) -> T:
        return await read()

    patch.setattr(offsets, "read_confirmed", unconfirmed)


KAFKA_GROUP_MUTATIONS: Final[Sequence[Mutation]] = (
    Mutation(a_commit_of_any_coordinator_counts, "I11", doubtful_coordinators),
    Mutation(a_commit_of_any_generation_counts, "I11", doubtful_coordinators),
    Mutation(a_generation_is_put_over_that_of_others, "I11", doubtful_coordinators),
    Mutation(a_coordinator_trusts_old_reads, "I11", old_coordinators),
)
