"""What the tests of the segment log share: records, a writer that dies as a killed process does, and damage to
files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import pytest

from llog.batch.columns import Columns, columns_of, records_of, stamp
from llog.engines.disk.format.bodies import encode_bodies, encode_body
from llog.engines.disk.format.frames import Body
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.log.writer import AppendedRange, EncodedAppend, SegmentWriter
from llog.errors import LlogError
from llog.log.producers import Producer
from llog.model import Record


class Damage(StrEnum):
    """What a power cut does to bytes that were not synced."""

    NONE = "none"
    CUT = "cut"
    ZEROS = "zeros"
    HOLE = "hole"
    TWICE = "twice"


class Faults:
    """Lets the call number `step` of those that change files fail, as on a full disk; `forever`: all after it, too.

    `interrupts`: as Ctrl-C does, once the call is done.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, step: int, *, forever: bool = False, interrupts: bool = False
    ) -> None:
        self.met = False
        self._left = step
        self._forever = forever
        self._interrupts = interrupts
        for name in ("open", "close", "fsync", "fdatasync", "ftruncate", "rename", "pwritev", "unlink"):
            patch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            self._left -= 1
            if self._left == -1 or (self._left < 0 and self._forever):
                self.met = True
                if self._interrupts:
                    real(*arguments, **named)
                    raise KeyboardInterrupt
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **named)

        return call


def body(payloads: Sequence[bytes], append_ms: int = 1, timestamps: Sequence[int | None] = ()) -> Body:
    return encode_body(_columns(payloads, append_ms, timestamps))


def _columns(payloads: Sequence[bytes], append_ms: int, timestamps: Sequence[int | None]) -> Columns:
    times = timestamps or [None] * len(payloads)
    records = [Record(payload=each, timestamp=ms) for each, ms in zip(payloads, times, strict=True)]
    return stamp(columns_of(records), append_ms)


def append(
    writer: SegmentWriter,
    payloads: Sequence[bytes],
    append_ms: int = 1,
    *,
    timestamps: Sequence[int | None] = (),
    producer: Producer | None = None,
) -> AppendedRange:
    """One append that must work."""
    columns, options = _columns(payloads, append_ms, timestamps), writer.options
    bodies = encode_bodies(columns, options.codec, options.frame_bytes)
    (result,) = writer.commit([EncodedAppend(bodies, producer)], append_ms)
    if isinstance(result, LlogError):
        raise result
    return result


def kill(writer: SegmentWriter) -> None:
    """What the end of a process does: descriptors close, nothing is written."""
    writer.is_closed = True
    writer.active.close()
    os.close(writer._tail)
    os.close(writer._lock)


def damage(path: Path, kind: Damage, start: int, length: int | None = None) -> None:
    """Does `kind` to the bytes of a file from `start` on: a `HOLE` are `length` of them, and `TWICE` repeats the last
    `length`.
    """
    data = path.read_bytes()
    start = min(start, len(data))
    if kind is Damage.CUT:
        data = data[:start]
    elif kind is Damage.ZEROS:
        data = data[:start] + bytes(len(data) - start)
    elif kind is Damage.HOLE:
        end = min(start + (length or 8), len(data))
        data = data[:start] + bytes(end - start) + data[end:]
    elif kind is Damage.TWICE:
        data += data[len(data) - (length or len(data) - start) :]
    path.write_bytes(data)


def read_all(reader: SegmentReader, offset: int | None = None, max_bytes: int = 1 << 20) -> dict[int, bytes]:
    """Every record from `offset` (or the log start) on, by offset."""
    bounds = reader.bounds_now()
    at = bounds.log_start_offset if offset is None else offset
    found: dict[int, bytes] = {}
    while at < bounds.next_offset:
        parts = reader.read_now(at, max_bytes)
        assert parts
        for start, columns in parts:
            assert start >= at
            found.update(payloads(start, columns))
            at = start + columns.count
    return found


def payloads(start: int, columns: Columns) -> dict[int, bytes]:
    return {record.offset or 0: record.payload or b"" for record in records_of(columns, start)}
