"""Whatever a right log may have answered is accepted, and whatever it cannot have answered is found."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llog.history.checker import check_history
from llog.history.lines import Append, Bounds, End, Outcome, Read
from llog.history.report import HistoryReport
from tests.unit.history.histories import broken, hashed
from tests.unit.history.model import Done, Drawn, draw

randoms = st.randoms(use_true_random=False)


def checked(drawn: Drawn) -> HistoryReport:
    assume(drawn.operations)  # A file without a single operation is refused.
    with tempfile.TemporaryDirectory() as directory:
        return check_history(drawn.write(Path(directory)), clock_skew_ms=drawn.skew_ms or None)


@given(randoms)
def test_a_history_of_a_right_log_is_accepted(chance: Random) -> None:
    report = checked(draw(chance))
    assert not report.findings, report


# --- what is done to a right history


def is_ok(done: Done) -> bool:
    return done.end is not None and done.end.outcome is Outcome.OK


def acknowledged(drawn: Drawn) -> list[Done]:
    return [each for each in drawn.operations if isinstance(each.begin, Append) and is_ok(each)]


def reads(drawn: Drawn) -> list[Done]:
    """Those that found records."""
    return [each for each in drawn.operations if isinstance(each.begin, Read) and each.end and each.end.batches]


def one_of(chance: Random, found: list[Done]) -> Done:
    assume(found)
    return chance.choice(found)


def replaced(drawn: Drawn, old: Done, **changes: object) -> Drawn:
    """With another end for this operation."""
    assert old.end is not None
    new = old._replace(end=msgspec.structs.replace(old.end, **changes))
    return drawn._replace(operations=[new if each is old else each for each in drawn.operations])


def records_of(end: End) -> dict[int, str]:
    return {first + place: value for first, values in end.batches for place, value in enumerate(values)}


def batches_of(records: dict[int, str]) -> list[tuple[int, list[str]]]:
    return [(offset, [value]) for offset, value in records.items()]


def another_record(drawn: Drawn, chance: Random) -> Drawn:
    read = one_of(chance, reads(drawn))
    assert read.end is not None
    records = records_of(read.end)
    records[chance.choice(list(records))] = hashed("nobody's")[0]
    return replaced(drawn, read, batches=batches_of(records))


def a_gap(drawn: Drawn, chance: Random) -> Drawn:
    read = one_of(chance, [each for each in reads(drawn) if each.end and len(records_of(each.end)) > 1])
    assert read.end is not None
    records = records_of(read.end)
    del records[chance.choice(list(records)[:-1])]
    return replaced(drawn, read, batches=batches_of(records))


def two_records_swapped(drawn: Drawn, chance: Random) -> Drawn:
    owned = {
        offset
        for each in acknowledged(drawn)
        if each.end and each.end.start_offset and each.end.end_offset
        for offset in range(each.end.start_offset, each.end.end_offset + 1)
    }
    read = one_of(chance, [each for each in reads(drawn) if each.end and len(records_of(each.end)) > 1])
    assert read.end is not None
    records = records_of(read.end)
    first, second = chance.sample(list(records), 2)
    assume(owned & {first, second})
    records[first], records[second] = records[second], records[first]
    return replaced(drawn, read, batches=batches_of(records))


def an_offset_twice(drawn: Drawn, chance: Random) -> Drawn:
    one, other = one_of(chance, acknowledged(drawn)), one_of(chance, acknowledged(drawn))
    assert isinstance(one.begin, Append)
    assert isinstance(other.begin, Append)
    assume(one.begin.hashes != other.begin.hashes)
    assert other.end is not None
    assert other.end.start_offset is not None
    end = other.end.start_offset + len(one.begin.hashes) - 1
    return replaced(drawn, one, start_offset=other.end.start_offset, end_offset=end)


def a_retry_at_another_place(drawn: Drawn, chance: Random) -> Drawn:
    tried = [each.begin.producer for each in acknowledged(drawn) if isinstance(each.begin, Append)]
    retried = [
        each
        for each in acknowledged(drawn)
        if isinstance(each.begin, Append) and each.begin.producer and tried.count(each.begin.producer) > 1
    ]
    retry = one_of(chance, retried)
    assert isinstance(retry.begin, Append)
    return replaced(drawn, retry, start_offset=1000, end_offset=999 + len(retry.begin.hashes))


def read_later(drawn: Drawn, records: list[str]) -> Drawn:
    """With a read behind all else that finds these records at the end."""
    offset = 1 + max(
        [0]
        + [each.end.end_offset for each in drawn.operations if each.end and each.end.end_offset]
        + [each.end.next_offset - 1 for each in drawn.operations if each.end and each.end.next_offset]
        + [offset for each in reads(drawn) if each.end for offset in records_of(each.end)]
    )
    begin = Read(op=10_000, topic="t", partition=0, start_ns=100_000, offset=offset)
    end = End(
        op=10_000,
        end_ns=100_001,
        outcome=Outcome.OK,
        batches=[(offset, records)],
        next_offset=offset + len(records),
    )
    return drawn._replace(operations=[*drawn.operations, Done(0, begin, end, 0)])


def appended_again(drawn: Drawn, chance: Random) -> Drawn:
    append = one_of(chance, acknowledged(drawn))
    assert isinstance(append.begin, Append)
    return read_later(drawn, append.begin.hashes)


def a_failed_append_that_is_there(drawn: Drawn, chance: Random) -> Drawn:
    possible = {
        tuple(each.begin.hashes) for each in drawn.operations if isinstance(each.begin, Append) and not is_failed(each)
    }
    failed = [
        each
        for each in drawn.operations
        if isinstance(each.begin, Append) and is_failed(each) and tuple(each.begin.hashes) not in possible
    ]
    append = one_of(chance, failed)
    assert isinstance(append.begin, Append)
    return read_later(drawn, append.begin.hashes)


def is_failed(done: Done) -> bool:
    return done.end is not None and done.end.outcome is Outcome.FAILED


def an_old_tail(drawn: Drawn, chance: Random) -> Drawn:
    """An answer that says less than was acknowledged when it was asked for."""
    append = one_of(chance, acknowledged(drawn))
    assert append.end is not None
    assert append.end.end_offset is not None
    next_offset = chance.randint(1, append.end.end_offset)
    begin = Bounds(op=10_000, topic="t", partition=0, start_ns=append.end.end_ns + drawn.skew_ms + 1)
    end = End(op=10_000, end_ns=begin.start_ns + 1, outcome=Outcome.OK, next_offset=next_offset)
    return drawn._replace(operations=[*drawn.operations, Done(append.process, begin, end, 0)])


CORRUPTIONS: dict[Callable[[Drawn, Random], Drawn], set[str]] = {
    another_record: {"I1", "I3"},
    a_gap: {"I2"},
    two_records_swapped: {"I1"},
    an_offset_twice: {"I2", "I8"},
    a_retry_at_another_place: {"I8"},
    appended_again: {"I3", "I8"},
    a_failed_append_that_is_there: {"I3"},
    an_old_tail: {"I3", "I9"},
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda each: each.__name__)
@given(chance=randoms)
def test_a_corrupted_history_is_found(corrupt: Callable[[Drawn, Random], Drawn], chance: Random) -> None:
    report = checked(corrupt(draw(chance), chance))
    assert broken(report) & CORRUPTIONS[corrupt], report
