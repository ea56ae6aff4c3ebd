"""How claims, acknowledgements and resets change a group's record for a partition: pure functions, without I/O.

Below the record's `offset`, an offset that is in no claim is acknowledged. So acknowledgements out of order are
remembered, and only a member's own acknowledgement drops its claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from llog.errors import TooManyClaims
from llog.groups.records import NOBODY, Claim, GroupRecord, is_held, is_unnamed
from llog.log.engine import Bounds

CLAIMS_MAX: Final = 10_000
"""Most claims in one partition: the record then stays well below the largest value that a store takes."""
GIVEN_BACK_MAX: Final = 11_000
"""The room beyond `CLAIMS_MAX` is for giving back: records that were not delivered must not stay with their member."""


def claim(
    record: GroupRecord,
    member: str,
    limit: int,
    bounds: Bounds,
    now_ms: int,
    visibility_ms: int,
    *,
    in_order: bool = False,
) -> tuple[GroupRecord, tuple[Claim, ...]]:
    """Claim up to `limit` records for `member`: those that expired or were given back first, then new ones.

    With `in_order`, for a partition that only this member has, everything from the first claim on that expired or
    belongs to another member is delivered again, and nothing until the delays of released records are over. Raises
    `TooManyClaims` if there is something to deliver but no room to record it.
    """
    known = _clip(record.claims, bounds.log_start_offset, record.offset - 1)
    if in_order:
        if held_up_until(known, now_ms) is not None:
            return replace(record, claims=tuple(known)), ()
        known = _expire_in_order(known, member, now_ms)
    deadline_ms = now_ms + visibility_ms
    room, left, full = CLAIMS_MAX - len(known), limit, False
    claims: list[Claim] = []
    given: list[Claim] = []
    for each in known:
        if left == 0 or is_held(each.deadline_ms, now_ms):
            claims.append(each)
            continue
        if each.count > left and room <= 0:
            claims.append(each)
            left, full = 0, True
            continue
        count = min(left, each.count)
        given.append(Claim(each.start, each.start + count - 1, member, deadline_ms, each.attempt + 1))
        claims.append(given[-1])
        if count < each.count:
            claims.append(replace(each, start=each.start + count))
            room -= 1
        left -= count
    offset = max(record.offset, bounds.log_start_offset)
    if left and offset < bounds.next_offset:
        if room > 0:
            given.append(Claim(offset, min(offset + left, bounds.next_offset) - 1, member, deadline_ms, 1))
            claims.append(given[-1])
            offset = given[-1].end + 1
        else:
            full = True
    if full and not given:
        raise _too_many_claims()
    return replace(record, offset=offset, claims=_merge(claims)), _merge(given)


def ack(record: GroupRecord, member: str, upto: int) -> GroupRecord:
    """Acknowledge, up to `upto`, what `member` holds, expired or not, and what was never delivered.

    Records that may have been delivered before a power cut are delivered again.
    """
    claims = _drop_held(record.claims, member, 0, upto)
    doubtful = min(upto, record.doubtful - 1)
    if doubtful >= record.offset:
        claims = _merge((*claims, Claim(record.offset, doubtful, NOBODY, 0, 0)))
    return replace(record, offset=max(record.offset, upto + 1), claims=claims)


def held_by(record: GroupRecord, member: str, upto: int) -> tuple[Claim, ...]:
    """Return the claims that an ACK of `member` up to `upto` would drop."""
    return tuple(each for each in _clip(record.claims, 0, upto) if _is_held_by(member, each))


def held_by_others(record: GroupRecord, member: str, upto: int) -> tuple[Claim, ...]:
    """Return the claims that an ACK of `member` up to `upto` would leave."""
    return tuple(each for each in _clip(record.claims, 0, upto) if not _is_held_by(member, each))


def is_any_acknowledged(record: GroupRecord, given: Iterable[Claim]) -> bool:
    """Return whether at least one record of these claims is in no claim any more."""
    return any(sum(part.count for part in _clip(record.claims, each.start, each.end)) < each.count for each in given)


def settle(record: GroupRecord, member: str, start: int, end: int) -> GroupRecord:
    """Acknowledge exactly these offsets, as far as `member` holds them.

    Raises `TooManyClaims` if the remaining claims would be too many.
    """
    return replace(record, claims=_check_count(_drop_held(record.claims, member, start, end), record))


def give_back(record: GroupRecord, member: str, start: int, end: int) -> GroupRecord:
    """Give back those of the offsets that `member` holds and never got: the next claim gets them, and this delivery
    does not count as an attempt.

    Raises `TooManyClaims` if there is no room to record that; never for whole claims.
    """
    claims = _change_held(
        record.claims,
        member,
        start,
        end,
        lambda part: replace(part, member=NOBODY, deadline_ms=0, attempt=part.attempt - 1),
    )
    offset = record.offset
    while claims and claims[-1].attempt == 0 and claims[-1].end == offset - 1:
        offset = claims.pop().start
    return replace(record, offset=offset, claims=_check_count(_merge(claims), record, GIVEN_BACK_MAX))


def release(record: GroupRecord, member: str, start: int, end: int, due_ms: int) -> GroupRecord:
    """Give back those of the offsets that `member` holds and failed with: the first claim from `due_ms` on gets them,
    and this delivery counts as an attempt.

    Nobody holds them until then, so an ACK of `member` above them does not acknowledge them. Raises `TooManyClaims` as
    `settle` does.
    """
    changed = _change_held(
        record.claims, member, start, end, lambda part: replace(part, member=NOBODY, deadline_ms=due_ms)
    )
    return replace(record, claims=_check_count(_merge(changed), record))


def is_released(record: GroupRecord, offset: int, due_ms: int) -> bool:
    """Return whether the record at `offset` was released until `due_ms` and not delivered since."""
    return any(
        each.member == NOBODY and each.deadline_ms == due_ms and each.start <= offset <= each.end
        for each in record.claims
    )


def held_up_until(claims: Iterable[Claim], now_ms: int) -> int | None:
    """Return when the last delay of a released record ends, until which an assigned group delivers nothing; None if no
    delay is under way.
    """
    waiting = (each.deadline_ms for each in claims if each.member == NOBODY and is_held(each.deadline_ms, now_ms))
    return max(waiting, default=None)


def commit(record: GroupRecord, offset: int) -> GroupRecord:
    """Move a plain group forward, never back."""
    return replace(record, offset=max(record.offset, offset))


def reset(record: GroupRecord, offset: int) -> GroupRecord:
    """Have everything from `offset` on delivered as if for the first time, and nothing below it."""
    return replace(record, offset=offset, claims=(), ahead=0, doubtful=0)


def still_held(record: GroupRecord, wanted: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the parts of these claims that the record still has with the same member, deadline and attempt."""
    found = [
        replace(each, start=max(each.start, one.start), end=min(each.end, one.end))
        for one in wanted
        for each in record.claims
        if _is_same_delivery(each, one) and each.start <= one.end and one.start <= each.end
    ]
    return _merge(found)


