"""Every key of a keyed log's SlateDB database, and the small values under them: no other module spells a key.

All numbers are big-endian, so that keys sort as the numbers do. Every key begins with the version, 1; types must stay
stable.

| type | key after `version u8 | type u8` | value | written |
| --- | --- | --- | --- | --- |
| 0x00 format marker | | `llog-keyed` `| format u32` | once, when the database is made |
| 0x01 entry | `segment_id u64 | key TerminatedBytes | last sequence u64` | a run (`keyed/runs.py`) | by each append, one for each run |
| 0x02 sequence block | | `base u64 | size u64`: the last block reserved | before any sequence of it is handed out |
| 0x03 SegmentMeta | `segment_id u64` | `start_seq u64 | start_time_ms i64 | user metadata …` | when a segment starts and is sealed |
| 0x04 listing entry | `segment_id u64 | key` (raw, up to the end) | empty | with the first record of a key in a segment |
| 0x05 log state | | `first segment u64 | active segment u64 |` totals of the active one | by each append, seal and deletion |
| 0x06 segment totals | `segment_id u64` | `end_seq u64 | records u64 | bytes u64 | append_ms i64` | when a segment is sealed |
| 0x07 deletion mark | `segment_id u64` | empty | from the moment a segment is deleted until the last of its entries is gone |
| 0x08 log id | | the id of the log whose metadata store records who writes this one | in a bucket, by the first writer that has one |

TerminatedBytes: 00 becomes 01 01, 01 becomes 01 02, and 00 ends it. So keys sort as their bytes do, a shorter key
before those that it is a prefix of, and the keys with a prefix are the range from its escaped bytes to their increment.
"""  # noqa: E501

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from llog.errors import CorruptBatch, WrongStore

VERSION: Final = 1
FORMAT: Final = 1
"""The format of the values: a database of a higher format is not opened."""

MARKER: Final = 0x00
ENTRY: Final = 0x01
SEQUENCE_BLOCK: Final = 0x02
SEGMENT_META: Final = 0x03
LISTING: Final = 0x04
STATE: Final = 0x05
SEGMENT_TOTALS: Final = 0x06
DELETION_MARK: Final = 0x07
LOG_ID: Final = 0x08

MARKER_KEY: Final = bytes((VERSION, MARKER))
SEQUENCE_BLOCK_KEY: Final = bytes((VERSION, SEQUENCE_BLOCK))
STATE_KEY: Final = bytes((VERSION, STATE))
LOG_ID_KEY: Final = bytes((VERSION, LOG_ID))
BEYOND_KEYS: Final = bytes((VERSION + 1,))
"""Keys from here on belong to a newer version."""

_NAME: Final = b"llog-keyed"
_SEGMENT: Final = struct.Struct(">BBQ")
_SEQUENCE: Final = struct.Struct(">Q")
_PAIR: Final = struct.Struct(">QQ")
_META: Final = struct.Struct(">Qq")
_TOTALS: Final = struct.Struct(">QQQq")

SEGMENT_BYTES: Final = _SEGMENT.size


class SegmentMeta(NamedTuple):
    """SegmentMeta: where and when a segment starts, and the user metadata that was attached when it was sealed."""

    start_seq: int
    start_time_ms: int
    user_meta: bytes | None


class SegmentTotals(NamedTuple):
    """The sequence after a segment's last record, its records, its bytes of keys and values, and the time of its last
    append.
    """

    end_seq: int
    records: int
    size: int
    append_ms: int


class LogState(NamedTuple):
    """The ids of the first and the active segment, and the active one's totals. One read of it shows any change."""

    first_id: int
    active_id: int
    totals: SegmentTotals


def escape(key: bytes) -> bytes:
    """Return TerminatedBytes without the terminator, which is what all keys with a prefix begin with."""
    return key.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01")


def unescape(data: bytes) -> bytes:
    key = data.replace(b"\x01\x01", b"\x00").replace(b"\x01\x02", b"\x01")
    if escape(key) != data:
        raise CorruptBatch(f"a key has invalid escaped bytes {data[:40].hex()}: the database is damaged")
    return key


