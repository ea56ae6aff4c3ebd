"""Key compaction of segments, against a dictionary, with crashes at every step and readers beside it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llog.batch.columns import columns_of, records_of, stamp
from llog.engines.disk.cleaning import cleaner as cleaning
from llog.engines.disk.cleaning import newest_offsets as newest
from llog.engines.disk.cleaning import rewriter as rewriting
from llog.engines.disk.cleaning.cleaner import CleaningOptions, clean
from llog.engines.disk.cleaning.newest_offsets import ABSENT, hashes_of, merge, newest_of
from llog.engines.disk.cleaning.progress import COMPACTED, Pass, Progress, put_progress, read_progress
from llog.engines.disk.format.bodies import encode_bodies
from llog.engines.disk.format.files import LOG, PRODUCERS, SWAP, file_name, file_numbers
from llog.engines.disk.format.index import Maxima
from llog.engines.disk.format.segment import Segment
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.log.writer import AppendedRange, EncodedAppend, SegmentWriter
from llog.engines.disk.options import SegmentOptions
from llog.errors import CorruptBatch, InvalidArgument, LlogError, StoreUnavailable
from llog.log.engine import CleanResult
from llog.log.producers import Producer
from llog.model import Record, TimestampType
from llog.runtime import SystemRuntime
from tests.unit.engines.disk.tools import kill

OPTIONS = SegmentOptions(segment_bytes=1500, index_interval_bytes=200)
DAY_MS = 86_400_000

Pair = tuple[str | None, str | None]
"""Key and payload of a record; None: it has none."""


class Compacted:
    """A log that is compacted, killed and opened again, and what a dictionary says must be in it."""

    def __init__(self, directory: Path, options: SegmentOptions = OPTIONS) -> None:
        self.directory = directory
        self.options = options
        self.now_ms = 1000
        self.records: dict[int, Pair] = {}
        self.open()

    def open(self) -> None:
        self.writer = SegmentWriter(self.directory, self.options, "t/0")
        self.log = SegmentLog(self.writer, SystemRuntime())

    def crash(self) -> None:
        kill(self.writer)

    def restart(self) -> None:
        self.crash()
        self.open()

    def append(self, *pairs: Pair, producer: Producer | None = None, timestamp: int | None = None) -> AppendedRange:
        records = [
            Record(
                payload=None if value is None else value.encode(),
                key=None if key is None else key.encode(),
                timestamp=timestamp,
            )
            for key, value in pairs
        ]
        columns = stamp(columns_of(records), self.now_ms)
        bodies = encode_bodies(columns, self.options.codec, self.options.frame_bytes)
        (result,) = self.writer.commit([EncodedAppend(bodies, producer)], self.now_ms)
        if isinstance(result, LlogError):
            raise result
        if not result.repeated:
            self.records.update(enumerate(pairs, result.start_offset))
        return result

    def seal(self) -> None:
        """The newest segment gets one more record, which stays."""
        self.append(("sealed", str(self.now_ms)))
        self.writer.roll()

    def clean(
        self, *, delay_ms: int = DAY_MS, force: bool = True, map_bytes: int = 128 << 20, ratio: float = 0.5
    ) -> CleanResult:
        options = CleaningOptions(map_bytes=map_bytes, min_dirty_ratio=ratio)
        return clean(self.log, delete_retention_ms=delay_ms, now_ms=lambda: self.now_ms, options=options, force=force)

    def read(self, offset: int | None = None) -> dict[int, Pair]:
        reader = SegmentReader.open(self.directory)
        try:
            return read_pairs(reader, offset)
        finally:
            reader.close()

    def newest(self) -> dict[int, Pair]:
        """What must be left: the newest of each key that is sealed, everything without a key, and all that is not
        sealed.
        """
        return newest_in(self.records, self.writer.active.base)


def newest_in(records: dict[int, Pair], sealed_stop: int) -> dict[int, Pair]:
    last = {key: offset for offset, (key, _) in records.items() if offset < sealed_stop}
    return {
        offset: (key, value)
        for offset, (key, value) in records.items()
        if offset >= sealed_stop or key is None or last[key] == offset
    }


def read_pairs(reader: SegmentReader, offset: int | None = None, max_bytes: int = 700) -> dict[int, Pair]:
    bounds = reader.bounds_now()
    at = bounds.log_start_offset if offset is None else offset
    found: dict[int, Pair] = {}
    while at < bounds.next_offset:
        parts = reader.read_now(at, max_bytes)
        assert parts
        for start, columns in parts:
            assert start >= at
            for record in records_of(columns, start):
                key, value = record.key, record.payload
                found[record.offset or 0] = (
                    None if key is None else key.decode(),
                    None if value is None else value.decode(),
                )
            at = start + columns.count
    return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Compacted]:
    made = Compacted(tmp_path / "log")
    yield made
    made.crash()


def fill(log: Compacted, rounds: int = 20, keys: int = 5) -> None:
    """Several sealed segments in which few keys come again and again."""
    for number in range(rounds):
        log.now_ms += 10
        log.append(*((f"key-{key}", f"{number}-{key}" * 3) for key in range(keys)))
    log.seal()


def test_the_newest_record_of_each_key_stays_at_its_offset(log: Compacted) -> None:
    fill(log)
    log.append(("key-0", "not sealed"))
    bounds = log.writer.bounds
    before = len(log.log.sealed_bases())
    result = log.clean()
    assert log.read() == log.newest()
    assert len(log.read()) == 7
    assert result.removed == len(log.records) - 7
    assert result.bytes_after < result.bytes_before
    assert result.through == log.writer.active.base
    assert log.writer.bounds == SegmentReader.open(log.directory).bounds_now() == bounds
    assert before > 3
    assert result.segments == before


def test_a_read_at_a_removed_offset_goes_on_at_the_next_record(log: Compacted) -> None:
    fill(log)
    log.append(("key-0", "not sealed"))
    log.clean()
    expected = log.newest()
    for offset in range(1, log.writer.bounds.next_offset + 1):
        assert log.read(offset) == {at: pair for at, pair in expected.items() if at >= offset}


def test_records_without_a_key_stay(log: Compacted) -> None:
    log.append((None, "a"), ("k", "1"), (None, None), ("k", "2"), ("", "x"), ("", "y"))
    log.seal()
    log.clean()
    assert [pair for _, pair in sorted(log.read().items())][:4] == [(None, "a"), (None, None), ("k", "2"), ("", "y")]


def test_small_neighbours_become_one_segment(log: Compacted) -> None:
    fill(log, rounds=30)
    before = len(log.log.sealed_bases())
    log.clean()
    fill(log, rounds=5)
    log.clean()
    assert len(log.log.sealed_bases()) < before // 2
    assert log.read() == log.newest()


def test_segments_of_which_nothing_goes_are_left_alone(log: Compacted) -> None:
    for number in range(60):
        log.append((f"key-{number}", "x" * 50))
    log.seal()
    paths = [log.directory / file_name(base, LOG) for base in log.log.sealed_bases()]
    inodes = [path.stat().st_ino for path in paths]
    result = log.clean()
    assert (result.removed, result.segments) == (0, 0)
    assert result.through == log.writer.active.base
    assert [path.stat().st_ino for path in paths] == inodes


def test_a_pass_begins_only_when_enough_is_new(log: Compacted) -> None:
    fill(log, rounds=40, keys=30)
    assert log.clean(force=False).passes == 1
    clean_bytes = sum((log.directory / file_name(base, LOG)).stat().st_size for base in log.log.sealed_bases())
    fill(log, rounds=1)
    dirty_bytes = (log.directory / file_name(log.log.sealed_bases()[-1], LOG)).stat().st_size
    ratio = dirty_bytes / (clean_bytes + dirty_bytes)
    assert log.clean(force=False, ratio=ratio + 0.01).passes == 0
    assert log.clean(force=False, ratio=ratio).passes == 1
    assert log.clean(force=True).passes == 0
    assert log.read() == log.newest()


def test_what_was_compacted_before_a_restart_is_not_new(log: Compacted) -> None:
    fill(log)
    log.clean()
    log.restart()
    assert log.clean(force=False).passes == log.clean(force=True).passes == 0
    fill(log)
    assert log.clean(force=False).passes == 1
    assert log.read() == log.newest()


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 9}', b'{"passes": [[99999999, 1]]}'])
def test_without_a_sound_note_of_the_last_pass_everything_is_compacted_again(log: Compacted, content: bytes) -> None:
    fill(log)
    log.clean()
    (log.directory / COMPACTED).write_bytes(content)
    fill(log)
    assert log.clean().through == log.writer.active.base
    assert log.read() == log.newest()


def test_more_keys_than_fit_into_memory_take_several_passes(log: Compacted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "BLOCK_BYTES", 500)
    for again in range(2):
        for number in range(0, 200, 4):
            log.append(*((f"key-{each:04}", f"{again}") for each in range(number, number + 4)))
    log.seal()
    result = log.clean(map_bytes=50 * (newest.ENTRY_BYTES + 8))
    assert result.passes > 5
    assert log.read() == log.newest()


def test_deletions_stay_for_their_delay_after_the_pass_that_met_them_first(log: Compacted) -> None:
    log.append(("a", "1"), ("b", "1"))
    log.append(("a", None))
    log.seal()
    log.now_ms += 5 * DAY_MS
    log.clean()
    met_ms = log.now_ms
    assert ("a", None) in log.read().values()
    fill(log)
    log.now_ms = met_ms + DAY_MS - 1
    log.clean()
    assert ("a", None) in log.read().values()
    log.restart()
    fill(log)
    log.now_ms = met_ms + DAY_MS
    log.clean()
    assert "a" not in {key for key, _ in log.read().values()}
    assert ("b", "1") in log.read().values()


def test_deletions_go_from_a_log_that_nobody_appends_to(log: Compacted) -> None:
    log.append(("a", "1"), ("a", None))
    log.seal()
    assert log.clean(force=False).passes == 1
    log.now_ms += DAY_MS - 1
    assert log.clean(force=False).passes == 0
    log.now_ms += 1
    assert log.clean(force=False).passes == 1
    assert log.clean(force=False).passes == 0
    assert log.read() == {3: log.records[3]}


def test_the_last_sealed_record_stays_even_if_it_is_an_old_deletion(log: Compacted) -> None:
    log.append(("a", "1"), ("a", None))
    log.writer.roll()
    for _ in range(3):
        log.clean(delay_ms=0)
        log.now_ms += 1
    assert log.read() == {2: ("a", None)}
    assert log.clean(delay_ms=0, force=False).passes == 0
    log.append(("b", "1"))
    log.writer.roll()
    log.clean(delay_ms=0)
    assert log.read() == {3: ("b", "1")}


def test_a_key_that_comes_back_after_its_deletion_stays(log: Compacted) -> None:
    log.append(("a", "1"), ("a", None))
    log.seal()
    log.clean(delay_ms=0)
    log.append(("a", "2"))
    log.seal()
    log.clean(delay_ms=0)
    assert [pair for pair in log.read().values() if pair[0] == "a"] == [("a", "2")]


def test_records_below_the_log_start_go_and_the_log_start_stays(log: Compacted) -> None:
    for number in range(10):
        log.append((f"key-{number}", "x" * 20))
    log.seal()
    asyncio.run(log.log.trim(5))
    log.append(("key-7", "again"))
    log.seal()
    log.clean()
    assert log.writer.bounds.log_start_offset == 5
    assert log.read() == {offset: pair for offset, pair in log.newest().items() if offset >= 5}


def test_times_are_found_where_they_were(log: Compacted) -> None:
    for number in range(60):
        log.now_ms += 10
        log.append((f"key-{number % 3}", "x" * 40), timestamp=5000 + number)
    log.seal()
    ends = [Segment(log.directory, base) for base in log.log.sealed_bases()]
    before = ends[-1].maxima_at_end(ends[-1].size())
    log.clean()
    reader = SegmentReader.open(log.directory)
    kept = sorted(log.newest())
    for number in range(60):
        for ms, by in ((5000 + number, TimestampType.CREATE), (1010 + 10 * number, TimestampType.APPEND)):
            found = reader.offset_for_time_now(ms, by)
            # Up to there, nothing reaches this time: the next record that is left is the one to begin with.
            assert found <= min(offset for offset in kept if offset >= number + 1)
    ends = [Segment(log.directory, base) for base in log.log.sealed_bases()]
    maxima = [each.maxima_at_end(each.size()) for each in ends]
    assert maxima == sorted(maxima)
    assert maxima[-1] == before
    assert all(each.index_problem(each.size()) is None for each in ends)
    assert before == Maxima(1600, before.timestamp_ms)


@pytest.mark.parametrize("frame_bytes", [1, 1 << 20])
@pytest.mark.parametrize("snapshots", ["whole", "lost"])
def test_a_producer_may_repeat_an_append_that_was_compacted(tmp_path: Path, snapshots: str, frame_bytes: int) -> None:
    log = Compacted(tmp_path / "log", msgspec.structs.replace(OPTIONS, frame_bytes=frame_bytes))
    results = []
    for sequence in range(30):
        producer = Producer(id="p", sequence=sequence, since=1)
        pairs = [(key, f"{sequence}" * 20) for key in ("j", "k", "l")]
        results.append(log.append(*pairs, producer=producer))
    log.seal()
    if snapshots == "lost":
        for offset in file_numbers(log.directory, PRODUCERS):
            os.unlink(log.directory / file_name(offset, PRODUCERS))
    log.clean()
    if snapshots == "lost":
        log.restart()
    log.restart()
    for sequence in range(25, 30):
        again = log.append(("k", "again"), producer=Producer(id="p", sequence=sequence, since=1))
        assert again == (*results[sequence][:2], True)
    assert log.append(("k", "new"), producer=Producer(id="p", sequence=30, since=1)).repeated is False
    log.crash()


def test_frames_are_joined_up_to_the_size_that_appends_are_cut_into(tmp_path: Path) -> None:
    log = Compacted(tmp_path / "log", msgspec.structs.replace(OPTIONS, segment_bytes=20_000, frame_bytes=1000))
    for number in range(60):
        log.append((f"key-{number % 50}", f"{number}" * 60))
    log.seal()
    before = len(list(SegmentReader.open(log.directory).frames()))
    log.clean()
    frames = list(SegmentReader.open(log.directory).frames())
    assert log.read() == log.newest()
    assert len(frames) < before // 3
    assert max(frame.length for frame in frames) < 1000 + 256
    log.crash()


def test_a_producer_may_repeat_an_append_even_if_snapshots_are_lost_after_the_pass(log: Compacted) -> None:
    for sequence in range(30):
        log.append(("k", f"{sequence}" * 20), producer=Producer(id="p", sequence=sequence, since=1))
    log.seal()
    log.clean()
    log.crash()
    for offset in file_numbers(log.directory, PRODUCERS):
        os.unlink(log.directory / file_name(offset, PRODUCERS))
    log.open()
    for sequence in range(25, 30):
        assert log.append(("k", "again"), producer=Producer(id="p", sequence=sequence, since=1)).repeated


def test_a_damaged_segment_ends_compaction_and_loses_nothing(log: Compacted) -> None:
    fill(log)
    path = log.directory / file_name(log.log.sealed_bases()[2], LOG)
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBatch, match="cannot be compacted"):
        log.clean()
    assert path.read_bytes() == data
    assert not (log.directory / COMPACTED).exists()
    assert not list(log.directory.glob("*.cleaned"))


def test_compaction_that_is_told_to_stop_leaves_a_whole_log(log: Compacted) -> None:
    fill(log)
    looks = 0
    for looks_max in range(0, 200, 7):
        looks = 0

        def stopped(most: int = looks_max) -> bool:
            nonlocal looks
            looks += 1
            return looks > most

        clean(log.log, delete_retention_ms=DAY_MS, now_ms=lambda: log.now_ms, force=True, stopped=stopped)
        found = log.read()
        assert log.newest().items() <= found.items() <= log.records.items()
    assert log.read() == log.newest()


def test_only_one_thread_compacts_a_log(log: Compacted) -> None:
    fill(log)
    with cleaning._exclusively(log.directory):
        assert log.clean() == CleanResult()
    assert log.clean().removed


def test_retention_beside_it_wins(log: Compacted, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(log)
    bases = log.log.sealed_bases()
    replace = log.log.replace
    trimmed = False

    def slow(*arguments: object) -> int:
        nonlocal trimmed
        if not trimmed:
            trimmed = True
            asyncio.run(log.log.trim(bases[2]))
        return replace(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(log.log, "replace", slow)
    result = log.clean()
    assert result.through == log.writer.active.base
    assert log.read() == {offset: pair for offset, pair in log.newest().items() if offset >= bases[2]}


def test_options_that_make_no_sense_are_refused(log: Compacted) -> None:
    with pytest.raises(InvalidArgument):
        log.clean(ratio=1.5)
    with pytest.raises(InvalidArgument):
        log.clean(map_bytes=0)


class Dead(Exception):
    """Stands for the end of a process: nothing that comes after it is done."""


@contextmanager
def dies_at(step: int, patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The `step`-th call that changes something on disk raises, and so does every later one; how many there were."""
    calls = [0]

    def doomed(call: Callable[..., object]) -> Callable[..., object]:
        def instead(*arguments: object, **options: object) -> object:
            calls[0] += 1
            if calls[0] >= step:
                raise Dead
            return call(*arguments, **options)

        return instead

    with patch.context() as context:
        for name in ("rename", "replace", "fsync", "fdatasync", "unlink", "pwritev", "pwrite", "ftruncate"):
            context.setattr(os, name, doomed(getattr(os, name)))
        yield calls


