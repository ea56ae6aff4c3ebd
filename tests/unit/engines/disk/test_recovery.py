"""A log whose writer died: torn tails, stray segments, lost indexes, damage."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from llog.engines.disk.format.files import INDEX, LOG, PRODUCERS, TAIL, TIMEINDEX, file_name, file_numbers
from llog.engines.disk.format.frames import frame_parts
from llog.engines.disk.format.index import Index
from llog.engines.disk.format.segment import Segment
from llog.engines.disk.log import retention
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.log.writer import SegmentWriter
from llog.engines.disk.options import Fsync, SegmentOptions
from llog.errors import CorruptBatch, StoreUnavailable
from llog.model import TimestampType
from tests.unit.engines.disk.tools import Damage, append, body, damage, kill, read_all

OPTIONS = SegmentOptions(segment_bytes=2000, index_interval_bytes=300)


def opened(directory: Path, options: SegmentOptions = OPTIONS) -> SegmentWriter:
    return SegmentWriter(directory, options, "t/0")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.mark.parametrize("cut", [1, 40, 71, 72, 100, 200])
def test_a_torn_tail_is_cut_at_the_last_whole_frame(directory: Path, cut: int) -> None:
    writer = opened(directory)
    append(writer, [b"a" * 50])
    whole = writer.active.position
    append(writer, [b"b" * 150])
    kill(writer)
    path = directory / file_name(1, LOG)
    os.truncate(path, os.stat(path).st_size - cut)
    writer = opened(directory)
    assert writer.bounds == (1, 2)
    assert os.stat(path).st_size == whole
    assert append(writer, [b"c"]).start_offset == 2
    assert read_all(SegmentReader.open(directory)) == {1: b"a" * 50, 2: b"c"}
    writer.close()


@pytest.mark.parametrize("suffix", [INDEX, TIMEINDEX])
@pytest.mark.parametrize("harm", ["missing", "short", "long", "zeros", "twice", "foreign"])
def test_an_index_of_the_newest_segment_is_put_right(directory: Path, suffix: str, harm: str) -> None:
    options = SegmentOptions(index_interval_bytes=300)
    writer = opened(directory, options)
    for number in range(60):
        append(writer, [bytes(number * 3)], number, timestamps=[number])
    writer.active.index.flush()
    writer.active.timeindex.flush()
    kill(writer)
    path = directory / file_name(1, suffix)
    right = path.read_bytes()
    assert len(right) >= 96
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "short": right[: len(right) // 2 + 3],
                "long": right + right[:24],
                "zeros": right[: len(right) // 2] + bytes(len(right) - len(right) // 2),
                "twice": right + right[len(right) // 2 :],
                "foreign": bytes(range(256)),
            }[harm]
        )
    reader = SegmentReader.open(directory)
    assert list(read_all(reader)) == list(range(1, 61))
    assert [reader.offset_for_time_now(ms, TimestampType.CREATE) for ms in (0, 17, 59, 60)] == [1, 18, 60, 61]
    writer = opened(directory, options)
    assert writer.bounds == (1, 61)
    assert path.read_bytes() == right
    append(writer, [bytes(500)])
    assert read_all(SegmentReader.open(directory), 60)[61] == bytes(500)
    writer.close()


def test_damage_before_the_last_index_entry_is_not_taken_for_a_torn_tail(directory: Path) -> None:
    options = SegmentOptions(index_interval_bytes=300)
    writer = opened(directory, options)
    for number in range(40):
        append(writer, [bytes([number]) * 100])
    writer.active.index.flush()
    writer.active.timeindex.flush()
    reader = SegmentReader.open(directory, what="t/0")
    frames = list(reader.frames())
    kill(writer)
    descriptor = os.open(directory / file_name(1, LOG), os.O_RDWR)
    os.pwrite(descriptor, b"??", frames[4].position + 120)
    os.pwrite(descriptor, b"??", frames[11].position + 10)
    os.close(descriptor)
    writer = opened(directory, options)
    assert writer.bounds == (1, 41)
    assert sorted(read_all(reader, 31)) == list(range(31, 41))
    path = str(directory / file_name(1, LOG))
    with pytest.raises(CorruptBatch, match=f"offsets 5 to 5 of t/0 are damaged in {path} at byte {frames[4].position}"):
        reader.read_now(5)
    with pytest.raises(CorruptBatch, match=f"{path} is damaged at byte {frames[11].position}"):
        reader.read_now(12)
    assert [start for start, _ in reader.read_now(1)] == [1, 2, 3, 4]
    found = list(reader.frames())
    problems = [(frame.path, frame.position, frame.start_offset) for frame in found if frame.problem]
    assert problems == [(path, frames[4].position, 5), (path, frames[11].position, 12)]
    assert found[-1].end_offset == 40
    writer.close()


def test_an_empty_segment_that_a_crash_during_a_roll_left_is_gone_on_with(directory: Path) -> None:
    writer = opened(directory)
    append(writer, [b"a"])
    kill(writer)
    (directory / file_name(2, LOG)).touch()
    writer = opened(directory)
    assert writer.bounds == (1, 2)
    assert append(writer, [b"b"]).start_offset == 2
    kill(writer)
    assert os.stat(directory / file_name(2, LOG)).st_size > 0
    assert read_all(SegmentReader.open(directory)) == {1: b"a", 2: b"b"}


def test_an_empty_segment_inside_the_offsets_of_the_one_before_is_removed(directory: Path) -> None:
    writer = opened(directory)
    for letter in (b"a", b"b", b"c"):
        append(writer, [letter])
    kill(writer)
    (directory / file_name(2, LOG)).touch()
    writer = opened(directory)
    assert writer.bounds == (1, 4)
    assert file_numbers(directory, LOG) == [1]
    assert read_all(SegmentReader.open(directory)) == {1: b"a", 2: b"b", 3: b"c"}
    writer.close()


def test_without_any_snapshot_nobody_unknown_is_taken_for_new(directory: Path) -> None:
    writer = opened(directory)
    for _ in range(6):
        append(writer, [bytes(900)])
    writer.close()
    for offset in file_numbers(directory, PRODUCERS):
        (directory / file_name(offset, PRODUCERS)).unlink()
    (directory / file_name(1, LOG)).unlink()
    writer = opened(directory)
    assert writer.state.evicted_through >= 1
    assert writer.state.maxima == (1, 1)
    writer.close()


@pytest.mark.parametrize("content", [None, b"", b"x" * 32])
def test_a_reader_without_a_tail_file_finds_the_end_itself(directory: Path, content: bytes | None) -> None:
    writer = opened(directory)
    for _ in range(7):
        append(writer, [bytes(400)])
    kill(writer)
    (directory / TAIL).unlink()
    if content is not None:
        (directory / TAIL).write_bytes(content)
    reader = SegmentReader.open(directory)
    assert reader.bounds_now() == (1, 8)
    assert len(read_all(reader)) == 7
    assert SegmentReader.open(directory / "none").bounds_now() == (1, 1)


def test_what_is_written_but_not_committed_is_not_seen_by_a_reader(directory: Path) -> None:
    writer = opened(directory)
    append(writer, [b"a"])
    os.pwrite(writer.active.descriptor, b"".join(frame_parts(body([b"b"]), 2, 1, 1)), writer.active.position)
    reader = SegmentReader.open(directory)
    assert reader.bounds_now() == (1, 2)
    assert read_all(reader) == {1: b"a"}
    assert reader.read_now(2) == []
    kill(writer)


def test_a_reader_goes_on_when_segments_that_it_reads_are_removed(directory: Path) -> None:
    writer = opened(directory)
    for number in range(40):
        append(writer, [bytes([number]) * 400])
    reader = SegmentReader.open(directory)
    (first,) = reader.read_now(1, 1)
    retention.trim(writer, 20)
    assert first[1].values.to_pylist() == [bytes(400)]
    assert list(read_all(reader)) == list(range(20, 41))
    writer.close()


def test_records_after_a_tail_that_was_lost_with_the_log_start_stay(directory: Path) -> None:
    unsynced = SegmentOptions(fsync=Fsync.OS)
    writer = opened(directory, unsynced)
    ends = []
    for number in range(9):
        append(writer, [b"%d" % number])
        ends.append(writer.active.position)
    retention.trim(writer, 8)
    kill(writer)
    damage(directory / f"{1:020}.log", Damage.CUT, ends[2])
    (directory / "tail").unlink()
    writer = opened(directory)
    assert writer.bounds == (4, 4)
    for number in range(8):
        append(writer, [b"new %d" % number])
    before = read_all(SegmentReader.open(directory))
    assert list(before) == list(range(4, 12))
    kill(writer)
    writer = opened(directory)
    assert read_all(SegmentReader.open(directory)) == before
    writer.close()


def test_a_log_that_cannot_be_opened_says_why_and_leaves_no_file_open(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(directory).close()
    (directory / TAIL).unlink()
    (directory / TAIL).mkdir()
    descriptors: set[int] = set()
    real_open, real_close = os.open, os.close

    def counted_open(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = real_open(path, flags, mode)
        descriptors.add(descriptor)
        return descriptor

    def counted_close(descriptor: int) -> None:
        descriptors.discard(descriptor)
        real_close(descriptor)

    monkeypatch.setattr(os, "open", counted_open)
    monkeypatch.setattr(os, "close", counted_close)
    with pytest.raises(StoreUnavailable, match="directory"):
        opened(directory)
    assert not descriptors
    with pytest.raises(StoreUnavailable, match="directory"):
        SegmentReader.open(directory).bounds_now()


def test_threads_that_miss_an_index_at_once_all_find_their_frames(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(directory)
    for number in range(15):
        append(writer, [b"%d" % number + bytes(60)])
    writer.close()
    (directory / file_name(1, INDEX)).unlink()
    segment = Segment(directory, 1)
    begun, go_on = threading.Event(), threading.Event()

    def slow(data: bytes) -> Index:
        begun.set()
        go_on.wait(30)
        return Index(data)

    monkeypatch.setattr("llog.engines.disk.format.segment.Index", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(segment.floor, 9, segment.size())
        assert begun.wait(30)
        second = threads.submit(segment.floor, 9, segment.size())
        wait([second], 0.2)
        go_on.set()
        assert first.result() == second.result()


def test_a_log_that_was_closed_and_lost_its_end_is_not_gone_on_with_unasked(directory: Path) -> None:
    writer = opened(directory)
    append(writer, [b"a"])
    append(writer, [b"b"])
    writer.close()
    path = directory / file_name(1, LOG)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptBatch, match="offsets 2 to 2 were durable"):
        opened(directory)
    assert path.read_bytes() == whole[:-1]
    path.rename(directory / "away")
    with pytest.raises(CorruptBatch, match="offsets 1 to 2 were durable"):
        opened(directory)
    (directory / "away").rename(path)
    (directory / file_name(3, PRODUCERS)).unlink()
    writer = opened(directory)
    assert append(writer, [b"c"]).start_offset == 2
    writer.close()


def test_an_append_that_is_interrupted_in_its_sync_is_not_in_the_way_of_the_next(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a program that appends on its main thread comes when the sync returns."""
    writer = opened(directory)
    append(writer, [b"a"])
    real = os.fdatasync

    def interrupted(descriptor: int) -> None:
        real(descriptor)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            append(writer, [b"b"])
    assert append(writer, [b"c"]).start_offset == 2
    assert append(writer, [b"d"]).start_offset == 3
    kill(writer)
    opened(directory).close()
    assert read_all(SegmentReader.open(directory)) == {1: b"a", 2: b"c", 3: b"d"}


def test_a_group_of_no_appends_changes_nothing(directory: Path) -> None:
    writer = opened(directory)
    append(writer, [b"a"])
    assert writer.commit([], 1) == []
    assert file_numbers(directory, LOG) == [1]
    writer.close()


def test_a_system_without_the_calls_of_linux_for_syncing_appends_durably(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr("llog.engines.disk.format.files._SYNC_FILE_RANGE", None)
    writer = opened(directory)
    for number in range(1, 40):
        assert append(writer, [b"a" * 100]).start_offset == number
    writer.close()
    opened(directory).close()
    assert len(read_all(SegmentReader.open(directory))) == 39
