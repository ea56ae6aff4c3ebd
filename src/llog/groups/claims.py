"""Which records of a partition are delivered to whom: what a claim, an acknowledgement and a reset make of a group's
record. Pure.

Below `offset`, an offset that is in no claim is acknowledged: so acknowledgements out of order are remembered, and
nobody's claim is dropped but by its holder's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from llog.engines.port import Bounds
from llog.errors import TooManyClaims
from llog.groups.records import NOBODY, Claim, GroupRecord, is_held, is_unnamed

CLAIMS_MAX: Final = 10_000
"""In one partition: a record with so many stays well below what a store takes."""
GIVEN_BACK_MAX: Final = 11_000
"""What was not handed out must not stay its member's: for that there is some room more."""


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
    """Gives `member` up to `limit` records, in order: expired ones and ones given back first, then new ones.

    With `in_order`, for a partition that is this member's alone, all from the first that is expired or another's is
    delivered again, and nothing while one that was released has to wait. `TooManyClaims` if there is something to
    deliver but no room to remember it.
    """
    known = _between(record.claims, bounds.log_start_offset, record.offset - 1)
    if in_order:
        if held_up_until(known, now_ms) is not None:
            return replace(record, claims=tuple(known)), ()
        known = _expired_from_first(known, member, now_ms)
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
        raise _too_many()
    return replace(record, offset=offset, claims=_merged(claims)), _merged(given)


def ack(record: GroupRecord, member: str, upto: int) -> GroupRecord:
    """Everything up to `upto` is done, as far as `member` can tell: what it holds, expired or not, and what nobody was
    given yet.

    What somebody may have been given, as far as a power cut has left that open, is delivered again.
    """
    claims = _without(record.claims, member, 0, upto)
    doubtful = min(upto, record.doubtful - 1)
    if doubtful >= record.offset:
        claims = _merged((*claims, Claim(record.offset, doubtful, NOBODY, 0, 0)))
    return replace(record, offset=max(record.offset, upto + 1), claims=claims)


def held_by(record: GroupRecord, member: str, upto: int) -> tuple[Claim, ...]:
    """What `member` would acknowledge up to `upto`."""
    return tuple(each for each in _between(record.claims, 0, upto) if _speaks_for(member, each))


def held_by_others(record: GroupRecord, member: str, upto: int) -> tuple[Claim, ...]:
    """What `member` would pass over up to `upto`."""
    return tuple(each for each in _between(record.claims, 0, upto) if not _speaks_for(member, each))


def is_any_done(record: GroupRecord, given: Iterable[Claim]) -> bool:
    """Whether one of the records that these claims had, at least, is in no claim any more."""
    return any(sum(part.count for part in _between(record.claims, each.start, each.end)) < each.count for each in given)


def settle(record: GroupRecord, member: str, start: int, end: int) -> GroupRecord:
    """Exactly these are done, as far as `member` holds them. `TooManyClaims` if what is left would be in too many
    pieces.
    """
    return replace(record, claims=_bounded(_without(record.claims, member, start, end), record))


def give_back(record: GroupRecord, member: str, start: int, end: int) -> GroupRecord:
    """These did not get to `member`: whoever comes next gets those of them that it holds, and this delivery does not
    count.

    `TooManyClaims` if there is no room to remember that, never for claims as they were given.
    """
    claims = _changed(
        record.claims,
        member,
        start,
        end,
        lambda part: replace(part, member=NOBODY, deadline_ms=0, attempt=part.attempt - 1),
    )
    offset = record.offset
    while claims and claims[-1].attempt == 0 and claims[-1].end == offset - 1:
        offset = claims.pop().start
    return replace(record, offset=offset, claims=_bounded(_merged(claims), record, GIVEN_BACK_MAX))


def release(record: GroupRecord, member: str, start: int, end: int, due_ms: int) -> GroupRecord:
    """`member` failed with these: whoever comes from `due_ms` on gets those of them that it holds, and this delivery
    counts.

    They are nobody's until then: what `member` acknowledges above them does not drop them. `TooManyClaims` as of
    `settle`.
    """
    changed = _changed(record.claims, member, start, end, lambda part: replace(part, member=NOBODY, deadline_ms=due_ms))
    return replace(record, claims=_bounded(_merged(changed), record))


