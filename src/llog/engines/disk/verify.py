"""Verification of a partition on disk: its frames, one by one, from its log start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from llog.engines.disk.format.files import explained
from llog.engines.disk.log.inspection import Piece
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.topics import DiskTopics
from llog.engines.verify import report_unreadable
from llog.errors import TopicElsewhere
from llog.log.findings import Findings, Problem, ProblemKind, VerifyReport
from llog.model import FIRST_OFFSET, TopicPartition

_ATTEMPTS: Final = 10


async def verify(topics: DiskTopics, tp: TopicPartition, progress: Callable[[int], None] | None) -> VerifyReport:
    try:
        place = await topics.find(tp)
    except TopicElsewhere as error:
        if not await topics.has_directory(tp.topic):
            raise
        return report_unreadable(tp, error)  # for the files of other partitions are here
    with topics.segments.reading(place.path, tp) as reader:
        return await asyncio.to_thread(_Walk(tp, reader, progress).run)


class _Walk:
    """Blocking, for a thread: one frame is in memory at a time."""

    def __init__(self, tp: TopicPartition, reader: SegmentReader, progress: Callable[[int], None] | None) -> None:
        self._tp = tp
        self._reader = reader
        self._progress = progress
        self._found = Findings(tp)
        self._expected = FIRST_OFFSET
        """The lowest offset not yet accounted for."""
        self._newest = (0, 0)

    def run(self) -> VerifyReport:
        with explained("verify", self._reader.directory):
            return self._run()

    def _run(self) -> VerifyReport:
        self._expected, stop = self._reader.bounds_now()
        for attempt in range(_ATTEMPTS if self._expected < stop else 0):
            reached = self._expected
            try:
                for piece in self._reader.pieces(self._expected):
                    if piece.start_offset >= stop:
                        break
                    self._visit(piece)
                break
            except FileNotFoundError as error:
                # Trimmed or replaced since the segments were listed: what is above the log start now is looked for
                # again.
                self._expected = max(reached, self._expected, self._reader.bounds_now().log_start_offset)
                if attempt + 1 == _ATTEMPTS:
                    self._report(ProblemKind.GAP, self._expected, stop - 1, str(error))
        return self._found.report()

    def _visit(self, piece: Piece) -> None:
        start = max(piece.start_offset, self._expected)
        if piece.problem is not None:
            # What was trimmed meanwhile is nobody's loss.
            if piece.end_offset >= self._reader.bounds_now().log_start_offset:
                where = f"{piece.path} at byte {piece.position}: {piece.problem}"
                kind = ProblemKind.CORRUPT if piece.length else ProblemKind.GAP
                self._report(kind, start, piece.end_offset, where)
        else:
            self._found.records += min(piece.records, piece.end_offset - start + 1)
            self._found.bytes += piece.length
            self._check_times(piece)
        self._found.pieces += 1
        self._expected = piece.end_offset + 1
        if self._progress is not None:
            self._progress(self._found.records)

    def _check_times(self, piece: Piece) -> None:
        times = piece.max_append_ms or 0, piece.max_timestamp_ms or 0
        if times[0] < self._newest[0] or times[1] < self._newest[1]:
            detail = (
                f"the running maxima {times} are below {self._newest} of the frame before: lookups by time go wrong"
            )
            self._report(ProblemKind.TIME_ORDER, piece.start_offset, piece.end_offset, detail)
        self._newest = max(times[0], self._newest[0]), max(times[1], self._newest[1])

    def _report(self, kind: ProblemKind, start_offset: int, end_offset: int, detail: str) -> None:
        self._found.add(Problem(kind=kind, start_offset=start_offset, end_offset=end_offset, detail=detail))
