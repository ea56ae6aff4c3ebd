"""The stored records of a consumer group, as JSON: one per partition, and for an assigned group one more per topic.

A field is never renamed or reused, and a new one has a default, so that older records decode.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from llog.errors import InvalidArgument
from llog.model import check_topic_name

VISIBILITY_MS_MAX: Final = 7 * 86_400_000
"""The longest time for which a claim is made, a member counts as alive, or a released record is delayed."""
_SKEW_MS_MAX: Final = 86_400_000
MEMBER_BYTES_MAX: Final = 128
NOBODY: Final = "\0"
"""The holder of claims that were given back. No member can have this name."""
UNNAMED: Final = "~"
"""The prefix of names that are generated for members without one. The empty name stands for all of these members."""


class GroupMode(StrEnum):
    """How a group shares a topic out. A group cannot be both claimed and assigned on one topic.

    A plain group has one reader for each partition, and commits positions. A claimed group gives every member records
    that no other member holds. An assigned group gives every partition to one member, and so keeps the order.
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
    """How far a group has come in a partition. Every offset below `offset` is in one of the claims or acknowledged.

    The claims are in order and do not overlap. `generation` is the highest one in which an assigned group was served
    here.
    """

    offset: int
    """The lowest offset that was never delivered."""
    updated_ms: int
    mode: GroupMode = GroupMode.PLAIN
    claims: tuple[Claim, ...] = ()
    generation: int = 0
    ahead: int = 0
    """In a store where a power cut may undo claims: offsets below this one may be claimed without a trace after it."""
    boot: str = ""
    """The boot of the machine during which `ahead` was stored."""
    doubtful: int = 0
    """Offsets below this one may have been claimed before a power cut."""
    metadata: str = ""
    """What a Kafka client committed with the offset, for itself."""
    leader_epoch: int = -1
    """The leader epoch that a Kafka client committed with the offset; -1 if none."""
    fence: int = 0
    """The version of the Kafka group's record under which its coordinator committed here."""
    is_unbounded: bool = False
    """Whether a Kafka client committed the offset, which may lie beyond the end. The first of llog's own consumers that
    changes the record moves such an offset to the end.
    """

    @property
    def committed(self) -> int:
        """The lowest offset that is not acknowledged, which the group wants next."""
        return self.claims[0].start if self.claims else self.offset


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """The members that share the partitions of a topic in an assigned group, and until when each counts as alive.

    The generation grows whenever a member joins or leaves.
    """

    generation: int = 0
    deadlines: dict[str, int] = {}


def is_held(deadline_ms: int, now_ms: int) -> bool:
    """Return whether a claim, membership or delay with this deadline still counts.

    A deadline farther ahead than any correct clock could have set it does not count: else a clock that was ahead for a
    moment would block others for as long as it was ahead.
    """
    return now_ms < deadline_ms <= now_ms + VISIBILITY_MS_MAX + _SKEW_MS_MAX


def check_group_name(name: str) -> str:
    """Return the name; raise `InvalidArgument` unless it follows the rules of topic names."""
    try:
        return check_topic_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace("topic name", "group name", 1)) from None


def is_unnamed(member: str) -> bool:
    return not member or member.startswith(UNNAMED)


def check_member_name(name: str) -> str:
    """Return the name; raise `InvalidArgument` unless it is short and printable. The empty name is one."""
    if not name.isprintable() or len(name.encode()) > MEMBER_BYTES_MAX:
        raise InvalidArgument(
            f"the member name {name[:80]!r} cannot be used: it must have at most {MEMBER_BYTES_MAX} bytes, all of "
            "printable characters"
        )
    return name
