"""The segment log against a dictionary, with crashes that damage everything that was not synced."""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llog.batch.columns import Buffer, concat, slice_columns
from llog.engines.disk.format.bodies import RecordRun, decode_frame, encode_body
from llog.engines.disk.format.files import INDEX, LOG_START, TAIL, TIMEINDEX, file_name
from llog.engines.disk.format.frames import CONTINUES, KIND_NONE, MORE, Frame, Offsets, frame_parts, make_body
from llog.engines.disk.format.segment import FrameStart, Segment
from llog.engines.disk.log import retention
from llog.engines.disk.log.index_repair import rebuild_indexes
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.log.writer import SegmentWriter
from llog.engines.disk.options import SegmentOptions
from llog.errors import CorruptBatch, OffsetOutOfRange, OutOfOrderSequence
from llog.log.producers import Producer
from llog.model import TimestampType
from llog.runtime import SystemRuntime
from tests.unit.engines.disk.tools import Damage, append, body, damage, kill, payloads, read_all

OPTIONS = SegmentOptions(segment_bytes=2500, index_interval_bytes=300)


class Kept(NamedTuple):
    payload: bytes
    timestamp: int
    append_ms: int


class Machine(RuleBasedStateMachine):
    @initialize(ahead_bytes=st.sampled_from([0, 300, 4096]), frame_bytes=st.sampled_from([1, 250, 1 << 20]))
    def begin(self, ahead_bytes: int, frame_bytes: int) -> None:
        self.options = msgspec.structs.replace(OPTIONS, ahead_bytes=ahead_bytes, frame_bytes=frame_bytes)
        self.root = Path(tempfile.mkdtemp(prefix="llog-segment-"))
        self.directory = self.root / "log"
        self.writer = SegmentWriter(self.directory, self.options, "t/0")
        self.reader = SegmentReader.open(self.directory, what="t/0")
        self.records: dict[int, Kept] = {}
        self.times: list[tuple[int, int]] = []
        """(append time, timestamp) of every record ever, as running maxima."""
        self.start = self.next = 1
        self.now = 1000
        self.sequences: dict[str, list[tuple[int, int, int]]] = {}
        self.appends: list[range] = []
        """Offsets of those that took several frames, or may have."""

    def teardown(self) -> None:
        if hasattr(self, "root"):
            kill(self.writer)
            self.reader.close()
            shutil.rmtree(self.root)

    def _noted(self, payloads: list[bytes], timestamps: list[int], append_ms: int) -> None:
        for payload, timestamp in zip(payloads, timestamps, strict=True):
            self.records[self.next] = Kept(payload, timestamp, append_ms)
            before = self.times[-1] if self.times else (-(1 << 63), -(1 << 63))
            self.times.append((max(before[0], append_ms), max(before[1], timestamp)))
            self.next += 1

    @rule(
        sizes=st.lists(st.integers(0, 120), min_size=1, max_size=12),
        behind=st.integers(-50, 50),
        name=st.sampled_from(["", "a", "b"]),
    )
    def append(self, sizes: list[int], behind: int, name: str) -> None:
        self.now += 7
        payloads = [bytes([self.now % 251]) * size for size in sizes]
        timestamps = [self.now + behind + number for number in range(len(sizes))]
        producer = None
        if name:
            known = self.sequences.setdefault(name, [])
            producer = Producer(id=name, sequence=len(known), since=1)
        result = append(self.writer, payloads, self.now, timestamps=timestamps, producer=producer)
        assert (result.start_offset, result.end_offset) == (self.next, self.next + len(sizes) - 1)
        assert not result.repeated
        if producer:
            self.sequences[name].append((producer.sequence, result.start_offset, result.end_offset))
        self.appends.append(range(result.start_offset, result.end_offset + 1))
        self._noted(payloads, timestamps, self.now)

    @precondition(lambda self: any(self.sequences.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, known in self.sequences.items() if known]))
        sequence, start, end = data.draw(st.sampled_from(self.sequences[name]))
        producer = Producer(id=name, sequence=sequence, since=1)
        try:
            result = append(self.writer, [b"again"], self.now, producer=producer)
        except OutOfOrderSequence:
            assert sequence < len(self.sequences[name]) - 5
            return
        assert result == (start, end, True)

    @rule()
    def roll(self) -> None:
        self.writer.roll()

    @rule()
    def close_and_open(self) -> None:
        self.writer.close()
        self.writer = SegmentWriter(self.directory, self.options, "t/0")

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        self._trimmed(data.draw(st.integers(self.start, self.next)))

    def _trimmed(self, before: int) -> None:
        result = retention.trim(self.writer, before)
        assert (result.old_start, result.new_start) == (self.start, before)
        self._started(before)

    def _started(self, start: int) -> None:
        self.start = start
        self.records = {offset: kept for offset, kept in self.records.items() if offset >= start}

    @rule(limit=st.integers(0, 9000), by=st.sampled_from(TimestampType), age=st.integers(0, 300))
    def retain(self, limit: int, by: TimestampType, age: int) -> None:
        result = retention.retain(self.writer, retention_ms=age, retention_bytes=limit, now_ms=self.now, by=by)
        assert result.old_start == self.start
        for offset in range(self.start, result.new_start):
            place = 0 if by is TimestampType.APPEND else 1
            too_old = self.times[offset - 1][place] < self.now - age
            assert too_old or result.bytes > 0
        self._started(result.new_start)

    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        """Rewrites neighbouring sealed segments without some of their records."""
        log = SegmentLog(self.writer, SystemRuntime())
        sealed_bases = log.sealed_bases()
        if not sealed_bases:
            return
        first = data.draw(st.integers(0, len(sealed_bases) - 1))
        bases = sealed_bases[first : data.draw(st.integers(first + 1, len(sealed_bases)))]
        gone = data.draw(st.sets(st.integers(bases[0], self.next - 1), max_size=40))
        gone -= {[*sealed_bases, self.writer.active.base][sealed_bases.index(bases[-1]) + 1] - 1}
        frames: list[tuple[list[Buffer], Offsets]] = []
        for base in bases:
            segment = Segment(self.directory, base)
            scan = segment.scan(FrameStart(0, base), segment.size())
            for located in scan:
                frame = located.frame
                kept = [
                    (offset, slice_columns(columns, number, number + 1))
                    for start, columns in decode_frame(scan, located)
                    for number, offset in enumerate(range(start, start + columns.count))
                    if offset not in gone
                ]
                offsets = np.array([offset - frame.base_offset for offset, _ in kept], np.uint32)
                made = _rewritten(frame, kept, offsets)
                frames.append((made, offsets))
        log.replace(bases, frames)
        end = [*log.sealed_bases(), self.writer.active.base]
        stop = end[end.index(bases[0]) + 1]
        for offset in gone:
            if bases[0] <= offset < stop:
                self.records.pop(offset, None)

    @rule(data=st.data())
    def lose_a_sealed_index(self, data: st.DataObject) -> None:
        sealed_bases = SegmentLog(self.writer, SystemRuntime()).sealed_bases()
        if sealed_bases:
            suffix = data.draw(st.sampled_from([INDEX, TIMEINDEX]))
            (self.directory / file_name(data.draw(st.sampled_from(sealed_bases)), suffix)).unlink(missing_ok=True)
            if data.draw(st.booleans()):
                assert rebuild_indexes(self.writer) >= 0

    @rule(
        appends=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=3), max_size=3),
        kind=st.sampled_from(Damage),
        at=st.integers(0, 100).map(lambda percent: percent / 100),
        index_kind=st.sampled_from(Damage),
        index_at=st.integers(0, 100).map(lambda percent: percent / 100),
        tail_kind=st.sampled_from(Damage),
        look=st.booleans(),
    )
    def crash(
        self,
        appends: list[list[int]],
        kind: Damage,
        at: float,
        index_kind: Damage,
        index_at: float,
        tail_kind: Damage,
        look: bool,
    ) -> None:
        """Appends that were not acknowledged are on their way, a frame for each record, and the machine stops."""
        active = self.writer.active
        synced = active.position
        under_way: list[bytes] = []
        payloads = [[bytes([self.now % 251]) * size for size in sizes] for sizes in appends]
        offset = self.next
        for each in payloads:
            frames = b""
            for left, payload in zip(range(len(each) - 1, -1, -1), each, strict=True):
                flags = (CONTINUES if frames else 0) | (MORE if left else 0)
                times = max(self.now, self._append_ms()), self._timestamp()
                frames += b"".join(frame_parts(body([payload], self.now), offset, *times, flags=flags))
                offset += 1
            under_way.append(frames)
        written = b"".join(under_way)
        os.pwrite(active.descriptor, written, synced)
        kill(self.writer)
        length = int(at * synced) if kind is Damage.TWICE else len(written) // 3
        damage(active.path, kind, synced + int(at * len(written)), max(length, 1))
        for suffix in (INDEX, TIMEINDEX):
            path = self.directory / file_name(active.base, suffix)
            damage(path, index_kind, int(index_at * path.stat().st_size))
        damage(self.directory / TAIL, tail_kind, int(index_at * 32))
        if look and tail_kind is not Damage.NONE and tail_kind is not Damage.TWICE:
            SegmentReader.open(self.directory).bounds_now()
        self.writer = SegmentWriter(self.directory, self.options, "t/0")
        # A whole append that nobody was told of may be there, or not; never a part of one.
        following = list(accumulate(map(len, payloads), initial=self.next))
        survived = following.index(self.writer.state.next_offset)
        ends = accumulate(map(len, under_way), initial=0)
        if kind in (Damage.NONE, Damage.TWICE):
            assert survived == len(under_way)
        elif kind is Damage.CUT:
            assert survived == max(n for n, end in enumerate(ends) if end <= int(at * len(written)))
        for each in payloads[:survived]:
            self.appends.append(range(self.next, self.next + len(each)))
            self._noted(each, [self.now] * len(each), self.now)

    @rule(data=st.data(), kind=st.sampled_from([Damage.CUT, Damage.ZEROS, Damage.TWICE]))
    def harm_any_suffix_of_any_file(self, data: st.DataObject, kind: Damage) -> None:
        """Also what was durable, which no crash does, so in a copy: nothing is lost but what was harmed, and nothing
        else turns up.
        """
        copy = self.root / "copy"
        shutil.copytree(self.directory, copy)
        path = data.draw(st.sampled_from(sorted(copy.iterdir())))
        start = data.draw(st.integers(0, path.stat().st_size))
        harmed = {
            offset
            for frame in self.reader.frames()
            if Path(frame.path).name == path.name and frame.position + frame.length > start
            for offset in range(frame.start_offset, frame.end_offset + 1)
        }
        # Recovery takes an append as a whole.
        harmed |= {offset for each in self.appends if not harmed.isdisjoint(each) for offset in each}
        if kind is Damage.TWICE:
            harmed = set()
        damage(path, kind, start)
        self._check_what_is_left(copy, harmed)
        try:
            writer = SegmentWriter(copy, self.options, "t/0")
        except CorruptBatch:
            assert harmed or path.name == LOG_START
        else:
            self._check_what_is_left(copy, harmed)
            assert harmed or append(writer, [b"next"], self.now).start_offset == self.next
            kill(writer)
        shutil.rmtree(copy)

    def _check_what_is_left(self, directory: Path, harmed: set[int]) -> None:
        reader = SegmentReader.open(directory, what="t/0")
        for offset, kept in self.records.items():
            try:
                found = reader.read_now(offset, 1)
            except (CorruptBatch, OffsetOutOfRange):
                found = []
            if offset not in harmed or found:
                assert payloads(*found[0])[offset] == kept.payload

    def _append_ms(self) -> int:
        return self.times[-1][0] if self.times else self.now

    def _timestamp(self) -> int:
        return max(self.times[-1][1] if self.times else self.now, self.now)

    @rule(data=st.data())
    def find_a_time(self, data: st.DataObject) -> None:
        by = data.draw(st.sampled_from(TimestampType))
        ms = data.draw(st.integers(900, self.now + 60))
        place = 0 if by is TimestampType.APPEND else 1
        found = self.reader.offset_for_time_now(ms, by)
        expected = next((n for n, times in enumerate(self.times, 1) if times[place] >= ms), self.next)
        # Where records were trimmed or removed, nobody knows their times: but no record that is there and has this time
        # is passed over.
        own = [n for n, kept in self.records.items() if (kept.append_ms if place == 0 else kept.timestamp) >= ms]
        assert self.start <= found <= min([*own, self.next])
        if len(self.records) == self.next - 1:
            assert found == expected

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "writer"):
            return
        assert self.reader.bounds_now() == self.writer.bounds == (self.start, self.next)
        assert read_all(self.reader, max_bytes=1500) == {offset: kept.payload for offset, kept in self.records.items()}

    @rule(data=st.data(), max_bytes=st.integers(1, 3000))
    def read_from_anywhere(self, data: st.DataObject, max_bytes: int) -> None:
        offset = data.draw(st.integers(self.start, self.next))
        found = read_all(SegmentReader.open(self.directory), offset, max_bytes)
        assert found == {each: kept.payload for each, kept in self.records.items() if each >= offset}

    @invariant()
    def inspection_finds_every_offset_and_no_damage(self) -> None:
        if not hasattr(self, "writer"):
            return
        at = self.start
        for frame in self.reader.frames():
            assert frame.problem is None
            assert frame.start_offset <= at <= frame.end_offset
            at = frame.end_offset + 1
        assert at == self.next


def _rewritten(frame: Frame, kept: list[RecordRun], offsets: Offsets) -> list[Buffer]:
    """A frame with these of its records."""
    if kept:
        made = encode_body(concat([columns for _, columns in kept]))
    else:
        made = make_body([], records=0, append_ms=frame.append_ms, timestamp_max=0, kind=KIND_NONE)
    return frame_parts(
        made, frame.base_offset, frame.max_append_ms, frame.max_timestamp_ms, offsets=offsets, span=frame.span
    )


TestSegments = Machine.TestCase
TestSegments.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
