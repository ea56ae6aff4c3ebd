"""The options of a consume call, and their checks."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from llog.errors import InvalidArgument
from llog.groups.dead_letters import dead_letter_topic
from llog.groups.records import VISIBILITY_MS_MAX, check_group_name, check_member_name
from llog.model import FIRST_OFFSET, check_topic_name

LIMIT_MAX: Final = 100_000
BYTES_MAX: Final = 256 << 20


class Start(msgspec.Struct, frozen=True):
    """Where to read from. `value` is an offset, or ms since 1970 for a timestamp."""

    kind: Literal["latest", "earliest", "offset", "after", "timestamp"]
    value: int | None = None


class ConsumeOptions(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    group: str | None = None
    """None for a plain read, which moves no position."""
    member: str = ""
    """The member that holds what is delivered. An ACK without a name acknowledges for all members without one."""
    partition: int | None = None
    start: Start | None = None
    """Latest and earliest apply where the group has no position yet. Any other start is read exactly there, and nothing
    is claimed.
    """
    limit: int = 100
    wait_ms: int = 0
    visibility_ms: int = 60_000
    max_attempts: int | None = None
    dead_letter: str | None = None
    mode: Literal["claimed", "assigned"] = "claimed"
    max_bytes: int = 8 << 20


def check_options(options: ConsumeOptions) -> None:
    for name, value, low, high in (
        ("limit", options.limit, 1, LIMIT_MAX),
        ("wait_ms", options.wait_ms, 0, VISIBILITY_MS_MAX),
        ("visibility_ms", options.visibility_ms, 1, VISIBILITY_MS_MAX),
        ("max_attempts", 1 if options.max_attempts is None else options.max_attempts, 1, 1 << 31),
        ("max_bytes", options.max_bytes, 1, BYTES_MAX),
    ):
        check_range(name, value, low, high)
    if options.start is not None:
        check_start(options.start)
    if options.group is None:
        return
    check_group_name(options.group)
    check_member_name(options.member)
    if options.mode == "assigned" and not options.member:
        raise InvalidArgument("an assigned group gives each partition to one member: name yours (member)")
    if options.max_attempts is not None:
        check_topic_name(dead_letter_topic(options.topic, options.dead_letter))


def check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}: it must be from {low} to {high}")


def check_start(start: Start) -> None:
    if start.kind in ("latest", "earliest"):
        return
    if start.value is None:
        raise InvalidArgument(f"a start of kind {start.kind!r} needs a value")
    low = {"offset": FIRST_OFFSET, "after": 0}.get(start.kind)
    if low is not None and start.value < low:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: a start of {start.kind} {start.value} names none")
