"""Sequences of Kafka's clients, which begin again at 0 after the highest one."""

from __future__ import annotations

import pytest

from llog.errors import OutOfOrderSequence
from llog.log.record_producers import (
    ProducerKind,
    RecordProducer,
    RecordProducerState,
    RememberedRecords,
    find_repeated_records,
    remember_records,
)

HIGHEST = (1 << 31) - 1


def producer(sequence: int, kind: ProducerKind = ProducerKind.KAFKA) -> RecordProducer:
    return RecordProducer(kind=kind, id="7", epoch=0, sequence=sequence)


def state(last_sequence: int, records: int = 10) -> RecordProducerState:
    last = RememberedRecords(last_sequence - records + 1, last_sequence, 101)
    return RecordProducerState(epoch=0, last=(last,), append_ms=0)


def test_the_sequence_after_the_highest_is_zero() -> None:
    assert find_repeated_records(state(HIGHEST), producer(0), 5, "t/0") is None
    after = remember_records(state(HIGHEST), producer(0), 5, 500, 0)
    assert after.last[-1] == RememberedRecords(HIGHEST + 1, HIGHEST + 5, 500)
    assert find_repeated_records(after, producer(5), 5, "t/0") is None


def test_an_append_across_the_highest_sequence_is_recognised_when_it_is_sent_again() -> None:
    before = state(HIGHEST - 2)
    assert find_repeated_records(before, producer(HIGHEST - 1), 5, "t/0") is None
    after = remember_records(before, producer(HIGHEST - 1), 5, 500, 0)
    assert find_repeated_records(after, producer(HIGHEST - 1), 5, "t/0") == 500
    assert find_repeated_records(after, producer(3), 1, "t/0") is None


def test_a_gap_is_out_of_order_on_both_sides_of_the_highest_sequence() -> None:
    for wrong in (1, 100, HIGHEST - 100):
        with pytest.raises(OutOfOrderSequence):
            find_repeated_records(state(HIGHEST), producer(wrong), 5, "t/0")
    with pytest.raises(OutOfOrderSequence):
        find_repeated_records(state(5, records=6), producer(HIGHEST), 1, "t/0")


def test_producers_over_http_count_on() -> None:
    with pytest.raises(OutOfOrderSequence):
        find_repeated_records(state(HIGHEST), producer(0, ProducerKind.HTTP), 5, "t/0")
    assert find_repeated_records(state(HIGHEST), producer(HIGHEST + 1, ProducerKind.HTTP), 5, "t/0") is None