def is_released(record: GroupRecord, offset: int, due_ms: int) -> bool:
    """Whether this one waits for `due_ms`, and nobody has got it since it was released."""
    return any(
        each.member == NOBODY and each.deadline_ms == due_ms and each.start <= offset <= each.end
        for each in record.claims
    )


def held_up_until(claims: Iterable[Claim], now_ms: int) -> int | None:
    """Where the order is kept: until when nothing is delivered, because one that was released has to wait."""
    waiting = (each.deadline_ms for each in claims if each.member == NOBODY and is_held(each.deadline_ms, now_ms))
    return max(waiting, default=None)


def commit(record: GroupRecord, offset: int) -> GroupRecord:
    """Moves a plain group on; never back."""
    return replace(record, offset=max(record.offset, offset))


def reset(record: GroupRecord, offset: int) -> GroupRecord:
    """All from `offset` on is to be delivered, as if for the first time; nothing below it."""
    return replace(record, offset=offset, claims=(), ahead=0, doubtful=0)


def still_held(record: GroupRecord, wanted: Iterable[Claim]) -> tuple[Claim, ...]:
    """What of these claims the record has, with the same holder, deadline and attempt."""
    found = [
        replace(each, start=max(each.start, one.start), end=min(each.end, one.end))
        for one in wanted
        for each in record.claims
        if _alike(each, one) and each.start <= one.end and one.start <= each.end
    ]
    return _merged(found)


def outstanding(record: GroupRecord, log_start_offset: int) -> int:
    """How many records are delivered, or given back, and not acknowledged, without those that retention took."""
    return sum(each.count for each in _between(record.claims, log_start_offset, record.offset - 1))


def _bounded(claims: tuple[Claim, ...], record: GroupRecord, most: int = CLAIMS_MAX) -> tuple[Claim, ...]:
    if len(claims) > max(most, len(record.claims)):
        raise _too_many()
    return claims


def _too_many() -> TooManyClaims:
    return TooManyClaims(
        f"the group has {CLAIMS_MAX} claims outstanding in this partition, and no more are kept: acknowledge what "
        "was delivered, or "
        "consume more records at once"
    )


def _alike(one: Claim, other: Claim) -> bool:
    return (one.member, one.deadline_ms, one.attempt) == (other.member, other.deadline_ms, other.attempt)


def _parts(claim: Claim, start: int, end: int) -> Iterator[tuple[Claim, bool]]:
    """The claim in up to three parts, and whether each is inside [start, end]."""
    first, last = max(claim.start, start), min(claim.end, end)
    if first > last:
        yield claim, False
        return
    if claim.start < first:
        yield replace(claim, end=first - 1), False
    yield replace(claim, start=first, end=last), True
    if last < claim.end:
        yield replace(claim, start=last + 1), False


def _changed(
    claims: Sequence[Claim], member: str, start: int, end: int, change: Callable[[Claim], Claim | None]
) -> list[Claim]:
    """With what `member` holds inside [start, end] changed, or gone."""
    changed: list[Claim] = []
    for each in claims:
        if not _speaks_for(member, each):
            changed.append(each)
            continue
        for part, inside in _parts(each, start, end):
            new = change(part) if inside else part
            if new is not None:
                changed.append(new)
    return changed


def _speaks_for(member: str, claim: Claim) -> bool:
    return claim.member == member or (not member and is_unnamed(claim.member))


def _without(claims: Sequence[Claim], member: str, start: int, end: int) -> tuple[Claim, ...]:
    return tuple(_changed(claims, member, start, end, lambda _: None))


def _between(claims: Sequence[Claim], start: int, end: int) -> list[Claim]:
    return [part for each in claims for part, inside in _parts(each, start, end) if inside]


def _expired_from_first(claims: Sequence[Claim], member: str, now_ms: int) -> list[Claim]:
    """The first that is expired or of another member, and all above it, expired."""
    late = next(
        (place for place, each in enumerate(claims) if not is_held(each.deadline_ms, now_ms) or each.member != member),
        None,
    )
    if late is None:
        return list(claims)
    return [*claims[:late], *(replace(each, deadline_ms=min(each.deadline_ms, now_ms)) for each in claims[late:])]


def _merged(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Neighbours of the same holder, deadline and attempt become one."""
    merged: list[Claim] = []
    for each in claims:
        if merged and merged[-1].end + 1 == each.start and _alike(merged[-1], each):
            merged[-1] = replace(merged[-1], end=each.end)
        else:
            merged.append(each)
    return tuple(merged)
