"""Consuming: claims and their redelivery, start positions, acknowledgements, dead letters and waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llog.batch.columns import records_of
from llog.config import Settings
from llog.engines.reading import iter_from
from llog.engines.routing import EngineAppender, EngineReader
from llog.engines.upkeep import clean_all
from llog.errors import (
    InvalidArgument,
    LlogError,
    OffsetOutOfRange,
    PartitionNotInitialized,
    StoreUnavailable,
    TopicNotFound,
)
from llog.groups.acks import AckResult
from llog.groups.dispatcher import Dispatcher
from llog.groups.group_partition import GroupPartition
from llog.groups.listing import GroupListing
from llog.groups.options import ConsumeOptions, Start
from llog.log.catalog import Catalog
from llog.log.opening import opened_log
from llog.log.records import Cleanup
from llog.model import TopicPartition
from tests.unit.groups.dispatcher_world import (
    ENGINES,
    Broken,
    Clock,
    Counting,
    Holes,
    NoAppends,
    World,
    numbers,
    opened_world,
    places,
)


@pytest.fixture(params=ENGINES)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with opened_world(request.param, tmp_path) as made:
        yield made


async def test_two_members_share_a_partition_and_their_acks_do_not_touch_each_other(world: World) -> None:
    await world.create()
    await world.append(*numbers(1, 10))
    assert await world.offsets("a", limit=4) == [1, 2, 3, 4]
    assert await world.offsets("b", limit=4) == [5, 6, 7, 8]
    assert await world.ack(8, "b") == 1, "b has acknowledged what a holds"
    assert await world.offsets("a", limit=9) == [9, 10]
    assert await world.ack(10, "a") == 11
    assert await world.offsets("b") == []


async def test_what_a_dead_member_held_is_delivered_again_with_the_attempt_counted(world: World) -> None:
    await world.create()
    await world.append(*numbers(1, 6))
    assert await world.offsets("dead", limit=3, visibility_ms=30_000) == [1, 2, 3]
    assert await world.offsets("b", limit=2) == [4, 5]
    world.clock.ahead_ms = 30_001
    again = await world.consume("b")
    assert again.column("offset").to_pylist() == [1, 2, 3, 6]
    assert again.column("attempt").to_pylist() == [2, 2, 2, 1]
    assert again.column("payload").to_pylist() == [b"1", b"2", b"3", b"6"]
    assert await world.ack(3, "dead") == 1, "the first holder has acknowledged what was given to another"
    assert await world.ack(6, "b") == 7


async def test_a_group_at_latest_misses_nothing_that_comes_between_two_polls(world: World) -> None:
    await world.create(partitions=2)
    await world.append("old")
    latest = Start("latest")
    assert await world.offsets(start=latest, partition=1) == []
    assert (await world.position(0), await world.position(1)) == (2, 1)
    await world.append("new")
    await world.append("other", partition=1)
    found = await world.consume(start=latest)
    assert sorted(places(found)) == [(0, 2), (1, 1)]


async def test_a_partition_that_is_added_later_is_read_from_its_beginning(world: World) -> None:
    await world.create()
    assert await world.offsets(start=Start("latest")) == []
    await Catalog(world.log).add_partitions("t", 2)
    await world.append("first", partition=1)
    assert places(await world.consume(start=Start("latest"))) == [(1, 1)]


async def test_earliest_counts_only_until_the_group_has_a_position(world: World) -> None:
    await world.create()
    await world.append(*numbers(1, 3))
    assert await world.offsets(limit=2) == [1, 2]
    await world.ack(2)
    assert await world.offsets(start=Start("earliest")) == [3]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (Start("offset", 3), [3, 4, 5]),
        (Start("after", 3), [4, 5]),
        (Start("after", 0), [1, 2, 3, 4, 5]),
        (Start("offset", 6), []),
        (Start("timestamp", 0), [1, 2, 3, 4, 5]),
    ],
)
async def test_a_read_at_a_given_place_claims_and_moves_nothing(
    world: World, start: Start, expected: list[int]
) -> None:
    await world.create()
    await world.append(*numbers(1, 5))
    assert await world.offsets(limit=1) == [1]
    group = await world.groups.partition("g", TopicPartition("t", 0))
    before = await group.record()
    for _ in range(2):
        found = await world.consume(start=start)
        assert found.column("offset").to_pylist() == expected
        assert set(found.column("attempt").to_pylist()) <= {0}
    assert await group.record() == before
    with pytest.raises(OffsetOutOfRange):
        await world.consume(start=Start("offset", 7))


async def test_a_timestamp_reads_from_the_first_record_of_that_time(world: World) -> None:
    await world.create()
    await world.append("1")
    world.clock.ahead_ms = 100_000
    since = world.clock.now_ms()
    await world.append("2")
    assert await world.offsets(group=None, start=Start("timestamp", since)) == [2]


async def test_without_a_group_all_is_read_from_the_beginning_and_nobody_remembers(world: World) -> None:
    await world.create(partitions=2)
    await world.append(*numbers(1, 3))
    await world.append("x", partition=1)
    for _ in range(2):
        assert places(await world.consume(group=None, limit=4)) == [(0, 1), (0, 2), (0, 3), (1, 1)]
    assert places(await world.consume(group=None, partition=1)) == [(1, 1)]
    assert (await world.position(0), await world.position(1)) == (None, None)


async def test_partitions_take_turns(world: World) -> None:
    await world.create(partitions=3)
    for partition in range(3):
        await world.append(*numbers(1, 4), partition=partition)
    first = [places(await world.consume(limit=1))[0][0] for _ in range(6)]
    assert first == [0, 1, 2, 0, 1, 2]


async def test_an_ack_must_name_the_partition_where_there_are_several(world: World) -> None:
    await world.create(partitions=2)
    await world.append("a")
    await world.consume()
    with pytest.raises(InvalidArgument, match="has 2 partitions: an ACK must name one"):
        await world.ack(1, partition=None)
    with pytest.raises(PartitionNotInitialized):
        await world.ack(1, partition=2)
    assert await world.dispatcher.ack("t", "g", {0: 1}, "m") == {0: AckResult(2)}


async def test_an_ack_beyond_the_end_is_refused(world: World) -> None:
    await world.create()
    await world.append("a")
    await world.consume()
    with pytest.raises(OffsetOutOfRange):
        await world.ack(2)
    assert await world.ack(1, partition=None) == 2


async def test_what_does_not_fit_into_max_bytes_is_not_kept_from_others(world: World) -> None:
    await world.create()
    await world.append(*["x" * 100] * 10)
    assert await world.offsets("a", max_bytes=250) == [1, 2]
    found = await world.consume("b")
    assert found.column("offset").to_pylist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert set(found.column("attempt").to_pylist()) == {1}


async def test_what_does_not_fit_is_not_its_members_however_many_claims_there_are(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llog.groups.claims.CLAIMS_MAX", 2)
    await world.create()
    await world.append(*("x" * 100 for _ in range(9)))
    for member, count in (("a", 5), ("b", 4)):
        assert len(await world.offsets(member, limit=count)) == count
    world.clock.ahead_ms = 60_001
    assert await world.offsets("c", limit=5, max_bytes=250) == [1, 2]
    assert await world.ack(9, "c") == 3, "what c was never given is acknowledged"
    assert await world.offsets("c", limit=3) == [3, 4, 5]


async def test_a_message_larger_than_max_bytes_comes_alone(world: World) -> None:
    await world.create()
    await world.append("x" * 100, "y" * 1000, "z")
    assert [await world.offsets(max_bytes=10) for _ in range(3)] == [[1], [2], [3]]


async def test_a_failed_read_gives_back_what_was_claimed(world: World) -> None:
    await world.create()
    await world.append(*numbers(1, 3))
    broken = Dispatcher(world.log, Broken(EngineReader(world.log)))
    with pytest.raises(StoreUnavailable):
        await broken.consume(ConsumeOptions(topic="t", group="g", member="a"))
    found = await world.consume("b")
    assert found.column("offset").to_pylist() == [1, 2, 3]
    assert set(found.column("attempt").to_pylist()) == {1}, "a delivery counts that never happened"


async def test_a_message_that_fails_too_often_becomes_a_dead_letter(world: World) -> None:
    await world.create()
    await world.append("good", "bad", key=b"k")
    for attempt in (1, 2, 3):
        found = await world.consume(max_attempts=3, visibility_ms=1000)
        assert found.column("attempt").to_pylist()[-1] == attempt
        if attempt == 1:
            await world.ack(1)
        world.clock.ahead_ms += 1001
    assert await world.offsets(max_attempts=3) == []
    assert await world.position() == 3
    reader = EngineReader(world.log)
    tp = TopicPartition("t.dead-letter", 0)
    (record,) = [r async for b in iter_from(reader, tp, 1) for r in records_of(b.columns, b.start_offset)]
    assert (record.payload, record.key) == (b"bad", b"k")
    assert dict(record.headers) == {
        "llog-dead-topic": b"t",
        "llog-dead-partition": b"0",
        "llog-dead-offset": b"2",
        "llog-dead-group": b"g",
        "llog-dead-attempts": b"3",
    }
    with pytest.raises(InvalidArgument, match="cannot go to that topic itself"):
        await world.consume(max_attempts=1, dead_letter="t")


async def test_dead_letters_that_cannot_be_written_stay_in_the_group(world: World) -> None:
    await world.create()
    await world.create("strict", engine="object")
    await world.append("bad")
    await world.consume(visibility_ms=1)
    world.clock.ahead_ms = 10
    failing = Dispatcher(world.log, appender=NoAppends())
    call = ConsumeOptions(topic="t", group="g", member="m", max_attempts=1, dead_letter="strict")
    with pytest.raises(StoreUnavailable):
        await failing.consume(call)
    assert await world.position() == 1
    assert (await world.consume()).column("attempt").to_pylist() == [2]


async def test_a_released_message_comes_again_after_its_delay_and_no_later_ack_takes_it_along(world: World) -> None:
    await world.create()
    await world.append(*numbers(1, 3))
    assert await world.offsets() == [1, 2, 3]
    assert await world.dispatcher.release("t", "g", 0, 2, member="m", delay_ms=5000)
    assert not await world.dispatcher.release("t", "g", 0, 2, member="m", delay_ms=0), "it was released already"
    assert not await world.dispatcher.release("t", "g", 0, 3, member="other", delay_ms=0), "another member's"
    assert await world.ack(3) == 2
    assert await world.offsets() == []
    world.clock.ahead_ms = 5001
    found = await world.consume("other")
    assert (found.column("offset").to_pylist(), found.column("attempt").to_pylist()) == ([2], [2])
    assert await world.ack(3, "other") == 4


async def test_a_wait_ends_with_a_record_in_any_partition(world: World) -> None:
    await world.create(partitions=3)
    waiting = asyncio.ensure_future(world.consume(wait_ms=30_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await world.append("came", partition=2)
    assert places(await asyncio.wait_for(waiting, 10)) == [(2, 1)]
    plain = asyncio.ensure_future(world.consume(group=None, start=Start("latest"), wait_ms=30_000))
    await asyncio.sleep(0.05)
    await world.append("more", partition=1)
    assert places(await asyncio.wait_for(plain, 10)) == [(1, 1)]


async def test_a_wait_notices_what_nothing_wakes_it_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llog.groups.dispatcher.LOOK_AGAIN_S", 0.1)
    await world.create()
    await world.append("old")
    assert await world.offsets() == [1]
    await world.ack(1)
    waiting = asyncio.ensure_future(world.consume(wait_ms=30_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await Dispatcher(world.log).reset("g", "t", Start("earliest"))
    assert places(await asyncio.wait_for(waiting, 10)) == [(0, 1)]
    waiting = asyncio.ensure_future(world.consume(wait_ms=30_000))
    await Catalog(world.log).add_partitions("t", 2)
    await world.append("new", partition=1)
    assert places(await asyncio.wait_for(waiting, 10)) == [(1, 1)]


async def test_a_topic_that_was_created_again_is_begun_anew(world: World) -> None:
    await world.create()
    await world.append("old")
    assert await world.offsets() == [1]
    await world.ack(1)
    await Catalog(world.log).delete("t")
    await world.create(partitions=2)
    await world.append("new", partition=1)
    assert places(await world.consume()) == [(1, 1)]


async def test_a_deleted_topic_takes_its_groups_along(world: World) -> None:
    for topic in ("t", "u"):
        await world.create(topic)
        await world.consume(topic=topic)
    await world.consume(group="assigned", mode="assigned")
    listing = GroupListing(world.groups)
    assert await listing.names() == ["assigned", "g"]
    await Catalog(world.log).delete("t")
    assert await listing.names() == ["g"]
    assert [(each.topic, each.offset) for each in await listing.describe("g")] == [("u", 1)]


async def test_a_wait_ends_when_a_claim_expires(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llog.groups.dispatcher.LOOK_AGAIN_S", 60.0)
    await world.create()
    await world.append("a")
    assert await world.offsets("dead", visibility_ms=200) == [1]
    assert await asyncio.wait_for(world.offsets("b", wait_ms=30_000), 10) == [1]


async def test_a_wait_ends_with_nothing_when_the_process_stops(world: World) -> None:
    await world.create()
    stopping = asyncio.Event()
    dispatcher = Dispatcher(world.log, stopping=stopping)
    waiting = asyncio.ensure_future(dispatcher.consume(ConsumeOptions(topic="t", group="g", wait_ms=60_000)))
    await asyncio.sleep(0.05)
    stopping.set()
    assert (await asyncio.wait_for(waiting, 10)).num_rows == 0


async def test_a_reset_moves_a_group_back_and_forgets_its_claims(world: World) -> None:
    await world.create(partitions=2)
    await world.append(*numbers(1, 3))
    await world.consume()
    assert await world.dispatcher.reset("g", "t", Start("earliest")) == {0: 1, 1: 1}
    assert await world.offsets() == [1, 2, 3]
    assert await world.dispatcher.reset("g", "t", Start("after", 2), 0) == {0: 3}
    assert await world.offsets() == [3]
    assert await world.dispatcher.reset("g", "t", Start("latest")) == {0: 4, 1: 1}
    assert await world.offsets() == []


async def test_records_that_key_compaction_took_count_as_acknowledged(world: World) -> None:
    holes = Holes(EngineReader(world.log), {2, 5, 6})
    await world.create()
    await world.append(*numbers(1, 6))
    dispatcher = Dispatcher(world.log, holes)
    call = ConsumeOptions(topic="t", group="g", member="m")
    assert (await dispatcher.consume(call)).column("offset").to_pylist() == [1, 3, 4]
    assert await dispatcher.ack("t", "g", {0: 4}, "m") == {0: AckResult(7)}
    await world.append("7")
    assert (await dispatcher.consume(call)).column("offset").to_pylist() == [7]


async def test_a_range_that_is_gone_altogether_does_not_stop_a_group(world: World) -> None:
    holes = Holes(EngineReader(world.log), {1, 2, 3})
    await world.create()
    await world.append(*numbers(1, 4))
    call = ConsumeOptions(topic="t", group="g", member="m", limit=2)
    assert (await Dispatcher(world.log, holes).consume(call)).column("offset").to_pylist() == [4]


async def test_what_retention_took_is_passed_over(world: World) -> None:
    await world.create()
    await world.append(*numbers(1, 5))
    assert await world.offsets("dead", limit=2, visibility_ms=1) == [1, 2]
    await EngineAppender(world.log).trim(TopicPartition("t", 0), 4)
    world.clock.ahead_ms = 10
    assert await world.offsets() == [4, 5]
    assert await world.ack(5) == 6


async def test_small_reads_do_not_fetch_a_large_batch_again_and_again(world: World) -> None:
    await world.create()
    await world.append(*numbers(1, 100))
    counting = Counting(EngineReader(world.log))
    dispatcher = Dispatcher(world.log, counting)
    got: list[int] = []
    while (
        found := (await dispatcher.consume(ConsumeOptions(topic="t", group="g", limit=7))).column("offset").to_pylist()
    ):
        got += found
    assert got == list(range(1, 101))
    assert counting.reads == (4 if world.engine == "rocksdb" else 1), (
        "RocksDB reads four times as much as it is asked for"
    )


async def test_what_was_read_ahead_is_not_delivered_once_key_compaction_took_it(world: World) -> None:
    if world.engine == "object":
        pytest.skip("keeps every record of a key")
    await world.create()
    await world.append(*numbers(1, 8), key=b"k")
    assert await world.offsets(limit=2) == [1, 2]
    await Catalog(world.log).set_options("t", cleanup=Cleanup.COMPACT)
    await world.append("9", key=b"k")
    (cleaned,) = (await clean_all(world.log, topic="t")).values()
    assert not isinstance(cleaned, LlogError)
    assert await world.offsets() == [9]


async def test_topics_on_disk_have_groups_too(tmp_path: Path) -> None:
    async with opened_log(Settings(data_dir=str(tmp_path))) as log:
        world = World(log, Clock())
        await world.create(engine="disk", cleanup=Cleanup.COMPACT)
        await world.append("a", key=b"1")
        await world.append("b", key=b"2")
        assert await world.offsets() == [1, 2]
        assert await world.ack(2) == 3


async def test_what_one_partition_gave_is_not_lost_by_the_failure_of_another(world: World) -> None:
    await world.create(partitions=2)
    await world.append("x")
    await world.append("y", partition=1)
    broken = Dispatcher(world.log, Broken(EngineReader(world.log), partition=1))
    call = ConsumeOptions(topic="t", group="g", member="m")
    assert places(await broken.consume(call)) == [(0, 1)]
    with pytest.raises(StoreUnavailable):
        await broken.consume(call)
    assert places(await world.consume("other")) == [(1, 1)]


@pytest.mark.parametrize(
    "call",
    [
        {"limit": 0},
        {"limit": 1_000_000},
        {"wait_ms": -1},
        {"visibility_ms": 0},
        {"max_attempts": 0},
        {"max_bytes": 0},
        {"group": "no/slash"},
        {"start": Start("offset")},
        {"start": Start("offset", 0)},
        {"start": Start("after", -1)},
    ],
)
async def test_what_is_out_of_its_bounds_is_refused(world: World, call: dict[str, Any]) -> None:
    await world.create()
    with pytest.raises(InvalidArgument):
        await world.consume(**call)


async def test_there_must_be_such_a_topic_and_partition(world: World) -> None:
    with pytest.raises(TopicNotFound):
        await world.consume()
    await world.create()
    with pytest.raises(PartitionNotInitialized):
        await world.consume(partition=1)


async def test_a_claim_whose_answer_was_lost_is_not_hidden_behind_what_others_gave(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create(partitions=2)
    await world.append("a")
    await world.append("b", partition=1)
    await world.consume(member="first", limit=1, visibility_ms=1)
    whole = GroupPartition.claim

    async def lossy(self: GroupPartition, member: str, **options: Any) -> Any:
        claims = await whole(self, member, **options)
        if self.tp.partition == 1:
            raise StoreUnavailable("the answer was lost")
        return claims

    world.clock.ahead_ms = 10
    monkeypatch.setattr(GroupPartition, "claim", lossy)
    with pytest.raises(StoreUnavailable):
        await world.consume(limit=10)
    monkeypatch.undo()
    # What was found before the failure is nobody's again; what may be claimed waits until it expires.
    assert (await world.consume("another", limit=10)).column("partition").to_pylist() == [0]
    world.clock.ahead_ms += 120_000
    assert sorted((await world.consume("another", limit=10)).column("partition").to_pylist()) == [0, 1]
