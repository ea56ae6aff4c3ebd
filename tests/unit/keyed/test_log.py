"""What one process sees of a keyed log that it writes."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from llog.errors import InvalidArgument, RecordTooLarge, StoreUnavailable
from llog.keyed import (
    Config,
    CountOptions,
    KeyedLog,
    KeyRange,
    LogEntry,
    Record,
    ScanOptions,
    SeqRange,
    StorageConfig,
    TimeRange,
    WriteOptions,
)
from llog.keyed.model import KEY_BYTES_MAX
from tests.unit.keyed.conftest import Clock, Opener

AWKWARD = [
    b"",
    b"\x00",
    b"\x00\x00",
    b"\x00\x01",
    b"\x01",
    b"\x01\x01",
    b"a",
    b"a\x00",
    b"a\x00b",
    b"a\x01",
    b"ab",
    b"b",
    b"\xff",
    b"\xff\xff",
]


async def values(found: Any) -> list[bytes]:
    return [entry.value async for entry in found]


async def test_records_of_a_key_come_back_in_the_order_of_their_sequences(log: KeyedLog) -> None:
    assert await log.append([(b"a", b"1"), Record(b"b", b"2"), (b"a", b"3")]) == 0
    assert await log.append([(b"a", b"4")]) == 3
    assert [entry async for entry in log.scan(b"a")] == [
        LogEntry(b"a", 0, b"1"),
        LogEntry(b"a", 2, b"3"),
        LogEntry(b"a", 3, b"4"),
    ]
    assert await values(log.scan(b"c")) == []
    assert await log.next_sequence() == 4


async def test_an_append_of_nothing_changes_nothing(log: KeyedLog) -> None:
    await log.append([(b"a", b"1")])
    assert await log.append([]) == 1
    assert await log.append(pa.table({"key": pa.array([], pa.binary()), "value": pa.array([], pa.binary())})) == 1
    assert await log.count(b"a") == 1


async def test_awkward_keys_are_logs_of_their_own_and_values_may_be_empty(log: KeyedLog) -> None:
    await log.append([(key, b"") for key in AWKWARD])
    await log.append([(key, b"v" + key) for key in reversed(AWKWARD)])
    for key in AWKWARD:
        assert await values(log.scan(key)) == [b"", b"v" + key]
        assert await log.count(key) == 2
    assert [key async for key in log.keys(b"")] == sorted(AWKWARD)


async def test_a_key_of_64_kib_is_the_longest(log: KeyedLog) -> None:
    for filler in (b"\x00", b"\xff"):
        key = filler * KEY_BYTES_MAX
        await log.append([(key, b"x")])
        assert [entry async for entry in log.scan(key)] == [LogEntry(key, await log.next_sequence() - 1, b"x")]
        assert await log.count(key) == 1
        with pytest.raises(RecordTooLarge, match="65537"):
            await log.append([(key + b"\x00", b"x")])
        with pytest.raises(RecordTooLarge, match="65537"):
            await log.count(key + b"\x00")
    assert [len(key) async for key in log.keys(b"")] == [KEY_BYTES_MAX] * 2


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5]),
        (SeqRange(), [0, 1, 2, 3, 4, 5]),
        (SeqRange(2), [2, 3, 4, 5]),
        (SeqRange(None, 2), [0, 1]),
        (range(1, 5), [1, 2, 3, 4]),
        (range(3, 3), []),
        (range(5, 2), []),
        (SeqRange(4, 1), []),
        (SeqRange(-5, 2), [0, 1]),
        (SeqRange(6), []),
        (SeqRange(2**70), []),
    ],
)
async def test_ranges_are_half_open_and_empty_or_inverted_ones_hold_nothing(
    log: KeyedLog, sequences: Any, expected: list[int]
) -> None:
    for number in range(0, 6, 2):  # runs of two, so that ranges cut them
        await log.append([(b"k", b"%d" % number), (b"k", b"%d" % (number + 1))])
    wanted = [b"%d" % number for number in expected]
    assert await values(log.scan(b"k", sequences)) == wanted
    assert await values(log.scan_prefix(b"", sequences)) == wanted
    assert await values(log.scan_keys(KeyRange(b"k"), sequences)) == wanted
    assert await log.count(b"k", sequences) == len(wanted)


@pytest.mark.parametrize("wrong", [range(0, 10, 2), (0, 5), SeqRange("a"), SeqRange(0, 1.5), "all", True])  # type: ignore[arg-type]
async def test_what_is_no_range_is_refused(log: KeyedLog, wrong: Any) -> None:
    with pytest.raises(InvalidArgument):
        await log.count(b"k", wrong)
    with pytest.raises(InvalidArgument):
        await values(log.scan(b"k", wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        [b"ab"],
        [("text", b"v")],
        [(b"k", "text")],
        [(b"k", None)],
        [(b"k",)],
        5,
        pa.table({"key": [b"k"]}),
        pa.table({"key": [1], "value": [b"v"]}),
        pa.table({"key": [b"k"], "value": pa.array([None], pa.binary())}),
    ],
)
async def test_what_is_no_record_is_refused_and_nothing_of_the_append_is_there(log: KeyedLog, wrong: Any) -> None:
    with pytest.raises(InvalidArgument):
        await log.append(wrong)
    assert [key async for key in log.keys(b"")] == []
    assert await log.append([(b"k", b"v")]) == 0


async def test_prefixes_and_ranges_of_keys_select_by_bytes(log: KeyedLog) -> None:
    await log.append([(key, key) for key in AWKWARD])
    await log.seal_segment()
    await log.append([(key, key) for key in AWKWARD])
    for prefix in AWKWARD:
        expected = sorted(key for key in AWKWARD if key.startswith(prefix))
        assert await values(log.scan_prefix(prefix)) == expected * 2
        assert [key async for key in log.keys(prefix)] == expected
    for start in AWKWARD:
        assert await values(log.scan_keys(KeyRange(start))) == sorted(key for key in AWKWARD if key >= start) * 2
        for end in AWKWARD:
            expected = sorted(key for key in AWKWARD if start <= key < end)
            assert await values(log.scan_keys(KeyRange(start, end))) == expected * 2
    with pytest.raises(InvalidArgument, match="KeyRange"):
        log.scan_keys_batches((b"a", b"b"))  # type: ignore[arg-type]


async def test_batches_are_arrow_and_carry_append_times(log: KeyedLog, clock: Clock) -> None:
    await log.append([(b"k", b"1")])
    clock.ms += 5
    await log.append([(b"k", b"2")])
    [batch] = [batch async for batch in log.scan_batches(b"k")]
    assert batch.schema.names == ["key", "sequence", "value", "append_time"]
    assert batch.column("append_time").cast(pa.int64()).to_pylist() == [clock.ms - 5, clock.ms]


async def test_a_time_range_selects_appends_and_reads_only_their_segments(opener: Opener, clock: Clock) -> None:
    log = await opener()
    for hour in range(10):
        await log.append([(b"k", b"%d" % hour), (b"other", b"")])
        clock.ms += 3_600_000
        await log.append([(b"k", b"%d end" % hour)])
        await log.seal_segment()
    last_hour = TimeRange(clock.ms - 3_600_000)
    before = log.segments_read
    assert await values(log.scan(b"k", time_range=last_hour)) == [b"8 end", b"9", b"9 end"]
    assert log.segments_read - before == 2  # of ten with records
    assert await values(log.scan_prefix(b"k", time_range=TimeRange(clock.ms, clock.ms + 1))) == [b"9 end"]
    assert await values(log.scan(b"k", time_range=TimeRange(end=0))) == []
    assert [each.segment_id for each in await log.segments(time_range=last_hour)] == [8, 9, 10]


async def test_a_clock_that_goes_back_does_not_take_append_times_back(log: KeyedLog, clock: Clock) -> None:
    await log.append([(b"k", b"1")])
    clock.ms -= 1000
    await log.append([(b"k", b"2")])
    [batch] = [batch async for batch in log.scan_batches(b"k")]
    assert batch.column("append_time").cast(pa.int64()).to_pylist() == [clock.ms + 1000] * 2


async def test_a_limit_ends_a_scan(log: KeyedLog) -> None:
    for _ in range(3):
        await log.append([(b"k", b"x")] * 10)
    for limit in (0, 1, 10, 15, 100):
        found = [batch async for batch in log.scan_batches(b"k", None, ScanOptions(limit=limit))]
        assert sum(batch.num_rows for batch in found) == min(limit, 30)


async def test_counts_are_those_of_a_scan_for_every_range(opener: Opener) -> None:
    log = await opener()
    for number in range(12):
        await log.append([(b"a", b""), (b"b", b""), (b"a", b"")] * (number % 3 + 1))
        if number % 5 == 4:
            await log.seal_segment()
    end = await log.next_sequence()
    scanned = [entry.sequence async for entry in log.scan(b"a")]
    for start in range(0, end + 1, 3):
        for stop in range(start, end + 2, 4):
            exact = sum(start <= sequence < stop for sequence in scanned)
            assert await log.count(b"a", range(start, stop)) == exact
            near = await log.count(b"a", range(start, stop), approximate=True)
            assert abs(near - exact) <= 2 * 6  # a run at each end


async def test_an_approximate_count_decodes_no_run(log: KeyedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    await log.append([(b"a", b""), (b"b", b"")] * 50)
    monkeypatch.setattr("llog.keyed.reader.sequences_of", None)
    assert abs(await log.count(b"a", range(20, 60), approximate=True) - 20) <= 50
    with pytest.raises(TypeError):
        await log.count(b"a", range(20, 60))


async def test_appends_in_flight_get_sequences_in_the_order_of_the_calls(log: KeyedLog) -> None:
    firsts = await asyncio.gather(*(log.append([(b"k", b"%d" % number)] * 3) for number in range(50)))
    assert firsts == list(range(0, 150, 3))
    assert await values(log.scan(b"k")) == [b"%d" % (number // 3) for number in range(150)]


@pytest.mark.parametrize("steps", range(12))
async def test_an_append_that_is_cancelled_at_any_moment_leaves_the_log_whole(log: KeyedLog, steps: int) -> None:
    appending = asyncio.ensure_future(log.append([(b"k", b"1")]))
    for _ in range(steps + 1):
        await asyncio.sleep(0)
    appending.cancel()
    await asyncio.wait([appending])
    assert await log.append([(b"k", b"2")]) == 1
    assert await values(log.scan(b"k")) == [b"1", b"2"]
    assert await log.count(b"k") == 2


async def test_an_append_that_is_cancelled_while_it_waits_for_durability_does_not_end_the_writer(
    opener: Opener,
) -> None:
    log = await opener(Config(storage=StorageConfig(flush_interval=timedelta(milliseconds=300))))
    appending = asyncio.ensure_future(log.append([(b"k", b"1")]))
    while not log._writes_in_flight:
        await asyncio.sleep(0.001)
    appending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await appending
    assert await log.append([(b"k", b"2")]) == 1
    assert await values(log.scan(b"k")) == [b"1", b"2"]


async def test_appends_that_are_not_awaited_are_seen_by_who_asks_for_them_and_by_all_after_a_flush(
    log: KeyedLog,
) -> None:
    await log.append([(b"k", b"1")])
    assert await log.append_with_options([(b"k", b"2")], WriteOptions(await_durable=False)) == 1
    hasty = ScanOptions(durable=False)
    assert await values(log.scan_with_options(b"k", None, hasty)) == [b"1", b"2"]
    assert await log.count_with_options(b"k", None, CountOptions(durable=False)) == 2
    await log.flush()
    assert await values(log.scan(b"k")) == [b"1", b"2"]
    assert await log.next_sequence() == 2


async def test_counts_go_on_where_the_writer_has_forgotten_them(opener: Opener) -> None:
    log = await opener(Config(storage=StorageConfig(counted_keys_max=4)))
    keys = [b"%d" % number for number in range(20)]
    for _ in range(3):
        for key in keys:
            await log.append([(key, b"x"), (key, b"y")])
    assert [await log.count(key) for key in keys] == [6] * 20


async def test_a_closed_log_refuses_calls_and_may_be_closed_again(opener: Opener) -> None:
    log = await opener()
    await log.close()
    await log.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await log.append([(b"k", b"v")])
    with pytest.raises(StoreUnavailable, match="closed"):
        await log.count(b"k")


async def test_a_count_from_a_sequence_that_is_still_to_come_is_0_while_appends_go_on(log: KeyedLog) -> None:
    async def appended() -> None:
        for _ in range(50):
            await log.append([(b"k", b"v")] * 3)

    appending = asyncio.ensure_future(appended())
    counts = set()
    while not appending.done():
        counts |= set(await asyncio.gather(*(log.count(b"k", SeqRange(100_000)) for _ in range(8))))
    await appending
    assert counts <= {0}


async def test_large_records_after_many_small_ones_are_not_read_all_at_once(log: KeyedLog) -> None:
    await asyncio.gather(*(log.append([(b"k", b"small")], await_durable=False) for _ in range(200)))
    await asyncio.gather(*(log.append([(b"k", bytes(1 << 16))], await_durable=False) for _ in range(100)))
    await log.flush()
    found = [batch async for batch in log.scan_batches(b"k", None, ScanOptions(batch_bytes=1 << 17))]
    assert sum(batch.num_rows for batch in found) == 300
    assert max(batch.nbytes for batch in found) <= 1 << 18


async def test_a_long_key_counts_with_each_record_in_the_size_of_a_batch(log: KeyedLog) -> None:
    key = b"k" * KEY_BYTES_MAX
    for _ in range(4):
        await log.append([(key, b"")] * 10)
    found = [batch async for batch in log.scan_batches(key, None, ScanOptions(batch_bytes=1 << 20))]
    assert [batch.num_rows for batch in found] == [10] * 4


async def test_pairs_may_come_from_an_iterator(log: KeyedLog) -> None:
    await log.append(zip([b"a", b"b", b"a"], [b"1", b"2", b"3"], strict=True))
    assert [entry.value async for entry in log.scan(b"a")] == [b"1", b"3"]
