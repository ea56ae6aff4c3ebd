"""Verifies a partition on disk, frame by frame, from its log start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from llog.engines.disk.format.files import translate_os_errors
from llog.engines.disk.log.inspection import FrameInfo
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.topics import DiskTopics
from llog.engines.verify import report_unreadable
from llog.errors import TopicElsewhere
from llog.log.findings import Findings, Problem, ProblemKind, VerifyReport
from llog.model import FIRST_OFFSET, TopicPartition

_ATTEMPTS: Final = 10


async def verify(topics: DiskTopics, tp: TopicPartition, progress: Callable[[int], None] | None) -> VerifyReport:
    try:
        partition = await topics.find(tp)
    except TopicElsewhere as error:
        if not await topics.has_directory(tp.topic):
            raise
        return report_unreadable(tp, error)  # files of other partitions are here, so this is damage
    with topics.segments.borrow_reader(partition.path, tp) as reader:
        return await asyncio.to_thread(_Walk(tp, reader, progress).run)


class _Walk:
    """Blocks, so it needs a thread; holds one frame in memory at a time."""

    def __init__(self, tp: TopicPartition, reader: SegmentReader, progress: Callable[[int], None] | None) -> None:
        self._tp = tp
        self._reader = reader
        self._progress = progress
        self._found = Findings(tp)
        self._expected = FIRST_OFFSET
        """The lowest offset not yet accounted for."""
        self._newest = (0, 0)

    def run(self) -> VerifyReport:
        with translate_os_errors("verify", self._reader.directory):
            return self._run()

    def _run(self) -> VerifyReport:
        self._expected, stop = self._reader.bounds_now()
        for attempt in range(_ATTEMPTS if self._expected < stop else 0):
            reached = self._expected
            try:
                for frame in self._reader.frames(self._expected):
                    if frame.start_offset >= stop:
                        break
                    self._visit(frame)
                break
            except FileNotFoundError as error:
                # A segment was trimmed or replaced since they were listed: continue at the present log start.
                self._expected = max(reached, self._expected, self._reader.bounds_now().log_start_offset)
                if attempt + 1 == _ATTEMPTS:
                    self._report(ProblemKind.GAP, self._expected, stop - 1, str(error))
        return self._found.report()

    def _visit(self, frame: FrameInfo) -> None:
        start = max(frame.start_offset, self._expected)
        if frame.problem is not None:
            # A frame that was trimmed meanwhile is no problem.
            if frame.end_offset >= self._reader.bounds_now().log_start_offset:
                where = f"{frame.path} at byte {frame.position}: {frame.problem}"
                kind = ProblemKind.CORRUPT if frame.length else ProblemKind.GAP
                self._report(kind, start, frame.end_offset, where)
        else:
            self._found.records += min(frame.records, frame.end_offset - start + 1)
            self._found.bytes += frame.length
            self._check_times(frame)
        self._found.pieces += 1
        self._expected = frame.end_offset + 1
        if self._progress is not None:
            self._progress(self._found.records)

    def _check_times(self, frame: FrameInfo) -> None:
        times = frame.max_append_ms or 0, frame.max_timestamp_ms or 0
        if times[0] < self._newest[0] or times[1] < self._newest[1]:
            detail = (
                f"the running maxima {times} are below {self._newest} of the frame before: lookups by time go wrong"
            )
            self._report(ProblemKind.TIME_ORDER, frame.start_offset, frame.end_offset, detail)
        self._newest = max(times[0], self._newest[0]), max(times[1], self._newest[1])

    def _report(self, kind: ProblemKind, start_offset: int, end_offset: int, detail: str) -> None:
        self._found.add(Problem(kind=kind, start_offset=start_offset, end_offset=end_offset, detail=detail))
