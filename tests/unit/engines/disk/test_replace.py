"""Sealed segments replaced by a rewritten one: whole, and whatever interrupts it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from llog.batch.columns import Buffer, concat, slice_columns
from llog.engines.disk.format.bodies import decode_frame, encode_body
from llog.engines.disk.format.frames import Offsets, frame_parts
from llog.engines.disk.format.segment import FrameStart, Segment
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.log.retention import trim
from llog.engines.disk.log.writer import SegmentWriter
from llog.engines.disk.options import SegmentOptions
from llog.errors import InvalidArgument, StoreUnavailable
from llog.runtime import SystemRuntime
from tests.unit.engines.disk.tools import Faults, append, kill, read_all

OPTIONS = SegmentOptions(segment_bytes=2000, index_interval_bytes=300)


def opened(directory: Path) -> SegmentWriter:
    return SegmentWriter(directory, OPTIONS, "t/0")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "log"


def sealed_log(directory: Path) -> SegmentWriter:
    writer = opened(directory)
    for number in range(20):
        append(writer, [b"%d.%d" % (number, each) + bytes(60) for each in range(5)], 100 + number)
    assert len(SegmentLog(writer, SystemRuntime()).sealed_bases()) >= 3
    return writer


def without_odd(directory: Path, bases: list[int], last: int) -> Iterator[tuple[Sequence[Buffer], Offsets]]:
    """The frames of these segments without records of odd offsets, except the last."""
    for base in bases:
        segment = Segment(directory, base)
        scan = segment.scan(FrameStart(0, base), segment.size())
        for located in scan:
            frame = located.frame
            ((start, columns),) = decode_frame(scan, located)
            kept = [n for n in range(columns.count) if (start + n) % 2 == 0 or start + n == last]
            parts = [slice_columns(columns, n, n + 1) for n in kept]
            offsets = np.array(kept, np.uint32)
            made = frame_parts(
                encode_body(concat(parts)),
                start,
                frame.max_append_ms,
                frame.max_timestamp_ms,
                offsets=offsets,
                span=frame.span,
            )
            yield made, offsets


def test_segments_are_replaced_by_a_rewritten_one_that_is_read_without_its_gaps(directory: Path) -> None:
    writer = sealed_log(directory)
    before = read_all(SegmentReader.open(directory))
    log = SegmentLog(writer, SystemRuntime())
    bases = log.sealed_bases()
    reader = SegmentReader.open(directory)
    for offset in range(1, 101):
        assert reader.read_now(offset, 1)[0][0] == offset
    last = writer.active.base - 1
    assert log.replace(bases, without_odd(directory, bases, last)) > 0
    expected = {n: each for n, each in before.items() if n % 2 == 0 or n >= last}
    assert log.sealed_bases() == [1]
    assert read_all(reader) == expected
    assert reader.read_now(7)[0][0] == 8
    for offset in range(1, 101):
        assert reader.read_now(offset, 1)[0][0] in (offset, offset + 1)
    assert reader.bounds_now() == (1, 101)
    assert all(frame.problem is None for frame in reader.frames())
    kill(writer)
    writer = opened(directory)
    assert read_all(reader) == expected
    writer.close()


def test_a_replacement_must_cover_all_offsets_and_keep_the_last_record(directory: Path) -> None:
    writer = sealed_log(directory)
    log = SegmentLog(writer, SystemRuntime())
    bases = log.sealed_bases()
    before = read_all(SegmentReader.open(directory))
    with pytest.raises(InvalidArgument, match="cover all offsets"):
        log.replace(bases, list(without_odd(directory, bases, 0))[:-1])
    odd = writer.active.base - 1
    if odd % 2:
        with pytest.raises(InvalidArgument, match="keep its record"):
            log.replace(bases, without_odd(directory, bases, 0))
    with pytest.raises(InvalidArgument, match="not neighbouring"):
        log.replace([bases[0], bases[2]], [])
    with pytest.raises(InvalidArgument, match="not neighbouring"):
        log.replace([writer.active.base], [])
    assert read_all(SegmentReader.open(directory)) == before
    assert not [name for name in os.listdir(directory) if "cleaned" in name]
    writer.close()


@pytest.mark.parametrize("forever", [True, False])
def test_a_replacement_that_is_interrupted_anywhere_has_happened_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forever: bool
) -> None:
    writer = sealed_log(tmp_path / "whole")
    bases = SegmentLog(writer, SystemRuntime()).sealed_bases()
    last = writer.active.base - 1
    kill(writer)
    before = read_all(SegmentReader.open(tmp_path / "whole"))
    after = {n: each for n, each in before.items() if n % 2 == 0 or n >= last}
    outcomes = []
    for step in range(200):
        directory = tmp_path / f"stopped-{step}"
        shutil.copytree(tmp_path / "whole", directory)
        writer = opened(directory)
        with monkeypatch.context() as patch:
            faults = Faults(patch, step, forever=forever)
            try:
                SegmentLog(writer, SystemRuntime()).replace(bases, without_odd(directory, bases, last))
            except (OSError, StoreUnavailable):
                assert faults.met
        during = read_all(SegmentReader.open(directory))
        assert during in (before, after) or before.items() >= during.items() >= after.items()
        kill(writer)
        writer = opened(directory)
        found = read_all(SegmentReader.open(directory))
        assert found in (before, after)
        outcomes.append(found == after)
        assert not [name for name in os.listdir(directory) if "cleaned" in name or "swap" in name]
        kill(writer)
        if not faults.met:
            break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_a_log_that_goes_on_after_a_failed_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are trimmed, or a rewrite of them is begun, while a committed replacement is not carried out."""
    writer = sealed_log(tmp_path / "whole")
    bases = SegmentLog(writer, SystemRuntime()).sealed_bases()
    last = writer.active.base - 1
    kill(writer)
    before = read_all(SegmentReader.open(tmp_path / "whole"))
    start = bases[1] + 1
    for step in range(200):
        directory = tmp_path / f"stopped-{step}"
        shutil.copytree(tmp_path / "whole", directory)
        writer = opened(directory)
        log = SegmentLog(writer, SystemRuntime())
        with monkeypatch.context() as patch:
            faults = Faults(patch, step)
            try:
                log.replace(bases, without_odd(directory, bases, last))
            except (OSError, StoreUnavailable):
                assert faults.met
        if step % 2:
            trim(writer, start)
        else:
            with pytest.raises(InvalidArgument):
                log.replace(log.sealed_bases(), [])
            # A rewrite that is killed leaves cleaned files, which nothing may call committed.
            assert not [name for name in os.listdir(directory) if "swap" in name]
        kill(writer)
        writer = opened(directory)
        found = read_all(SegmentReader.open(directory))
        wanted = {n: each for n, each in before.items() if n >= start and (n % 2 == 0 or n >= last)}
        assert wanted.items() <= found.items() <= before.items()
        kill(writer)
        if not faults.met:
            break