def count_outstanding(record: GroupRecord, log_start_offset: int) -> int:
    """Return how many records were delivered and not acknowledged, without those that retention removed."""
    return sum(each.count for each in _clip(record.claims, log_start_offset, record.offset - 1))


def _check_count(claims: tuple[Claim, ...], record: GroupRecord, claims_max: int = CLAIMS_MAX) -> tuple[Claim, ...]:
    if len(claims) > max(claims_max, len(record.claims)):
        raise _too_many_claims()
    return claims


def _too_many_claims() -> TooManyClaims:
    return TooManyClaims(
        f"the group has {CLAIMS_MAX} claims outstanding in this partition, and no more are kept: acknowledge what "
        "was delivered, or consume more records at once"
    )


def _is_same_delivery(one: Claim, other: Claim) -> bool:
    return (one.member, one.deadline_ms, one.attempt) == (other.member, other.deadline_ms, other.attempt)


def _parts(claim: Claim, start: int, end: int) -> Iterator[tuple[Claim, bool]]:
    """Yield the claim in up to three parts, each with whether it lies inside [start, end]."""
    first, last = max(claim.start, start), min(claim.end, end)
    if first > last:
        yield claim, False
        return
    if claim.start < first:
        yield replace(claim, end=first - 1), False
    yield replace(claim, start=first, end=last), True
    if last < claim.end:
        yield replace(claim, start=last + 1), False


def _change_held(
    claims: Sequence[Claim], member: str, start: int, end: int, change: Callable[[Claim], Claim | None]
) -> list[Claim]:
    """Return the claims with those parts changed that `member` holds inside [start, end]; None drops a part."""
    changed: list[Claim] = []
    for each in claims:
        if not _is_held_by(member, each):
            changed.append(each)
            continue
        for part, inside in _parts(each, start, end):
            new = change(part) if inside else part
            if new is not None:
                changed.append(new)
    return changed


def _is_held_by(member: str, claim: Claim) -> bool:
    return claim.member == member or (not member and is_unnamed(claim.member))


def _drop_held(claims: Sequence[Claim], member: str, start: int, end: int) -> tuple[Claim, ...]:
    return tuple(_change_held(claims, member, start, end, lambda _: None))


def _clip(claims: Sequence[Claim], start: int, end: int) -> list[Claim]:
    return [part for each in claims for part, inside in _parts(each, start, end) if inside]


def _expire_in_order(claims: Sequence[Claim], member: str, now_ms: int) -> list[Claim]:
    """Return the claims with every one expired from the first on that expired or belongs to another member."""
    first = next(
        (index for index, each in enumerate(claims) if not is_held(each.deadline_ms, now_ms) or each.member != member),
        len(claims),
    )
    return [*claims[:first], *(replace(each, deadline_ms=min(each.deadline_ms, now_ms)) for each in claims[first:])]


def _merge(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Join neighbouring claims of the same member, deadline and attempt."""
    merged: list[Claim] = []
    for each in claims:
        if merged and merged[-1].end + 1 == each.start and _is_same_delivery(merged[-1], each):
            merged[-1] = replace(merged[-1], end=each.end)
        else:
            merged.append(each)
    return tuple(merged)
