"""Histories written by hand: one operation a call, with times in whole seconds."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from llog.history.checker import check_history
from llog.history.lines import FORMAT, Append, Begin, Bounds, End, Outcome, Process, ProducerKey, Read, Trim
from llog.history.report import HistoryReport

SECOND = 1_000_000_000


def hashed(*values: str) -> list[str]:
    return [blake2b(value.encode(), digest_size=8).hexdigest() for value in values]


class Hand:
    """A history of one process about partition 0 of topic t."""

    def __init__(self, path: Path, *, machine: str = "here", wall_s: float = 0.0) -> None:
        self.path = path
        self._lines: list[Process | Begin | End] = [
            Process(format=FORMAT, process=path.stem, machine=machine, wall_ns=int(wall_s * SECOND), clock_ns=0)
        ]
        self._op = 0

    def append(
        self,
        start: float,
        end: float | None,
        values: Sequence[str],
        offset: int | None = None,
        *,
        outcome: Outcome | None = None,
        producer: tuple[str, int] | None = None,
        partition: int = 0,
    ) -> Hand:
        """Acknowledged if it has an offset; without an end, its process was killed."""
        self._op += 1
        key = None if producer is None else ProducerKey(id=producer[0], sequence=producer[1])
        self._lines.append(
            Append(
                op=self._op, topic="t", partition=partition, start_ns=_ns(start), hashes=hashed(*values), producer=key
            )
        )
        if end is not None:
            self._end(
                end,
                outcome or (Outcome.OK if offset is not None else Outcome.UNKNOWN),
                start_offset=offset,
                end_offset=None if offset is None else offset + len(values) - 1,
            )
        return self

    def read(
        self,
        start: float,
        end: float,
        offset: int,
        values: Sequence[str] = (),
        *,
        next_offset: int | None = None,
        log_start: int | None = None,
        error: str = "",
        at: int | None = None,
    ) -> Hand:
        """The values from `offset` on, or from `at` on."""
        self._op += 1
        self._lines.append(Read(op=self._op, topic="t", partition=0, start_ns=_ns(start), offset=offset))
        batches = [(offset if at is None else at, hashed(*values))] if values else []
        outcome = Outcome.FAILED if error else Outcome.OK
        self._end(end, outcome, batches=batches, next_offset=next_offset, log_start_offset=log_start, error=error)
        return self

    def bounds(self, start: float, end: float, log_start: int, next_offset: int) -> Hand:
        self._op += 1
        self._lines.append(Bounds(op=self._op, topic="t", partition=0, start_ns=_ns(start)))
        self._end(end, Outcome.OK, log_start_offset=log_start, next_offset=next_offset)
        return self

    def trim(self, start: float, end: float, before: int | None, log_start: int | None) -> Hand:
        self._op += 1
        self._lines.append(Trim(op=self._op, topic="t", partition=0, start_ns=_ns(start), before_offset=before))
        self._end(end, Outcome.OK if log_start else Outcome.UNKNOWN, log_start_offset=log_start)
        return self

    def write(self) -> Path:
        self.path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in self._lines))
        return self.path

    def check(self, *others: Hand, clock_skew_ms: int | None = None) -> HistoryReport:
        return check_history([each.write() for each in (self, *others)], clock_skew_ms=clock_skew_ms)

    def _end(self, end: float, outcome: Outcome, **more: object) -> None:
        self._lines.append(End(op=self._op, end_ns=_ns(end), outcome=outcome, **more))  # type: ignore[arg-type]


def broken(report: HistoryReport) -> set[str]:
    """The invariants that the findings are about."""
    return {finding.invariant for each in report.partitions for finding in each.findings}


def _ns(seconds: float) -> int:
    return int(seconds * SECOND)
