"""The outcome of an ACK: the position after it and, if it acknowledged nothing, which members hold the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from llog.groups.records import NOBODY, Claim, is_unnamed
from llog.model import TopicPartition

_HELD_MAX: Final = 100
_WARNING_RANGES_MAX: Final = 3


class HeldRange(msgspec.Struct, frozen=True):
    """Records from `start` to `end`, both included, that another member holds."""

    start: int
    end: int
    member: str | None
    """None if no member holds them: they were given back, and are delivered again."""


class AckResult(NamedTuple):
    committed: int
    """The next offset that the group wants."""
    held: tuple[HeldRange, ...] = ()
    """If the ACK acknowledged nothing: who holds the records that it named, 100 ranges at most."""


def held_ranges(claims: Sequence[Claim]) -> tuple[HeldRange, ...]:
    return tuple(
        HeldRange(claim.start, claim.end, None if claim.member == NOBODY else claim.member)
        for claim in claims[:_HELD_MAX]
    )


def committed_offsets(results: Mapping[int, AckResult]) -> dict[int, int]:
    """Return the next offset that the group wants, by partition."""
    return {partition: result.committed for partition, result in sorted(results.items())}


def ack_warnings(topic: str, results: Mapping[int, AckResult]) -> tuple[str, ...]:
    """Return a sentence for every partition in which nothing was acknowledged."""
    return tuple(
        _warning(TopicPartition(topic, partition), result.held)
        for partition, result in sorted(results.items())
        if result.held
    )


def _warning(tp: TopicPartition, held: Sequence[HeldRange]) -> str:
    ranges = [f"{_offsets(each)} {_holder(each)}" for each in held[:_WARNING_RANGES_MAX]]
    more = ["and more"] if len(held) > _WARNING_RANGES_MAX else []
    return f"acknowledged nothing: of {tp}, {', '.join([*ranges, *more])}"


def _offsets(held: HeldRange) -> str:
    if held.start == held.end:
        return f"offset {held.start} is"
    return f"offsets {held.start} to {held.end} are"


def _holder(held: HeldRange) -> str:
    if held.member is None:
        return "held by nobody and will be delivered again"
    return "held by a member without a name" if is_unnamed(held.member) else f"held by {held.member!r}"
