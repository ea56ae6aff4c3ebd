"""The lines of a history: one JSON object when an operation begins, and another when it ends.

A process that is killed leaves whole lines and at most one that is cut off. An operation without an end may have
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
"""A 64-bit hash of a record, equal for equal records. The checker compares hashes and computes none."""
Offset = Annotated[int, Meta(ge=1, lt=1 << 62)]
Nanoseconds = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Outcome(StrEnum):
    """Whether an operation happened: OK, it did; FAILED, it did not and never will; UNKNOWN, it may have or may yet."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="line", omit_defaults=True, forbid_unknown_fields=True
):
    pass


class Process(_Line, frozen=True, kw_only=True, tag="process"):
    """The first line of a process. The numbers of operations start again after it; operations that were under way
    before it have no end.
    """

    format: int
    process: str
    machine: str
    """Processes with the same machine share a clock."""
    wall_ns: Nanoseconds
    """The time since 1970 when the clock of all other lines showed `clock_ns`."""
    clock_ns: Nanoseconds


class _Begin(_Line, frozen=True, kw_only=True):
    op: Number
    topic: str
    partition: Number
    start_ns: Nanoseconds
    """The time before the operation began."""
    via: str = ""
    """The broker that served the operation; empty if it ran in this process."""


class ProducerKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The identity of an append: an append that is repeated with it is not appended twice."""

    id: str
    epoch: Number = 0
    sequence: Number


class Append(_Begin, frozen=True, kw_only=True, tag="append"):
    hashes: Annotated[list[Hash], Meta(min_length=1)]
    producer: ProducerKey | None = None


class Read(_Begin, frozen=True, kw_only=True, tag="read"):
    """A read of the records from `offset` on."""

    offset: Offset
    stop: Offset | None = None
    max_bytes: Number | None = None


class Bounds(_Begin, frozen=True, kw_only=True, tag="bounds"):
    """A read of the log start and the next offset, without records."""


class Trim(_Begin, frozen=True, kw_only=True, tag="trim"):
    """The removal of the records below `before_offset`, or of those that retention chooses."""

    before_offset: Offset | None = None


class End(_Line, frozen=True, kw_only=True, tag="end"):
    """How operation `op` ended. An append has `start_offset` and `end_offset`; the other fields answer a reader."""

    op: Number
    end_ns: Nanoseconds
    """The time after the answer arrived."""
    outcome: Outcome
    error: str = ""
    """The code of the error."""
    start_offset: Offset | None = None
    end_offset: Offset | None = None
    batches: list[tuple[Offset, Annotated[list[Hash], Meta(min_length=1)]]] = []
    """Runs of consecutive records, each with the offset of its first record."""
    log_start_offset: Offset | None = None
    next_offset: Offset | None = None
    """The next offset in the answer; absent if the answer had none."""


Begin = Append | Read | Bounds | Trim
Line = Process | Append | Read | Bounds | Trim | End

decoder: Final = msgspec.json.Decoder(Line)


def hashes_of(records: Sequence[Record] | Columns) -> list[str]:
    """Return one hash per record, of its payload, key and headers; not of its timestamp, which an append may set."""
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
