"""The simulation finds what can go wrong with consumer groups and the outbox: each way to break them is caught within a few seeds."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from llog.errors import VersionMismatch
from llog.model import TopicPartition
from llog.partition.keys import group_key
from llog.ports import Bounds
from llog.producers import Producer
from llog.sim import consumers, outbox
from llog.sim.plan import SimPlan
from llog.sim.stores import Faults
from llog.sim.world import run_seed
from llog.topics import assignment, claims, groups, relay
from llog.topics.group_records import Claim, GroupRecord, Members
from llog.topics.group_stores import GroupKey, MetaGroups
from llog.topics.outbox import Cut

Mutation = Callable[[pytest.MonkeyPatch], None]
SEEDS_MAX = 40


def an_ack_drops_the_claims_of_others(patch: pytest.MonkeyPatch) -> None:
    def ack(record: GroupRecord, member: str, upto: int) -> GroupRecord:
        kept = tuple(claim for claim in record.claims if claim.start > upto)
        return msgspec.structs.replace(record, offset=max(record.offset, upto + 1), claims=kept)

    patch.setattr(claims, "ack", ack)


def an_ack_drops_the_expired_claims_of_others(patch: pytest.MonkeyPatch) -> None:
    shipped = claims.ack

    def ack(record: GroupRecord, member: str, upto: int) -> GroupRecord:
        live = tuple(claim for claim in record.claims if claim.deadline_ms > record.updated_ms or claim.start > upto)
        return shipped(msgspec.structs.replace(record, claims=live), member, upto)

    patch.setattr(claims, "ack", ack)


def an_ack_of_what_was_released_counts(patch: pytest.MonkeyPatch) -> None:
    def release(record: GroupRecord, member: str, start: int, end: int, due_ms: int) -> GroupRecord:
        return claims.settle(record, member, start, end)

    patch.setattr(claims, "release", release)


def _claiming(change: Callable[[GroupRecord, int], GroupRecord]) -> Mutation:
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


def expired_claims_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def forget(record: GroupRecord, now_ms: int) -> GroupRecord:
        return msgspec.structs.replace(record, claims=tuple(c for c in record.claims if c.deadline_ms > now_ms))

    _claiming(forget)(patch)


def live_claims_are_given_to_others(patch: pytest.MonkeyPatch) -> None:
    def expire(record: GroupRecord, now_ms: int) -> GroupRecord:
        return msgspec.structs.replace(
            record, claims=tuple(msgspec.structs.replace(claim, deadline_ms=0) for claim in record.claims)
        )

    _claiming(expire)(patch)


def expired_claims_are_never_delivered_again(patch: pytest.MonkeyPatch) -> None:
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


def the_first_position_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    async def begin(self: groups.Groups, group: str, tp: TopicPartition, offset: int, **_: object) -> int:
        return offset

    patch.setattr(groups.Groups, "begin", begin)


def the_first_position_is_put_over_that_of_others(patch: pytest.MonkeyPatch) -> None:
    shipped = groups.Groups._change

    async def change(self: groups.Groups, home: groups.Home, decide: groups.Decision) -> GroupRecord | None:
        first = decide(None) if "begin" in decide.__qualname__ else None
        return await shipped(self, home, decide if first is None else lambda _: first)

    patch.setattr(groups.Groups, "_change", change)


def an_ack_beyond_the_end_is_accepted(patch: pytest.MonkeyPatch) -> None:
    async def reached(*_: object) -> None:
        pass

    patch.setattr(groups.Groups, "_check_reached", reached)


def a_claim_is_delivered_although_its_swap_failed(patch: pytest.MonkeyPatch) -> None:
    shipped = MetaGroups.put

    async def put(self: MetaGroups, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        try:
            await shipped(self, key, record, expected=expected, durable=durable)
        except VersionMismatch:
            pass

    patch.setattr(MetaGroups, "put", put)


def records_are_put_unconditionally(patch: pytest.MonkeyPatch) -> None:
    async def put(self: MetaGroups, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        await self._meta.put(group_key(*key), msgspec.json.encode(record))

    patch.setattr(MetaGroups, "put", put)


def a_stale_generation_is_served(patch: pytest.MonkeyPatch) -> None:
    def served(home: groups.Home, record: GroupRecord, generation: int) -> GroupRecord:
        return msgspec.structs.replace(record, generation=max(record.generation, generation))

    patch.setattr(groups, "_served", served)


def whoever_had_the_partition_may_acknowledge(patch: pytest.MonkeyPatch) -> None:
    async def generation(self: groups.Groups, home: groups.Home, member: str) -> int:
        return (await self.assignments.members(home.key.group, home.topic)).generation

    patch.setattr(groups.Groups, "_generation_of_holder", generation)


def members_come_and_go_within_a_generation(patch: pytest.MonkeyPatch) -> None:
    shipped = assignment._renewed

    def renewed(old: Members, member: str, now_ms: int, session_ms: int) -> Members:
        new = shipped(old, member, now_ms, session_ms)
        return msgspec.structs.replace(new, generation=max(old.generation, 1))

    patch.setattr(assignment, "_renewed", renewed)


def a_member_keeps_its_name_after_a_failed_consume(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumers.Member, "failed", lambda self: None)


def a_cut_is_not_durable(patch: pytest.MonkeyPatch) -> None:
    shipped = outbox.SimOutbox.write

    def write(self: outbox.SimOutbox, change: outbox.Write, *, sync: bool) -> None:
        shipped(self, change, sync=sync and "put_cut" not in change.__qualname__)

    patch.setattr(outbox.SimOutbox, "write", write)


def a_cut_is_not_put(patch: pytest.MonkeyPatch) -> None:
    async def put_cut(self: outbox.OwnedOutbox, directory: str, partition: int, cut: Cut) -> bool:
        return True

    patch.setattr(outbox.OwnedOutbox, "put_cut", put_cut)


def the_relay_forgets_its_sequence(patch: pytest.MonkeyPatch) -> None:
    """A producer of another name for each attempt: the partition cannot tell that it has the batch."""
    made = 0

    def producer(*, id: str, sequence: int, since: int) -> Producer:
        nonlocal made
        made += 1
        return Producer(id=f"{id}/{made}", sequence=sequence, since=since)

    patch.setattr(relay, "Producer", producer)


def entries_are_dropped_before_they_are_appended(patch: pytest.MonkeyPatch) -> None:
    shipped = outbox.OwnedOutbox.put_cut

    async def put_cut(self: outbox.OwnedOutbox, directory: str, partition: int, cut: Cut) -> bool:
        done = await shipped(self, directory, partition, cut)
        await self.finish(directory, partition, cut)
        return done

    patch.setattr(outbox.OwnedOutbox, "put_cut", put_cut)


def only(faults: Faults, **roles: int) -> Callable[[SimPlan], SimPlan]:
    """A writer and these, on a bad day."""

    def adjust(plan: SimPlan) -> SimPlan:
        return msgspec.structs.replace(
            plan,
            roles=dict.fromkeys(plan.roles, 0) | {"writer": 1} | roles,
            faults=faults,
            skew_ms_max=0,
            crash_every=10.0,
            stall_every=5.0,
            groups=1,
            visibility_ms=2_000,
        )

    return adjust


BAD = Faults(unavailable=0.02, lost_answer=0.05, throttled=0.05, delay=0.05, throttle_delay=8.0)
WORSE = Faults(unavailable=0.08, lost_answer=0.15, late_effect=0.02, delay=0.05)
claimed = only(BAD, consumer=4)
lossy = only(WORSE, consumer=3)
assigned = only(BAD, assignee=3)
relayed = only(BAD, outbox=1)


@pytest.mark.parametrize(
    ("mutation", "adjust"),
    [
        (an_ack_drops_the_claims_of_others, claimed),
        (an_ack_drops_the_expired_claims_of_others, claimed),
        (an_ack_of_what_was_released_counts, claimed),
        (expired_claims_are_forgotten, claimed),
        (live_claims_are_given_to_others, claimed),
        (expired_claims_are_never_delivered_again, claimed),
        (the_first_position_is_not_stored, claimed),
        (the_first_position_is_put_over_that_of_others, claimed),
        (an_ack_beyond_the_end_is_accepted, claimed),
        (a_claim_is_delivered_although_its_swap_failed, claimed),
        (records_are_put_unconditionally, claimed),
        (a_stale_generation_is_served, assigned),
        (whoever_had_the_partition_may_acknowledge, assigned),
        (members_come_and_go_within_a_generation, assigned),
        (a_member_keeps_its_name_after_a_failed_consume, lossy),
        (a_cut_is_not_durable, relayed),
        (a_cut_is_not_put, relayed),
        (the_relay_forgets_its_sequence, relayed),
        (entries_are_dropped_before_they_are_appended, relayed),
    ],
    ids=lambda value: getattr(value, "__name__", "") if value not in (claimed, lossy, assigned, relayed) else "",
)
def test_a_broken_group_or_outbox_is_caught(
    mutation: Mutation, adjust: Callable[[SimPlan], SimPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    for seed in range(SEEDS_MAX):
        violation = run_seed(seed, adjust=adjust).violation
        if violation is not None:
            assert re.match("I7|O1|I8|OutOfOrderSequence", violation), violation
            return
    pytest.fail(f"not caught within {SEEDS_MAX} seeds")


@pytest.mark.parametrize("adjust", [claimed, lossy, assigned, relayed], ids=["claimed", "lossy", "assigned", "relayed"])
def test_nothing_breaks_where_the_mutations_are_looked_for(adjust: Callable[[SimPlan], SimPlan]) -> None:
    found = [run_seed(seed, adjust=adjust) for seed in range(5)]
    assert [outcome.violation for outcome in found] == [None] * 5
