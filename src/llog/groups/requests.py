"""What somebody who consumes asks for, checked."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from llog.errors import InvalidArgument
from llog.groups.dead_letters import target_of
from llog.groups.records import VISIBILITY_MS_MAX, check_group_name, check_member_name
from llog.model import FIRST_OFFSET, check_topic_name

LIMIT_MAX: Final = 100_000
BYTES_MAX: Final = 256 << 20


class Start(msgspec.Struct, frozen=True):
    """Where to read from. `value` is an offset, or ms since 1970 for a timestamp."""

    kind: Literal["latest", "earliest", "offset", "after", "timestamp"]
    value: int | None = None


class ConsumeCall(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    group: str | None = None
    """None: a plain read, which nobody remembers."""
    member: str = ""
    """Who holds what is delivered. An ACK without a name acknowledges what all hold who gave none."""
    partition: int | None = None
    start: Start | None = None
    """Latest and earliest count where the group has no position yet; the others are read exactly there, and nothing is
    claimed.
    """
    limit: int = 100
    wait_ms: int = 0
    visibility_ms: int = 60_000
    max_attempts: int | None = None
    dead_letter: str | None = None
    mode: Literal["claimed", "assigned"] = "claimed"
    max_bytes: int = 8 << 20


def check_call(call: ConsumeCall) -> None:
    for name, value, low, high in (
        ("limit", call.limit, 1, LIMIT_MAX),
        ("wait_ms", call.wait_ms, 0, VISIBILITY_MS_MAX),
        ("visibility_ms", call.visibility_ms, 1, VISIBILITY_MS_MAX),
        ("max_attempts", 1 if call.max_attempts is None else call.max_attempts, 1, 1 << 31),
        ("max_bytes", call.max_bytes, 1, BYTES_MAX),
    ):
        check_range(name, value, low, high)
    if call.start is not None:
        check_start(call.start)
    if call.group is None:
        return
    check_group_name(call.group)
    check_member_name(call.member)
    if call.mode == "assigned" and not call.member:
        raise InvalidArgument("an assigned group gives each partition to one member: name yours (member)")
    if call.max_attempts is not None:
        check_topic_name(target_of(call.topic, call.dead_letter))


def check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} is {value}: it is from {low} to {high}")


def check_start(start: Start) -> None:
    if start.kind in ("latest", "earliest"):
        return
    if start.value is None:
        raise InvalidArgument(f"a start of kind {start.kind!r} needs a value")
    low = {"offset": FIRST_OFFSET, "after": 0}.get(start.kind)
    if low is not None and start.value < low:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: {start.kind} {start.value}")
