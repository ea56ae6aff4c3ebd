"""The committed offsets of Kafka groups, and those of llog's own consumers in the same records."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llog.engines.rocksdb.store import RocksStore
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.groups.records import GroupMode
from llog.groups.store import RocksGroupStore
from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups.coordinator import GroupCoordinator
from llog.kafka.groups.membership import Identity
from llog.kafka.groups.offsets import METADATA_BYTES_MAX, Commit
from llog.model import TopicPartition
from tests.unit.kafka.group_brokers import Broker
from tests.unit.world import TP, Faults, World

OTHER = TopicPartition(TP.topic, 1)


@pytest.fixture(params=["meta", "rocksdb"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker on a topic of four partitions, whose groups are in the metadata store or in RocksDB."""
    world = World()
    await world.catalog.create(TP.topic, 4)
    broker = Broker(world)
    if request.param == "meta":
        yield broker
        return
    store = RocksStore.open(tmp_path)
    broker.groups = Groups(world.process(), world.reader, {"object": RocksGroupStore(store, world.runtime)})
    broker.coordinator = GroupCoordinator(broker.groups, broker.view)
    yield broker
    store.close()


async def test_a_commit_is_fetched_with_its_metadata_and_epoch(broker: Broker) -> None:
    assert await broker.commit(None, 0, metadata="ünder way") is ErrorCode.NONE
    assert await broker.coordinator.fetch("g", [TP, OTHER]) == {TP: Commit(0, 5, "ünder way")}
    assert await broker.coordinator.fetch("g", None) == {TP: Commit(0, 5, "ünder way")}
    assert await broker.coordinator.fetch("g", []) == {}
    assert await broker.coordinator.fetch("other", [TP]) == {}


async def test_a_commit_goes_back_and_beyond_the_end(broker: Broker) -> None:
    await broker.world.append("a", "b", "c")
    for offset in (3, 1, 1_000, (1 << 63) - 2, 0):
        assert await broker.commit(None, offset) is ErrorCode.NONE
        assert await broker.committed() == offset


async def test_what_cannot_be_committed_is_refused_by_itself(broker: Broker) -> None:
    missing, beyond = TopicPartition("missing", 0), TopicPartition(TP.topic, 4)
    results = await broker.coordinator.commit(
        "g",
        Identity(""),
        -1,
        {
            TP: Commit(1),
            OTHER: Commit(1, -1, "x" * (METADATA_BYTES_MAX + 1)),
            TopicPartition(TP.topic, 2): Commit(-1),
            missing: Commit(1),
            beyond: Commit(1),
            TopicPartition("a/b", 0): Commit(1),
        },
    )
    assert [*results.values()].count(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) == 3
    assert results[TP] is ErrorCode.NONE
    assert results[OTHER] is ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert results[TopicPartition(TP.topic, 2)] is ErrorCode.OFFSET_OUT_OF_RANGE
    assert await broker.coordinator.fetch("g", [TP, OTHER, missing, beyond]) == {TP: Commit(1)}


async def test_a_topic_that_is_created_again_has_no_committed_offsets(broker: Broker) -> None:
    await broker.commit(None, 3)
    await broker.world.catalog.delete(TP.topic)
    assert await broker.commit(None, 3) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    await broker.world.catalog.create(TP.topic, 4)
    assert await broker.committed() is None
    assert await broker.coordinator.fetch("g", None) == {}


async def test_a_commit_of_many_partitions_takes_a_few_round_trips() -> None:
    world, faults = World(), Faults()
    await world.catalog.create(TP.topic, 1_000)
    broker = Broker(world, log=world.process(faults))
    (joined,) = await broker.start()
    commits = {TopicPartition(TP.topic, number): Commit(number) for number in range(1_000)}
    for generation in (joined.generation, joined.generation):
        faults.calls.clear()
        results = await broker.coordinator.commit("g", Identity(joined.member_id), generation, commits)
        assert set(results.values()) == {ErrorCode.NONE}
        assert len(faults.calls) <= 5
    assert "put_many" not in [what for what, _ in faults.calls], "nothing changed"
    faults.calls.clear()
    assert await broker.coordinator.fetch("g", [*commits]) == commits
    assert len(faults.calls) <= 3


# --- with llog's own consumers


async def test_llogs_own_consumers_continue_after_a_kafka_commit_and_the_other_way_round(broker: Broker) -> None:
    await broker.world.append("a", "b", "c", "d")
    await broker.commit(None, 1, metadata="mine")
    group = await broker.groups.partition("g", TP)
    assert await group.position() == 2
    assert await group.commit(3) == 3
    assert await broker.coordinator.fetch("g", [TP]) == {TP: Commit(2)}, "the metadata was that of another offset"
    lag = await GroupListing(broker.groups).lag("g")
    assert [(each.partition, each.offset, each.lag) for each in lag] == [(0, 3, 2)]
    assert await GroupListing(broker.groups).names() == ["g"]


async def test_a_member_that_claims_begins_at_the_end_after_a_kafka_commit_beyond_it(broker: Broker) -> None:
    await broker.world.append("a", "b")
    await broker.commit(None, 1_000)
    group = await broker.groups.partition("g", TP)
    assert await group.claim("m", limit=10, visibility_ms=60_000) == ()
    await broker.world.append("c", "d")
    given = await group.claim("m", limit=10, visibility_ms=60_000)
    assert given is not None
    assert [(each.start, each.end) for each in given] == [(3, 4)]


async def test_a_plain_reader_commits_from_the_end_after_a_kafka_commit_beyond_it(broker: Broker) -> None:
    await broker.world.append("a", "b")
    await broker.commit(None, 1_000)
    group = await broker.groups.partition("g", TP)
    assert await group.commit(3) == 3
    await broker.world.append("c")
    assert await group.commit(4) == 4
    assert await broker.committed() == 3


async def test_a_member_that_claims_begins_at_the_log_start_after_a_kafka_commit_below_it(broker: Broker) -> None:
    await broker.world.append("a", "b", "c")
    await broker.world.change_control(log_start_offset=3)
    await broker.commit(None, 0)
    given = await (await broker.groups.partition("g", TP)).claim("m", limit=10, visibility_ms=60_000)
    assert given is not None
    assert [(each.start, each.end) for each in given] == [(3, 3)]


@pytest.mark.parametrize("mode", [GroupMode.CLAIMED, GroupMode.ASSIGNED])
async def test_a_group_whose_records_llogs_own_members_share_takes_no_kafka_commits(
    broker: Broker, mode: GroupMode
) -> None:
    await broker.world.append("a", "b")
    await (await broker.groups.partition("g", TP)).begin(1, mode=mode)
    for tp in (TP, OTHER):
        assert await broker.commit(None, 1, tp) is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert await broker.committed() == 0, "but a Kafka client sees how far they are"
    assert await broker.coordinator.delete_offsets("g", [TP]) == {TP: ErrorCode.INCONSISTENT_GROUP_PROTOCOL}


async def test_a_group_that_assigned_members_have_just_joined_takes_no_kafka_commits(broker: Broker) -> None:
    await broker.groups.join("g", TP.topic, "m", session_ms=60_000)
    assert await broker.commit(None, 1) is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert await broker.coordinator.delete("g") is ErrorCode.NON_EMPTY_GROUP
    broker.world.runtime.now += 60_001
    assert await broker.commit(None, 1) is ErrorCode.NONE
