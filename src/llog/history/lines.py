"""The lines of a history: one JSON object each. A line when an operation begins, another one when it ends.

Whatever kills the process leaves whole lines and at most one that is cut off. An operation without an end may have
happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from llog.batch.columns import Columns, columns_of
from llog.model import Record

FORMAT: Final = 1

Hash = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
"""64 bits of a record: equal for equal records. The checker compares them and computes none."""
Offset = Annotated[int, Meta(ge=1, lt=1 << 62)]
Nanoseconds = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Outcome(StrEnum):
    """Of an append: OK, it happened; FAILED, it did not and never will; UNKNOWN, it may have happened or happen yet."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="line", omit_defaults=True, forbid_unknown_fields=True
):
    pass


class Process(_Line, frozen=True, kw_only=True, tag="process"):
    """Begins the lines of one process. Numbers of operations start again after it; what was under way before has no
    end.
    """

    format: int
    process: str
    machine: str
    """Processes with the same one share a clock."""
    wall_ns: Nanoseconds
    """Time since 1970 when the clock that all other lines are about showed `clock_ns`."""
    clock_ns: Nanoseconds


class _Begin(_Line, frozen=True, kw_only=True):
    op: Number
    topic: str
    partition: Number
    start_ns: Nanoseconds
    """Taken before the operation began."""
    via: str = ""
    """The broker that was asked; none: the operation ran in this process."""


class ProducerKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What makes a repeated append the same one: repeated with it, nothing is appended twice."""

    id: str
    epoch: Number = 0
    sequence: Number


class Append(_Begin, frozen=True, kw_only=True, tag="append"):
    hashes: Annotated[list[Hash], Meta(min_length=1)]
    producer: ProducerKey | None = None


class Read(_Begin, frozen=True, kw_only=True, tag="read"):
    """Records from `offset` on."""

    offset: Offset
    stop: Offset | None = None
    max_bytes: Number | None = None


class Bounds(_Begin, frozen=True, kw_only=True, tag="bounds"):
    """The log start and the next offset, without records."""


class Trim(_Begin, frozen=True, kw_only=True, tag="trim"):
    """Removes records from the front: those below `before_offset`, or as retention decides."""

    before_offset: Offset | None = None


class End(_Line, frozen=True, kw_only=True, tag="end"):
    """How operation `op` ended. `start_offset` and `end_offset` are an append's; the rest is what a reader was told."""

    op: Number
    end_ns: Nanoseconds
    """Taken after the answer was there."""
    outcome: Outcome
    error: str = ""
    """The code of the error."""
    start_offset: Offset | None = None
    end_offset: Offset | None = None
    batches: list[tuple[Offset, Annotated[list[Hash], Meta(min_length=1)]]] = []
    """Runs of consecutive records, each with the offset of its first."""
    log_start_offset: Offset | None = None
    next_offset: Offset | None = None
    """The next offset as the answer said; absent where it said none."""


Begin = Append | Read | Bounds | Trim
Line = Process | Append | Read | Bounds | Trim | End

decoder: Final = msgspec.json.Decoder(Line)


def hashes_of(records: Sequence[Record] | Columns) -> list[str]:
    """One hash per record, of its payload, key and headers; not of its timestamp, which an append may set."""
    columns = records if isinstance(records, Columns) else columns_of(records)
    values = columns.values.to_pylist()
    if columns.keys is None and columns.headers is None:
        return [_hash(value, None, b"") for value in values]
    keys = [None] * columns.count if columns.keys is None else columns.keys.to_pylist()
    headers = [b""] * columns.count if columns.headers is None else columns.headers.to_pylist()
    return [_hash(*parts) for parts in zip(values, keys, headers, strict=True)]


def _hash(payload: bytes | None, key: bytes | None, headers: bytes | None) -> str:
    if payload is not None and key is None and not headers:
        return blake2b(payload, digest_size=8).hexdigest()
    parts = msgspec.msgpack.encode((payload, key, headers or b""))
    return blake2b(parts, digest_size=8, person=b"llog record").hexdigest()