def test_a_crash_between_any_two_steps_loses_nothing_and_the_next_pass_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tmp_path / "original"
    log = Compacted(original)
    log.append(("a", "1"))
    fill(log, rounds=12)
    log.append(("a", None), ("key-0", None))
    log.seal()
    log.clean()
    fill(log, rounds=6)
    log.now_ms += DAY_MS
    log.append(("key-1", "not sealed"))
    records, sealed_stop, now_ms = log.records, log.writer.active.base, log.now_ms
    log.crash()
    newest_pairs = newest_in(records, sealed_stop)
    expected = {at: pair for at, pair in newest_pairs.items() if pair != ("a", None)}
    step, died, swaps = 0, True, 0
    while died:
        step += 1
        directory = tmp_path / f"step-{step}"
        shutil.copytree(original, directory)
        log = Compacted(directory)
        log.records, log.now_ms = records, now_ms
        with dies_at(step, monkeypatch):
            try:
                log.clean()
                died = False
            except Dead:
                pass
        swaps += bool(list(directory.glob(f"*{SWAP}")))
        before = SegmentReader.open(directory)
        found = read_pairs(before)
        assert expected.items() <= found.items() <= records.items()
        assert ("a", "1") not in found.values()
        before.close()
        log.restart()
        found = log.read()
        assert expected.items() <= found.items() <= records.items()
        assert not list(directory.glob("*.cleaned"))
        assert not list(directory.glob(f"*{SWAP}"))
        log.clean()
        assert log.read() == expected
        log.crash()
        shutil.rmtree(directory)
    assert step > 20
    assert swaps >= 4


