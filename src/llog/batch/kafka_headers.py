"""The headers of records between Kafka's form, framed by varints, and llog's (`columns.encode_headers`).

Often, all records have the same header keys, and values of the same lengths: such headers are converted at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llog.batch.columns import (
    COLUMN_BYTES_MAX,
    binary_array,
    binary_lengths,
    binary_offsets,
    binary_rows,
    decode_headers,
)
from llog.batch.varints import Numbers, read_one, write_one
from llog.errors import InvalidRecord
from llog.model import Header

_NULL: Final = b"\xff\xff\xff\xff"
Rows = npt.NDArray[np.uint8]


def all_from_kafka(sections: pa.BinaryArray, counts: Numbers) -> pa.BinaryArray:
    """Return the headers of every record as `from_kafka` does; `counts` are their numbers, 0 for an empty section."""
    rows = None if np.count_nonzero(counts != counts[0]) else _rows(sections)
    if rows is not None:
        first = rows[0].tobytes()
        converted = from_kafka(first, int(counts[0]))
        if to_kafka(converted) == write_one(int(counts[0])) + first:  # not if a number is wider than it needs to be
            spans = _value_spans(decode_headers(converted))
            found = _with_values(rows, converted, spans)
            if found is not None:
                return binary_rows(found)
    return binary_array(list(map(from_kafka, sections.to_pylist(), counts.tolist())))


def all_to_kafka(headers: pa.BinaryArray) -> pa.BinaryArray:
    """Return the headers of every record as `to_kafka` does."""
    rows = _rows(headers)
    if rows is not None:
        first = rows[0].tobytes()
        pairs = decode_headers(first)
        front = len(write_one(len(pairs)))
        spans = [(llog, front + kafka, length) for kafka, llog, length in _value_spans(pairs)]
        found = _with_values(rows, to_kafka(first), spans)
        if found is not None:
            return binary_rows(found)
    return binary_array([to_kafka(encoded) for encoded in headers.to_pylist()])


def from_kafka(section: bytes, count: int) -> bytes:
    """Return `count` headers of Kafka's form as llog's; raises `InvalidRecord` unless they fill the whole section."""
    parts: list[bytes] = []
    position = 0
    for _ in range(count):
        name, position = _read(section, position)
        if name is None:
            raise InvalidRecord("a record of a Kafka batch has a header without a key")
        try:
            name.decode()
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"header key {name[:80]!r} of a Kafka batch is not UTF-8") from error
        value, position = _read(section, position)
        parts += (len(name).to_bytes(4, "little"), name)
        parts += (_NULL,) if value is None else (len(value).to_bytes(4, "little"), value)
    if position != len(section):
        raise InvalidRecord(f"a record of a Kafka batch has {len(section) - position} bytes after {count} headers")
    return b"".join(parts)


def to_kafka(encoded: bytes) -> bytes:
    """Return headers of llog's form as Kafka's, with their number in front."""
    headers = decode_headers(encoded)
    parts = [write_one(len(headers))]
    for key, value in headers:
        name = key.encode()
        parts += (write_one(len(name)), name)
        parts += (write_one(-1),) if value is None else (write_one(len(value)), value)
    return b"".join(parts)


def _read(section: bytes, position: int) -> tuple[bytes | None, int]:
    length, start = read_one(section, position)
    end = start + length
    if length < -1 or end > len(section):
        raise InvalidRecord(f"a record of a Kafka batch has a header of {length} bytes, which exceed the record")
    return (None, start) if length == -1 else (section[start:end], end)


def _rows(sections: pa.BinaryArray) -> Rows | None:
    """Return sections of one length, which is not 0, as the rows of a matrix."""
    lengths = binary_lengths(sections)
    length = int(lengths[0])
    if not length or np.count_nonzero(lengths != length):
        return None
    start = int(binary_offsets(sections)[0])
    return np.frombuffer(sections.buffers()[2], np.uint8, length * len(lengths), start).reshape(-1, length)


def _value_spans(headers: Sequence[Header]) -> list[tuple[int, int, int]]:
    """Return of each value its position in Kafka's form, without the number of headers, and in llog's, and its
    length.
    """
    spans: list[tuple[int, int, int]] = []
    kafka = llog = 0
    for key, value in headers:
        name = key.encode()
        length = 0 if value is None else len(value)
        kafka += len(write_one(len(name))) + len(name) + len(write_one(length))  # a null's -1 has one byte, like 0
        llog += 4 + len(name) + 4
        spans.append((kafka, llog, length))
        kafka += length
        llog += length
    return spans


def _with_values(rows: Rows, converted: bytes, spans: Sequence[tuple[int, int, int]]) -> Rows | None:
    """Return for each row the headers `converted` of the first one with the values of its own, which move from the
    first to the second position of each span; None unless the rows differ only in their values and fit into an array.
    """
    if len(rows) * len(converted) > COLUMN_BYTES_MAX:
        return None
    framing = np.ones(rows.shape[1], np.bool_)
    found = np.tile(np.frombuffer(converted, np.uint8), (len(rows), 1))
    for source, target, length in spans:
        framing[source : source + length] = False
        found[:, target : target + length] = rows[:, source : source + length]
    return None if np.count_nonzero(rows[:, framing] != rows[0, framing]) else found
