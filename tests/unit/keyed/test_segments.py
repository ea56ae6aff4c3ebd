"""When segments start and end, what is known of them, and how they go."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from llog.errors import InvalidArgument
from llog.keyed import (
    Config,
    CountOptions,
    KeyedLog,
    KeyedLogReader,
    RetentionConfig,
    SegmentConfig,
    SeqRange,
    TimeRange,
    segments,
    writer,
)
from llog.keyed.encoding import (
    DELETION_MARK,
    ENTRY,
    LISTING,
    SEGMENT_TOTALS,
    SegmentMeta,
    SegmentTotals,
    after_prefix,
    entry_prefix,
    segment_key,
    sequence_suffix,
)
from llog.keyed.model import NUMBER_MAX
from llog.keyed.segments import EVERYTHING, Segments, state_of
from llog.keyed.slate import Database, new_batch
from tests.unit.keyed.conftest import Clock, Opener, ReaderOpener


async def ids(log: KeyedLogReader) -> list[int]:
    return [segment.segment_id for segment in await log.segments()]


async def values(found: Any) -> list[bytes]:
    return [entry.value async for entry in found]


async def test_without_a_trigger_everything_stays_in_segment_0(log: KeyedLog, clock: Clock) -> None:
    for _ in range(5):
        await log.append([(b"k", b"x" * 1000)] * 100)
        clock.ms += 10**9
    [segment] = await log.segments()
    assert (segment.segment_id, segment.start_seq, segment.end_seq, segment.end_time_ms) == (0, 0, 500, None)
    assert (segment.records, segment.size) == (500, 500 * 1001)


async def test_the_interval_starts_a_segment_before_the_append_that_finds_it_over(opener: Opener, clock: Clock) -> None:
    log = await opener(Config(segmentation=SegmentConfig(seal_interval=timedelta(hours=1))))
    began = clock.ms
    await log.append([(b"k", b"1")])
    clock.ms += 3_599_999
    await log.append([(b"k", b"2")])
    clock.ms += 1
    await log.append([(b"k", b"3"), (b"k", b"4")])
    first, second = await log.segments()
    assert (first.start_seq, first.end_seq, first.start_time_ms, first.end_time_ms) == (0, 2, began, clock.ms)
    assert (second.start_seq, second.end_seq, second.start_time_ms) == (2, 4, clock.ms)


@pytest.mark.parametrize("limits", [SegmentConfig(seal_records=10), SegmentConfig(seal_bytes=110)])
async def test_a_full_segment_is_followed_by_another_and_no_append_spans_two(
    opener: Opener, limits: SegmentConfig
) -> None:
    log = await opener(Config(segmentation=limits))
    for _ in range(5):
        await log.append([(b"k", b"x" * 10)] * 7)
    assert [(each.start_seq, each.end_seq) for each in await log.segments()] == [(0, 14), (14, 28), (28, 35)]
    assert await log.count(b"k") == 35


async def test_size_triggers_go_on_after_a_restart(opener: Opener) -> None:
    config = Config(segmentation=SegmentConfig(seal_records=10))
    for _ in range(4):
        log = await opener(config)
        await log.append([(b"k", b"x")] * 5)
        await log.close()
    assert [each.records for each in await (await opener(config)).segments()] == [10, 10]


@pytest.mark.parametrize("wrong", [{"seal_records": 0}, {"seal_bytes": -1}, {"seal_interval": timedelta(0)}])
def test_a_trigger_that_would_always_fire_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="seal_"):
        SegmentConfig(**wrong)


async def test_sealing_returns_the_sealed_id_and_keeps_what_the_user_attached(opener: Opener) -> None:
    log = await opener()
    await log.append([(b"k", b"1")])
    assert await log.seal_segment(b"end of day") == 0
    assert await log.seal_segment() == 1  # an empty one may be sealed
    await log.append([(b"k", b"2")])
    await log.close()
    log = await opener()
    assert [each.user_meta for each in await log.segments()] == [b"end of day", None, None]
    assert await values(log.scan(b"k")) == [b"1", b"2"]
    with pytest.raises(InvalidArgument, match="user_meta"):
        await log.seal_segment("text")  # type: ignore[arg-type]


async def test_segments_and_keys_are_selected_by_ranges(log: KeyedLog, clock: Clock) -> None:
    for number in range(5):
        await log.append([(b"all", b""), (b"only %d" % number, b"")])
        clock.ms += 100
        await log.seal_segment()
    assert [each.segment_id for each in await log.segments(SeqRange(3, 5))] == [1, 2]
    assert [each.segment_id for each in await log.segments(range(4, 4))] == []
    assert [each.segment_id for each in await log.segments(time_range=TimeRange(clock.ms - 50))] == [4, 5]
    assert [key async for key in log.keys(segment_range=range(1, 3))] == [b"all", b"only 1", b"only 2"]
    assert [key async for key in log.keys(b"only", SeqRange(4))] == [b"only 4"]
    assert [key async for key in log.keys(b"only", SeqRange(7))] == []


async def test_a_scan_from_a_sequence_reads_only_the_newest_segments(log: KeyedLog) -> None:
    for number in range(20):
        await log.append([(b"k", b"%d" % number)])
        await log.seal_segment()
    before = log.segments_read
    assert await values(log.scan(b"k", SeqRange(18))) == [b"18", b"19"]
    assert await log.count(b"k", SeqRange(18)) == 2
    assert log.segments_read - before == 5  # two for the scan; the count looks into the empty active one, too


async def test_deleted_segments_are_gone_and_the_rest_stays(
    opener: Opener, reader_opener: ReaderOpener, clock: Clock
) -> None:
    log = await opener()
    for number in range(4):
        await log.append([(b"k", b"%d" % number), (b"only %d" % number, b"")])
        await log.seal_segment()
    reader = await reader_opener()
    assert await reader.count(b"k") == 4
    assert await log.delete_segments(before=2) == 2
    assert await log.delete_segments(before=2) == 0
    while await ids(reader) != [2, 3, 4]:
        await reader.wait()
    for each in (log, reader):
        assert await ids(each) == [2, 3, 4]
        assert await values(each.scan(b"k")) == [b"2", b"3"]
        assert await values(each.scan(b"k", range(4))) == []
        assert await each.count(b"k") == 2
        assert [key async for key in each.keys(b"")] == [b"k", b"only 2", b"only 3"]
    await log.close()
    log = await opener()
    assert await ids(log) == [2, 3, 4]
    assert await log.append([(b"k", b"4")]) == 8


@pytest.mark.parametrize("wrong", [-1, 3, 100, "2", None])
async def test_the_active_segment_cannot_be_deleted(log: KeyedLog, wrong: Any) -> None:
    await log.seal_segment()
    await log.seal_segment()
    with pytest.raises(InvalidArgument, match="active segment, 2"):
        await log.delete_segments(wrong)
    assert await log.delete_segments(2) == 2


async def test_a_deletion_that_was_cut_short_is_invisible_and_ended_by_the_next_writer(
    opener: Opener, reader_opener: ReaderOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opener()
    await log.append([(b"k", b"old")])
    await log.seal_segment()
    await log.append([(b"k", b"new")])

    async def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(writer, "erase", crash)
        with pytest.raises(KeyboardInterrupt):
            await log.delete_segments(1)
    reader = await reader_opener()
    assert await ids(reader) == [1]
    assert await values(reader.scan_prefix(b"")) == [b"new"]
    log = await opener()
    for kind in (ENTRY, LISTING):
        rows = await log._database.rows(segment_key(kind, 0), after_prefix(segment_key(kind, 0)))
        assert await rows.first() is None
    rows = await log._database.rows_with_prefix(segment_key(DELETION_MARK, 0)[:2])
    assert await rows.first() is None
    assert await values(log.scan(b"k")) == [b"new"]


async def test_a_reader_never_sees_half_of_a_segment_that_is_deleted_while_it_scans(
    opener: Opener, reader_opener: ReaderOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opener()
    for number in range(3):
        await log.append([(b"a", b"a%d" % number), (b"b", b"b%d" % number)])
        await log.seal_segment()
    reader = await reader_opener()
    scan = reader.scan_prefix(b"")
    assert (await anext(scan)).value == b"a0"

    async def half(database: Database, segment_id: int) -> None:
        batch = new_batch()
        batch.delete(entry_prefix(segment_id, b"a") + sequence_suffix(2 * segment_id))
        await database.await_durable(await database.write(batch))

    monkeypatch.setattr(writer, "erase", half)
    await log.delete_segments(2)
    seen = entry_prefix(1, b"a") + sequence_suffix(2)
    while await reader._database.get(seen) is not None:
        await reader.wait()
    assert [entry.value async for entry in scan] == [b"b0", b"a2", b"b2"]
    counted = await reader._count_in_segment(b"b", EVERYTHING, CountOptions(), 1, 2, 4)
    assert counted == 0


async def test_retention_by_age_deletes_segments_whose_last_record_is_too_old(opener: Opener, clock: Clock) -> None:
    log = await opener(Config(retention=RetentionConfig(max_age=timedelta(hours=2))))
    for _ in range(4):
        await log.append([(b"k", b"x")])
        await log.seal_segment()
        clock.ms += 3_600_000
    assert await log.retain() == 2  # 4 h and 3 h old; 2 h is not older
    assert await ids(log) == [2, 3, 4]
    clock.ms += 10**9
    assert await log.retain() == 2
    assert await ids(log) == [4]
    assert await log.retain() == 0


async def test_retention_by_bytes_keeps_the_newest_segments_and_always_the_active_one(opener: Opener) -> None:
    log = await opener(Config(retention=RetentionConfig(max_bytes=250)))
    for _ in range(5):
        await log.append([(b"k", b"x" * 99)])
        await log.seal_segment()
    assert await log.retain() == 3
    assert await ids(log) == [3, 4, 5]
    await log.append([(b"k", b"x" * 999)])
    assert await log.retain(RetentionConfig(max_bytes=0)) == 2
    assert await ids(log) == [5]
    assert await log.count(b"k") == 1
    assert await log.retain(RetentionConfig()) == 0


def test_which_segments_a_range_needs() -> None:
    segments = Segments()
    assert segments.within() == range(0)
    for segment_id, start, time in ((5, 100, 1000), (6, 200, 2000), (7, 200, 2000), (8, 300, 3000)):
        segments.set(segment_id, SegmentMeta(start, time, None))
    assert list(segments.within()) == [5, 6, 7, 8]
    assert list(segments.within((0, 100))) == []
    assert list(segments.within((0, 101))) == [5]
    assert list(segments.within((199, 201))) == [5, 6, 7]
    assert list(segments.within((200, NUMBER_MAX))) == [7, 8]
    assert list(segments.within(times=(1500, 1600))) == [5]
    assert list(segments.within(times=(3000, NUMBER_MAX))) == [7, 8]
    assert list(segments.within(times=(3001, NUMBER_MAX))) == [8]
    assert list(segments.within(ids=(6, 8))) == [6, 7]
    assert list(segments.within((150, 350), (0, 2500), (6, 100))) == [6, 7]
    segments.set_totals(8, SegmentTotals(350, 50, 500, 3500))
    assert (segments.next_seq, segments.last_ms, segments.active_id) == (350, 3500, 8)
    segments.drop(7)
    assert list(segments.within()) == [7, 8]
    segments.set(12, SegmentMeta(900, 9000, None))  # all before it are gone
    assert list(segments.within()) == [12]
    segments.set(3, SegmentMeta(0, 0, None))
    assert list(segments.within()) == [12]


async def test_a_reader_that_looks_twice_at_once_keeps_what_the_later_look_found(
    log: KeyedLog, reader_opener: ReaderOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await reader_opener()
    records, begun, go_on = segments._records, asyncio.Event(), asyncio.Event()

    async def held_up(*asked: Any) -> Any:
        found = await records(*asked)
        if asked[1] == SEGMENT_TOTALS and not begun.is_set():
            begun.set()
            await go_on.wait()
        return found

    async def seen(count: int) -> None:
        while (await state_of(reader._database)).active_id < count:
            await reader.wait()

    await log.seal_segment()
    await seen(1)
    monkeypatch.setattr(segments, "_records", held_up)
    early = asyncio.ensure_future(reader.segments())
    await begun.wait()
    await log.append([(b"k", b"v")] * 5)
    await log.seal_segment()
    await seen(2)
    assert [each.records for each in await reader.segments()] == [0, 5, 0]
    go_on.set()
    await early
    assert [each.records for each in await reader.segments()] == [0, 5, 0]


@pytest.mark.parametrize("limits", [{"max_age": timedelta(seconds=-1)}, {"max_bytes": -1}])
def test_a_negative_limit_would_delete_everything_and_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="must not be negative"):
        RetentionConfig(**limits)
