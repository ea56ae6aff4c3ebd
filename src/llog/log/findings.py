"""What a verification finds: the report on one partition, whatever its engine."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from llog.model import TopicPartition

PROBLEMS_MAX: Final = 1000


class ProblemKind(StrEnum):
    GAP = "gap"
    OVERLAP = "overlap"
    MISSING_BLOB = "missing_blob"
    CORRUPT = "corrupt"
    COUNT_MISMATCH = "count_mismatch"
    TIME_ORDER = "time_order"
    INLINE_TOTAL = "inline_total"
    CONTROL = "control"
    CURSOR = "cursor"
    BREADCRUMB = "breadcrumb"
    HEADER = "header"
    """The blob's header is damaged or contradicts the index: the records can be read, but no repair would find them."""
    UNREADABLE = "unreadable"
    """The partition's files or records cannot be read at all."""
    STALE_ENTRY = "stale_entry"
    """An entry that a stalled writer or a killed compactor left inside a compacted range. It is harmless; the next
    compactor or the collector deletes it.
    """


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Damage to a range of offsets; both offsets are 0 if it concerns the whole partition."""

    kind: ProblemKind
    start_offset: int
    end_offset: int
    detail: str

    @property
    def harmless(self) -> bool:
        return self.kind is ProblemKind.STALE_ENTRY


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one verification. `records`, `bytes` and `pieces` count what was read and found undamaged."""

    topic: str
    partition: int
    records: int
    bytes: int
    pieces: int
    problems: list[Problem]
    problems_left_out: int = 0
    """The number of problems beyond the first `PROBLEMS_MAX`."""
    unchecked: str | None = None
    """Why nothing was read: another process owns the partition, or its files are elsewhere."""

    @property
    def healthy(self) -> bool:
        return not self.problems_left_out and all(problem.harmless for problem in self.problems)


class Findings:
    """The counts and problems of one partition, collected while it is verified."""

    def __init__(self, tp: TopicPartition) -> None:
        self._tp = tp
        self.records = self.bytes = self.pieces = 0
        self.problems: list[Problem] = []
        self._left_out = 0

    def add(self, problem: Problem) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)
        else:
            self._left_out += 1

    def report(self) -> VerifyReport:
        return VerifyReport(
            topic=self._tp.topic,
            partition=self._tp.partition,
            records=self.records,
            bytes=self.bytes,
            pieces=self.pieces,
            problems=self.problems,
            problems_left_out=self._left_out,
        )
