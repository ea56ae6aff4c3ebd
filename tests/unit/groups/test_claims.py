"""Claims, against a model that remembers of every single offset what became of it."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llog.errors import InvalidArgument, TooManyClaims
from llog.groups import claims
from llog.groups.records import (
    MEMBER_BYTES_MAX,
    NOBODY,
    VISIBILITY_MS_MAX,
    Claim,
    GroupMode,
    GroupRecord,
    check_member_name,
)
from llog.log.engine import Bounds
from llog.log.records import decode, encode
from llog.stores.meta import VALUE_BYTES_MAX

MEMBERS = ("a", "b", "")
VISIBILITY_MS = 10


class Held(NamedTuple):
    member: str
    deadline_ms: int
    attempt: int


class EveryOffset(RuleBasedStateMachine):
    """`held` has the outstanding offsets; what is below `offset` and not in it was acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.record = GroupRecord(offset=1, updated_ms=0)
        self.held: dict[int, Held] = {}
        self.offset = 1
        self.bounds = Bounds(1, 1)
        self.now_ms = 1000

    @initialize(count=st.integers(0, 30))
    def filled(self, count: int) -> None:
        self.bounds = Bounds(1, 1 + count)

    @rule(count=st.integers(1, 20))
    def appended(self, count: int) -> None:
        self.bounds = self.bounds._replace(next_offset=self.bounds.next_offset + count)

    @rule(share=st.floats(0, 1))
    def trimmed(self, share: float) -> None:
        start, end = self.bounds
        self.bounds = Bounds(start + int((end - start) * share), end)

    @rule(ms=st.integers(1, VISIBILITY_MS))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule(member=st.sampled_from(MEMBERS), limit=st.integers(1, 12), in_order=st.booleans())
    def claim(self, member: str, limit: int, in_order: bool) -> None:
        self.record, given = claims.claim(
            self.record, member, limit, self.bounds, self.now_ms, VISIBILITY_MS, in_order=in_order
        )
        delivered = {offset: each for each in given for offset in range(each.start, each.end + 1)}
        assert list(delivered) == sorted(delivered)
        assert sum(each.count for each in given) == len(delivered) <= limit
        for offset in [offset for offset in self.held if offset < self.bounds.log_start_offset]:
            del self.held[offset]
        expected = self._deliverable(member, in_order)[:limit]
        assert list(delivered) == expected
        for offset in expected:
            attempt = self.held[offset].attempt + 1 if offset in self.held else 1
            self.held[offset] = Held(member, self.now_ms + VISIBILITY_MS, attempt)
            each = delivered[offset]
            assert Held(each.member, each.deadline_ms, each.attempt) == self.held[offset]
        assert claims.still_held(self.record, given) == given
        self.offset = max(
            self.offset, self.bounds.log_start_offset if self._may_move else 1, *(o + 1 for o in expected), 1
        )

    def _deliverable(self, member: str, in_order: bool) -> list[int]:
        self._may_move = True
        due = sorted(offset for offset, each in self.held.items() if each.deadline_ms <= self.now_ms)
        if in_order:
            if any(each.member == NOBODY and each.deadline_ms > self.now_ms for each in self.held.values()):
                self._may_move = False
                return []
            late = [
                offset for offset, each in self.held.items() if each.deadline_ms <= self.now_ms or each.member != member
            ]
            due = sorted(offset for offset in self.held if late and offset >= min(late))
            for offset in due:
                each = self.held[offset]
                self.held[offset] = each._replace(deadline_ms=min(each.deadline_ms, self.now_ms))
        new = range(max(self.offset, self.bounds.log_start_offset), self.bounds.next_offset)
        return [*due, *new]

    @rule(member=st.sampled_from(MEMBERS), back=st.integers(0, 30))
    def ack(self, member: str, back: int) -> None:
        upto = self.bounds.next_offset - 1 - back
        if upto < 1:
            return
        others = {offset: each for offset, each in self.held.items() if each.member != member}
        committed = self.record.committed
        self.record = claims.ack(self.record, member, upto)
        self.held = {o: each for o, each in self.held.items() if each.member != member or o > upto}
        self.offset = max(self.offset, upto + 1)
        assert self.record.committed >= committed
        assert others.keys() <= self.held.keys()

    @rule(member=st.sampled_from(MEMBERS), start=st.integers(1, 60), count=st.integers(1, 20))
    def settle(self, member: str, start: int, count: int) -> None:
        self.record = claims.settle(self.record, member, start, start + count - 1)
        for offset in self._holding(member, start, count):
            del self.held[offset]

    @rule(member=st.sampled_from(MEMBERS), start=st.integers(1, 60), count=st.integers(1, 20))
    def give_back(self, member: str, start: int, count: int) -> None:
        committed = self.record.committed
        self.record = claims.give_back(self.record, member, start, start + count - 1)
        for offset in self._holding(member, start, count):
            self.held[offset] = Held(NOBODY, 0, self.held[offset].attempt - 1)
        while (last := self.held.get(self.offset - 1)) is not None and last.attempt == 0:
            self.offset -= 1
            del self.held[self.offset]
        assert self.record.committed == committed

    @rule(member=st.sampled_from(MEMBERS), start=st.integers(1, 60), count=st.integers(1, 5), wait=st.integers(0, 20))
    def release(self, member: str, start: int, count: int, wait: int) -> None:
        self.record = claims.release(self.record, member, start, start + count - 1, self.now_ms + wait)
        for offset in self._holding(member, start, count):
            self.held[offset] = self.held[offset]._replace(member=NOBODY, deadline_ms=self.now_ms + wait)

    @rule(back=st.integers(0, 30))
    def reset(self, back: int) -> None:
        self.offset = max(1, self.bounds.next_offset - back)
        self.record = claims.reset(self.record, self.offset)
        self.held = {}

    @rule(back=st.integers(0, 30))
    def commit(self, back: int) -> None:
        if self.held:
            return
        to = max(1, self.bounds.next_offset - back)
        self.record = claims.commit(self.record, to)
        self.offset = max(self.offset, to)

    def _holding(self, member: str, start: int, count: int) -> list[int]:
        return [o for o in range(start, start + count) if o in self.held and self.held[o].member == member]

    @invariant()
    def agrees_with_the_model(self) -> None:
        expanded = {
            offset: Held(each.member, each.deadline_ms, each.attempt)
            for each in self.record.claims
            for offset in range(each.start, each.end + 1)
        }
        assert expanded == self.held
        assert self.record.offset == self.offset
        assert self.record.committed == min(self.held, default=self.offset)
        assert claims.count_outstanding(self.record, 1) == len(self.held)

    @invariant()
    def claims_are_in_order_and_apart(self) -> None:
        end = 0
        for each in self.record.claims:
            assert end < each.start <= each.end < self.record.offset
            end = each.end

    @invariant()
    def never_beyond_the_end(self) -> None:
        assert self.record.offset <= self.bounds.next_offset

    @invariant()
    def comes_back_from_its_bytes(self) -> None:
        assert decode(GroupRecord, encode(self.record), "key") == self.record


