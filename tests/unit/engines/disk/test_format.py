"""The bytes of segment files: as documented, and refused when they are anything else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from llog.engines.disk.format.frames import (
    CONTINUES,
    KIND_BATCH,
    KIND_NONE,
    MORE,
    Frame,
    Scan,
    frame_parts,
    make_body,
    parse,
)
from llog.engines.disk.format.index import (
    Index,
    IndexRule,
    Maxima,
    TimeIndex,
    count_sound_entries,
    count_sound_time_entries,
)
from llog.engines.disk.format.tail import pack_tail, unpack_tail
from llog.errors import CorruptBatch, InvalidArgument
from llog.log.engine import Bounds
from tests.unit.engines.disk.tools import body

VECTORS: dict[str, Any] = msgspec.json.decode(Path(__file__).with_name("vectors.json").read_bytes())


def vector_bytes() -> dict[str, bytes]:
    """What this code makes of the documented examples."""
    dense = frame_parts(body([b"one", b"two"], 1000, [900, 1100]), 1, 1000, 1100)
    named = frame_parts(body([b"x"], 1001), 3, 1001, 1100, producer="pröd", sequence=7)
    sparse = frame_parts(body([b"a", b"b"], 1002), 4, 1002, 1100, offsets=np.array([1, 4], np.uint32), span=6)
    nothing = make_body([], records=0, append_ms=1003, timestamp_max=0, kind=KIND_NONE)
    empty = frame_parts(nothing, 10, 1003, 1100, offsets=np.array([], np.uint32), span=5)
    begun = frame_parts(body([b"a"], 1004), 15, 1004, 1100, producer="p", sequence=1, flags=MORE)
    ended = frame_parts(body([b"b"], 1004), 16, 1004, 1100, producer="p", sequence=1, flags=CONTINUES)
    rule = IndexRule(1, 100, None)
    found = [rule.entries(at, at // 8 + 1, Maxima(at, at - 5)) for at in (0, 96, 104, 208, 800, 1000)]
    return {
        "dense": b"".join(dense),
        "producer": b"".join(named),
        "sparse": b"".join(sparse),
        "empty": b"".join(empty),
        "two frames": b"".join([*begun, *ended]),
        "index": b"".join(entry for entry, _ in found),
        "timeindex": b"".join(entry for _, entry in found),
        "tail": pack_tail(Bounds(3, 15), 0x0123456789ABCDEF),
    }


@pytest.mark.parametrize("name", ["dense", "producer", "sparse", "empty", "two frames", "index", "timeindex", "tail"])
def test_the_bytes_are_those_of_the_vectors(name: str) -> None:
    assert vector_bytes()[name].hex() == VECTORS[name]


def test_the_vector_of_a_frame_reads_as_documented() -> None:
    data = bytes.fromhex(VECTORS["producer"])

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    assert data[:4] == b"LLF1"
    assert number(4, 4) == crc32c(data[8:80])
    assert [number(8, 8), number(16, 4), number(20, 4)] == [3, 48, 1]
    assert number(24, 4) == crc32c(data[88:128] + data[80:88])
    assert [number(28, 2), number(30, 2)] == [2, 5]
    assert [number(32, 8), number(40, 8), number(48, 8), number(56, 8)] == [1001, 1001, 1100, 7]
    assert [number(64, 4), number(68, 4)] == [1, 1]
    assert data[72:80] == "pröd".encode() + bytes(3)
    assert data[80:84] == b"LLB1"
    assert len(data) == 128


def test_a_frame_says_what_it_was_made_of() -> None:
    data = vector_bytes()["producer"]
    frame = parse(data, 0, len(data))
    assert isinstance(frame, Frame)
    assert (frame.base_offset, frame.span, frame.records) == (3, 1, 1)
    assert (frame.append_ms, frame.max_append_ms, frame.max_timestamp_ms) == (1001, 1001, 1100)
    assert (frame.producer, frame.sequence, frame.kind, frame.sparse) == ("pröd", 7, KIND_BATCH, False)
    assert frame.length == len(data)
    assert (frame.more, frame.continues) == (False, False)
    both = vector_bytes()["two frames"]
    begun = parse(both, 0, len(both))
    assert isinstance(begun, Frame)
    ended = parse(both, begun.length, len(both))
    assert isinstance(ended, Frame)
    assert (begun.more, begun.continues, ended.more, ended.continues) == (True, False, False, True)


@pytest.mark.parametrize("name", ["dense", "producer", "sparse", "empty"])
def test_a_change_of_any_byte_of_a_frame_is_noticed(tmp_path: Path, name: str) -> None:
    data = vector_bytes()[name]
    base = {"dense": 1, "producer": 3, "sparse": 4, "empty": 10}[name]
    path = tmp_path / "frames"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDWR)
    assert len(list(Scan(descriptor, 0, len(data), base, bodies=True))) == 1
    unnoticed = []
    for at in range(len(data)):
        os.pwrite(descriptor, bytes([data[at] ^ 0x40]), at)
        if list(Scan(descriptor, 0, len(data), base, bodies=True)):
            unnoticed.append(at)
        os.pwrite(descriptor, data[at : at + 1], at)
    os.close(descriptor)
    # Only zeros behind the body, which mean nothing.
    frame = parse(data, 0, len(data))
    assert isinstance(frame, Frame)
    assert all(at >= frame.body_start + frame.body_length for at in unnoticed)


@given(cut=st.integers(0, 200))
def test_a_frame_that_is_cut_short_is_none(cut: int) -> None:
    data = vector_bytes()["dense"]
    kept = data[: min(cut, len(data) - 1)]
    descriptor = os.memfd_create("frames")
    os.write(descriptor, kept)
    scan = Scan(descriptor, 0, len(kept), 1, bodies=True)
    assert not list(scan)
    assert (scan.position, scan.offset) == (0, 1)
    assert bool(kept) == (scan.problem is not None)
    os.close(descriptor)


def test_a_frame_of_another_offset_than_the_next_ends_the_log() -> None:
    first, again = vector_bytes()["dense"], vector_bytes()["dense"]
    descriptor = os.memfd_create("frames")
    os.write(descriptor, first + again)
    scan = Scan(descriptor, 0, len(first) * 2, 1, bodies=True)
    assert [located.position for located in scan] == [0]
    assert scan.problem == "a frame has base offset 1 where 3 is expected"
    os.close(descriptor)


def test_frames_that_do_not_hold_together_are_refused() -> None:
    one = body([b"a"])
    with pytest.raises(InvalidArgument, match="offsets that grow"):
        frame_parts(one, 1, 1, 1, offsets=np.array([3], np.uint32), span=3)
    with pytest.raises(InvalidArgument, match="cannot cover 2"):
        frame_parts(one, 1, 1, 1, span=2)
    with pytest.raises(InvalidArgument, match="0 offsets"):
        frame_parts(make_body([], records=0, append_ms=1, timestamp_max=1), 1, 1, 1)
    with pytest.raises(CorruptBatch, match="begins with"):
        parse(bytes(100), 0, 100)


@given(parts=st.lists(st.binary(max_size=30), max_size=5))
def test_the_checksum_of_a_body_does_not_depend_on_how_it_is_cut_into_parts(parts: list[bytes]) -> None:
    whole = make_body([b"".join(parts)], records=1, append_ms=1, timestamp_max=1)
    assert make_body(parts, records=1, append_ms=1, timestamp_max=1)[1:] == whole[1:]


@given(relative=st.lists(st.integers(1, 10_000), unique=True).map(sorted), target=st.integers(0, 10_100))
def test_a_lookup_finds_the_last_entry_at_or_below(relative: list[int], target: int) -> None:
    index = Index(b"".join(each.to_bytes(4, "big") + (each * 8).to_bytes(4, "big") for each in relative))
    number = index.floor(target)
    below = [each for each in relative if each <= target]
    assert number == len(below) - 1
    if below:
        assert index[number] == (below[-1], below[-1] * 8)


def test_only_the_sound_start_of_an_index_counts() -> None:
    data = bytes.fromhex(VECTORS["index"])
    times = bytes.fromhex(VECTORS["timeindex"])
    count, time_count = len(data) // 8, len(times) // 24
    assert (len(Index(data)), len(TimeIndex(times))) == (4, 2)
    assert count_sound_entries(data, 1 << 20) == count
    assert count_sound_time_entries(times, 1 << 20) == time_count
    assert count_sound_entries(data + bytes(16), 1 << 20) == count
    assert count_sound_entries(data + data[-8:], 1 << 20) == count
    assert count_sound_entries(data, 1000) == count - 1
    assert count_sound_entries(data[:-3], 1 << 20) == count - 1
    assert count_sound_time_entries(times + bytes(24), 1 << 20) == time_count
    assert count_sound_time_entries(times + times[-24:], 1 << 20) == time_count


def test_a_tail_that_is_torn_or_of_another_boot_is_not_relied_on() -> None:
    data = bytes.fromhex(VECTORS["tail"])
    boot = 0x0123456789ABCDEF
    assert unpack_tail(data, boot) == (3, 15)
    assert unpack_tail(data, boot + 1) is None
    assert unpack_tail(data[:31], boot) is None
    for at in range(32):
        assert unpack_tail(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], boot) is None
