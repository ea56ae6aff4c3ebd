from __future__ import annotations

import msgspec
import pytest

from llog.engines.object.compaction.claims import Claims
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.description import describe_blob, describe_partition
from llog.errors import BlobNotFound, CorruptBatch, InvalidArgument, PartitionNotInitialized
from llog.log.keys import WAL
from llog.log.records import CompactorClaim, Kind
from llog.model import TopicPartition
from tests.unit.world import TP, World


async def test_a_partition_is_described_as_it_is_stored(world: World) -> None:
    for number in range(4):
        await world.append(f"a{number}", f"b{number}")
    await Compactor(world.log).compact_once(TP)
    claims, claim = Claims(world.log, "compactor-1"), (await world.keys()).claim
    assert await claims.take(claim)
    described = await describe_partition(world.log, TP)
    await claims.release(claim)
    assert (described.topic, described.partition, described.directory) == ("orders", 0, "orders")
    assert described.control == await world.control()
    assert described.cursor == 7
    assert described.compaction is None
    assert described.claim == CompactorClaim(holder="compactor-1")
    assert [(entry.start_offset, entry.end_offset, entry.entry.kind) for entry in described.entries] == [
        (1, 6, Kind.COMPACTED),
        (7, 8, Kind.WAL),
    ]
    assert described.more_from is None
    assert (await describe_partition(world.log, TP)).claim is None
    msgspec.json.encode(described)


async def test_index_entries_come_in_pages(world: World) -> None:
    for number in range(6):
        await world.append(f"a{number}")
    ends: list[int] = []
    following: int | None = 0
    while following is not None:
        page = await describe_partition(world.log, TP, 2, from_offset=following)
        assert len(page.entries) <= 2
        ends += [entry.end_offset for entry in page.entries]
        following = page.more_from
    assert ends == [1, 2, 3, 4, 5]
    with pytest.raises(InvalidArgument):
        await describe_partition(world.log, TP, 0)
    with pytest.raises(PartitionNotInitialized):
        await describe_partition(world.log, TopicPartition(TP.topic, 9))


async def test_a_shared_blob_tells_what_is_in_it(world: World) -> None:
    await world.append("a", "b")
    [name] = world.blob_server.names
    described = await describe_blob(world.log, name)
    assert described.shared is not None
    assert described.batch is None
    [body] = described.shared.partitions
    assert (body.topic, body.partition, body.msg_count) == (TP.topic, TP.partition, 2)
    assert (described.size, described.modified_ms) == (
        len(await world.blobs.get(name)),
        world.runtime.now,
    )


async def test_a_compacted_blob_tells_how_many_records_it_holds(world: World) -> None:
    await world.append("a", "b")
    await world.append("c")
    await Compactor(world.log).compact_once(TP, force=True)
    [span] = await world.index()
    described = await describe_blob(world.log, span.entry.data_uri)
    assert described.shared is not None
    [body] = described.shared.partitions
    assert (body.start_offset, body.msg_count) == (1, 3)
    await world.blobs.put(
        "llog/older", [await world.blobs.get_range(described.name, body.body_offset, body.body_length)]
    )
    older = await describe_blob(world.log, "llog/older")
    assert older.batch is not None
    assert older.batch.count == 3


async def test_what_is_no_blob_of_ours_is_an_error(world: World) -> None:
    with pytest.raises(BlobNotFound):
        await describe_blob(world.log, WAL + "missing")
    for name, data in (("short", b"LL"), ("cut", b"LLS1\x00\x00\x10\x00\x00\x00\x00\x00"), ("text", b"x" * 100)):
        await world.blobs.put(name, [data])
        with pytest.raises(CorruptBatch):
            await describe_blob(world.log, name)
