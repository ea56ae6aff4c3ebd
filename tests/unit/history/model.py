"""Histories that a log which keeps its promises can have: drawn at random, in time and in what the clients do.

Every operation takes effect at one moment between its start and its end; one of unknown outcome at any moment after its
start, or never. The model is a list of records, and each answer is what the list says at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from llog.history.lines import FORMAT, Append, Begin, Bounds, End, Outcome, Process, ProducerKey, Read, Trim
from tests.unit.history.histories import hashed

_SPAN_MS = 2_000
_MS = 1_000_000


class Done(NamedTuple):
    """One operation: the process that recorded it, its lines, and the moment at which it took effect.

    Times are ms until they are written.
    """

    process: int
    begin: Begin
    end: End | None
    at: int


class Drawn(NamedTuple):
    operations: list[Done]
    skew_ms: int
    """The clocks of the processes differ by at most this."""

    def write(self, directory: Path) -> list[Path]:
        """One file for each process, each on a machine of its own if clocks differ."""
        files = []
        for number in sorted({each.process for each in self.operations}):
            machine = f"machine-{number}" if self.skew_ms else "machine"
            lines: list[Process | Begin | End] = [
                Process(format=FORMAT, process=f"p{number}", machine=machine, wall_ns=10**18, clock_ns=0)
            ]
            mine = [each for each in self.operations if each.process == number]
            lines += [msgspec.structs.replace(each.begin, start_ns=each.begin.start_ns * _MS) for each in mine]
            lines += [msgspec.structs.replace(each.end, end_ns=each.end.end_ns * _MS) for each in mine if each.end]
            files.append(directory / f"{number}.jsonl")
            files[-1].write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        return files


def draw(chance: Random) -> Drawn:
    """A history of a few processes and some dozens of operations on partition 0 of topic t."""
    processes = chance.randint(1, 4)
    skew_ms = chance.choice([0, 0, chance.randint(2, 300)])
    clocks = [chance.randint(0, skew_ms) for _ in range(processes)]
    wanted = list(_wanted(chance, chance.randint(1, 40), processes))
    wanted.sort(key=lambda each: each.at)
    log = _Model(chance)
    return Drawn([_shifted(log.answer(each), clocks[each.process], skew_ms) for each in wanted], skew_ms)


def _wanted(chance: Random, count: int, processes: int) -> Iterator[Done]:
    """Operations without their answers: how those of unknown outcome end is decided here, all else when they take
    effect.
    """
    sequences: dict[int, int] = {}
    op = 0
    while op < count:
        op += 1
        process = chance.randrange(processes)
        start = chance.randint(0, _SPAN_MS)
        kind = chance.choice(["append", "append", "retried", "read", "read", "bounds", "trim"])
        if kind in ("append", "retried"):
            values = [f"{op} {number}" for number in range(chance.choice([1, 1, 2, 3]))]
            producer = None
            if kind == "retried":
                number = chance.randrange(2)
                sequences[number] = sequences.get(number, -1) + 1
                # One producer's appends follow one another: each begins when the one before is surely over.
                start = sequences[number] * 400
                producer = ProducerKey(id=f"producer-{number}", sequence=sequences[number])
            for attempt in range(1 if producer is None else chance.randint(1, 3)):
                begin = start + attempt * chance.randint(0, 60)
                yield _timed(
                    chance,
                    process,
                    Append(op=op, topic="t", partition=0, start_ns=begin, hashes=hashed(*values), producer=producer),
                    late_max=0 if producer is None else 390 - attempt * 60,
                )
                op += 1
        elif kind == "read":
            yield _timed(chance, process, Read(op=op, topic="t", partition=0, start_ns=start, offset=1))
        elif kind == "bounds":
            yield _timed(chance, process, Bounds(op=op, topic="t", partition=0, start_ns=start))
        elif chance.random() < 0.2:
            yield _timed(chance, process, Trim(op=op, topic="t", partition=0, start_ns=start, before_offset=1))


def _timed(chance: Random, process: int, begin: Begin, late_max: int = 0) -> Done:
    """With a moment, and an end behind it; an append of unknown outcome may take effect long after its end, up to
    `late_max` if given.
    """
    took = chance.randint(0, 60)
    at = begin.start_ns + chance.randint(0, took)
    if isinstance(begin, Append) and chance.random() < 0.25:
        at = begin.start_ns + chance.randint(0, late_max or _SPAN_MS)
        unknown = End(op=begin.op, end_ns=begin.start_ns + took, outcome=Outcome.UNKNOWN)
        return Done(process, begin, chance.choice([None, unknown]), at)
    return Done(process, begin, End(op=begin.op, end_ns=begin.start_ns + took, outcome=Outcome.OK), at)


class _Model:
    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._records: list[str] = []
        self._log_start = 1
        self._appended: dict[tuple[str, int], int] = {}

    def answer(self, wanted: Done) -> Done:
        begin, end = wanted.begin, wanted.end
        if isinstance(begin, Append):
            return wanted._replace(end=self._append(begin, end))
        assert end is not None
        if isinstance(begin, Trim):
            before = self._chance.randint(1, len(self._records) + 1)
            self._log_start = max(self._log_start, before)
            begin = msgspec.structs.replace(begin, before_offset=before)
            return wanted._replace(begin=begin, end=msgspec.structs.replace(end, log_start_offset=self._log_start))
        if self._chance.random() < 0.1:
            failed = msgspec.structs.replace(end, outcome=Outcome.FAILED, error="store_unavailable")
            return wanted._replace(end=failed)
        next_offset = len(self._records) + 1
        if isinstance(begin, Bounds):
            return wanted._replace(
                end=msgspec.structs.replace(end, log_start_offset=self._log_start, next_offset=next_offset)
            )
        begin = msgspec.structs.replace(begin, offset=self._chance.randint(1, next_offset))
        return wanted._replace(begin=begin, end=self._read(begin.offset, end, next_offset))

    def _append(self, begin: Append, end: End | None) -> End | None:
        key = None if begin.producer is None else (begin.producer.id, begin.producer.sequence)
        is_unknown = end is None or end.outcome is Outcome.UNKNOWN
        if self._chance.random() < (0.4 if is_unknown else 0.1):  # it did not happen
            return end if is_unknown or end is None else msgspec.structs.replace(end, outcome=Outcome.FAILED)
        start = len(self._records) + 1
        if key is not None:
            start = self._appended.setdefault(key, start)
        if start > len(self._records):
            self._records += begin.hashes
        if is_unknown or end is None:
            return end
        return msgspec.structs.replace(end, start_offset=start, end_offset=start + len(begin.hashes) - 1)

    def _read(self, offset: int, end: End, next_offset: int) -> End:
        if offset < self._log_start:
            return msgspec.structs.replace(
                end,
                outcome=Outcome.FAILED,
                error="offset_out_of_range",
                log_start_offset=self._log_start,
                next_offset=next_offset,
            )
        found = self._records[offset - 1 : offset - 1 + self._chance.choice([1, 3, 100])]
        cut = self._chance.randint(0, len(found))
        pieces = [(offset, found[:cut]), (offset + cut, found[cut:])]
        says_bounds = not found or self._chance.random() < 0.6
        return msgspec.structs.replace(
            end,
            batches=[piece for piece in pieces if piece[1]],
            log_start_offset=self._log_start if says_bounds and self._chance.random() < 0.5 else None,
            next_offset=next_offset if says_bounds else None,
        )


def _shifted(done: Done, clock: int, skew_ms: int) -> Done:
    """As a clock recorded it that is off by this."""
    if not skew_ms:
        return done
    begin = msgspec.structs.replace(done.begin, start_ns=done.begin.start_ns + clock)
    end = None if done.end is None else msgspec.structs.replace(done.end, end_ns=done.end.end_ns + clock)
    return done._replace(begin=begin, end=end)
