"""The checker on histories written by hand: what a log may do is accepted, and each way to break a promise is found and
named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llog.errors import InvalidArgument
from llog.history.lines import Outcome
from tests.unit.history.histories import Hand, broken


@pytest.fixture
def hand(tmp_path: Path) -> Hand:
    return Hand(tmp_path / "one.jsonl")


@pytest.fixture
def other(tmp_path: Path) -> Hand:
    return Hand(tmp_path / "two.jsonl")


# --- what is right


def test_appends_and_reads_that_overlap_are_accepted_in_any_order_that_can_be(hand: Hand, other: Hand) -> None:
    hand.append(0, 4, ["a", "b"], 3).append(1, 5, ["c"], 1).read(6, 7, 1, ["c", "d", "a", "b"], next_offset=5)
    other.append(2, 3, ["d"], 2).read(0, 9, 1, next_offset=1).read(0, 9, 1, ["c", "d"], next_offset=3)
    report = hand.check(other)
    assert report.clean, report
    assert (report.operations, report.partitions[0].acknowledged) == (6, 4)
    assert report.summary() == "6 operations on 1 partition: nothing wrong"


def test_an_append_of_unknown_outcome_may_be_there_or_not_and_late(hand: Hand) -> None:
    hand.append(0, 1, ["a", "b"]).append(0, None, ["c"]).append(0, 1, ["d"]).append(2, 3, ["e"], 1)
    hand.read(4, 5, 1, ["e"], next_offset=2).read(6, 7, 1, ["e", "c", "a", "b"], next_offset=5)
    assert hand.check().clean, hand.check()


def test_equal_records_of_different_appends_are_no_finding(hand: Hand) -> None:
    hand.append(0, 1, ["x", "x"]).append(0, 1, ["x"]).append(0, 9, ["x"], 2).read(10, 11, 1, ["x"] * 4, next_offset=5)
    assert hand.check().clean, hand.check()


def test_a_retry_that_gets_the_first_attempts_offsets_is_accepted(hand: Hand) -> None:
    hand.append(0, 1, ["a"], producer=("p", 0)).append(2, 3, ["b"], 2)
    hand.append(4, 5, ["a"], 1, producer=("p", 0)).append(6, 7, ["a"], 1, producer=("p", 0))
    hand.append(8, 9, ["c"], 3, producer=("p", 1)).read(10, 11, 1, ["a", "b", "c"], next_offset=4)
    report = hand.check()
    assert report.clean, report
    assert report.partitions[0].acknowledged == 3


def test_a_trim_takes_records_that_nobody_read(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).append(2, 3, ["b"], 2).trim(4, 5, 2, 2).read(6, 7, 2, ["b"], next_offset=3, log_start=2)
    hand.read(6, 7, 1, next_offset=3, log_start=2, error="offset_out_of_range").bounds(8, 9, 2, 3)
    assert hand.check().clean, hand.check()


def test_records_that_were_never_read_leave_the_verdict_open(hand: Hand) -> None:
    report = hand.append(0, 1, ["a"], 1).append(2, 3, ["b"], 2).read(4, 5, 1, ["a"], next_offset=3).check()
    assert not report.findings
    assert not report.clean
    assert (report.unread, report.partitions[0].unread_first) == (1, 2)


def test_errors_of_stores_and_answers_that_were_lost_say_nothing(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).read(2, 3, 1, error="store_unavailable").read(4, 5, 1, ["a"], next_offset=2)
    hand.append(6, 7, ["b"], outcome=Outcome.FAILED)
    assert hand.check().clean, hand.check()


# --- what is wrong


def test_a_lost_acknowledged_append_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).append(2, 3, ["b"], 2).read(4, 5, 1, ["a"], next_offset=2)
    report = hand.check()
    assert broken(report) == {"I3"}
    [finding] = report.partitions[0].findings
    assert (finding.start_offset, finding.end_offset) == (2, 2)
    assert [(each.line, each.end_line) for each in finding.operations] == [(6, 7), (4, 5)]
    assert f"the append by one ({hand.path}, line 4, ended in line 5)" in str(report)
    assert "3 operations on 1 partition: 1 finding (I3)" in str(report)


def test_a_retry_that_was_appended_again_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1, producer=("p", 0)).append(2, 3, ["a"], 2, producer=("p", 0))
    hand.read(4, 5, 1, ["a", "a"], next_offset=3)
    assert "I8" in broken(hand.check())


def test_a_retry_whose_first_attempt_is_there_too_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], producer=("p", 0)).append(2, 3, ["a"], 2, producer=("p", 0))
    hand.read(4, 5, 1, ["a", "a"], next_offset=3)
    assert broken(hand.check()) == {"I8"}


def test_an_unknown_append_that_is_there_twice_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a", "b"]).read(4, 5, 1, ["a", "b", "a", "b"], next_offset=5)
    assert "I3" in broken(hand.check())


def test_a_stale_read_after_an_acknowledgement_is_found(hand: Hand, other: Hand) -> None:
    hand.append(0, 1, ["a"], 1).append(2, 3, ["b"], 2)
    other.read(4, 5, 1, ["a"], next_offset=2).read(6, 7, 1, ["a", "b"], next_offset=3)
    report = hand.check(other)
    assert broken(report) == {"I9"}
    assert "1.000000 s after the append by one" in str(report)


def test_a_next_offset_that_goes_back_from_one_broker_to_another_is_found(hand: Hand, other: Hand) -> None:
    hand.append(0, 9, ["a"], 1).read(1, 2, 1, ["a"], next_offset=2)
    assert broken(hand.check(other.bounds(3, 4, 1, 1))) == {"I9"}


def test_a_topic_that_is_not_found_after_an_acknowledgement_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).read(2, 3, 1, error="topic_not_found").read(4, 5, 1, ["a"], next_offset=2)
    assert broken(hand.check()) == {"I9"}


def test_two_appends_at_one_offset_are_found(hand: Hand, other: Hand) -> None:
    hand.append(0, 2, ["a"], 1).read(3, 4, 1, ["a"], next_offset=2)
    assert "I2" in broken(hand.check(other.append(0, 2, ["b"], 1)))


def test_bytes_that_are_not_the_acknowledged_ones_are_found(hand: Hand) -> None:
    assert "I1" in broken(hand.append(0, 1, ["a"], 1).read(2, 3, 1, ["A"], next_offset=2).check())


def test_bytes_that_change_from_one_read_to_another_are_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"]).append(0, 1, ["b"]).read(2, 3, 1, ["a"], next_offset=2).read(4, 5, 1, ["b"], next_offset=2)
    assert broken(hand.check()) == {"I1"}


def test_a_record_that_cannot_be_read_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).read(2, 3, 1, error="corrupt_batch").read(4, 5, 1, ["a"], next_offset=2)
    assert broken(hand.check()) == {"I1"}


def test_a_gap_within_an_answer_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).append(2, 3, ["b"], 2).append(4, 5, ["c"], 3).read(6, 7, 1, ["a", "b"])
    assert broken(hand.read(8, 9, 2, ["c"], at=3, next_offset=4).check()) == {"I2"}


def test_an_offset_that_no_append_can_have_taken_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).append(2, 3, ["b"], 3).read(4, 5, 1, ["a"]).read(6, 7, 3, ["b"], next_offset=4)
    assert broken(hand.check()) == {"I2"}


def test_an_append_behind_one_that_began_after_it_was_acknowledged_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 2).append(2, 3, ["b"], 1).read(4, 5, 1, ["b", "a"], next_offset=3)
    assert broken(hand.check()) == {"I2"}


def test_a_producers_appends_out_of_order_are_found(hand: Hand) -> None:
    hand.append(0, 9, ["a"], 2, producer=("p", 0)).append(0, 9, ["b"], 1, producer=("p", 1))
    assert broken(hand.read(10, 11, 1, ["b", "a"], next_offset=3).check()) == {"I2"}


def test_half_an_append_is_found(hand: Hand) -> None:
    hand.append(0, 9, ["a", "b"], 1).read(1, 2, 1, ["a"], next_offset=2).read(10, 11, 1, ["a", "b"], next_offset=3)
    assert broken(hand.check()) == {"I3"}


def test_a_part_of_an_unknown_append_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a", "b"]).append(2, 3, ["c"], 2).read(4, 5, 1, ["a", "c"], next_offset=3)
    assert broken(hand.check()) == {"I3"}


def test_a_failed_append_that_is_there_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], outcome=Outcome.FAILED).read(2, 3, 1, ["a"], next_offset=2)
    report = hand.check()
    assert broken(report) == {"I3"}
    assert "failed, but" in str(report)


def test_a_record_that_nobody_appended_is_found(hand: Hand) -> None:
    assert broken(hand.read(2, 3, 1, ["a"], next_offset=2).check()) == {"I3"}


def test_a_log_start_that_no_trim_explains_is_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).append(2, 3, ["b"], 2).read(4, 5, 2, ["b"], next_offset=3, log_start=2)
    assert broken(hand.check()) == {"I3"}


def test_records_that_come_back_after_a_trim_are_found(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1).append(2, 3, ["b"], 2).trim(4, 5, 2, 2).read(6, 7, 1, ["a", "b"], next_offset=3)
    assert broken(hand.check()) == {"I1"}


def test_a_record_that_is_seen_before_its_append_began_is_found(hand: Hand) -> None:
    assert broken(hand.append(5, 6, ["a"], 1).read(1, 2, 1, ["a"], next_offset=2).check()) == {"I2"}


def test_many_findings_are_counted(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1)
    for number in range(500):
        hand.read(2 + number, 2 + number, 1, [f"b{number}"])
    report = hand.check()
    assert report.findings == 500
    assert len(report.partitions[0].findings) == 100
    assert "400 more findings" in str(report)


# --- clocks


def test_histories_of_several_machines_need_the_skew_of_their_clocks(tmp_path: Path) -> None:
    here = Hand(tmp_path / "here.jsonl", machine="one", wall_s=1000).append(0, 1, ["a"], 1)
    there = Hand(tmp_path / "there.jsonl", machine="two", wall_s=1000.5)
    there.read(0.6, 0.7, 1, next_offset=1).read(9, 10, 1, ["a"], next_offset=2)
    with pytest.raises(InvalidArgument, match="--clock-skew"):
        here.check(there)
    assert broken(here.check(there, clock_skew_ms=50)) == {"I9"}
    assert here.check(there, clock_skew_ms=100).clean


def test_a_retry_of_other_records_is_no_retry(hand: Hand) -> None:
    hand.append(0, 1, ["a"], 1, producer=("p", 0)).append(2, 3, ["b"], 1, producer=("p", 0))
    with pytest.raises(InvalidArgument, match="same producer and sequence"):
        hand.check()