def segment_key(kind: int, segment_id: int) -> bytes:
    """Return a whole key of the types 0x03, 0x06 and 0x07; of 0x01 and 0x04, the prefix of a segment's keys."""
    return _SEGMENT.pack(VERSION, kind, segment_id)


def segment_of(key: bytes) -> int:
    return int(_SEGMENT.unpack_from(key)[2])


def entry_prefix(segment_id: int, key: bytes) -> bytes:
    """Return the prefix of all entries of one log key in one segment, terminator included."""
    return _SEGMENT.pack(VERSION, ENTRY, segment_id) + escape(key) + b"\x00"


def sequence_suffix(sequence: int) -> bytes:
    return _SEQUENCE.pack(sequence)


def entry_parts(key: bytes) -> tuple[bytes, int]:
    """Return the escaped log key and the last sequence in an entry's key."""
    return key[SEGMENT_BYTES:-9], int(_SEQUENCE.unpack_from(key, len(key) - 8)[0])


def filter_length(key: bytes) -> int:
    """Return the length of the part of an entry's key, or of a scan's prefix, that the bloom filter covers: up to the
    terminator; 0 for other keys.
    """
    return key.find(0, SEGMENT_BYTES) + 1 if key[1:2] == b"\x01" else 0


def listing_key(segment_id: int, key: bytes) -> bytes:
    return _SEGMENT.pack(VERSION, LISTING, segment_id) + key


def listed_key(key: bytes) -> bytes:
    return key[SEGMENT_BYTES:]


def after_prefix(prefix: bytes) -> bytes:
    """Return the lowest bytes above everything that begins with `prefix`; the version byte is never FF."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes((kept[-1] + 1,))


def marker_value() -> bytes:
    return _NAME + FORMAT.to_bytes(4, "big")


def check_marker(value: bytes | None, where: str) -> None:
    """Raise `WrongStore` unless the marker names a format that this version can read."""
    if value is None or value[: len(_NAME)] != _NAME or len(value) != len(_NAME) + 4:
        raise WrongStore(f"{where} is a SlateDB database, but not a keyed log of llog: use another address")
    found = int.from_bytes(value[len(_NAME) :], "big")
    if found != FORMAT:
        raise newer_format_error(where, f"format {found}")


def newer_format_error(where: str, what: str) -> WrongStore:
    return WrongStore(
        f"{where} was written by a newer version of llog ({what}; this one knows format {FORMAT}): upgrade llog"
    )


def block_value(base: int, size: int) -> bytes:
    return _PAIR.pack(base, size)


def block_end(value: bytes) -> int:
    """Return the first sequence that was never reserved."""
    base, size = _fields(_PAIR, value, "sequence block")
    return base + size


def meta_value(meta: SegmentMeta) -> bytes:
    return _META.pack(meta.start_seq, meta.start_time_ms) + (meta.user_meta or b"")


def decode_meta(value: bytes) -> SegmentMeta:
    start_seq, start_time_ms = _fields(_META, value[: _META.size], "SegmentMeta")
    return SegmentMeta(start_seq, start_time_ms, value[_META.size :] or None)


def totals_value(totals: SegmentTotals) -> bytes:
    return _TOTALS.pack(*totals)


def decode_totals(value: bytes) -> SegmentTotals:
    return SegmentTotals(*_fields(_TOTALS, value, "segment totals"))


def state_value(state: LogState) -> bytes:
    return _PAIR.pack(state.first_id, state.active_id) + totals_value(state.totals)


def decode_state(value: bytes) -> LogState:
    first_id, active_id = _fields(_PAIR, value[: _PAIR.size], "log state")
    return LogState(first_id, active_id, decode_totals(value[_PAIR.size :]))


def _fields(layout: struct.Struct, value: bytes, what: str) -> tuple[int, ...]:
    if len(value) != layout.size:
        raise CorruptBatch(f"a {what} record has {len(value)} bytes, not {layout.size}: the database is damaged")
    return layout.unpack(value)
