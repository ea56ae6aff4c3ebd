"""The coordinator of Kafka groups, on one broker and on two that disagree."""

from __future__ import annotations

import asyncio

import pytest

from llog.errors import OutcomeUnknown, StoreUnavailable
from llog.groups.records import GroupRecord
from llog.groups.store import GroupKey
from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups import coordinator as coordinator_module
from llog.kafka.groups.fence import KafkaGroup
from llog.kafka.groups.group import INITIAL_DELAY_MS
from llog.kafka.groups.membership import GroupView, Identity
from llog.log.keys import kafka_group_key
from llog.log.records import decode
from llog.model import TopicPartition
from llog.stores.meta import ABSENT
from tests.unit.kafka.group_brokers import Broker, settle, started
from tests.unit.kafka.group_members import SESSION_MS, join_request
from tests.unit.world import TP, LostAnswers, Stall, World


@pytest.fixture
async def world() -> World:
    world = World()
    await world.catalog.create(TP.topic, 4)
    return world


async def _stored(world: World, name: str = "g") -> KafkaGroup | None:
    found = await world.meta.get(kafka_group_key(name))
    return None if found is None else decode(KafkaGroup, found.value, found.key)


# --- one broker


async def test_members_join_sync_commit_and_leave(world: World) -> None:
    broker = Broker(world)
    first, second = await broker.start(members=2)
    assert first.generation == second.generation == 1
    assert await _stored(world) == KafkaGroup(generation=1, coordinator=1)
    assert await broker.commit(first, 7) is ErrorCode.NONE
    assert await broker.committed() == 7
    assert broker.coordinator.leave("g", [Identity(second.member_id), Identity("nobody")]) == (
        ErrorCode.NONE,
        [ErrorCode.NONE, ErrorCode.UNKNOWN_MEMBER_ID],
    )
    assert broker.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS
    again = await broker.coordinator.join("g", join_request(first.member_id))
    assert again.generation == 2
    assert await broker.commit(first, 9) is ErrorCode.ILLEGAL_GENERATION
    assert await broker.committed() == 7


