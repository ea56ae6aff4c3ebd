"""What the collector leaves to exactly-once writers, and what it takes."""

from __future__ import annotations

import pytest

from llog.batch.columns import Columns, columns_of
from llog.engines.object.collector import (
    Collector,
    sink_references,
)
from llog.engines.object.sink import SinkUploader, Upload, forget_sink, publish
from llog.errors import BlobCollected
from llog.log.keys import sink_key
from llog.log.records import Manifest, Sink, decode, encode
from llog.model import Record
from tests.unit.world import TP, World

HOUR = 3_600_000
DAY = 24 * HOUR


def columns(*payloads: str) -> Columns:
    return columns_of([Record(payload=payload.encode()) for payload in payloads])


async def sink_record(world: World, sink: str) -> Sink:
    found = await world.meta.get(sink_key(sink))
    assert found is not None
    return decode(Sink, found.value, found.key)


async def uploaded(world: World, sink: str, *payloads: str) -> Upload:
    return await SinkUploader(world.log, sink).upload([(TP, columns(*payloads))])


async def test_an_open_upload_is_spared_and_can_still_be_committed_after_the_grace(world: World) -> None:
    upload = await uploaded(world, "s", "a")
    world.runtime.now += 20 * HOUR
    assert (await Collector(world.log).collect_once()).deleted == 0
    await publish(world.log, "s", 0, [upload])
    assert await world.payloads() == ["a"]


async def test_an_upload_of_a_dead_batch_goes_and_cannot_be_committed(world: World) -> None:
    upload = await uploaded(world, "s", "a")
    world.runtime.now += DAY + 1
    assert (await Collector(world.log).collect_once()).deleted == 1
    with pytest.raises(BlobCollected):
        await publish(world.log, "s", 0, [upload])
    assert await world.payloads() == []


async def test_an_attempt_that_lost_goes_once_its_batch_is_finished(world: World) -> None:
    loser, winner = await uploaded(world, "s", "a"), await uploaded(world, "s", "a")
    await publish(world.log, "s", 0, [winner])
    world.runtime.now += HOUR + 1
    following = await uploaded(world, "s", "b")
    result = await Collector(world.log).collect_once()
    assert result.deleted == 1
    assert loser.blob not in world.blob_server.names
    await publish(world.log, "s", 1, [following])
    assert await world.payloads() == ["a", "b"]


async def test_a_manifest_keeps_its_blobs_however_old(world: World) -> None:
    upload = await uploaded(world, "s", "a")
    manifest = Manifest(blobs=(upload.blob,), since={str(TP): 1})
    record = await sink_record(world, "s")
    await world.meta.put(sink_key("s"), encode(Sink(batch=0, manifest=manifest, touched_ms=record.touched_ms)))
    world.runtime.now += 30 * DAY
    assert [name async for name in sink_references(world.log)] == [upload.blob]
    assert (await Collector(world.log).collect_once()).deleted == 0
    await publish(world.log, "s", 0, [])
    assert await world.payloads() == ["a"]


async def test_what_a_forgotten_sink_left_goes(world: World) -> None:
    upload = await uploaded(world, "s", "a")
    await forget_sink(world.log, "s")
    world.runtime.now += HOUR + 1
    assert (await Collector(world.log).collect_once()).deleted == 1
    assert upload.blob not in world.blob_server.names
