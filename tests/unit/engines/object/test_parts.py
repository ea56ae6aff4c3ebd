"""Compacted blobs of several batches: a reader asks for those that it needs, and for no others."""

from __future__ import annotations

import pytest

from llog.batch import multi_batch
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.reader import Reader
from llog.engines.object.snapshot import take_snapshot
from llog.errors import CorruptBatch
from llog.log.engine import AppendGroup
from llog.model import Record
from tests.unit.world import TP, Faults, World

COUNT = 8


@pytest.fixture
async def compacted(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Eight appends of two records each, compacted into a body of four batches."""
    monkeypatch.setattr(multi_batch, "PART_BYTES", 300)
    for number in range(COUNT):
        pair = [Record(payload=b"%02d" % each * 35, timestamp=each) for each in (2 * number, 2 * number + 1)]
        await world.writer.append([AppendGroup(topic=TP.topic, partition=TP.partition, records=pair)])
    await Compactor(world.log).compact_once(TP, force=True)
    (span,) = await world.index()
    assert [part.records for part in span.entry.parts] == [4] * 4
    return world


async def test_a_read_of_one_record_fetches_one_batch(compacted: World) -> None:
    batches = await compacted.reader.read(TP, 6, 1)
    assert [(batch.start_offset, batch.end_offset) for batch in batches] == [(6, 8)]


async def test_a_read_takes_as_many_batches_as_it_has_room_for_in_one_request(compacted: World) -> None:
    faults = Faults()
    part = (await compacted.index())[0].entry.parts[0].byte_length
    batches = await Reader(compacted.process(faults)).read(TP, 1, 3 * part)
    assert [(batch.start_offset, batch.end_offset) for batch in batches] == [(1, 4), (5, 8), (9, 12)]
    assert [operation for operation, _ in faults.calls if operation == "get blob"] == ["get blob"]
    assert await compacted.payloads() == [f"{each:02}" * 35 for each in range(2 * COUNT)]


async def test_no_batch_begins_at_the_stop(compacted: World) -> None:
    batches = await compacted.reader.read(TP, 2, stop=9)
    assert [(batch.start_offset, batch.end_offset) for batch in batches] == [(2, 4), (5, 8)]


async def test_a_time_is_found_in_a_later_batch(compacted: World) -> None:
    for offset in range(1, 2 * COUNT + 1):
        assert await compacted.reader.offset_for_time(TP, offset - 1) == offset


async def test_a_snapshot_has_an_extent_for_each_batch(compacted: World) -> None:
    snapshot = await take_snapshot(compacted.log, TP, 6, 9)
    assert [(extent.start_offset, extent.end_offset) for extent in snapshot] == [(5, 8)]
    snapshot = await take_snapshot(compacted.log, TP, 6, 10)
    assert [(extent.start_offset, extent.end_offset) for extent in snapshot] == [(5, 8), (9, 12)]


async def test_damage_in_one_batch_leaves_the_others_readable(compacted: World) -> None:
    (span,) = await compacted.index()
    entry = span.entry
    data, put_ms = compacted.blob_server.blobs[entry.data_uri]
    place = entry.byte_offset + multi_batch.positions(entry.parts)[2] + 100
    compacted.blob_server.blobs[entry.data_uri] = (data[:place] + b"?" + data[place + 1 :], put_ms)
    assert [batch.end_offset for batch in await compacted.reader.read(TP, 1)] == [4, 8]
    with pytest.raises(CorruptBatch, match="offsets 9 to 12"):
        await compacted.reader.read(TP, 9)
    assert [batch.start_offset for batch in await compacted.reader.read(TP, 13)] == [13]


async def test_a_blob_that_was_cut_is_readable_up_to_there(compacted: World) -> None:
    (span,) = await compacted.index()
    data, put_ms = compacted.blob_server.blobs[span.entry.data_uri]
    cut = span.entry.byte_offset + multi_batch.positions(span.entry.parts)[1] + 10
    compacted.blob_server.blobs[span.entry.data_uri] = (data[:cut], put_ms)
    assert [batch.end_offset for batch in await compacted.reader.read(TP, 1)] == [4]
    with pytest.raises(CorruptBatch):
        await compacted.reader.read(TP, 5)