TestEveryOffset = EveryOffset.TestCase
TestEveryOffset.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def _claimed(record: GroupRecord, member: str, limit: int, end: int, now_ms: int = 0) -> GroupRecord:
    return claims.claim(record, member, limit, Bounds(1, end + 1), now_ms, VISIBILITY_MS)[0]


def test_an_expired_claim_is_split_where_the_limit_is() -> None:
    record = _claimed(GroupRecord(offset=1, updated_ms=0), "a", 10, 10)
    record, given = claims.claim(record, "b", 4, Bounds(1, 11), VISIBILITY_MS, VISIBILITY_MS)
    assert given == (Claim(1, 4, "b", 2 * VISIBILITY_MS, 2),)
    assert record.claims == (*given, Claim(5, 10, "a", VISIBILITY_MS, 1))


def test_the_late_ack_of_a_claim_that_went_to_another_member_drops_nothing_of_it() -> None:
    record = _claimed(GroupRecord(offset=1, updated_ms=0), "a", 10, 10)
    record = _claimed(record, "b", 4, 10, VISIBILITY_MS)
    record = claims.ack(record, "a", 10)
    assert [(each.start, each.end, each.member) for each in record.claims] == [(1, 4, "b")]
    assert (record.committed, record.offset) == (1, 11)


def test_neighbours_that_are_delivered_together_become_one_claim() -> None:
    record = GroupRecord(offset=1, updated_ms=0)
    for now_ms in range(5):
        record = _claimed(record, "a", 2, 10, now_ms)
    assert len(record.claims) == 5
    record, given = claims.claim(record, "b", 10, Bounds(1, 11), 100, VISIBILITY_MS)
    assert record.claims == given == (Claim(1, 10, "b", 100 + VISIBILITY_MS, 2),)


def test_a_released_record_outlives_what_its_member_acknowledges_above_it() -> None:
    record = _claimed(GroupRecord(offset=1, updated_ms=0), "a", 10, 10)
    record = claims.ack(claims.release(record, "a", 5, 5, 50), "a", 10)
    assert record.claims == (Claim(5, 5, NOBODY, 50, 1),)
    assert claims.claim(record, "a", 10, Bounds(1, 11), 49, VISIBILITY_MS)[1] == ()
    assert claims.claim(record, "a", 10, Bounds(1, 11), 50, VISIBILITY_MS)[1] == (Claim(5, 5, "a", 60, 2),)


