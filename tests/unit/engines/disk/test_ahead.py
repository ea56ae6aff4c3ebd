"""Zeros ahead of small appends that are synced: nobody sees them, and they are gone when a segment is sealed."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path

import pytest

from llog.batch.columns import Buffer
from llog.engines.disk.format.files import LOG, file_name, file_numbers, write_at
from llog.engines.disk.format.frames import PRODUCER, frame_parts
from llog.engines.disk.format.segment import FrameStart, Segment
from llog.engines.disk.log import active_segment as active
from llog.engines.disk.log import inspection as inspecting
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.log.writer import EncodedAppend, SegmentWriter
from llog.engines.disk.options import Fsync, SegmentOptions
from llog.errors import StoreUnavailable
from tests.unit.engines.disk.tools import append, body, kill, read_all

SMALL = b"a" * 100
BLOCK = 4 << 10


def opened(directory: Path, options: SegmentOptions | None = None) -> SegmentWriter:
    return SegmentWriter(directory, options or SegmentOptions(), "t/0")


def zeros_behind(writer: SegmentWriter) -> int:
    """How many bytes follow the last frame, which are all zero."""
    data = writer.active.path.read_bytes()[writer.active.position :]
    assert not any(data)
    return len(data)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_small_appends_replace_zeros_and_a_close_leaves_none(directory: Path) -> None:
    writer = opened(directory)
    lengths = set()
    for number in range(1, 200):
        assert append(writer, [SMALL]).start_offset == number
        lengths.add(os.stat(writer.active.path).st_size)
        assert zeros_behind(writer) <= writer.active.position + 4096, "a small log stays small"
    assert zeros_behind(writer) > 0
    assert len(lengths) < 15, "the file gets longer once for many appends"
    assert len(read_all(SegmentReader.open(directory))) == 199
    writer.close()
    assert zeros_behind(writer) == 0


def test_a_sealed_segment_has_no_zeros(directory: Path) -> None:
    writer = opened(directory, SegmentOptions(segment_bytes=3000))
    for _ in range(100):
        append(writer, [SMALL])
    bases = file_numbers(directory, LOG)
    assert len(bases) > 3
    reader = SegmentReader.open(directory)
    ends = {frame.path: frame.position + frame.length for frame in reader.frames()}
    for base in bases[:-1]:
        path = directory / file_name(base, LOG)
        assert path.stat().st_size == ends[str(path)]
    kill(writer)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (SegmentOptions(ahead_bytes=0), 100),
        (SegmentOptions(fsync=Fsync.OS), 100),
        (SegmentOptions(fsync=Fsync.INTERVAL), 100),
        (SegmentOptions(), 200_000),
    ],
    ids=["off", "os", "interval", "large"],
)
def test_who_gains_nothing_by_zeros_gets_none(directory: Path, options: SegmentOptions, size: int) -> None:
    writer = opened(directory, options)
    for _ in range(20):
        append(writer, [b"a" * size])
        assert zeros_behind(writer) == 0
    writer.close()


def test_a_killed_writer_leaves_zeros_that_the_next_one_takes_away(directory: Path) -> None:
    writer = opened(directory)
    for _ in range(50):
        append(writer, [SMALL])
    position = writer.active.position
    kill(writer)
    (directory / "tail").unlink()
    assert SegmentReader.open(directory).bounds_now() == (1, 51), "a reader that finds the end itself"
    assert os.stat(writer.active.path).st_size > position
    writer = opened(directory)
    assert os.stat(writer.active.path).st_size == position
    assert append(writer, [b"next"]).start_offset == 51
    writer.close()


def test_a_frame_that_reached_the_disk_before_the_one_ahead_of_it_never_comes_back(directory: Path) -> None:
    """Of one group, the power cut has taken the first frame and left the second: it must not follow what is appended
    later.
    """
    writer = opened(directory)
    for _ in range(50):
        append(writer, [SMALL])
    at, first = writer.active.position, b"".join(frame_parts(body([b"lost"]), 51, 1, 1))
    second = b"".join(frame_parts(body([b"left"]), 52, 1, 1))
    os.pwrite(writer.active.descriptor, second, at + len(first))
    kill(writer)
    writer = opened(directory)
    assert writer.bounds.next_offset == 51
    assert append(writer, [b"new!"]).start_offset == 51
    kill(writer)
    writer = opened(directory)
    assert writer.bounds.next_offset == 52
    assert read_all(SegmentReader.open(directory), 51) == {51: b"new!"}
    writer.close()


@pytest.mark.parametrize("ahead_bytes", [0, 64 << 10])
def test_whichever_blocks_of_a_group_a_power_cut_leaves_its_first_frames_are_there_or_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch, ahead_bytes: int
) -> None:
    writer = opened(directory, SegmentOptions(ahead_bytes=ahead_bytes))
    acknowledged = [bytes([number]) * 1000 for number in range(20)]
    for payload in acknowledged:
        append(writer, [payload])
    path = writer.active.path
    synced, under_way = path.read_bytes(), [letter * 3000 for letter in (b"a", b"b", b"c")]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _stopped)
        with pytest.raises(KeyboardInterrupt):
            writer.commit([EncodedAppend([body([payload])]) for payload in under_way], 1)
    written = path.read_bytes()
    kill(writer)
    synced = synced.ljust(len(written), b"\0")
    starts = [at for at in range(0, len(written), BLOCK) if synced[at : at + BLOCK] != written[at : at + BLOCK]]
    assert len(starts) in (3, 4)
    for left in chain.from_iterable(combinations(starts, count) for count in range(len(starts) + 1)):
        image = bytearray(synced)
        for at in left:
            image[at : at + BLOCK] = written[at : at + BLOCK]
        path.write_bytes(image)
        writer = opened(directory, SegmentOptions(ahead_bytes=0))  # new zeros would hide what is left behind a hole
        survived = writer.bounds.next_offset - 1 - len(acknowledged)
        assert survived == 3 if len(left) == len(starts) else survived < 3
        append(writer, [b"d" * 3000])
        kill(writer)
        kill(opened(directory))
        expected = [*acknowledged, *under_way[:survived], b"d" * 3000]
        assert list(read_all(SegmentReader.open(directory)).values()) == expected


def _stopped(_: int) -> None:
    raise KeyboardInterrupt


def test_a_disk_without_room_for_zeros_takes_the_append(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, parts: Sequence[Buffer], position: int, size: int) -> None:
        if not any(map(any, parts)):
            os.pwrite(descriptor, bytes(size // 2), position)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(descriptor, parts, position, size)

    writer = opened(directory)
    with monkeypatch.context() as patch:
        patch.setattr(active, "write_at", full)
        for number in range(1, 50):
            assert append(writer, [SMALL]).start_offset == number
            assert zeros_behind(writer) == 0, "what was written of them is given back"
    while not zeros_behind(writer):
        append(writer, [SMALL])
    writer.close()


def test_readers_go_on_when_the_zeros_that_they_had_mapped_are_cut_off(directory: Path) -> None:
    writer = opened(directory, SegmentOptions(segment_bytes=2 << 20))
    large = b"b" * 4000
    for _ in range(300):
        append(writer, [large])
    assert zeros_behind(writer) > 100_000
    reader = SegmentReader.open(directory)
    assert len(read_all(reader, max_bytes=8 << 20)) == 300
    while len(file_numbers(directory, LOG)) < 3:
        append(writer, [large])
    assert len(read_all(reader, max_bytes=8 << 20)) == writer.bounds.next_offset - 1
    kill(writer)


def test_a_damaged_header_leads_nobody_into_zeros_that_were_mapped_before_they_were_cut_off(directory: Path) -> None:
    writer = opened(directory)
    for _ in range(50):
        append(writer, [SMALL])
    segment, start, end = Segment(directory, 1), FrameStart(0, 1), writer.active.position
    *_, last = segment.scan(start, segment.size(), mapped=True)
    os.pwrite(writer.active.descriptor, struct.pack("<HH", PRODUCER, zeros_behind(writer)), last.position + 28)
    scan = segment.scan(start, end, mapped=True)
    assert len(list(scan)) == 49
    assert scan.problem is not None
    assert scan.problem.endswith(f"the file ends at {end}")
    kill(writer)


def test_inspection_tells_the_bytes_of_frames(directory: Path) -> None:
    writer = opened(directory)
    for _ in range(50):
        append(writer, [SMALL])
    assert zeros_behind(writer) > 0
    (info,) = SegmentReader.open(directory).describe()
    assert info.bytes == writer.active.position
    writer.close()


def test_a_segment_that_goes_while_it_is_looked_at_has_no_bytes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(directory)
    append(writer, [SMALL])
    monkeypatch.setattr(inspecting, "file_numbers", lambda *_: [1, 2])
    assert [info.bytes for info in SegmentReader.open(directory).describe()] == [writer.active.position, 0]
    writer.close()


def test_a_removed_file_is_noticed_where_the_system_tells_no_names_of_open_files(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: str) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    writer = opened(directory)
    monkeypatch.setattr(os, "readlink", missing)
    append(writer, [SMALL])
    writer.active.path.unlink()
    with pytest.raises(StoreUnavailable, match="removed"):
        append(writer, [SMALL])
    kill(writer)
