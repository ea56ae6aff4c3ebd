"""What became of an ACK: the position that it left, and who holds what it named if it acknowledged nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from llog.groups.records import NOBODY, Claim, is_unnamed
from llog.model import TopicPartition

_HELD_MAX: Final = 100
_SHOWN_MAX: Final = 3


class Held(msgspec.Struct, frozen=True):
    """Records from `start` to `end`, both included, that another member holds."""

    start: int
    end: int
    member: str | None
    """None if nobody does: they were given back, and are delivered again."""


class Acked(NamedTuple):
    committed: int
    """The next offset that the group wants."""
    held: tuple[Held, ...] = ()
    """If the ACK acknowledged nothing: who holds what it named, 100 ranges at most."""


def held_in(claims: Sequence[Claim]) -> tuple[Held, ...]:
    return tuple(
        Held(each.start, each.end, None if each.member == NOBODY else each.member) for each in claims[:_HELD_MAX]
    )


def committed_in(acked: Mapping[int, Acked]) -> dict[int, int]:
    """Returns the next offset that the group wants, by partition."""
    return {partition: each.committed for partition, each in sorted(acked.items())}


def warnings_of(topic: str, acked: Mapping[int, Acked]) -> tuple[str, ...]:
    """Returns a sentence for every partition in which nothing was acknowledged."""
    return tuple(
        _warning(TopicPartition(topic, partition), each.held) for partition, each in sorted(acked.items()) if each.held
    )


def _warning(tp: TopicPartition, held: Sequence[Held]) -> str:
    said = [
        f"offset{f' {each.start} is' if each.start == each.end else f's {each.start} to {each.end} are'} "
        f"{_holder(each)}"
        for each in held[:_SHOWN_MAX]
    ]
    more = ["and more"] if len(held) > _SHOWN_MAX else []
    return f"acknowledged nothing: of {tp}, {', '.join([*said, *more])}"


def _holder(held: Held) -> str:
    if held.member is None:
        return "held by nobody and will be delivered again"
    return "held by a member without a name" if is_unnamed(held.member) else f"held by {held.member!r}"
