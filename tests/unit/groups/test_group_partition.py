"""Consumer groups, with their records in the metadata store and in RocksDB."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from llog.engines.object.retention import trim
from llog.engines.rocksdb import keys as rocks_keys
from llog.engines.rocksdb.store import RocksStore
from llog.errors import (
    Contention,
    GroupConflict,
    InconsistentReadState,
    InvalidArgument,
    LlogError,
    OffsetOutOfRange,
    OutcomeUnknown,
    StaleMember,
    TopicNotFound,
    VersionMismatch,
)
from llog.groups.acks import AckResult, HeldRange
from llog.groups.records import Claim, GroupMode, GroupRecord
from llog.groups.store import GroupKey, MetaGroupStore, RocksGroupStore, VersionedRecord
from llog.log.keys import group_key
from llog.model import TopicPartition
from llog.stores.meta import ABSENT
from tests.unit.groups.groups_room import KEY, OTHER, UNKNOWN, VISIBILITY_MS, Disturbed, Room
from tests.unit.world import START_MS, TP, World

# --- plain positions


async def test_a_committed_position_is_found_again_per_group_and_partition(room: Room) -> None:
    group = await room.group()
    await room.fill(3)
    assert await group.position() is None
    assert await group.commit(3) == 3
    assert await group.position() == 3
    assert await (await room.group("other")).position() is None
    assert await (await room.group(tp=OTHER)).position() is None


async def test_a_commit_never_goes_back(room: Room) -> None:
    group = await room.group()
    await room.fill(3)
    await group.commit(3)
    assert await group.commit(2) == 3
    assert await group.position() == 3


@pytest.mark.parametrize("seed", range(5))
async def test_racing_commits_leave_the_highest(room: Room, seed: int) -> None:
    group = await room.group()
    await room.fill(8)
    consumers = [await room.group(store=Disturbed(room.store, seed=seed * 10 + number)) for number in range(8)]
    await asyncio.gather(*(each.commit(number + 2) for number, each in enumerate(consumers)))
    assert await group.position() == 9


async def test_positions_outside_the_log_are_refused(room: Room) -> None:
    group = await room.group()
    await room.fill(1)
    for change in (group.commit, group.reset):
        with pytest.raises(OffsetOutOfRange):
            await change(3)
        with pytest.raises(InvalidArgument):
            await change(0)
    with pytest.raises(OffsetOutOfRange, match="offset 2 "):
        await group.ack("a", 2)
    with pytest.raises(InvalidArgument):
        await group.ack("a", 0)
    with pytest.raises(TopicNotFound):
        await room.group("g", TopicPartition("nothing", 0))
    with pytest.raises(InvalidArgument, match="group name"):
        await room.group("g/h")
    assert await group.position() is None


async def test_reset_may_go_back_and_forgets_claims(room: Room) -> None:
    group = await room.group()
    await room.fill(4)
    await group.begin(1)
    await room.claim("a", 3)
    await group.reset(2)
    assert await group.position() == 2
    assert await room.claim("b", 10) == [(2, 4, 1)]
    assert (await group.ack("a", 4)).committed == 2


async def test_a_topic_created_again_starts_its_groups_anew(room: Room) -> None:
    group = await room.group()
    await room.fill(3)
    await group.commit(4)
    await room.world.catalog.delete(TP.topic)
    assert await room.listing.lag("g") == []
    await room.world.catalog.create(TP.topic, 1)
    group = await room.group()
    assert await group.position() is None
    assert await group.commit(1) == 1


# --- claims


async def test_members_get_different_records_and_only_their_own_are_acknowledged(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    assert await group.claim("a", limit=3, visibility_ms=1) is None
    assert await group.begin(1) == 1
    assert await room.claim("a", 3) == [(1, 3, 1)]
    assert await room.claim("b", 3) == [(4, 6, 1)]
    assert await room.claim("a", 100) == [(7, 10, 1)]
    assert await room.claim("a", 100) == []
    assert (await group.ack("b", 6)).committed == 1
    assert (await group.ack("a", 3)).committed == 7
    assert (await group.ack("b", 10)).committed == 7
    assert (await group.ack("a", 10)).committed == 11


async def test_an_ack_of_what_others_hold_says_who_does(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)
    await room.claim("a", 3)
    await room.claim("b", 3)
    assert await group.ack("c", 5) == AckResult(1, (HeldRange(1, 3, "a"), HeldRange(4, 5, "b")))
    assert await group.ack("b", 6) == AckResult(1)
    assert await group.ack("b", 6) == AckResult(1, (HeldRange(1, 3, "a"),)), "b holds nothing any more"
    assert await group.release("a", 2)
    assert await group.ack("b", 2) == AckResult(1, (HeldRange(1, 1, "a"), HeldRange(2, 2, None)))
    assert await group.ack("a", 3) == AckResult(2)
    assert await group.ack("c", 8) == AckResult(2), "nobody was given the last ones: c passes over them"
    await room.claim("c", 1)
    assert await group.ack("c", 2) == AckResult(9)
    assert await group.ack("c", 2) == AckResult(9), "all of it is acknowledged, by whomever"


async def test_an_ack_without_a_name_is_for_all_who_gave_none(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)
    for member in ("~first", "~second", "named"):
        await room.claim(member, 2)
    assert await group.ack("~second", 4) == AckResult(1)
    assert (await group.ack("~second", 4)).held == (HeldRange(1, 2, "~first"),)
    assert (await group.ack("named", 2)).held == (HeldRange(1, 2, "~first"),)
    assert await group.ack("", 6) == AckResult(5), "it has nothing of what named members hold"
    assert (await group.ack("", 6)).held == (HeldRange(5, 6, "named"),)


async def test_expired_claims_are_delivered_again_and_outstanding_until_acknowledged(room: Room) -> None:
    group = await room.group()
    await room.fill(6)
    await group.begin(1)
    await room.claim("a", 3)
    room.world.runtime.now += VISIBILITY_MS
    assert await room.claim("b", 5) == [(1, 3, 2), (4, 5, 1)]
    assert (await group.ack("a", 3)).committed == 1
    room.world.runtime.now += VISIBILITY_MS
    assert await group.position() == 1
    assert await room.claim("c", 2) == [(1, 2, 3)]
    assert (await group.ack("b", 5)).committed == 1
    assert (await group.ack("c", 2)).committed == 6


async def test_the_first_position_counts_whoever_stores_another(room: Room) -> None:
    group = await room.group()
    await room.fill(6)
    assert await group.begin(7) == 7
    assert await group.begin(1) == 7
    await room.fill(1)
    assert await room.claim("a", 10) == [(7, 7, 1)]


async def test_an_ack_is_remembered_by_a_group_without_a_position(room: Room) -> None:
    group = await room.group()
    await room.fill(6)
    assert (await group.ack("a", 4)).committed == 5
    assert await room.claim("a", 10) == [(5, 6, 1)]


async def test_exact_ranges_are_settled_given_back_and_released(room: Room) -> None:
    group = await room.group()
    await room.fill(12)
    await group.begin(1)
    await room.claim("a", 12)
    await group.settle("b", [(1, 12)])
    assert await group.position() == 1
    await group.settle("a", [(1, 2), (5, 6)])
    assert await group.position() == 3
    await group.give_back("a", [(4, 4), (11, 12)])
    assert await room.claim("b", 100) == [(4, 4, 1), (11, 12, 1)]
    assert await group.release("a", 8, delay_ms=5)
    assert not await group.release("a", 8)
    assert (await group.ack("a", 10)).committed == 4
    assert (await group.ack("b", 12)).committed == 8
    assert await room.claim("b", 100) == []
    room.world.runtime.now += 5
    assert await room.claim("b", 100) == [(8, 8, 2)]


async def test_records_that_retention_took_are_no_longer_outstanding(room: Room) -> None:
    group = await room.group()
    await room.fill(6)
    await group.begin(1)
    await room.claim("a", 4)
    await trim(room.world.log, TP, 4)
    room.world.runtime.now += VISIBILITY_MS
    assert await room.claim("b", 100) == [(4, 4, 2), (5, 6, 1)]
    assert (await group.ack("b", 6)).committed == 7


async def test_a_poll_that_finds_nothing_writes_nothing(room: Room) -> None:
    group = await room.group()
    await room.fill(2)
    await group.begin(1)
    await room.claim("a", 10)
    disturbed, store = await room.disturbed()
    assert await room.claim("b", 10, disturbed) == []
    assert (await disturbed.ack("b", 2)).committed == 1
    assert store.puts == 0


async def test_claims_need_no_sync_and_all_else_does(room: Room) -> None:
    await room.fill(9)
    disturbed, store = await room.disturbed()
    await disturbed.begin(1)
    await room.claim("a", 5, disturbed)
    await disturbed.give_back("a", [(5, 5)])
    await disturbed.ack("a", 3)
    await disturbed.settle("a", [(4, 4)])
    await disturbed.reset(1)
    await disturbed.commit(2)
    assert store.durable == [True, False, True, True, True, True, True]


# --- lost answers and lost races


async def test_a_claim_whose_answer_was_lost_is_delivered_as_it_was_recorded(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)
    disturbed, store = await room.disturbed((UNKNOWN, True))
    assert await room.claim("a", 4, disturbed) == [(1, 4, 1)]
    assert store.puts == 1
    record = await group.record()
    assert record is not None
    assert record.claims == (Claim(1, 4, "a", START_MS + VISIBILITY_MS, 1),)


async def test_a_claim_that_did_not_happen_is_made_again(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)
    disturbed, store = await room.disturbed((UNKNOWN, False))
    assert await room.claim("a", 4, disturbed) == [(1, 4, 1)]
    assert store.puts == 2


async def test_a_claim_whose_answer_was_lost_is_told_from_that_of_another(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)

    class Raced(Disturbed):
        async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
            """Another member is faster, and the answer that says so is lost."""
            if self.puts == 0:
                await room.claim("b", 3)
                self.failures = [(UNKNOWN, False)]
            await super().put(key, record, expected=expected, durable=durable)

    disturbed = await room.group(store=Raced(room.store))
    assert await room.claim("a", 4, disturbed) == [(4, 7, 1)]


@pytest.mark.parametrize("done", [True, False])
async def test_an_ack_whose_answer_was_lost_counts_once(room: Room, done: bool) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)
    await room.claim("a", 4)
    await room.claim("b", 4)
    disturbed, _ = await room.disturbed((UNKNOWN, done))
    assert (await disturbed.ack("a", 10)).committed == 5
    assert (await group.ack("b", 8)).committed == 11


async def test_an_ack_that_was_done_or_overtaken_says_so_whatever_answers_were_lost(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)
    await room.claim("b", 2)
    await room.claim("a", 2)
    disturbed, _ = await room.disturbed((UNKNOWN, True))
    assert await disturbed.ack("a", 4) == AckResult(1)
    await room.claim("a", 2)
    room.world.runtime.now += VISIBILITY_MS

    class Raced(Disturbed):
        async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
            if self.puts == 0:
                assert await room.claim("b", 4) == [(1, 2, 2), (5, 6, 2)]
            await super().put(key, record, expected=expected, durable=durable)

    overtaken = await (await room.group(store=Raced(room.store))).ack("a", 6)
    assert overtaken.held == (HeldRange(1, 2, "b"), HeldRange(5, 6, "b"))


async def test_a_release_says_whether_it_was_done(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)
    await room.claim("a", 4)
    disturbed, _ = await room.disturbed((UNKNOWN, True))
    assert await disturbed.release("a", 4, delay_ms=VISIBILITY_MS * 2)
    room.world.runtime.now += VISIBILITY_MS

    class Raced(Disturbed):
        async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
            if self.puts == 0:
                assert await room.claim("b", 1) == [(1, 1, 2)]
            await super().put(key, record, expected=expected, durable=durable)

    assert not await (await room.group(store=Raced(room.store))).release("a", 1)


async def test_whoever_loses_every_race_is_told_so(room: Room) -> None:
    group = await room.group()
    await room.fill(1)
    await group.begin(1)
    lost: tuple[LlogError, bool] = (VersionMismatch("lost"), False)
    disturbed, _ = await room.disturbed(*[lost] * 1000)
    with pytest.raises(Contention, match="group 'g' on orders/0"):
        await room.claim("a", 1, disturbed)
    disturbed, _ = await room.disturbed(*[(UNKNOWN, False)] * 1000)
    with pytest.raises(OutcomeUnknown):
        await disturbed.ack("a", 1)


@pytest.mark.parametrize("seed", range(10))
async def test_nothing_is_lost_when_members_race_stall_and_die(room: Room, seed: int) -> None:
    """Committed is only what somebody who was given it has acknowledged, and in the end it is everything."""
    group = await room.group()
    count = 60
    await room.fill(count)
    await group.begin(1)
    done: set[int] = set()

    async def live(name: str, rng: random.Random) -> None:
        disturbed = await room.group(store=Disturbed(room.store, seed=rng.randrange(1 << 30)))
        held: list[Claim] = []
        for _ in range(rng.randrange(3, 9)):
            given = await disturbed.claim(name, limit=rng.randrange(1, 9), visibility_ms=50)
            held += given or ()
            room.world.runtime.now += rng.choice((0, 1, 60))
            if held and rng.random() < 0.6:
                upto = rng.choice(held).end
                done.update(o for each in held for o in range(each.start, each.end + 1) if o <= upto)
                committed = (await disturbed.ack(name, upto)).committed
                assert set(range(1, committed)) <= done

    rng = random.Random(seed)
    await asyncio.gather(*(live(f"m{number}", random.Random(rng.random())) for number in range(6)))
    position = await group.position()
    assert position is not None
    assert set(range(1, position)) <= done
    room.world.runtime.now += 1000
    again = await room.claim("last", 1000)
    delivered = {offset for start, end, _ in again for offset in range(start, end + 1)}
    assert delivered | done == set(range(1, count + 1))
    assert (await group.ack("last", count)).committed == count + 1


# --- modes


async def test_plain_commits_are_refused_while_members_hold_claims(room: Room) -> None:
    group = await room.group()
    await room.fill(6)
    await group.commit(2)
    await room.claim("a", 3)
    with pytest.raises(GroupConflict, match="group 'g' on orders/0"):
        await group.commit(7)
    assert (await group.ack("a", 4)).committed == 5
    assert await group.commit(7) == 7


async def test_claimed_and_assigned_do_not_mix(room: Room) -> None:
    await room.fill(6)
    claimed = await room.group("claimed")
    await claimed.begin(1)
    await claimed.claim("a", limit=1, visibility_ms=1)
    with pytest.raises(GroupConflict, match="claimed"):
        await room.groups.join("claimed", TP.topic, "a", session_ms=1000)

    assigned = await room.group("assigned")
    await room.groups.join("assigned", TP.topic, "a", session_ms=1000)
    with pytest.raises(GroupConflict, match="assigned"):
        await assigned.begin(1)
    await assigned.begin(1, mode=GroupMode.ASSIGNED)
    with pytest.raises(GroupConflict, match="assigned"):
        await assigned.claim("b", limit=1, visibility_ms=1)
    with pytest.raises(GroupConflict):
        await assigned.commit(1)


async def test_an_assigned_partition_is_delivered_in_order_by_one_member_at_a_time(room: Room) -> None:
    group = await room.group()
    await room.fill(8)
    a = await room.groups.join("g", TP.topic, "a", session_ms=1000)
    assert await group.claim("a", limit=3, visibility_ms=50, membership=a) is None
    await group.begin(1, mode=GroupMode.ASSIGNED)

    async def claim(membership_of: str, limit: int) -> list[tuple[int, int, int]]:
        membership = {"a": a, "A": later}[membership_of]
        member = membership.member
        given = await group.claim(member, limit=limit, visibility_ms=50, membership=membership)
        return [(each.start, each.end, each.attempt) for each in given or ()]

    later = a
    assert await claim("a", 3) == [(1, 3, 1)]
    assert await claim("a", 2) == [(4, 5, 1)]
    room.world.runtime.now += 50
    assert await claim("a", 4) == [(1, 4, 2)]  # in order from the first that expired, though 4 was claimed later
    assert (await group.ack("a", 2)).committed == 3

    later = await room.groups.join("g", TP.topic, "A", session_ms=1000)  # sorts first: it gets partition 0
    assert later.partitions == (0, 2)
    assert await claim("A", 100) == [(3, 4, 3), (5, 5, 2), (6, 8, 1)]
    with pytest.raises(StaleMember):
        await claim("a", 1)
    with pytest.raises(StaleMember):
        await group.ack("a", 8)
    assert await group.position() == 3
    assert (await group.ack("A", 8)).committed == 9


async def test_a_member_that_was_replaced_while_it_acknowledged_is_refused(room: Room) -> None:
    group = await room.group()
    await room.fill(8)
    a = await room.groups.join("g", TP.topic, "b", session_ms=1000)
    await group.begin(1, mode=GroupMode.ASSIGNED)
    await group.claim("b", limit=3, visibility_ms=50, membership=a)

    class Replaced(Disturbed):
        async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
            if self.puts == 0:
                self.puts += 1
                now = await room.groups.join("g", TP.topic, "a", session_ms=1000)
                await group.claim("a", limit=3, visibility_ms=50, membership=now)
            await super().put(key, record, expected=expected, durable=durable)

    with pytest.raises(StaleMember):
        await (await room.group(store=Replaced(room.store))).ack("b", 8)
    assert await group.position() == 1


async def test_an_ack_before_the_first_claim_of_an_assigned_group_is_its_holders_alone(room: Room) -> None:
    group = await room.group()
    await room.fill(6)
    a = await room.groups.join("g", TP.topic, "a", session_ms=1000)
    with pytest.raises(StaleMember):
        await group.ack("b", 4)
    await room.fill(1, OTHER)
    await (await room.group(tp=OTHER)).reset(1)
    with pytest.raises(StaleMember):
        await (await room.group(tp=OTHER)).ack("b", 1)
    assert (await group.ack("a", 2)).committed == 3
    given = await group.claim("a", limit=9, visibility_ms=50, membership=a)
    assert [(each.start, each.end) for each in given or ()] == [(3, 6)]


async def test_an_ack_that_finds_partitions_assigned_meanwhile_is_refused(room: Room) -> None:
    group = await room.group()
    await room.fill(6)

    class Assigned(Disturbed):
        async def get(self, key: GroupKey) -> VersionedRecord | None:
            found = await super().get(key)
            if found is None:
                await room.groups.join("g", TP.topic, "a", session_ms=1000)
                await group.begin(1, mode=GroupMode.ASSIGNED)
            return found

    with pytest.raises(StaleMember):
        await (await room.group(store=Assigned(room.store))).ack("b", 6)
    assert await group.position() == 1


async def test_a_partition_that_was_added_is_shared_out_as_the_others_are(room: Room) -> None:
    group = await room.group()
    added = TopicPartition(TP.topic, 4)
    await room.groups.join("g", TP.topic, "a", session_ms=1000)
    await group.begin(1, mode=GroupMode.ASSIGNED)
    await room.groups.leave("g", TP.topic, "a")
    await room.world.catalog.add_partitions(TP.topic, 5)
    await room.fill(1, added)
    with pytest.raises(GroupConflict, match="assigned"):
        await (await room.group(tp=added)).begin(1)
    with pytest.raises(StaleMember):
        await (await room.group(tp=added)).ack("b", 1)
    assert await (await room.group(tp=added)).position() is None
    await room.groups.join("g", TP.topic, "a", session_ms=1000)


async def test_positions_that_outlived_their_members_can_be_served_again(room: Room) -> None:
    group = await room.group()
    await room.fill(6)
    for member in ("a", "b"):
        b = await room.groups.join("g", TP.topic, member, session_ms=1000)
        await room.groups.leave("g", TP.topic, member)
    await group.begin(1, mode=GroupMode.ASSIGNED)
    await group.claim("b", limit=2, visibility_ms=50, membership=b)
    await room.groups.assignments.forget("g", TP.topic)
    c = await room.groups.join("g", TP.topic, "c", session_ms=1000)
    given = await group.claim("c", limit=9, visibility_ms=50, membership=c)
    assert [(each.start, each.end) for each in given or ()] == [(1, 2), (3, 6)]


async def test_nothing_is_delivered_in_order_past_one_that_was_released_until_it_is_due(room: Room) -> None:
    group = await room.group()
    await room.fill(4)
    a = await room.groups.join("g", TP.topic, "a", session_ms=10_000)
    await group.begin(1, mode=GroupMode.ASSIGNED)
    await group.claim("a", limit=2, visibility_ms=500, membership=a)
    await group.release("a", 1, delay_ms=100)
    assert await group.claim("a", limit=9, visibility_ms=500, membership=a) == ()
    room.world.runtime.now += 100
    given = await group.claim("a", limit=9, visibility_ms=500, membership=a)
    assert [(each.start, each.end, each.attempt) for each in given or ()] == [(1, 2, 2), (3, 4, 1)]


# --- bytes


async def test_positions_of_earlier_versions_go_on() -> None:
    world = World()
    await world.catalog.create(TP.topic, 1)
    room = Room(world, MetaGroupStore(world.meta))
    await room.fill(5)
    await world.meta.put(group_key(*KEY), b'{"offset":3,"updated_ms":5}')
    group = await room.group()
    assert await group.position() == 3
    assert await group.commit(4) == 4
    assert await room.claim("a", 10) == [(4, 5, 1)]


async def test_the_value_in_rocksdb_begins_with_the_last_acknowledged_offset(tmp_path: Path) -> None:
    world = World()
    store = RocksStore.open(tmp_path)
    groups = RocksGroupStore(store, world.runtime)
    record = GroupRecord(offset=9, updated_ms=1, claims=(Claim(5, 8, "a", 1, 1),))
    await groups.put(KEY, record, expected=ABSENT, durable=True)
    value = store.get(rocks_keys.OFFSETS, b"offset/orders/g/0")
    assert value is not None
    assert int.from_bytes(value[:8], "little") == 4
    for damaged in (value[:9], value[:-1]):
        changes = store.changes()
        changes.put(rocks_keys.OFFSETS, b"offset/orders/g/0", damaged)
        store.write(changes, sync=False)
        with pytest.raises(InconsistentReadState, match="offset/orders/g/0"):
            await groups.get(KEY)
    store.close()
