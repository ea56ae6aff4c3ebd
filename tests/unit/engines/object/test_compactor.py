"""What compaction does to one partition when nobody disturbs it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from llog.batch.columns import Columns
from llog.batch.format import Codec, peek
from llog.batch.multi_batch import BodyLayout, encode_run
from llog.engines.object.blob_headers import read_header
from llog.engines.object.compaction import job as compaction
from llog.engines.object.compaction.claims import Claims
from llog.engines.object.compaction.compactor import Compactor, CompactorOptions, lagging_partitions
from llog.engines.object.pending import pending_puts
from llog.engines.object.retention import trim
from llog.errors import CorruptBatch, InconsistentReadState, RecordTooLarge
from llog.log.engine import AppendGroup, AppendResult
from llog.log.keys import WAL
from llog.log.records import Kind
from llog.model import Record, TimestampType, TopicPartition
from llog.stores.blobs import Buffer
from tests.unit.world import START_MS, TP, Crash, Faults, World


class CrashAfterBlob(Faults):
    """Dies when it has put a blob."""

    async def after(self, operation: str, key: str) -> None:
        if operation == "put blob":
            raise Crash


def compactor(world: World, **options: object) -> Compactor:
    return Compactor(world.log, CompactorOptions(**options))  # type: ignore[arg-type]


async def test_small_appends_become_one_entry_below_the_newest_append(world: World) -> None:
    for number in range(5):
        await world.append(f"a{number}", f"b{number}")
    result = await compactor(world).compact_once(TP)
    assert (result.start_offset, result.end_offset, result.entries, result.records) == (1, 8, 4, 8)
    assert result.bytes_read > 0
    assert result.bytes_written > 0
    assert await world.shape() == [(1, 8, Kind.COMPACTED), (9, 10, Kind.WAL)]
    assert await world.cursor() == 9
    assert await world.payloads() == [f"{letter}{number}" for number in range(5) for letter in "ab"]
    await world.check_index()


async def test_nothing_to_do_changes_nothing(world: World) -> None:
    assert (await compactor(world).compact_once(TP)).end_offset is None
    await world.append("a")
    await world.append("b")
    result = await compactor(world).compact_once(TP)
    assert result.end_offset is None
    assert result.error is None
    assert await world.shape() == [(1, 1, Kind.WAL), (2, 2, Kind.WAL)]


async def test_force_compacts_a_single_entry_and_the_newest_append(world: World) -> None:
    await world.append("a")
    result = await compactor(world).compact_once(TP, force=True)
    assert (result.start_offset, result.end_offset, result.entries) == (1, 1, 1)
    assert await world.payloads() == ["a"]
    assert (await world.control()).pending is None


async def test_a_large_entry_is_worth_a_run_of_its_own(world: World) -> None:
    await world.append("x" * 2000)
    await world.append("b")
    assert (await compactor(world).compact_once(TP)).end_offset is None
    assert (await compactor(world, max_bytes=4000).compact_once(TP)).end_offset == 1


async def test_an_idle_partition_gives_up_its_pending_append(world: World) -> None:
    await world.append("a")
    await compactor(world, idle_ms=1000).compact_once(TP)
    assert (await world.control()).pending is not None
    world.runtime.now += 1000
    await compactor(world, idle_ms=1000).compact_once(TP)
    assert (await world.control()).pending is None
    assert await world.payloads() == ["a"]
    assert (await world.append("b")).start_offset == 2
    assert await world.payloads() == ["a", "b"]


async def test_runs_end_at_the_limits_and_follow_one_another(world: World) -> None:
    for number in range(10):
        await world.append(f"a{number}")
    small = compactor(world, max_offsets=3)
    ends = [(await small.compact_once(TP, force=True)).end_offset for _ in range(5)]
    assert ends == [3, 6, 9, 10, None]
    await world.check_index()
    for number in range(10, 14):
        await world.append(f"a{number}")
    bytewise = compactor(world, max_bytes=1)
    assert [(await bytewise.compact_once(TP)).end_offset for _ in range(4)] == [11, 12, 13, None]
    assert await world.payloads() == [f"a{number}" for number in range(14)]


async def test_a_run_has_a_bounded_number_of_entries(world: World) -> None:
    for number in range(10):
        await world.append(f"a{number}")
    result = await compactor(world, max_entries=4).compact_once(TP)
    assert (result.end_offset, result.entries) == (4, 4)


async def test_the_compacted_entry_keeps_times_and_maxima(world: World) -> None:
    for add_ms, timestamps in ((0, [START_MS + 500, None]), (-100, [START_MS - 900]), (50, [None])):
        world.runtime.now = START_MS + add_ms
        records = [Record(payload=b"x", timestamp=timestamp) for timestamp in timestamps]
        await world.writer.append([AppendGroup(topic=TP.topic, partition=0, records=records)])
    await world.append("end")
    replaced = [span.entry for span in (await world.index())]
    await compactor(world).compact_once(TP)
    entry = (await world.index())[0].entry
    assert entry.kind is Kind.COMPACTED
    assert entry.msg_count == 4
    assert (entry.timestamp_min, entry.timestamp_max) == (START_MS - 900, START_MS + 500)
    assert (entry.append_ms, entry.max_append_ms) == (START_MS + 50, replaced[-1].max_append_ms)
    assert entry.max_timestamp_ms == replaced[-1].max_timestamp_ms == START_MS + 500


async def test_offset_for_time_inside_a_compacted_entry(world: World) -> None:
    for number in range(6):
        world.runtime.now = START_MS + 100 * number
        await world.writer.append(
            [AppendGroup(topic=TP.topic, partition=0, records=[Record(payload=b"x", timestamp=10 * number)] * 2)]
        )
    await compactor(world).compact_once(TP, force=True)
    assert [kind for _, _, kind in await world.shape()] == [Kind.COMPACTED]
    for by, step, start in ((TimestampType.CREATE, 10, 0), (TimestampType.APPEND, 100, START_MS)):
        for number in range(6):
            assert await world.reader.offset_for_time(TP, start + step * number, by) == 1 + 2 * number
            assert await world.reader.offset_for_time(TP, start + step * number + 1, by) == 3 + 2 * number


async def test_a_trimmed_partition_is_compacted_from_the_entry_that_covers_the_log_start(world: World) -> None:
    for number in range(5):
        await world.append(f"a{number}", f"b{number}")
    await trim(world.log, TP, 4)
    result = await compactor(world).compact_once(TP)
    assert (result.start_offset, result.end_offset) == (3, 8)
    assert await world.cursor() == 9
    assert await world.payloads() == ["b1", "a2", "b2", "a3", "b3", "a4", "b4"]


async def test_a_partition_that_was_trimmed_wholly_has_nothing_to_compact(world: World) -> None:
    for number in range(3):
        await world.append(f"a{number}")
    await trim(world.log, TP, 4)
    assert (await compactor(world).compact_once(TP, force=True)).end_offset is None
    assert (await compactor(world).lag(TP)).offsets == 0
    await world.append("b")
    assert (await compactor(world).compact_once(TP, force=True)).end_offset == 4
    assert await world.cursor() == 5


async def test_a_damaged_slice_ends_a_run_and_is_passed_and_reported(world: World) -> None:
    for number in range(7):
        await world.append(f"a{number}")
    [uri] = [span.entry.data_uri for span in await world.index() if span.end_offset == 3]
    world.damage(uri)
    first = await compactor(world).compact_once(TP)
    assert (first.end_offset, first.damaged) == (2, ())
    second = await compactor(world).compact_once(TP)
    assert (second.start_offset, second.end_offset) == (4, 6)
    [damage] = second.damaged
    assert uri in damage
    assert "offsets 3 to 3 of orders/0" in damage
    assert await world.shape() == [(1, 2, Kind.COMPACTED), (3, 3, Kind.WAL), (4, 6, Kind.COMPACTED), (7, 7, Kind.WAL)]
    with pytest.raises(CorruptBatch, match=uri):
        await world.reader.read_offset(TP, 3)
    assert (await world.reader.read_offset(TP, 4)).payload == b"a3"


async def test_a_missing_blob_is_damage_too(world: World) -> None:
    for number in range(4):
        await world.append(f"a{number}")
    await world.blobs.delete_many([(await world.index())[0].entry.data_uri])
    result = await compactor(world).compact_once(TP)
    assert (result.start_offset, result.end_offset, len(result.damaged)) == (2, 3, 1)


async def test_a_blob_cut_short_spares_the_slices_that_are_whole(world: World) -> None:
    groups = [AppendGroup(topic=TP.topic, partition=part, records=[Record(payload=b"x" * 100)]) for part in (0, 1)]
    for _ in range(3):
        await world.writer.append(groups)
    uri = (await world.index())[0].entry.data_uri
    data, put_ms = world.blob_server.blobs[uri]
    world.blob_server.blobs[uri] = (data[:-50], put_ms)
    whole, cut = await compactor(world).compact_many([TP, TopicPartition("orders", 1)])
    assert (whole.start_offset, whole.end_offset, whole.damaged) == (1, 2, ())
    assert (cut.start_offset, cut.end_offset) == (None, None)
    assert len(cut.damaged) == 1


async def test_a_run_too_large_for_one_blob_is_halved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        await world.append(f"a{number}")

    def encode_few(parts: Sequence[Columns], codec: Codec) -> tuple[list[Buffer], BodyLayout]:
        if sum(part.count for part in parts) > 3:
            raise RecordTooLarge("too large")
        return encode_run(parts, codec)

    monkeypatch.setattr(compaction, "encode_run", encode_few)
    ends = [(await compactor(world).compact_once(TP)).end_offset for _ in range(4)]
    assert ends == [2, 5, 8, None]
    assert await world.payloads() == [f"a{number}" for number in range(9)]
    await world.check_index()


@pytest.mark.parametrize("codec", list(Codec))
async def test_compacted_blobs_may_be_compressed(world: World, codec: Codec) -> None:
    for number in range(5):
        await world.append(f"a{number}" * 100)
    await compactor(world, codec=codec).compact_once(TP)
    entry = (await world.index())[0].entry
    data = await world.blobs.get_range(entry.data_uri, entry.byte_offset, entry.byte_length)
    assert peek(data).codec is codec
    assert await world.payloads() == [f"a{number}" * 100 for number in range(5)]


async def test_a_compacted_blob_names_its_offsets(world: World) -> None:
    for number in range(5):
        await world.append(f"a{number}", f"b{number}")
    await trim(world.log, TP, 4)
    await compactor(world).compact_once(TP)
    [span, _] = await world.index()
    [body] = (await read_header(world.log, span.entry.data_uri)).partitions
    assert (body.topic, body.partition, body.directory) == (*TP, "orders")
    assert (body.start_offset, body.msg_count) == (span.start_offset, span.entry.msg_count) == (3, 6)
    assert (body.body_offset, body.body_length) == (span.entry.byte_offset, span.entry.byte_length)
    assert (body.encoding, body.timestamp_max) == (span.entry.encoding, span.entry.timestamp_max)


async def test_the_name_of_a_compacted_blob_says_whose_records_it_has(world: World) -> None:
    for number in range(5):
        await world.append(f"a{number}")
    await Compactor(world.log).compact_once(TP)
    [name] = [name for name in world.blob_server.names if "/compacted/" in name]
    assert re.fullmatch(r"llog/orders/partitions/0/data/compacted/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)
    assert name in {span.entry.data_uri for span in await world.index()}


async def test_twins_put_the_same_blob(world: World) -> None:
    for number in range(5):
        await world.append(f"a{number}")
    made = []
    for _ in range(2):
        twin = world.process(CrashAfterBlob())
        with pytest.raises(Crash):
            await Compactor(twin).compact_once(TP)
        [name] = [name for name in world.blob_server.names if "/compacted/" in name]
        made.append(world.blob_server.blobs.pop(name)[0])
        world.blob_server.names.remove(name)
        world.runtime.now += 1000
    assert made[0] == made[1]


async def test_a_compaction_that_an_older_version_began_is_finished_with_its_blob(world: World) -> None:
    """Before blobs of compactions had headers, they were a body and nothing else."""
    for number in range(5):
        await world.append(f"a{number}")
    with pytest.raises(Crash):
        await Compactor(world.process(CrashAfterBlob())).compact_once(TP)
    [name] = [name for name in world.blob_server.names if "/compacted/" in name]
    [body] = (await read_header(world.log, name)).partitions
    data, put_ms = world.blob_server.blobs[name]
    plain = data[body.body_offset : body.body_offset + body.body_length]
    world.blob_server.blobs[name] = plain, put_ms
    await compactor(world).compact_once(TP)
    [span, _] = await world.index()
    assert (span.entry.data_uri, span.entry.byte_offset, span.entry.byte_length) == (name, 0, len(plain))
    assert await world.payloads() == [f"a{number}" for number in range(5)]


async def test_a_gap_in_the_index_is_an_error_and_nothing_is_compacted(world: World) -> None:
    for number in range(5):
        await world.append(f"a{number}")
    await world.meta.delete((await world.keys()).entry(1))
    with pytest.raises(InconsistentReadState, match="gap at offset 1"):
        await compactor(world).compact_once(TP)
    assert [kind for _, _, kind in await world.shape()] == [Kind.WAL] * 4


async def test_a_leftover_entry_in_a_compacted_range_does_not_disturb_the_next_run(world: World) -> None:
    await world.append("a0")
    zombie = pending_puts(await world.keys(), (await world.control()).pending)
    for number in range(1, 4):
        await world.append(f"a{number}")
    await compactor(world).compact_once(TP)
    await world.meta.put_many(zombie)
    await world.append("a4")
    await world.append("a5")
    result = await compactor(world).compact_once(TP)
    assert (result.start_offset, result.end_offset) == (4, 5)
    assert await world.payloads() == [f"a{number}" for number in range(6)]


async def test_one_pass_reads_each_shared_blob_once(world: World) -> None:
    tps = [TopicPartition("orders", partition) for partition in range(4)]
    for number in range(6):
        await world.writer.append(
            [
                AppendGroup(topic=tp.topic, partition=tp.partition, records=[Record(payload=b"%d" % number)])
                for tp in tps
            ]
        )
    world.blobs.counts.count.clear()
    results = await compactor(world).compact_many(tps)
    assert [(result.start_offset, result.end_offset, result.error) for result in results] == [(1, 5, None)] * 4
    assert world.blobs.counts.count == {"range_get": 5, "put": 4}
    for tp in tps:
        await world.check_index(tp)
        assert await world.payloads(tp) == [str(number) for number in range(6)]
        assert await world.meta.get((await world.keys(tp)).claim) is None


async def test_a_pass_with_little_memory_goes_in_waves(world: World) -> None:
    tps = [TopicPartition("orders", partition) for partition in range(4)]
    for number in range(6):
        await world.writer.append(
            [
                AppendGroup(topic=tp.topic, partition=tp.partition, records=[Record(payload=b"%d" % number)])
                for tp in tps
            ]
        )
    world.blobs.counts.count.clear()
    results = await compactor(world, memory_bytes_max=1).compact_many(tps)
    assert [result.end_offset for result in results] == [5] * 4
    assert world.blobs.counts.count == {"range_get": 20, "put": 4}


async def test_one_partition_s_error_stops_no_other(world: World) -> None:
    broken, whole, missing = TP, TopicPartition("orders", 1), TopicPartition("orders", 9)
    for tp in (broken, whole):
        for number in range(4):
            await world.append(f"a{number}", tp=tp)
    await world.meta.delete((await world.keys(broken)).entry(1))
    results = await compactor(world).compact_many([broken, whole, missing])
    assert isinstance(results[0].error, InconsistentReadState)
    assert results[1].end_offset == 3
    assert results[2].error is not None
    assert results[2].error.code == "partition_not_initialized"


async def test_a_claimed_partition_is_left_to_its_compactor(world: World) -> None:
    for number in range(4):
        await world.append(f"a{number}")
    claim, other = (await world.keys()).claim, Claims(world.process())
    assert await other.take(claim)
    assert not await Claims(world.log).take(claim)
    [result] = await compactor(world).compact_many([TP])
    assert (result.end_offset, result.error, result.claimed_elsewhere) == (None, None, True)
    [result] = await compactor(world).compact_many([TP], claim=False)
    assert (result.end_offset, result.claimed_elsewhere) == (3, False)
    await other.release(claim)
    assert await Claims(world.log).take(claim)


async def test_lag_counts_what_waits(world: World) -> None:
    assert (await compactor(world).lag(TP)).offsets == 0
    for number in range(5):
        await world.append(f"a{number}")
    lag = await compactor(world).lag(TP)
    assert (lag.offsets, lag.entries) == (5, 4)
    assert lag.bytes == sum(span.entry.byte_length for span in await world.index())
    assert [(found.tp, found.offsets, found.begun) async for found in lagging_partitions(world.log)] == [(TP, 5, False)]
    assert [found.tp async for found in lagging_partitions(world.log, min_offsets=6)] == []
    await compactor(world).compact_once(TP, force=True)
    assert [found async for found in lagging_partitions(world.log)] == []


async def test_the_compacted_blob_is_stamped_above_the_floor(world: World) -> None:
    for number in range(3):
        await world.append(f"a{number}")
    await world.change_control(blob_floor_ms=START_MS + 5000)
    await compactor(world).compact_once(TP)
    [compacted] = [name for name in world.blob_server.names if not name.startswith(WAL)]
    assert int(compacted[-36:].replace("-", "")[:12], 16) == START_MS + 5000


async def test_a_long_index_is_compacted_page_by_page(world: World) -> None:
    keys = await world.keys()
    results = await world.writer.append(
        [AppendGroup(topic=TP.topic, partition=0, records=[Record(payload=b"%d" % number)]) for number in range(2500)]
    )
    assert all(isinstance(result, AppendResult) for result in results)
    world.meta.counts.count.clear()
    ends = [(await compactor(world, max_entries=2100).compact_once(TP)).end_offset for _ in range(2)]
    assert ends == [2100, 2499]
    assert await world.payloads() == [str(number) for number in range(2500)]
    assert len(await world.meta.keys(keys.index, keys.index[:-1] + "0", 10)) == 3


async def test_a_few_small_appends_wait_for_more_as_long_as_they_may_linger(world: World) -> None:
    patient = Compactor(world.log, CompactorOptions(linger_ms=1000, linger_entries_max=6))
    for number in range(4):
        await world.append(f"a{number}")
    assert (await patient.compact_once(TP)).end_offset is None
    world.runtime.now += 999
    assert (await patient.compact_once(TP)).end_offset is None
    world.runtime.now += 1
    assert (await patient.compact_once(TP)).end_offset == 3
    for number in range(6):
        await world.append(f"b{number}")
    assert (await patient.compact_once(TP)).end_offset == 9, "six entries do not wait, and one is pending"
    assert await world.payloads() == [*(f"a{n}" for n in range(4)), *(f"b{n}" for n in range(6))]


async def test_a_large_run_and_a_forced_one_do_not_linger(world: World) -> None:
    for number in range(3):
        await world.append(f"a{number}" * 100)
    small = CompactorOptions(linger_ms=1000, max_bytes=1000)
    assert (await Compactor(world.log, small).compact_once(TP)).end_offset is not None
    for number in range(3):
        await world.append(f"b{number}")
    assert (await Compactor(world.log, CompactorOptions(linger_ms=1000)).compact_once(TP, force=True)).end_offset == 6


async def test_a_clock_that_was_set_back_lets_nothing_linger(world: World) -> None:
    for number in range(3):
        await world.append(f"a{number}")
    world.runtime.now -= 10_000
    assert (await Compactor(world.log, CompactorOptions(linger_ms=1000)).compact_once(TP)).end_offset == 3