def test_an_error_of_the_disk_is_told_and_the_log_goes_on(log: Compacted, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(log)
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", _full)
        with pytest.raises(StoreUnavailable, match="free some space"):
            log.clean()
    assert log.read() == log.records
    log.append(("key-0", "more"))
    log.clean()
    assert log.read() == log.newest()


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_readers_and_the_writer_go_on_beside_it(log: Compacted) -> None:
    fill(log, rounds=20)
    errors: list[BaseException] = []
    done = threading.Event()
    reads = 0

    def read_on() -> None:
        nonlocal reads
        reader = SegmentReader.open(log.directory)
        try:
            while not (done.is_set() and reads):
                expected = newest_in(dict(log.records), log.writer.active.base)
                first = log.writer.bounds.next_offset
                found = read_pairs(reader, max_bytes=300)
                for offset, pair in expected.items():
                    if offset < first and offset in found:
                        assert found[offset] == pair
                assert {f"key-{number}" for number in range(5)} <= {key for key, _ in found.values()}
                reads += 1
        except BaseException as error:
            errors.append(error)
        finally:
            reader.close()

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in readers:
        thread.start()

    def clean_on() -> None:
        while not done.is_set():
            log.clean()

    cleaner = threading.Thread(target=clean_on)
    cleaner.start()
    for _ in range(150):
        log.now_ms += 1
        log.append(*((f"key-{key}", f"{log.now_ms}") for key in range(5)))
    done.set()
    for thread in (cleaner, *readers):
        thread.join()
    assert not errors
    assert reads
    log.seal()
    log.clean()
    assert log.read() == log.newest()


def test_a_reader_that_was_here_before_reads_on(log: Compacted) -> None:
    fill(log, rounds=40)
    log.append(("key-0", "not sealed"))
    reader = SegmentReader.open(log.directory)
    expected = {}
    for offset in range(1, log.writer.bounds.next_offset, 3):
        reader.read_now(offset, 1)
        expected[offset] = offset
    log.clean()
    kept = log.newest()
    for offset in range(1, log.writer.bounds.next_offset):
        assert read_pairs(reader, offset, 200) == {at: pair for at, pair in kept.items() if at >= offset}
    reader.close()


keys = st.sampled_from([None, "", "a", "b", "longer key 1", "longer key 2", *map(str, range(12))])
values = st.one_of(st.none(), st.text("xy", max_size=30))
steps = st.one_of(
    st.lists(st.tuples(keys, values), min_size=1, max_size=12),
    st.sampled_from(["roll", "clean", "crash", "close", "wait", "small"]),
)


@settings(max_examples=150, deadline=None)
@given(todo=st.lists(steps, max_size=40), frame_bytes=st.sampled_from([50, 1 << 20]))
def test_any_history_leaves_what_a_dictionary_holds(todo: Sequence[list[Pair] | str], frame_bytes: int) -> None:
    root = Path(tempfile.mkdtemp(prefix="llog-cleaning-"))
    options = SegmentOptions(segment_bytes=600, index_interval_bytes=150, frame_bytes=frame_bytes)
    log = Compacted(root / "log", options)
    try:
        sealed_stop = 1
        for step in todo:
            log.now_ms += 10
            if isinstance(step, list):
                log.append(*step)
            elif step == "roll":
                log.writer.roll()
            elif step == "crash":
                log.restart()
            elif step == "close":
                log.writer.close()
                log.open()
            elif step == "wait":
                log.now_ms += 1000
            else:
                result = log.clean(delay_ms=1000, map_bytes=1 if step == "small" else 128 << 20)
                sealed_stop = log.writer.active.base
                assert result.through == (sealed_stop if log.log.sealed_bases() else 0)
            _check(log, sealed_stop)
    finally:
        log.crash()
        shutil.rmtree(root)


def _check(log: Compacted, sealed_stop: int) -> None:
    """All that is newest is there, except deletions; of what is not, only deletions that wait."""
    found = log.read()
    kept = newest_in(log.records, sealed_stop)
    values = {offset: pair for offset, pair in kept.items() if pair[1] is not None or pair[0] is None}
    assert values.items() <= found.items() <= kept.items()
    assert {offset for offset in kept if offset >= sealed_stop - 1} <= found.keys()


@given(st.lists(st.binary(max_size=40)), st.binary(max_size=3))
def test_the_newest_offset_of_each_key_is_found(given_keys: list[bytes], front: bytes) -> None:
    every = pa.array([front, *given_keys], pa.binary()).slice(1)
    offsets = np.arange(100, 100 + len(every))
    half = len(every) // 2
    found = merge([newest_of(every.slice(0, half), offsets[:half]), newest_of(every.slice(half), offsets[half:])])
    expected = dict(zip(given_keys, offsets.tolist(), strict=True))
    assert len(found.hashes) == len(expected)
    asked = [*given_keys, b"?", front]
    assert found.of(pa.array(asked, pa.binary())).tolist() == [expected.get(key, ABSENT) for key in asked]


def test_keys_whose_hashes_collide_stay_apart(log: Compacted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "hashes_of", lambda found: hashes_of(found) % np.uint64(2))
    fill(log, keys=12)
    fill(log, keys=7)
    log.clean()
    assert log.read() == log.newest()


def test_hashes_of_keys_that_differ_in_one_byte_or_in_zeros_differ() -> None:
    every = [bytes(length) for length in range(40)]
    every += [bytes(16)[:place] + b"\1" + bytes(16)[place + 1 :] for place in range(16)]
    assert len(set(hashes_of(pa.array(every, pa.binary())).tolist())) == len(every)


def test_passes_close_together_are_noted_as_one() -> None:
    passes = Progress()
    for number in range(1, 2001):
        passes = passes.after(number * 10, 1, DAY_MS, number * 60_000)
        assert passes.through == number * 10
        assert len(passes.passes) <= 70
    now = 2000 * 60_000
    expired_through = passes.expired_through(DAY_MS, now)
    assert (now - DAY_MS - DAY_MS // 32) // 60_000 * 10 <= expired_through <= (now - DAY_MS) // 60_000 * 10


def test_a_note_of_another_log_is_not_taken(tmp_path: Path) -> None:
    put_progress(tmp_path, Progress(passes=(Pass(50, 1),)))
    assert read_progress(tmp_path, 49) == Progress()
    assert read_progress(tmp_path, 50).through == 50
