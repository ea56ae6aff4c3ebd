"""An append of several frames: each is bounded and indexed, and all of them are in the log, or none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from llog.batch.columns import columns_of, stamp
from llog.engines.disk.format.bodies import encode_bodies
from llog.engines.disk.format.files import INDEX, LOG, TAIL, TIMEINDEX, file_name, file_numbers
from llog.engines.disk.format.frames import frame_parts
from llog.engines.disk.format.index import Index
from llog.engines.disk.log.log import Fsync, SegmentLog, SegmentOptions
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.log.writer import AppendedRange, EncodedAppend, SegmentWriter
from llog.errors import RecordTooLarge
from llog.log.producers import Producer
from llog.model import Record
from tests.unit.engines.disk.tools import append, body, kill, read_all

MIB = 1 << 20
OPTIONS = SegmentOptions(frame_bytes=200, index_interval_bytes=100, ahead_bytes=0)
HEADERS_BYTES = 256
"""More than a frame and a batch have beside their records."""


def opened(directory: Path, options: SegmentOptions = OPTIONS) -> SegmentWriter:
    return SegmentWriter(directory, options, "t/0")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "log"


async def test_a_large_append_is_written_as_frames_of_bounded_size_and_each_is_indexed(directory: Path) -> None:
    payloads = [number.to_bytes(4) * 250 for number in range(5000)]
    log = SegmentLog.open(directory)
    result = await log.append(columns_of([Record(payload=payload) for payload in payloads]))
    assert (result.start_offset, result.end_offset) == (1, 5000)
    await log.close()
    reader = SegmentReader.open(directory)
    frames = list(reader.frames())
    assert len(frames) == 5
    assert all(frame.length <= MIB + HEADERS_BYTES for frame in frames)
    index = Index((directory / file_name(1, INDEX)).read_bytes())
    found = [tuple(index[number]) for number in range(len(index))]
    assert found == [(frame.start_offset - 1, frame.position) for frame in frames[1:]]
    assert read_all(reader) == dict(enumerate(payloads, 1))
    ((start, columns),) = reader.read_now(3000, 1)
    assert start == 3000
    assert columns.count < MIB // 1000


@pytest.mark.parametrize("sizes", [[1] * 1000, [0] * 1000, [300], [300, 1, 300], [190, 20, 190, 20], [0, 500, 0]])
def test_a_frame_holds_as_many_records_as_fit_and_one_at_least(sizes: list[int]) -> None:
    records = [Record(payload=bytes(size), key=b"k", timestamp=7) for size in sizes]
    bodies = encode_bodies(stamp(columns_of(records), 1), OPTIONS.codec, 200)
    assert sum(body.records for body in bodies) == len(sizes)
    assert all(body.length <= 200 + 100 for body in bodies if body.records > 1)
    assert all(first.length + second.length > 200 for first, second in pairwise(bodies))


def test_an_append_of_more_than_a_batch_may_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llog.engines.disk.format.bodies.BATCH_BYTES_MAX", 1000)
    columns = stamp(columns_of([Record(payload=bytes(100))] * 10), 1)
    with pytest.raises(RecordTooLarge, match="an append of 10 records has 1040 bytes, more than 1000"):
        encode_bodies(columns, OPTIONS.codec, 200)


def large(letter: bytes, count: int = 6) -> list[bytes]:
    """Records that take three frames."""
    return [letter * 90] * count


APPENDS: Sequence[list[bytes]] = ([b"a"], large(b"b"), [b"c"], large(b"d"))


def appended(directory: Path, options: SegmentOptions = OPTIONS) -> list[tuple[int, int]]:
    """Writes `APPENDS` as a process does that is killed then; where each ends: byte and next offset."""
    writer = opened(directory, options)
    ends = [(0, 1)]
    for number, payloads in enumerate(APPENDS):
        append(writer, payloads, producer=Producer(id="p", sequence=number, since=1))
        ends.append((writer.active.position, writer.state.next_offset))
    writer.active.index.flush()
    writer.active.timeindex.flush()
    kill(writer)
    return ends


def payloads_below(next_offset: int) -> dict[int, bytes]:
    everything = [payload for payloads in APPENDS for payload in payloads]
    return dict(enumerate(everything[: next_offset - 1], 1))


@pytest.mark.parametrize("indexes", ["kept", "lost"])
@pytest.mark.parametrize("fsync", [Fsync.ALWAYS, Fsync.OS])
def test_a_segment_cut_at_any_byte_gives_back_every_append_that_was_whole(
    directory: Path, tmp_path: Path, indexes: str, fsync: Fsync
) -> None:
    ends = appended(directory, SegmentOptions(frame_bytes=200, index_interval_bytes=100, ahead_bytes=0, fsync=fsync))
    (directory / TAIL).unlink()
    if indexes == "lost":
        (directory / file_name(1, INDEX)).unlink()
        (directory / file_name(1, TIMEINDEX)).unlink()
    log = directory / file_name(1, LOG)
    for cut in range(log.stat().st_size, -1, -1):
        os.truncate(log, cut)
        position, next_offset = max(end for end in ends if end[0] <= cut)
        assert SegmentReader.open(directory).bounds_now() == (1, next_offset), cut
        if cut % 97:
            continue
        copy = tmp_path / "copy"
        shutil.copytree(directory, copy)
        writer = opened(copy)
        assert writer.active.position == (copy / file_name(1, LOG)).stat().st_size == position
        assert append(writer, large(b"z")).start_offset == next_offset
        kept = payloads_below(next_offset)
        assert read_all(SegmentReader.open(copy)) == kept | dict(enumerate(large(b"z"), next_offset))
        kill(writer)
        shutil.rmtree(copy)


def test_a_frame_of_a_large_append_that_did_not_get_to_the_disk_takes_all_of_that_append(directory: Path) -> None:
    ends = appended(directory)
    log = directory / file_name(1, LOG)
    frames = [frame for frame in SegmentReader.open(directory).frames() if frame.position >= ends[-2][0]]
    assert len(frames) == 3
    with log.open("r+b") as file:
        file.seek(frames[1].position)
        file.write(bytes(frames[1].length))
    writer = opened(directory)
    assert writer.state.next_offset == ends[-2][1]
    assert log.stat().st_size == ends[-2][0]
    assert read_all(SegmentReader.open(directory)) == payloads_below(ends[-2][1])
    kill(writer)


def test_an_append_that_begins_before_another_has_ended_ends_the_log(directory: Path) -> None:
    ends = appended(directory)
    (directory / file_name(1, INDEX)).unlink()
    last = list(SegmentReader.open(directory).frames())[-1]
    strange = b"".join(frame_parts(body([b"?"] * last.records), last.start_offset, 1, 1))
    log = directory / file_name(1, LOG)
    log.write_bytes(log.read_bytes()[: last.position] + strange)
    writer = opened(directory)
    assert (writer.active.position, writer.state.next_offset) == ends[-2]
    kill(writer)


def test_a_reader_sees_nothing_of_a_large_append_that_is_under_way(directory: Path) -> None:
    ends = appended(directory)
    log = directory / file_name(1, LOG)
    whole = log.read_bytes()
    os.truncate(log, ends[-2][0])
    writer = opened(directory)
    reader = SegmentReader.open(directory)
    for end in range(ends[-2][0], len(whole), 8):
        os.pwrite(writer.active.descriptor, whole[ends[-2][0] : end], ends[-2][0])
        assert reader.bounds_now().next_offset == ends[-2][1]
        assert reader.read_now(ends[-2][1]) == []
        (directory / TAIL).rename(directory / "away")
        assert SegmentReader.open(directory).bounds_now().next_offset == ends[-2][1]
        (directory / "away").rename(directory / TAIL)
    kill(writer)


def test_an_append_is_never_in_two_segments(directory: Path) -> None:
    writer = opened(directory, SegmentOptions(segment_bytes=2000, frame_bytes=200))
    starts = [append(writer, large(b"%d" % number, 3 + number)).start_offset for number in range(8)]
    kill(writer)
    bases = file_numbers(directory, LOG)
    assert len(bases) > 3
    assert set(bases) <= set(starts)
    assert len(read_all(SegmentReader.open(directory))) == sum(range(3, 11))


def test_a_large_append_of_a_producer_is_found_again_when_it_is_repeated(directory: Path) -> None:
    ends = appended(directory)
    for _ in range(2):
        writer = opened(directory)
        for number in range(1, len(APPENDS)):
            again = append(writer, [b"again"], producer=Producer(id="p", sequence=number, since=1))
            assert again == (ends[number][1], ends[number + 1][1] - 1, True)
        assert writer.bounds == (1, ends[-1][1])
        kill(writer)
        opened(directory).close()  # which leaves a snapshot: the next one knows it by that


def test_appends_of_one_group_are_whole_or_gone_one_by_one(directory: Path) -> None:
    writer = opened(directory)
    columns = [stamp(columns_of([Record(payload=payload) for payload in each]), 1) for each in APPENDS]
    bodies = [encode_bodies(each, OPTIONS.codec, OPTIONS.frame_bytes) for each in columns]
    results = writer.commit([EncodedAppend(each) for each in bodies], 1)
    size = writer.active.position
    kill(writer)
    assert [result.start_offset for result in results if isinstance(result, AppendedRange)] == [1, 2, 8, 9]
    os.truncate(directory / file_name(1, LOG), size - 1)
    writer = opened(directory)
    assert read_all(SegmentReader.open(directory)) == payloads_below(9)
    kill(writer)
