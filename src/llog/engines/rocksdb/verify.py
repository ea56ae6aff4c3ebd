"""Verifies a partition in RocksDB: every record can be read, and none is missing except those that key compaction
removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from llog.engines.rocksdb.envelope import decode
from llog.engines.rocksdb.keys import LOGS, offset_of, record_key
from llog.engines.rocksdb.topics import RocksTopic, RocksTopics
from llog.errors import CorruptBatch
from llog.log.findings import Findings, Problem, ProblemKind, VerifyReport
from llog.model import FIRST_OFFSET, TopicPartition

_PAGE: Final = 1000


async def verify(topics: RocksTopics, tp: TopicPartition, progress: Callable[[int], None] | None) -> VerifyReport:
    return await asyncio.to_thread(_Walk(tp, await topics.find(tp), progress).run)


class _Walk:
    """Blocks, so it needs a thread; holds one page of records in memory at a time."""

    def __init__(self, tp: TopicPartition, topic: RocksTopic, progress: Callable[[int], None] | None) -> None:
        self._tp = tp
        self._directory = topic.topic.directory
        self._logs = topic.logs
        self._progress = progress
        self._found = Findings(tp)
        self._expected = FIRST_OFFSET
        """The lowest offset not yet accounted for."""
        self._newest = (0, 0)

    def run(self) -> VerifyReport:
        partition = self._tp.partition
        self._expected, stop = self._logs.bounds(self._directory, partition, str(self._tp))
        end = record_key(self._directory, partition, stop)
        while page := self._page(end):
            self._visit_all(page)
            if self._progress is not None:
                self._progress(self._found.records)
        self._report_missing(stop)
        return self._found.report()

    def _page(self, end: bytes) -> list[tuple[bytes, bytes]]:
        """Return the next page, from the first record that RocksDB can read; report the records before it."""
        store = self._logs.store
        while (key := record_key(self._directory, self._tp.partition, self._expected)) < end:
            try:
                return store.items(LOGS, key, end, _PAGE)
            except CorruptBatch:
                pass  # some record of this page: try one at a time
            try:
                value = store.get(LOGS, key)
            except CorruptBatch as error:
                self._report(ProblemKind.CORRUPT, self._expected, self._expected, str(error))
            else:
                if value is not None:
                    return [(key, value)]
                self._report_missing(self._expected + 1)
            self._expected += 1
        return []

    def _visit_all(self, page: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            self._visit(page)
        except CorruptBatch:
            for entry in page:
                try:
                    self._visit([entry])
                except CorruptBatch as error:
                    offset = offset_of(entry[0])
                    self._report_missing(offset)
                    self._report(ProblemKind.CORRUPT, offset, offset, str(error))
                    self._expected = offset + 1

    def _visit(self, page: Sequence[tuple[bytes, bytes]]) -> None:
        batch = decode([value for _, value in page])
        offsets = batch.offsets.tolist()
        if offsets != [offset_of(key) for key, _ in page]:
            raise CorruptBatch(f"the entry of offset {offset_of(page[0][0])} says that it is offset {offsets[0]}")
        if offsets[-1] - self._expected == len(offsets) - 1:
            self._expected = offsets[-1] + 1
        for offset in offsets if self._expected <= offsets[-1] else ():
            self._report_missing(offset)
            self._expected = offset + 1
        self._check_times(offsets[0], offsets[-1], batch.append_ms.tolist(), batch.newest_ms.tolist())
        self._found.records += len(offsets)
        self._found.bytes += int(batch.lengths.sum())
        self._found.pieces += 1

    def _check_times(self, start: int, end: int, append_ms: list[int], newest_ms: list[int]) -> None:
        times = [self._newest, *zip(append_ms, newest_ms, strict=True)]
        if times != sorted(times) or newest_ms != sorted(newest_ms) or newest_ms[0] < self._newest[1]:
            detail = "append times or running maxima decrease: lookups by time go wrong"
            self._report(ProblemKind.TIME_ORDER, start, end, detail)
        self._newest = max(self._newest[0], *append_ms), max(self._newest[1], *newest_ms)

    def _report_missing(self, before: int) -> None:
        """Report the offsets missing below `before`, unless they were compacted, which the last record never is, or
        trimmed meanwhile.
        """
        if self._expected >= before:
            return
        with self._logs.store.mutex:  # a removal of records updates the state before it releases the mutex
            state = self._logs.state(self._directory, self._tp.partition, str(self._tp))
        start = max(self._expected, state.log_start_offset)
        if start < before and not (state.has_gaps and before < state.next_offset):
            self._report(ProblemKind.GAP, start, before - 1, f"{self._logs.store.directory} has no records there")

    def _report(self, kind: ProblemKind, start_offset: int, end_offset: int, detail: str) -> None:
        self._found.add(Problem(kind=kind, start_offset=start_offset, end_offset=end_offset, detail=detail))
