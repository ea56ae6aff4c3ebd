"""Ways to break consumer groups and the outbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from llog.cdc import relay
from llog.cdc.outbox import Cut
from llog.errors import VersionMismatch
from llog.groups import assignment, claims
from llog.groups.group_partition import Decision, GroupPartition
from llog.groups.records import Claim, GroupRecord, Members
from llog.groups.store import GroupKey, MetaGroupStore
from llog.log.engine import Bounds
from llog.log.keys import group_key
from llog.log.producers import Producer
from llog.sim import consumers, outbox
from llog.sim.mutations.patch import Change, Mutation, Patch
from llog.sim.plan import jumping_members, lossy_groups


def an_ack_drops_the_claims_of_others(patch: Patch) -> None:
    def ack(record: GroupRecord, member: str, upto: int) -> GroupRecord:
        kept = tuple(claim for claim in record.claims if claim.start > upto)
        return msgspec.structs.replace(record, offset=max(record.offset, upto + 1), claims=kept)

    patch.setattr(claims, "ack", ack)


def an_ack_drops_the_expired_claims_of_others(patch: Patch) -> None:
    shipped = claims.ack

    def ack(record: GroupRecord, member: str, upto: int) -> GroupRecord:
        live = tuple(claim for claim in record.claims if claim.deadline_ms > record.updated_ms or claim.start > upto)
        return shipped(msgspec.structs.replace(record, claims=live), member, upto)

    patch.setattr(claims, "ack", ack)


def an_ack_of_what_was_released_counts(patch: Patch) -> None:
    def release(record: GroupRecord, member: str, start: int, end: int, due_ms: int) -> GroupRecord:
        return claims.settle(record, member, start, end)

    patch.setattr(claims, "release", release)


def _claiming(change: Callable[[GroupRecord, int], GroupRecord]) -> Change:
    """A claim that first does this to the record, at this time."""
    shipped = claims.claim

    def claim(
        record: GroupRecord,
        member: str,
        limit: int,
        bounds: Bounds,
        now_ms: int,
        visibility_ms: int,
        *,
        in_order: bool = False,
    ) -> tuple[GroupRecord, tuple[Claim, ...]]:
        return shipped(change(record, now_ms), member, limit, bounds, now_ms, visibility_ms, in_order=in_order)

    return lambda patch: patch.setattr(claims, "claim", claim)


def expired_claims_are_forgotten(patch: Patch) -> None:
    def forget(record: GroupRecord, now_ms: int) -> GroupRecord:
        return msgspec.structs.replace(record, claims=tuple(c for c in record.claims if c.deadline_ms > now_ms))

    _claiming(forget)(patch)


def live_claims_are_given_to_others(patch: Patch) -> None:
    def expire(record: GroupRecord, now_ms: int) -> GroupRecord:
        return msgspec.structs.replace(
            record, claims=tuple(msgspec.structs.replace(claim, deadline_ms=0) for claim in record.claims)
        )

    _claiming(expire)(patch)


def expired_claims_are_never_delivered_again(patch: Patch) -> None:
    shipped = claims.claim

    def claim(
        record: GroupRecord,
        member: str,
        limit: int,
        bounds: Bounds,
        now_ms: int,
        visibility_ms: int,
        *,
        in_order: bool = False,
    ) -> tuple[GroupRecord, tuple[Claim, ...]]:
        return shipped(record, member, limit, bounds, 0, now_ms + visibility_ms)

    patch.setattr(claims, "claim", claim)


def claims_of_a_clock_that_was_ahead_are_held(patch: Patch) -> None:
    patch.setattr(claims, "is_held", lambda deadline_ms, now_ms: now_ms < deadline_ms)


def the_first_position_is_not_stored(patch: Patch) -> None:
    async def begin(self: GroupPartition, offset: int, **_: object) -> int:
        return offset

    patch.setattr(GroupPartition, "begin", begin)


def the_first_position_is_put_over_that_of_others(patch: Patch) -> None:
    shipped = GroupPartition._change

    async def change(self: GroupPartition, decide: Decision) -> GroupRecord | None:
        first = decide(None) if "begin" in decide.__qualname__ else None
        return await shipped(self, decide if first is None else lambda _: first)

    patch.setattr(GroupPartition, "_change", change)


def an_ack_beyond_the_end_is_accepted(patch: Patch) -> None:
    async def reached(*_: object) -> None:
        pass

    patch.setattr(GroupPartition, "_check_reached", reached)


def a_claim_is_delivered_although_its_swap_failed(patch: Patch) -> None:
    shipped = MetaGroupStore.put

    async def put(self: MetaGroupStore, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        try:
            await shipped(self, key, record, expected=expected, durable=durable)
        except VersionMismatch:
            pass

    patch.setattr(MetaGroupStore, "put", put)


def records_are_put_unconditionally(patch: Patch) -> None:
    async def put(self: MetaGroupStore, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        await self._meta.put(group_key(*key), msgspec.json.encode(record))

    patch.setattr(MetaGroupStore, "put", put)


def a_stale_generation_is_served(patch: Patch) -> None:
    def in_generation(self: GroupPartition, record: GroupRecord, generation: int) -> GroupRecord:
        return msgspec.structs.replace(record, generation=max(record.generation, generation))

    patch.setattr(GroupPartition, "_in_generation", in_generation)


def whoever_had_the_partition_may_acknowledge(patch: Patch) -> None:
    async def generation(self: GroupPartition, member: str) -> int:
        return (await self._assignments.members(self._key.group, self.topic)).generation

    patch.setattr(GroupPartition, "_generation_of_holder", generation)


def members_come_and_go_within_a_generation(patch: Patch) -> None:
    shipped = assignment._renew_member

    def renewed(old: Members, member: str, now_ms: int, session_ms: int) -> Members:
        new = shipped(old, member, now_ms, session_ms)
        return msgspec.structs.replace(new, generation=max(old.generation, 1))

    patch.setattr(assignment, "_renew_member", renewed)


def a_member_keeps_its_name_after_a_failed_consume(patch: Patch) -> None:
    patch.setattr(consumers.Member, "take_new_name", lambda self: None)


def a_cut_is_not_durable(patch: Patch) -> None:
    shipped = outbox.SimOutbox.write

    def write(self: outbox.SimOutbox, change: outbox.Write, *, sync: bool) -> None:
        shipped(self, change, sync=sync and "put_cut" not in change.__qualname__)

    patch.setattr(outbox.SimOutbox, "write", write)


def a_cut_is_not_put(patch: Patch) -> None:
    async def put_cut(self: outbox.OwnedOutbox, directory: str, partition: int, cut: Cut) -> bool:
        return True

    patch.setattr(outbox.OwnedOutbox, "put_cut", put_cut)


def the_relay_forgets_its_sequence(patch: Patch) -> None:
    """A producer of another name for each attempt: so the partition does not recognise the batch."""
    made = 0

    def producer(*, id: str, sequence: int, since: int) -> Producer:
        nonlocal made
        made += 1
        return Producer(id=f"{id}/{made}", sequence=sequence, since=since)

    patch.setattr(relay, "Producer", producer)


def entries_are_dropped_before_they_are_appended(patch: Patch) -> None:
    shipped = outbox.OwnedOutbox.put_cut

    async def put_cut(self: outbox.OwnedOutbox, directory: str, partition: int, cut: Cut) -> bool:
        done = await shipped(self, directory, partition, cut)
        await self.finish(directory, partition, cut)
        return done

    patch.setattr(outbox.OwnedOutbox, "put_cut", put_cut)


GROUP_MUTATIONS: Final = (
    Mutation(claims_of_a_clock_that_was_ahead_are_held, "I7", jumping_members),
    Mutation(a_member_keeps_its_name_after_a_failed_consume, "I7", lossy_groups),
    *(
        Mutation(change, "I7|O1|I8|OutOfOrderSequence")
        for change in (
            an_ack_drops_the_claims_of_others,
            an_ack_drops_the_expired_claims_of_others,
            an_ack_of_what_was_released_counts,
            expired_claims_are_forgotten,
            live_claims_are_given_to_others,
            expired_claims_are_never_delivered_again,
            the_first_position_is_not_stored,
            the_first_position_is_put_over_that_of_others,
            an_ack_beyond_the_end_is_accepted,
            a_claim_is_delivered_although_its_swap_failed,
            records_are_put_unconditionally,
            a_stale_generation_is_served,
            whoever_had_the_partition_may_acknowledge,
            members_come_and_go_within_a_generation,
            a_cut_is_not_durable,
            a_cut_is_not_put,
            the_relay_forgets_its_sequence,
            entries_are_dropped_before_they_are_appended,
        )
    ),
)
