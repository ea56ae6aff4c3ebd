"""What is to be seen of consumer groups, and their removal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from llog.config import Settings
from llog.engines.object.retention import trim
from llog.engines.registry import all_engines
from llog.engines.rocksdb.handle import RocksHandle
from llog.errors import GroupConflict, VersionMismatch
from llog.groups.groups import Groups
from llog.groups.listing import GroupLag, GroupListing, GroupProgress
from llog.groups.records import GroupMode, GroupRecord
from llog.log.catalog import ROCKSDB, Catalog
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.model import TopicPartition
from llog.stores.meta import ABSENT
from tests.unit.groups.groups_room import KEY, OTHER, VISIBILITY_MS, Room
from tests.unit.world import TP


async def test_all_groups_are_listed_once(room: Room) -> None:
    await room.fill(1)
    await room.fill(1, OTHER)
    for name in ("b", "a", "a.b", "a-b"):
        await (await room.group(name)).commit(2)
        await (await room.group(name, OTHER)).commit(1)
    await room.groups.join("members-only", TP.topic, "m", session_ms=1000)
    assert await room.listing.names() == ["a", "a-b", "a.b", "b", "members-only"]
    assert await room.listing.unreachable() is None


async def test_lag_counts_what_is_still_there_to_read(room: Room) -> None:
    await room.fill(4)
    await room.fill(1, OTHER)
    await (await room.group()).commit(2)
    await (await room.group(tp=OTHER)).commit(2)
    await (await room.group("h")).commit(1)
    await trim(room.world.log, TP, 4)
    assert await room.listing.lag("g") == [
        GroupLag(topic=TP.topic, partition=0, offset=2, next_offset=5, lag=1),
        GroupLag(topic=TP.topic, partition=1, offset=2, next_offset=2, lag=0),
    ]


async def test_lag_counts_what_is_delivered_but_not_what_is_acknowledged_out_of_order(room: Room) -> None:
    group = await room.group()
    await room.fill(10)
    await group.begin(1)
    await room.claim("a", 3)
    await room.claim("b", 3)
    await group.ack("b", 6)
    room.world.runtime.now += VISIBILITY_MS
    assert await room.claim("c", 2) == [(1, 2, 2)]
    [share] = await room.listing.describe("g")
    assert share == GroupProgress(
        topic=TP.topic,
        partition=0,
        mode="claimed",
        offset=1,
        next_offset=11,
        lag=7,
        outstanding=3,
        expired=1,
        holders=("a", "c"),
    )


async def test_partitions_with_a_member_and_no_position_are_described(room: Room) -> None:
    await room.fill(2)
    await room.groups.join("g", TP.topic, "a", session_ms=1000)
    await room.groups.join("g", TP.topic, "b", session_ms=1000)
    await (await room.group()).begin(1, mode=GroupMode.ASSIGNED)
    shares = await room.listing.describe("g")
    assert [(each.partition, each.offset, each.lag, each.assigned_to) for each in shares] == [
        (0, 1, 2, "a"),
        (1, None, None, "b"),
        (2, None, None, "a"),
        (3, None, None, "b"),
    ]
    assert [each.partition for each in await room.listing.lag("g")] == [0]


async def test_a_group_is_deleted_once_nobody_is_at_work(room: Room) -> None:
    group = await room.group()
    await room.fill(2)
    await group.begin(1)
    await (await room.group("h")).begin(1)
    await room.claim("a", 1)
    with pytest.raises(GroupConflict, match="'a'"):
        await room.listing.delete("g")
    room.world.runtime.now += VISIBILITY_MS
    assert await room.listing.delete("g") == 1
    assert await room.listing.names() == ["h"]
    assert await group.position() is None

    await room.groups.join("g", TP.topic, "a", session_ms=1000)
    await group.begin(1, mode=GroupMode.ASSIGNED)
    with pytest.raises(GroupConflict, match="'a'"):
        await room.listing.delete("g", TP.topic)
    assert await room.listing.delete("g", TP.topic, force=True) == 1
    assert await room.listing.names() == ["h"]


async def test_a_deleted_group_is_not_changed_by_a_put_that_comes_late(room: Room) -> None:
    record = GroupRecord(offset=1, updated_ms=0)
    await room.store.put(KEY, record, expected=ABSENT, durable=True)
    found = await room.store.get(KEY)
    assert found is not None
    assert await room.store.delete(KEY)
    assert not await room.store.delete(KEY)
    await room.store.put(KEY, record, expected=ABSENT, durable=True)
    for expected in (found.version, ABSENT):
        with pytest.raises(VersionMismatch):
            await room.store.put(KEY, GroupRecord(offset=9, updated_ms=0), expected=expected, durable=True)
    assert (await room.store.get(KEY) or found).record == record


async def test_topics_that_lie_elsewhere_hide_no_groups_of_those_that_are_here(tmp_path: Path) -> None:
    """As a log of a version that let each directory have a RocksDB of its own may have them."""

    @asynccontextmanager
    async def opened(name: str) -> AsyncIterator[Log]:
        async with opened_log(Settings(data_dir=str(tmp_path))) as log:
            rocks = RocksHandle(tmp_path / name, log.runtime)
            yield log._replace(engines=all_engines(rocks=rocks), owners=None)
            await rocks.close()

    for name, topic in (("elsewhere", "a"), ("here", "b"), ("elsewhere", "c")):
        async with opened(name) as log:
            await Catalog(log).create(topic, engine=ROCKSDB)
            await (await Groups(log).partition("g", TopicPartition(topic, 0))).commit(1)
    async with opened("here") as log:
        listing = GroupListing(Groups(log))
        assert await listing.names() == ["g"]
        assert [each.topic for each in await listing.describe("g")] == ["b"]
        assert "topic 'a'" in str(await listing.unreachable())
    async with opened("elsewhere") as log:
        listing = GroupListing(Groups(log))
        assert [each.topic for each in await listing.describe("g")] == ["a", "c"]
        assert "topic 'b'" in str(await listing.unreachable())