def test_too_many_claims_stop_new_deliveries_and_splits_but_not_whole_redeliveries() -> None:
    many = claims.CLAIMS_MAX
    record = GroupRecord(
        offset=2 * many + 1,
        updated_ms=0,
        claims=tuple(Claim(start, start + 1, "a", start, 1) for start in range(1, 2 * many, 2)),
    )
    bounds = Bounds(1, 2 * many + 100)
    with pytest.raises(TooManyClaims, match="acknowledge"):
        claims.claim(record, "b", 10, bounds, 0, VISIBILITY_MS)
    with pytest.raises(TooManyClaims):
        claims.claim(record, "b", 1, bounds, 1, VISIBILITY_MS)
    wide = msgspec.structs.replace(
        record, offset=2 * many + 2, claims=(*record.claims[:-1], Claim(2 * many - 1, 2 * many + 1, "a", 0, 1))
    )
    with pytest.raises(TooManyClaims):
        claims.release(wide, "a", 2 * many, 2 * many, 0)
    with pytest.raises(TooManyClaims):
        claims.settle(wide, "a", 2 * many, 2 * many)
    back = claims.give_back(wide, "a", 2 * many, 2 * many)
    assert back.claims[many:] == (Claim(2 * many, 2 * many, NOBODY, 0, 0), Claim(2 * many + 1, 2 * many + 1, "a", 0, 1))
    again, given = claims.claim(record, "b", 3, bounds, 4, VISIBILITY_MS)
    assert [(each.start, each.end, each.attempt) for each in given] == [(1, 2, 2)]
    assert len(again.claims) == many
    room = claims.ack(again, "b", 2)
    assert claims.claim(room, "b", 10, bounds, 0, VISIBILITY_MS)[1] == (
        Claim(2 * many + 1, 2 * many + 10, "b", VISIBILITY_MS, 1),
    )


def test_claims_are_given_back_whole_even_where_there_is_no_room_for_parts() -> None:
    many = claims.GIVEN_BACK_MAX
    pairs = tuple(Claim(start, start + 1, "a", start, 1) for start in range(1, 2 * many, 2))
    record = GroupRecord(offset=2 * many + 1, updated_ms=0, claims=pairs)
    with pytest.raises(TooManyClaims):
        claims.give_back(record, "a", 2, 2)
    assert claims.give_back(record, "a", 1, 2).claims == (Claim(1, 2, NOBODY, 0, 0), *pairs[1:])


def test_the_largest_record_fits_into_a_metadata_store() -> None:
    claim = Claim(1 << 62, 1 << 62, check_member_name('"' * MEMBER_BYTES_MAX), 1 << 50, 1 << 31)
    record = GroupRecord(offset=1 << 62, updated_ms=1 << 50, claims=(claim,) * claims.GIVEN_BACK_MAX)
    assert len(encode(record)) < VALUE_BYTES_MAX


@pytest.mark.parametrize("name", ["a" * (MEMBER_BYTES_MAX + 1), NOBODY, "\ud800", "a\n"])
def test_member_names_are_short_and_printable(name: str) -> None:
    with pytest.raises(InvalidArgument, match="member name"):
        check_member_name(name)


def test_records_of_earlier_versions_are_plain_positions() -> None:
    record = decode(GroupRecord, b'{"offset":7,"updated_ms":5}', "key")
    assert (record.committed, record.mode, record.claims) == (7, GroupMode.PLAIN, ())
    assert encode(record) == b'{"offset":7,"updated_ms":5}'


def test_a_claim_farther_ahead_than_any_lease_is_delivered_again() -> None:
    """A member whose clock was 400 days ahead for a moment made it; claims for as long as one may be made stay."""
    far, longest = 400 * 86_400_000, VISIBILITY_MS_MAX
    record = GroupRecord(offset=7, updated_ms=0, claims=(Claim(1, 3, "a", far, 1), Claim(4, 6, "a", longest, 1)))
    _, given = claims.claim(record, "b", 10, Bounds(1, 7), 0, VISIBILITY_MS)
    assert given == (Claim(1, 3, "b", VISIBILITY_MS, 2),)


def test_a_record_released_until_a_time_farther_ahead_than_any_delay_holds_up_nothing() -> None:
    released = (Claim(1, 1, NOBODY, 400 * 86_400_000, 1),)
    assert claims.held_up_until(released, 0) is None
    assert claims.held_up_until((Claim(1, 1, NOBODY, VISIBILITY_MS_MAX, 1),), 0) == VISIBILITY_MS_MAX
    record = GroupRecord(offset=2, updated_ms=0, claims=released)
    _, given = claims.claim(record, "a", 10, Bounds(1, 2), 0, VISIBILITY_MS, in_order=True)
    assert given == (Claim(1, 1, "a", VISIBILITY_MS, 2),)
