"""The header of change events, and which records delete their key. No I/O.

Records that describe a change of a table have the header `llog-event`, little-endian:

 0  1  version 1            4  4  zero
 1  1  op                   8  8  message id (i64)
 2  1  payload mode        16  …  source table, UTF-8
 3  1  zero
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llog.batch.columns import Columns, binary_offsets

HEADER: Final = "llog-event"
VERSION: Final = 1
FIXED: Final = struct.Struct("<BBBBIq")
_NAME: Final = HEADER.encode()
START: Final = len(_NAME).to_bytes(4, "little") + _NAME
VALUE: Final = len(START) + 4
"""The position of the header's value, after its name and its length."""
TABLE: Final = VALUE + FIXED.size


class Op(IntEnum):
    """The change of a row."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3


class PayloadMode(IntEnum):
    """What an event contains of its row: the primary key, all columns, or the key and the columns that changed."""

    KEY = 1
    FULL = 2
    DIFF = 3


_STATES: Final = (PayloadMode.KEY, PayloadMode.FULL)
"""Payload modes whose newest event describes the whole row, so that the event of a deleted row deletes the key."""


def deletion_mask(columns: Columns) -> npt.NDArray[np.bool_]:
    """Return which records delete their key, for key compaction: those without a value, and events of a DELETE with
    payload `key` or `full`.

    An event counts only if `llog-event` is its first header, as in the events that routes make.
    """
    found: npt.NDArray[np.bool_] = columns.values.is_null().to_numpy(zero_copy_only=False)
    return found if columns.headers is None or not columns.count else found | _deleting_events(columns.headers)


def _deleting_events(headers: pa.BinaryArray) -> npt.NDArray[np.bool_]:
    offsets = binary_offsets(headers)
    found = np.diff(offsets) >= TABLE
    if not found.any():
        return found
    data = np.frombuffer(headers.buffers()[2], np.uint8)
    fronts = data[offsets[:-1][found, None] + np.arange(VALUE + 3)]
    lengths = np.ascontiguousarray(fronts[:, len(START) : VALUE]).view("<i4").reshape(-1)
    version, op, mode = fronts[:, VALUE:].T
    found[found] = (
        (fronts[:, : len(START)] == np.frombuffer(START, np.uint8)).all(axis=1)
        & (lengths >= FIXED.size)
        & (version == VERSION)
        & (op == Op.DELETE)
        & np.isin(mode, _STATES)
    )
    return found