async def test_a_silent_member_is_dropped_by_the_timer(world: World) -> None:
    broker = Broker(world)
    first, second = await broker.start(members=2)
    for _ in range(3):
        await broker.pass_time(SESSION_MS // 2)
        broker.heartbeat(first)
    assert broker.heartbeat(second) is ErrorCode.UNKNOWN_MEMBER_ID
    assert broker.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS


async def test_many_groups_share_one_timer(world: World) -> None:
    broker = Broker(world)
    names = [f"group-{number}" for number in range(100)]
    joined = {name: await broker.start(name, members=10) for name in names}
    for _ in range(20):
        for name, members in joined.items():
            assert {broker.heartbeat(each, name) for each in members} == {ErrorCode.NONE}
        await broker.pass_time(SESSION_MS // 2)
    assert len(broker.coordinator._due) < 3 * len(names), "a heartbeat makes no timer"


async def test_the_loop_of_the_timer_begins_a_generation_without_being_asked(world: World) -> None:
    broker = Broker(world)
    run = asyncio.create_task(broker.coordinator.run())
    try:
        joining = await started(broker.coordinator.join("g", join_request()))
        world.runtime.now += INITIAL_DELAY_MS
        assert (await asyncio.wait_for(joining, 60)).generation == 1
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def test_members_that_wait_are_sent_away_when_the_broker_stops(world: World) -> None:
    broker = Broker(world)
    run = await started(broker.coordinator.run())
    joining = await started(broker.coordinator.join("g", join_request()))
    run.cancel()
    assert (await asyncio.wait_for(joining, 60)).error is ErrorCode.NOT_COORDINATOR


async def test_a_member_whose_connection_ends_does_not_hold_the_others_up(world: World) -> None:
    broker = Broker(world)
    first, second = await broker.start(members=2)
    waiting = await started(broker.coordinator.join("g", join_request(first.member_id)))
    waiting.cancel()
    await settle()
    again = await started(broker.coordinator.join("g", join_request(second.member_id)))
    assert not again.done()
    await broker.pass_time(SESSION_MS)
    assert [each.member.member_id for each in (await again).members] == [second.member_id]


async def test_a_generation_that_cannot_be_recorded_does_not_begin(world: World) -> None:
    faults = LostAnswers(StoreUnavailable("away"), lambda what, key: what == "put" and "kafka" in key, done=False)
    broker = Broker(world, log=world.process(faults))
    joining = await started(broker.coordinator.join("g", join_request()))
    await broker.pass_time(INITIAL_DELAY_MS)
    refused = await joining
    assert refused.error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    again = await broker.coordinator.join("g", join_request(refused.member_id))
    assert (again.error, again.generation) == (ErrorCode.NONE, 1)


async def test_a_generation_whose_record_may_be_stored_gets_another_number(world: World) -> None:
    lost = OutcomeUnknown("the answer was lost")
    faults = LostAnswers(lost, lambda what, key: what == "put" and "kafka" in key, done=True)
    broker = Broker(world, log=world.process(faults))
    (joined,) = await broker.start()
    assert joined.generation == 2
    assert await broker.commit(joined, 1) is ErrorCode.NONE


async def test_groups_whose_name_llog_does_not_take_are_refused(world: World) -> None:
    broker = Broker(world)
    for name in ("", "a/b", "ä", "x" * 250):
        assert (await broker.coordinator.join(name, join_request())).error is ErrorCode.INVALID_GROUP_ID
        assert await broker.commit(None, 1, name=name) is ErrorCode.INVALID_GROUP_ID


async def test_a_full_broker_forgets_groups_without_members_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "GROUPS_MAX", 2)
    broker = Broker(world)
    await broker.start("a")
    assert await broker.commit(None, 1, name="b") is ErrorCode.NONE
    await broker.start("c")
    assert (await broker.coordinator.join("d", join_request())).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert await broker.commit(None, 1, name="d") is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert await broker.committed(name="b") == 1


async def test_a_group_without_members_is_forgotten_and_its_generations_go_on(world: World) -> None:
    broker = Broker(world)
    (joined,) = await broker.start()
    broker.coordinator.leave("g", [Identity(joined.member_id)])
    for _ in range(3):
        await broker.pass_time(coordinator_module._IDLE_MS)
    assert broker.coordinator._groups == {}
    (again,) = await broker.start()
    assert again.generation == 2


# --- two brokers


async def test_members_are_sent_away_when_their_group_moves(world: World) -> None:
    broker, other = Broker(world, 1), Broker(world, 2)
    (joined,) = await broker.start()
    assert await broker.commit(joined, 3) is ErrorCode.NONE
    waiting = await started(broker.coordinator.join("g", join_request()))
    broker.view.coordinator = 2
    broker.coordinator.drop_moved()
    assert (await waiting).error is ErrorCode.NOT_COORDINATOR
    assert broker.heartbeat(joined) is ErrorCode.NOT_COORDINATOR
    assert await broker.commit(joined, 4) is ErrorCode.NOT_COORDINATOR
    assert other.heartbeat(joined) is ErrorCode.UNKNOWN_MEMBER_ID
    assert (await other.coordinator.join("g", join_request(joined.member_id))).error is ErrorCode.UNKNOWN_MEMBER_ID
    (again,) = await other.start()
    assert again.generation == 2
    assert await other.committed() == 3


async def test_a_member_that_waits_is_sent_away_without_another_request(world: World) -> None:
    broker = Broker(world)
    run = await started(broker.coordinator.run())
    waiting = await started(broker.coordinator.join("g", join_request()))
    broker.view.coordinator = 2
    assert (await asyncio.wait_for(waiting, 60)).error is ErrorCode.NOT_COORDINATOR
    run.cancel()


async def test_a_broker_that_knows_of_no_live_broker_says_so(world: World) -> None:
    broker = Broker(world)
    broker.view.coordinator = None
    assert (await broker.coordinator.join("g", join_request())).error is ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_a_member_cannot_commit_through_a_coordinator_that_was_replaced(world: World) -> None:
    stale, new = Broker(world, 1), Broker(world, 2)
    (old,) = await stale.start()
    (current,) = await new.start()
    assert current.generation == old.generation + 1
    assert await new.commit(current, 10) is ErrorCode.NONE
    assert stale.heartbeat(old) is ErrorCode.NONE, "its coordinator does not know yet"
    assert await stale.commit(old, 3) is ErrorCode.NOT_COORDINATOR
    assert await new.committed() == 10
    assert stale.heartbeat(old) is ErrorCode.UNKNOWN_MEMBER_ID, "now it does"


async def test_a_replaced_coordinator_cannot_commit_even_if_nothing_was_committed_since(world: World) -> None:
    stale, new = Broker(world, 1), Broker(world, 2)
    (old,) = await stale.start()
    await new.start()
    assert await stale.commit(old, 3) is ErrorCode.NOT_COORDINATOR
    assert await new.committed() is None


async def test_a_commit_that_stalls_does_not_replace_that_of_a_later_generation(world: World) -> None:
    stall = Stall(lambda what, key: what == "put_many")
    stale, new = Broker(world, 1, world.process(stall)), Broker(world, 2)
    (old,) = await stale.start()
    late = await started(stale.commit(old, 3))
    assert stall.stalled.is_set()
    (current,) = await new.start()
    assert await new.commit(current, 10) is ErrorCode.NONE
    stall.go.set()
    assert await late is ErrorCode.NOT_COORDINATOR
    assert await new.committed() == 10


async def test_a_commit_that_read_the_fence_too_early_finds_the_later_commit(world: World) -> None:
    """The stale coordinator reads that it still is one, and the offset only after its successor has committed."""
    stall = Stall(lambda what, key: what == "get_many" and "/groups/g/orders/0" in key)
    stale, new = Broker(world, 1, world.process(stall)), Broker(world, 2)
    (old,) = await stale.start()
    late = await started(stale.commit(old, 3))
    assert stall.stalled.is_set()
    (current,) = await new.start()
    assert await new.commit(current, 10) is ErrorCode.NONE
    stall.go.set()
    assert await late is ErrorCode.NOT_COORDINATOR
    assert await new.committed() == 10


async def test_a_commit_judged_by_an_old_state_of_the_store_is_tried_again(world: World) -> None:
    log, meta = world.stale_process()
    stale, new = Broker(world, 1, log), Broker(world, 2)
    (old,) = await stale.start()
    meta.pause(kafka_group_key("g"))
    await new.start()
    assert await stale.commit(old, 3) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert await new.committed() is None


async def test_a_record_that_names_a_fence_of_another_store_does_not_stop_commits(world: World) -> None:
    """As after the metadata was moved to a store that counts versions from the beginning."""
    broker = Broker(world)
    record = GroupRecord(offset=1, updated_ms=0, fence=1_000_000)
    key = GroupKey("g", TP.topic, 0)
    await broker.groups.stores.meta.put(key, record, expected=ABSENT, durable=True)
    (joined,) = await broker.start()
    assert await broker.commit(joined, 3) is ErrorCode.NONE
    assert await broker.committed() == 3


async def test_an_administrator_who_resets_a_group_elsewhere_fences_its_members(world: World) -> None:
    broker, other = Broker(world, 1), Broker(world, 2)
    (joined,) = await broker.start()
    assert await other.commit(None, 100) is ErrorCode.NONE
    assert await broker.commit(joined, 3) is ErrorCode.NOT_COORDINATOR
    assert await other.committed() == 100


async def test_a_broker_that_restarts_does_not_take_itself_for_its_former_self(world: World) -> None:
    before = Broker(world, 1)
    (joined,) = await before.start()
    after = Broker(world, 1)
    assert await after.commit(joined, 3) is ErrorCode.ILLEGAL_GENERATION
    assert await after.commit(None, 5) is ErrorCode.NONE
    assert await before.commit(joined, 3) is ErrorCode.NOT_COORDINATOR


async def test_commits_of_one_group_keep_their_order(world: World) -> None:
    broker = Broker(world)
    (joined,) = await broker.start()
    results = await asyncio.gather(*(broker.commit(joined, offset) for offset in range(20)))
    assert set(results) == {ErrorCode.NONE}
    assert await broker.committed() == 19


# --- administration


async def test_groups_are_described_and_listed_with_those_of_llogs_own_consumers(world: World) -> None:
    broker = Broker(world)
    await broker.start("kafka")
    await world.append("a")
    await (await broker.groups.partition("own", TP)).commit(2)
    listed = await broker.coordinator.list()
    assert not isinstance(listed, ErrorCode)
    assert [(each.name, each.view.state) for each in listed] == [("kafka", "Stable"), ("own", "Empty")]
    described = await broker.coordinator.describe("kafka")
    assert isinstance(described, GroupView)
    assert (described.state, len(described.members)) == ("Stable", 1)
    assert await broker.coordinator.describe("own") == GroupView("Empty")
    assert await broker.coordinator.describe("nobody") == GroupView("Dead")


async def test_a_group_is_deleted_with_its_offsets_once_it_has_no_members(world: World) -> None:
    broker = Broker(world)
    (joined,) = await broker.start()
    await broker.commit(joined, 3)
    assert await broker.coordinator.delete("g") is ErrorCode.NON_EMPTY_GROUP
    broker.coordinator.leave("g", [Identity(joined.member_id)])
    assert await broker.coordinator.delete("g") is ErrorCode.NONE
    assert await broker.committed() is None
    assert await _stored(world) is None
    assert await broker.coordinator.delete("g") is ErrorCode.GROUP_ID_NOT_FOUND
    (again,) = await broker.start()
    assert await broker.commit(again, 1) is ErrorCode.NONE


async def test_a_replaced_coordinator_does_not_bring_a_deleted_group_back(world: World) -> None:
    stale, new = Broker(world, 1), Broker(world, 2)
    (old,) = await stale.start()
    assert await stale.commit(old, 3) is ErrorCode.NONE
    assert await new.coordinator.delete("g") is ErrorCode.NONE
    assert await stale.commit(old, 4) is ErrorCode.NOT_COORDINATOR
    (again,) = await new.start()
    assert again.generation == old.generation, "the numbers begin again"
    assert await stale.commit(old, 4) is ErrorCode.ILLEGAL_GENERATION
    assert await new.committed() is None


async def test_offsets_are_deleted_of_topics_that_nobody_reads(world: World) -> None:
    broker = Broker(world)
    other = TopicPartition(TP.topic, 1)
    assert await broker.coordinator.delete_offsets("g", [TP]) is ErrorCode.GROUP_ID_NOT_FOUND
    await broker.commit(None, 3)
    await broker.commit(None, 4, other)
    missing = TopicPartition("missing", 0)
    assert await broker.coordinator.delete_offsets("g", [TP, missing]) == {
        TP: ErrorCode.NONE,
        missing: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert (await broker.committed(), await broker.committed(other)) == (None, 4)
    subscribed = b"\0\0\0\0\0\1\0\6orders\0\0\0\0"
    joining = await started(broker.coordinator.join("g", join_request(metadata=subscribed)))
    await broker.pass_time(INITIAL_DELAY_MS)
    assert await broker.coordinator.delete_offsets("g", [other]) is ErrorCode.NON_EMPTY_GROUP
    await broker.sync(await joining)
    assert await broker.coordinator.delete_offsets("g", [other]) == {other: ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC}
    assert await broker.committed(other) == 4
