"""`SegmentLog`: one writer, group commit, time, producers, retention, and what a reader beside it sees."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest

from llog.batch.columns import Columns, append_times, columns_of, effective_timestamps
from llog.engines.disk.format.files import INDEX, LOG, PRODUCERS, TAIL, TIMEINDEX, UNSYNCED, file_name, file_numbers
from llog.engines.disk.log import retention
from llog.engines.disk.log.index_repair import rebuild_indexes
from llog.engines.disk.log.log import Fsync, SegmentLog, SegmentOptions
from llog.engines.disk.log.reader import SegmentReader
from llog.errors import (
    InvalidArgument,
    LogOwned,
    OffsetOutOfRange,
    OutOfOrderSequence,
    StoreUnavailable,
    UnknownProducer,
)
from llog.log.producers import PRODUCERS_MAX, Producer
from llog.model import Record, TimestampType
from tests.unit.engines.disk.tools import kill, read_all

SMALL = SegmentOptions(segment_bytes=2000, index_interval_bytes=300)


class Clock:
    """A runtime whose time is set by hand."""

    def __init__(self, now_ms: int = 1000) -> None:
        self.now = now_ms

    def now_ms(self) -> int:
        return self.now

    def random(self) -> Random:
        return Random(1)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


def records(*payloads: bytes, timestamp: int | None = None) -> Columns:
    return columns_of([Record(payload=payload, timestamp=timestamp) for payload in payloads])


async def test_concurrent_appends_share_writes_and_keep_the_order_of_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SegmentLog.open(tmp_path / "log")
    syncs: list[int] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        syncs.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    results = await asyncio.gather(*(log.append(records(b"%d" % number)) for number in range(200)))
    assert [result.start_offset for result in results] == list(range(1, 201))
    assert len(syncs) < 20
    found = read_all(SegmentReader.open(tmp_path / "log"))
    assert found == {number + 1: b"%d" % number for number in range(200)}
    await log.close()


async def test_a_second_writer_is_told_who_owns_the_log(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log", what="orders/3")
    with pytest.raises(
        LogOwned, match=rf"orders/3 in .* process {os.getpid()} \(.*go through that process, or stop it"
    ):
        SegmentLog.open(tmp_path / "log", what="orders/3")
    await log.close()
    await SegmentLog.open(tmp_path / "log").close()


async def test_append_time_never_goes_back_and_fills_in_for_create_time(tmp_path: Path) -> None:
    clock = Clock(5000)
    log = SegmentLog.open(tmp_path / "log", SMALL, clock)
    await log.append(records(b"a"))
    clock.now = 4000
    await log.append(records(b"b", timestamp=17))
    await log.close()
    clock.now = 3000
    log = SegmentLog.open(tmp_path / "log", SMALL, clock)
    await log.append(records(b"c"))
    parts = await SegmentReader.open(tmp_path / "log").read(1)
    assert [append_times(columns).tolist() for _, columns in parts] == [[5000]] * 3
    assert [effective_timestamps(columns).to_pylist() for _, columns in parts] == [[5000], [17], [5000]]
    await log.close()


async def test_a_segment_is_sealed_when_it_is_full_or_old(tmp_path: Path) -> None:
    clock = Clock()
    log = SegmentLog.open(tmp_path / "log", SegmentOptions(segment_bytes=2000, segment_ms=100), clock)
    for _ in range(3):
        await log.append(records(bytes(700)))
    assert file_numbers(tmp_path / "log", LOG) == [1, 3]
    clock.now += 100
    await log.append(records(b""))
    assert file_numbers(tmp_path / "log", LOG) == [1, 3, 4]
    await log.append(records(bytes(5000)))
    assert file_numbers(tmp_path / "log", LOG) == [1, 3, 4, 5]
    assert len(read_all(SegmentReader.open(tmp_path / "log"))) == 5
    await log.close()


async def test_a_repeated_append_gets_its_offsets_again_after_a_kill_and_after_rolls(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log", SMALL)
    first = await log.append(records(b"a", b"b"), Producer(id="p", sequence=0, since=1))
    for sequence in range(1, 4):
        await log.append(records(bytes(900)), Producer(id="p", sequence=sequence, since=1))
    assert len(log.sealed_bases()) >= 1
    for _ in range(2):
        again = await log.append(records(b"a", b"b"), Producer(id="p", sequence=0, since=1))
        assert (again.start_offset, again.end_offset, again.repeated) == (first.start_offset, first.end_offset, True)
        with pytest.raises(OutOfOrderSequence):
            await log.append(records(b"z"), Producer(id="p", sequence=9, since=1))
        kill(log._writer)
        log = SegmentLog.open(tmp_path / "log", SMALL)
    await log.close()


async def test_a_repetition_in_the_same_group_is_found(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log")
    producer = Producer(id="p", sequence=0, since=1)
    results = await asyncio.gather(*(log.append(records(b"a"), producer) for _ in range(5)))
    assert [result.repeated for result in results] == [False, True, True, True, True]
    assert log.bounds().next_offset == 2
    await log.close()


async def test_a_forgotten_producer_is_unknown_also_after_a_kill(tmp_path: Path) -> None:
    clock = Clock()
    log = SegmentLog.open(tmp_path / "log", SMALL, clock)
    for number in range(PRODUCERS_MAX + 1):
        clock.now += 1
        await log.append(records(b"x"), Producer(id=f"p{number}", sequence=0, since=1))
    kill(log._writer)
    log = SegmentLog.open(tmp_path / "log", SMALL, clock)
    with pytest.raises(UnknownProducer):
        await log.append(records(b"x"), Producer(id="p0", sequence=1, since=1))
    await log.close()


async def test_only_the_newest_segment_is_read_when_a_log_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SegmentLog.open(tmp_path / "log", SMALL)
    for number in range(30):
        await log.append(records(bytes(500)), Producer(id="p", sequence=number, since=1))
    sealed_bases = log.sealed_bases()
    kill(log._writer)
    for base in sealed_bases:
        (tmp_path / "log" / file_name(base, LOG)).write_bytes(b"not read")
        (tmp_path / "log" / file_name(base, INDEX)).write_bytes(b"not read")
    log = SegmentLog.open(tmp_path / "log", SMALL)
    assert log.bounds().next_offset == 31
    assert (await log.append(records(b""), Producer(id="p", sequence=29, since=1))).repeated
    await log.close()


async def test_trim_is_exact_at_once_and_survives_a_kill(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log", SMALL)
    for _ in range(12):
        await log.append(records(bytes(200), bytes(200)))
    reader = SegmentReader.open(tmp_path / "log", what="t/0")
    result = await log.trim(12)
    assert (result.old_start, result.new_start, result.records) == (1, 12, 11)
    assert result.bytes > 0
    assert await reader.bounds() == (12, 25)
    with pytest.raises(OffsetOutOfRange, match=r"offset 11 of t/0 .* starts at 12 and the next offset is 25"):
        await reader.read(11)
    assert (await reader.read(12))[0][0] == 12
    assert (await log.trim(5)).records == 0
    with pytest.raises(OffsetOutOfRange):
        await log.trim(26)
    with pytest.raises(InvalidArgument):
        await log.trim(0)
    kill(log._writer)
    log = SegmentLog.open(tmp_path / "log", SMALL)
    assert log.bounds() == (12, 25)
    assert (await log.trim(25)).records == 13
    kill(log._writer)
    log = SegmentLog.open(tmp_path / "log", SMALL)
    assert log.bounds() == (25, 25)
    assert (await log.append(records(b"a"))).start_offset == 25
    await log.close()


@pytest.mark.parametrize("by", TimestampType)
async def test_retention_by_age_counts_the_kind_of_time_asked_for(tmp_path: Path, by: TimestampType) -> None:
    clock = Clock(1000)
    log = SegmentLog.open(tmp_path / "log", SMALL, clock)
    for _ in range(10):
        clock.now += 100
        await log.append(records(bytes(900), timestamp=clock.now - 500))
    older = await log.retain(retention_ms=600, retention_bytes=None, by=by)
    assert older.new_start == (4 if by is TimestampType.APPEND else 9)
    everything = await log.retain(retention_ms=0, retention_bytes=None, now_ms=clock.now + 1, by=by)
    assert everything.new_start == 11
    assert log.bounds() == (11, 11)
    assert file_numbers(tmp_path / "log", LOG) == [11]
    assert (await log.append(records(b"a"))).start_offset == 11
    await log.close()


async def test_retention_by_size_keeps_the_segment_that_crosses_the_limit(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log", SMALL)
    for _ in range(10):
        await log.append(records(bytes(900)))
    sizes = [os.stat(tmp_path / "log" / file_name(base, LOG)).st_size for base in file_numbers(tmp_path / "log", LOG)]
    result = await log.retain(retention_ms=None, retention_bytes=sizes[-1] + sizes[-2] + 1)
    assert result.new_start == file_numbers(tmp_path / "log", LOG)[0]
    assert len(file_numbers(tmp_path / "log", LOG)) == 3
    assert (await log.retain(retention_ms=None, retention_bytes=0)).new_start == 11
    await log.close()


async def test_missing_indexes_of_sealed_segments_are_made_again_as_they_were(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log", SMALL)
    for number in range(30):
        await log.append(records(bytes(number * 9)))
    paths = [tmp_path / "log" / file_name(base, suffix) for base in log.sealed_bases() for suffix in (INDEX, TIMEINDEX)]
    before = [path.read_bytes() for path in paths]
    for path in paths[::2]:
        path.unlink()
    paths[1].write_bytes(b"damaged")
    await log.retain(retention_ms=None, retention_bytes=None)
    assert [path.read_bytes() for path in paths] == before
    await log.close()


async def test_appends_that_are_synced_later_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    log = SegmentLog.open(tmp_path / "log", SegmentOptions(fsync=Fsync.INTERVAL, fsync_interval_ms=5), clock)
    assert (tmp_path / "log" / UNSYNCED).exists()
    synced = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        real(descriptor)
        loop.call_soon_threadsafe(synced.set)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    await log.append(records(b"a"))
    await asyncio.wait_for(synced.wait(), 30)
    await log.close()
    assert not (tmp_path / "log" / UNSYNCED).exists()


async def test_a_hole_in_what_was_not_synced_ends_the_log_there(tmp_path: Path) -> None:
    options = SegmentOptions(fsync=Fsync.OS, index_interval_bytes=300)
    log = SegmentLog.open(tmp_path / "log", options)
    for number in range(20):
        await log.append(records(bytes([number]) * 200))
    positions = [frame.position for frame in SegmentReader.open(tmp_path / "log", log=log).frames()]
    kill(log._writer)
    path = tmp_path / "log" / file_name(1, LOG)
    data = bytearray(path.read_bytes())
    data[positions[7] + 100 : positions[7] + 150] = bytes(50)
    path.write_bytes(data)
    log = SegmentLog.open(tmp_path / "log", options)
    assert log.bounds().next_offset == 8
    assert list(read_all(SegmentReader.open(tmp_path / "log", log=log))) == list(range(1, 8))
    await log.close()


async def test_a_large_read_hands_out_views_of_the_mapped_file(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log")
    await log.append(records(*[b"x" * 1000] * 1000))
    reader = SegmentReader.open(tmp_path / "log")
    ((_, columns),) = reader.read_now(1)
    memory = reader._segments[1]._memory
    assert memory is not None
    first = np.frombuffer(memory, np.uint8).ctypes.data
    assert first < columns.values.buffers()[2].address < first + len(memory)
    await log.close()


async def test_a_waiting_reader_wakes_with_the_append(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log")
    for reader in (SegmentReader.open(tmp_path / "log", log=log), SegmentReader.open(tmp_path / "log")):
        next_offset = (await reader.bounds()).next_offset
        assert not await reader.wait(next_offset, 0.01)
        waiting = asyncio.create_task(reader.wait(next_offset, 30))
        await asyncio.sleep(0)
        await log.append(records(b"a"))
        assert await waiting
        assert await reader.wait(next_offset, 0)
        assert await reader.read(next_offset + 1) == []
    await log.close()


async def test_a_closed_log_and_an_empty_append_are_refused(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log")
    with pytest.raises(InvalidArgument, match="at least one record"):
        await log.append(records())
    await log.close()
    await log.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await log.append(records(b"a"))
    with pytest.raises(InvalidArgument, match="segment_bytes"):
        SegmentLog.open(tmp_path / "log", SegmentOptions(segment_bytes=0))


async def test_a_close_leaves_what_the_next_open_needs(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log")
    await log.append(records(b"a"), Producer(id="p", sequence=0, since=1))
    await log.close()
    assert file_numbers(tmp_path / "log", PRODUCERS) == [2]
    (tmp_path / "log" / TAIL).unlink()
    assert await SegmentReader.open(tmp_path / "log").bounds() == (1, 2)
    log = SegmentLog.open(tmp_path / "log")
    assert (await log.append(records(b"a"), Producer(id="p", sequence=0, since=1))).repeated
    await log.close()


async def test_nothing_is_acknowledged_once_the_files_were_removed(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "log")
    await log.append(records(b"a"))
    shutil.rmtree(tmp_path / "log")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="removed"):
            await log.append(records(b"b"))
    assert log.bounds().next_offset == 2
    with pytest.raises(StoreUnavailable):
        await log.close()


async def test_upkeep_that_comes_after_the_close_touches_nothing(tmp_path: Path) -> None:
    """The threads that do it go on though the task that wanted it was cancelled."""
    log = SegmentLog.open(tmp_path / "log")
    await log.append(records(b"a"))
    writer = log._writer
    await log.close()
    before = sorted(os.listdir(tmp_path / "log"))
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(8)]
    for upkeep in (
        lambda: retention.trim(writer, 2),
        lambda: retention.retain(writer, retention_ms=None, retention_bytes=0, now_ms=1, by=TimestampType.APPEND),
        writer.roll,
        lambda: rebuild_indexes(writer),
    ):
        with pytest.raises(StoreUnavailable, match="closed"):
            upkeep()
    assert sorted(os.listdir(tmp_path / "log")) == before
    for descriptor in others:
        os.close(descriptor)


async def test_what_is_committed_while_a_sync_ends_is_synced_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SegmentOptions(fsync=Fsync.INTERVAL, fsync_interval_ms=5)
    log = SegmentLog.open(tmp_path / "log", options, Clock())
    loop = asyncio.get_running_loop()
    real, syncs, synced = log._writer.sync, 0, asyncio.Event()

    def sync() -> None:
        nonlocal syncs
        real()
        syncs += 1
        if syncs == 1:
            asyncio.run_coroutine_threadsafe(log.append(records(b"b")), loop).result()
        else:
            loop.call_soon_threadsafe(synced.set)

    monkeypatch.setattr(log._writer, "sync", sync)
    await log.append(records(b"a"))
    await asyncio.wait_for(synced.wait(), 10)
    assert not log._writer.has_unsynced
    await log.close()
