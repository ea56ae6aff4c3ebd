"""What is stored for a consumer group: a record per partition, and for assigned groups one per topic. JSON.

A field is never renamed or reused; a new one has a default, so that older records decode.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from llog.errors import InvalidArgument
from llog.model import check_topic_name

VISIBILITY_MS_MAX: Final = 7 * 86_400_000
"""The longest time for which a claim is made, a member counts as alive, or a released record waits."""
_SKEW_MS_MAX: Final = 86_400_000
MEMBER_BYTES_MAX: Final = 128
NOBODY: Final = "\0"
"""Holds the claims that were given back: no member has this name."""
UNNAMED: Final = "~"
"""How the names begin that members are given who have none of their own. The empty name speaks for all of them."""


class GroupMode(StrEnum):
    """How a group shares a topic out. Mixing the latter two on one topic is refused.

    A plain group has one reader for each partition, and commits positions. A claimed one gives every member records
    that no other holds. An assigned one gives every partition to one member, and so keeps the order.
    """

    PLAIN = ""
    CLAIMED = "claimed"
    ASSIGNED = "assigned"


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """The records from `start` to `end`, both included, were delivered to `member` and are not acknowledged.

    From `deadline_ms` on they may be delivered again. `attempt` counts the deliveries so far.
    """

    start: int
    end: int
    member: str
    deadline_ms: int
    attempt: int

    @property
    def count(self) -> int:
        return self.end - self.start + 1


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a group has come in a partition. Every offset below `offset` is in one of the claims, or acknowledged.

    The claims are in order and do not overlap. `generation` is the highest one under which an assigned group was served
    here.
    """

    offset: int
    """The lowest one that was never delivered."""
    updated_ms: int
    mode: GroupMode = GroupMode.PLAIN
    claims: tuple[Claim, ...] = ()
    generation: int = 0
    ahead: int = 0
    """Where a power cut may undo claims: offsets below this one may be claimed, and the cut leaves no trace of it."""
    boot: str = ""
    """The machine's, since when that may have been."""
    doubtful: int = 0
    """Offsets below this one may have been claimed before a power cut."""

    @property
    def committed(self) -> int:
        """The lowest offset that is not acknowledged: the next one that the group wants."""
        return self.claims[0].start if self.claims else self.offset


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """Who shares the partitions of a topic in an assigned group, and until when each counts as alive.

    The generation grows with every change of who they are.
    """

    generation: int = 0
    deadlines: dict[str, int] = {}


def is_held(deadline_ms: int, now_ms: int) -> bool:
    """Whether what ends at this deadline still counts.

    A deadline farther ahead than any right clock could have set it does not: a clock that was wrong for a moment would
    hold on for as long as it was ahead.
    """
    return now_ms < deadline_ms <= now_ms + VISIBILITY_MS_MAX + _SKEW_MS_MAX


def check_group_name(name: str) -> str:
    """Group names follow the rule of topic names."""
    try:
        return check_topic_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace("topic name", "group name", 1)) from None


def is_unnamed(member: str) -> bool:
    return not member or member.startswith(UNNAMED)


def check_member_name(name: str) -> str:
    """Any short text. Under the empty name, all is acknowledged and released that was claimed without a name."""
    if not name.isprintable() or len(name.encode()) > MEMBER_BYTES_MAX:
        raise InvalidArgument(
            f"the member name {name[:80]!r} is not usable: at most {MEMBER_BYTES_MAX} bytes of characters that can "
            "be printed"
        )
    return name
