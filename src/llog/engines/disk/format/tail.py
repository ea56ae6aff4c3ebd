"""Two small files beside the segments: how far readers in other processes may read, and where the log starts.

`tail`, 32 bytes, overwritten in place after each commit and never synced: "LLT1" · u32 crc32c of bytes 8.. · u64 next
offset · u64 log start · u64 boot number. The boot number identifies this run of the machine: a tail from an earlier run
may be older than the log.

`log-start`, 16 bytes, replaced durably: "LLO1" · u32 crc32c of bytes 8.. · u64 log start. All numbers are
little-endian.
"""

from __future__ import annotations

import os
import struct
from functools import cache
from pathlib import Path
from typing import Final

from awscrt.checksums import crc32c

from llog.base.durable import FILE_MODE, boot_id
from llog.engines.disk.format.files import LOG_START, TAIL, read_small_file, replace_small_file
from llog.errors import CorruptBatch
from llog.log.engine import Bounds

TAIL_MAGIC: Final = b"LLT1"
START_MAGIC: Final = b"LLO1"
TAIL_BYTES: Final = 32
_TAIL: Final = struct.Struct("<QQQ")
_READ_ATTEMPTS: Final = 20


@cache
def boot() -> int:
    """Return a number that identifies this run of the machine; 0 if the system has none."""
    try:
        return int((boot_id() or "0").replace("-", "")[:16], 16)
    except ValueError:
        return 0


def pack_tail(bounds: Bounds, boot_number: int) -> bytes:
    content = _TAIL.pack(bounds.next_offset, bounds.log_start_offset, boot_number)
    checksum: bytes = crc32c(content).to_bytes(4, "little")
    return TAIL_MAGIC + checksum + content


def unpack_tail(data: bytes, boot_number: int) -> Bounds | None:
    """Return the bounds in a tail file; None if it is torn, damaged, or from before the last start of the machine."""
    if len(data) != TAIL_BYTES or data[:4] != TAIL_MAGIC or crc32c(data[8:]) != int.from_bytes(data[4:8], "little"):
        return None
    next_offset, log_start, written_in = _TAIL.unpack_from(data, 8)
    return Bounds(log_start, next_offset) if written_in == boot_number else None


def open_tail(directory: Path) -> int:
    return os.open(directory / TAIL, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def write_tail(descriptor: int, packed: bytes) -> None:
    os.pwrite(descriptor, packed, 0)


def read_tail(descriptor: int) -> Bounds | None:
    """Return the bounds that the writer published last; None if the file is not valid. A read that raced a write is
    repeated.
    """
    data = b""
    for _ in range(_READ_ATTEMPTS):
        before, data = data, os.pread(descriptor, TAIL_BYTES, 0)
        found = unpack_tail(data, boot())
        if found is not None or data == before:
            return found
    return None


def put_log_start(directory: Path, offset: int) -> None:
    content = offset.to_bytes(8, "little")
    replace_small_file(directory / LOG_START, START_MAGIC + crc32c(content).to_bytes(4, "little") + content)


def read_log_start(directory: Path) -> int | None:
    """Return the stored log start; None if none was ever stored. Raises `CorruptBatch` if the file, which is only ever
    replaced as a whole, is damaged.
    """
    data = read_small_file(directory / LOG_START)
    if data is None:
        return None
    if len(data) != 16 or data[:4] != START_MAGIC or crc32c(data[8:]) != int.from_bytes(data[4:8], "little"):
        raise CorruptBatch(
            f"{directory / LOG_START} is damaged: remove it, and the log starts with its first segment again"
        )
    return int.from_bytes(data[8:], "little")
