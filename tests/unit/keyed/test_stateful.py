"""A keyed log against a dict of lists, through appends, seals, deletions, restarts and takeovers."""

from __future__ import annotations

from datetime import timedelta
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llog.errors import WriterFenced
from llog.keyed import (
    Config,
    CountOptions,
    KeyRange,
    LogEntry,
    ScanOptions,
    SegmentConfig,
    SeqRange,
    StorageConfig,
    SyncKeyedLog,
    SyncKeyedLogReader,
)
from llog.keyed.scanner import entries_of

KEYS = st.sampled_from([b"", b"\x00", b"\x01", b"a", b"a\x00", b"ab", b"\xff"])
RECORDS = st.lists(st.tuples(KEYS, st.binary(max_size=3)), min_size=1, max_size=8)
STORAGE = StorageConfig(
    flush_interval=timedelta(milliseconds=1), refresh_interval=timedelta(milliseconds=5), counted_keys_max=4
)
SEEN = ScanOptions(durable=False)
_numbers = count()


class Log(RuleBasedStateMachine):
    """`records` is what must be there, by sequence; `doubtful` are appends that nobody was told are durable, oldest
    first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.url = f"memory://stateful-{next(_numbers)}"
        self.records: list[LogEntry] = []
        self.doubtful: list[list[LogEntry]] = []
        self.starts = [0]
        self.first_segment = 0
        self.highest = -1
        self.fenced: list[SyncKeyedLog] = []

    @initialize(seal_records=st.sampled_from([None, 12]))
    def begin(self, seal_records: int | None) -> None:
        self.config = Config(storage=STORAGE, segmentation=SegmentConfig(seal_records=seal_records))
        self.log = SyncKeyedLog.open(self.url, self.config)

    def teardown(self) -> None:
        for log in (*self.fenced, self.log):
            try:
                log.close()
            except WriterFenced:
                pass

    @rule(records=RECORDS, await_durable=st.booleans())
    def append(self, records: list[tuple[bytes, bytes]], await_durable: bool) -> None:
        first = self.log.append(records, await_durable)
        assert first > self.highest
        self.highest = first + len(records) - 1
        entries = [LogEntry(key, first + place, value) for place, (key, value) in enumerate(records)]
        self.doubtful.append(entries)
        if await_durable:
            self.certain()
        self.starts = [segment.start_seq for segment in self.log.segments()]

    @rule()
    def flush(self) -> None:
        self.log.flush()
        self.certain()

    @rule(user_meta=st.sampled_from([None, b"meta"]))
    def seal(self, user_meta: bytes | None) -> None:
        sealed = self.log.seal_segment(user_meta)
        self.certain()
        segment = self.log.segments()[-2]
        assert (segment.segment_id, segment.user_meta) == (sealed, user_meta)
        self.starts.append(segment.end_seq)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        active = self.first_segment + len(self.starts) - 1
        before = data.draw(st.integers(0, active))
        gone = max(0, before - self.first_segment)
        assert self.log.delete_segments(before) == gone
        self.starts = self.starts[gone:]
        self.first_segment += gone
        self.certain()
        self.records = [entry for entry in self.records if entry.sequence >= self.starts[0]]

    @rule()
    def restart(self) -> None:
        self.log.close()
        self.certain()
        self.log = SyncKeyedLog.open(self.url, self.config)

    @rule()
    def take_over(self) -> None:
        self.fenced.append(self.log)
        self.log = SyncKeyedLog.open(self.url, self.config)
        found = set(self.log.scan_prefix(b""))
        while self.doubtful and found.issuperset(self.doubtful[0]):
            self.records += self.doubtful.pop(0)
        # A later append is not there without an earlier one, and none in part.
        assert not found & {entry for entries in self.doubtful for entry in entries}
        self.doubtful = []
        self.starts = [segment.start_seq for segment in self.log.segments()]

    @precondition(lambda self: self.fenced)
    @rule(records=RECORDS)
    def append_by_a_fenced_writer(self, records: list[tuple[bytes, bytes]]) -> None:
        with pytest.raises(WriterFenced):
            self.fenced[-1].append(records)

    @rule(start=st.integers(0, 60), length=st.integers(-2, 40), key=KEYS)
    def range_of_a_key(self, start: int, length: int, key: bytes) -> None:
        base = self.starts[-1] if start % 2 else 0
        wanted = SeqRange(base + start, base + start + length)
        expected = [entry for entry in self.of(key) if base + start <= entry.sequence < base + start + length]
        assert list(self.log.scan_with_options(key, wanted, SEEN)) == expected
        assert self.log.count_with_options(key, wanted, CountOptions(durable=False)) == len(expected)
        near = self.log.count_with_options(key, wanted, CountOptions(approximate=True, durable=False))
        assert abs(near - len(expected)) <= 16

    @rule(start=KEYS, end=st.one_of(st.none(), KEYS))
    def range_of_keys(self, start: bytes, end: bytes | None) -> None:
        found = [
            entry
            for batch in self.log.scan_keys_batches(KeyRange(start, end), None, SEEN)
            for entry in entries_of(batch)
        ]
        expected = [entry for entry in self.all() if entry.key >= start and (end is None or entry.key < end)]
        assert sorted(found, key=lambda entry: entry.sequence) == expected

    @rule()
    def read_elsewhere(self) -> None:
        self.log.flush()
        self.certain()
        with SyncKeyedLogReader.open(self.url, Config(storage=STORAGE)) as reader:
            found = sorted(reader.scan_prefix(b""), key=lambda entry: entry.sequence)
            assert found == self.records
            tail = reader.tail(prefix=b"", after=-1)
            assert [next(tail) for _ in self.records] == self.records
            assert [segment.start_seq for segment in reader.segments()] == self.starts

    @invariant()
    def every_key_is_as_in_the_model(self) -> None:
        if not hasattr(self, "log"):
            return
        if self.doubtful:
            everything = [
                entry for batch in self.log.scan_prefix_batches(b"", None, SEEN) for entry in entries_of(batch)
            ]
            assert sorted(everything, key=lambda entry: entry.sequence) == self.all()
            return
        keys = sorted({entry.key for entry in self.records})
        assert list(self.log.keys()) == keys
        for key in keys:
            assert list(self.log.scan(key)) == self.of(key)
            assert self.log.count(key) == len(self.of(key))

    def certain(self) -> None:
        """What was appended up to now is durable."""
        for entries in self.doubtful:
            self.records += entries
        self.doubtful = []

    def all(self) -> list[LogEntry]:
        return self.records + [entry for entries in self.doubtful for entry in entries]

    def of(self, key: bytes) -> list[LogEntry]:
        return [entry for entry in self.all() if entry.key == key]


TestLog = Log.TestCase
TestLog.settings = settings(settings.default, stateful_step_count=20, max_examples=settings().max_examples // 6)
