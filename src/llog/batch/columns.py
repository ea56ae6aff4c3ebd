"""Records of one partition as Arrow columns: the form that appends take, batches store, and reads return.

Only `columns_of`, `records_of` and the conversions of headers loop over records in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llog.errors import CorruptBatch, InvalidArgument, RecordTooLarge
from llog.model import Header, Record

Buffer = bytes | bytearray | memoryview
Runs = tuple[tuple[int, int], ...]

COLUMN_BYTES_MAX: Final = (1 << 31) - 1
"""Arrow's binary arrays have 32-bit offsets."""

TIMESTAMP_MS_MAX: Final = (1 << 63) // 1000 - 1
"""The limit before and after 1970: readers that count microseconds in 64 bits, as Spark does, must be able to hold it.
"""

FEW: Final = 16
"""Up to this many records or rows, a Python loop is faster: a call into Arrow that was not made for a while costs about
50 µs.
"""

HEADERS_TYPE: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


class Columns(NamedTuple):
    """Records of one partition as Arrow columns, all of one length.

    Timestamps are effective: the create time, or the append time where none was given (null until `stamp`).
    """

    values: pa.BinaryArray
    """A null value marks its key as deleted."""
    keys: pa.BinaryArray | None
    """Null where a record has no key; None if no record has one."""
    timestamps: pa.Int64Array | None
    """In ms; None if every record has the append time of its run."""
    headers: pa.BinaryArray | None
    """One encoded list per record (`encode_headers`), empty where a record has none; None if no record has any."""
    append_runs: Runs
    """((record count, append time in ms), …), which cover all records; () before the append."""

    @property
    def count(self) -> int:  # type: ignore[override]  # hides tuple.count, which nobody needs here
        return len(self.values)


def columns_of(records: Sequence[Record]) -> Columns:
    """Return records as columns without append times. Offsets of the records are ignored: an append assigns new ones.

    Raises `InvalidArgument` if a part of a record has a wrong type or is out of bounds.
    """
    keys = [record.key for record in records]
    timestamps = [record.timestamp for record in records]
    headers = [encode_headers(record.headers) for record in records]
    return Columns(
        values=_bytes_array("payload", [record.payload for record in records]),
        keys=_bytes_array("key", keys) if any(key is not None for key in keys) else None,
        timestamps=times_of(timestamps) if any(ms is not None for ms in timestamps) else None,
        headers=binary_array(headers) if any(headers) else None,
        append_runs=(),
    )


def stamp(columns: Columns, append_ms: int) -> Columns:
    """Return the records with the append time `append_ms`, which becomes the timestamp of those that have none.

    Raises `InvalidArgument` if a timestamp is farther from 1970 than `TIMESTAMP_MS_MAX`.
    """
    values, keys, timestamps, headers, _ = columns
    if timestamps is not None:
        check_times(timestamps)
        if timestamps.null_count:
            timestamps = None if timestamps.null_count == len(timestamps) else timestamps.fill_null(append_ms)
    count = len(values)
    return Columns(values, keys, timestamps, headers, ((count, append_ms),) if count else ())


def concat(parts: Sequence[Columns]) -> Columns:
    """Join the parts, all of them stamped or none. Neighbouring runs with the same append time become one.

    Raises `RecordTooLarge` if a column would not fit into one Arrow array.
    """
    parts = [part for part in parts if part.count]
    if not parts:
        return columns_of(())
    if len(parts) == 1:
        return parts[0]
    if len({bool(part.append_runs) for part in parts}) > 1:
        raise InvalidArgument("columns that were stamped with an append time cannot be joined with some that were not")
    return Columns(
        values=_concat_binary([part.values for part in parts]),
        keys=_concat_optional([(part.keys, part.count) for part in parts], None),
        timestamps=_concat_timestamps(parts),
        headers=_concat_optional([(part.headers, part.count) for part in parts], b""),
        append_runs=_merge_runs(chain.from_iterable(part.append_runs for part in parts)),
    )


def slice_columns(columns: Columns, start: int, stop: int) -> Columns:
    """Return the records [start, stop), counted from 0, sharing the memory of `columns`."""
    if not 0 <= start <= stop <= columns.count:
        raise InvalidArgument(f"records {start} to {stop} are outside of the {columns.count} records")
    if start == 0 and stop == columns.count:
        return columns
    length = stop - start
    runs = []
    position = 0
    for count, append_ms in columns.append_runs:
        kept = min(stop, position + count) - max(start, position)
        if kept > 0:
            runs.append((kept, append_ms))
        position += count
    return Columns(
        values=columns.values.slice(start, length),
        keys=None if columns.keys is None else columns.keys.slice(start, length),
        timestamps=None if columns.timestamps is None else columns.timestamps.slice(start, length),
        headers=None if columns.headers is None else columns.headers.slice(start, length),
        append_runs=tuple(runs),
    )


def cut_columns(columns: Columns, edges: Sequence[int]) -> list[Columns]:
    """Return `slice_columns` between each of `edges`, which go from 0 to the count, and the next. Reads the append runs
    only once.
    """
    values, keys, timestamps, headers, append_runs = columns
    runs = iter(append_runs)
    left = append_ms = 0
    found = []
    for start, stop in pairwise(edges):
        length = wanted = stop - start
        kept = []
        while wanted:
            if not left:
                left, append_ms = next(runs)
            taken = min(left, wanted)
            kept.append((taken, append_ms))
            left -= taken
            wanted -= taken
        found.append(
            Columns(
                values=values.slice(start, length),
                keys=None if keys is None else keys.slice(start, length),
                timestamps=None if timestamps is None else timestamps.slice(start, length),
                headers=None if headers is None else headers.slice(start, length),
                append_runs=tuple(kept),
            )
        )
    return found


def effective_timestamps(columns: Columns) -> pa.Int64Array:
    """Return the timestamp of every record, in ms."""
    if columns.timestamps is not None:
        return columns.timestamps
    return pa.array(append_times(columns), pa.int64())


def append_times(columns: Columns) -> npt.NDArray[np.int64]:
    """Return the append time of every record, in ms; raises `InvalidArgument` if they are not stamped."""
    if columns.count and not columns.append_runs:
        raise InvalidArgument("these records have no append time yet: stamp them first")
    runs = np.array(columns.append_runs, np.int64).reshape(-1, 2)
    return np.repeat(runs[:, 1], runs[:, 0])


def timestamp_bounds(columns: Columns) -> tuple[int, int]:
    """Return the lowest and highest effective timestamp of stamped, non-empty columns."""
    if columns.timestamps is None:
        runs = columns.append_runs
        if len(runs) == 1:
            return runs[0][1], runs[0][1]
        times = [append_ms for _, append_ms in runs]
        return min(times), max(times)
    bounds = pc.min_max(columns.timestamps)
    return bounds["min"].as_py(), bounds["max"].as_py()


def byte_size(columns: Columns) -> int:
    """Return the bytes of values, keys and encoded headers, without those that a format adds."""
    size = binary_size(columns.values)
    for array in (columns.keys, columns.headers):
        if array is not None:
            size += binary_size(array)
    return size


def binary_size(array: pa.BinaryArray) -> int:
    """Return the bytes of all values of a binary array."""
    if len(array) == 0:
        return 0
    if array.null_count:
        return pc.sum(pc.binary_length(array)).as_py() or 0
    return int(array.total_values_length)


def binary_offsets(array: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """Return the n + 1 offsets of a non-empty binary array into its data; those of a slice do not start at 0."""
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)


def binary_lengths(array: pa.BinaryArray) -> npt.NDArray[np.int64]:
    """Return the bytes of each value of a binary array; 0 where it is null."""
    if len(array) == 0:
        return np.zeros(0, np.int64)
    if array.null_count:
        found: npt.NDArray[np.int64] = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False)
        return found.astype(np.int64)
    return np.diff(binary_offsets(array)).astype(np.int64)


def record_sizes(columns: Columns) -> npt.NDArray[np.int64]:
    """Return the bytes of each record: value, key and headers."""
    sizes: npt.NDArray[np.int64] = np.zeros(columns.count, np.int64)
    for array in (columns.values, columns.keys, columns.headers):
        if array is not None:
            sizes += binary_lengths(array)
    return sizes


def count_fitting(columns: Columns, max_bytes: int, *, record_overhead: int = 0) -> tuple[int, int]:
    """Return how many of the first records fit into `max_bytes`, and their bytes; if none fits, 0 and the bytes of the
    first record.

    Each record counts for `record_overhead` bytes more than its value, key and headers.
    """
    size = byte_size(columns) + record_overhead * columns.count
    if size <= max_bytes:
        return columns.count, size
    if record_overhead:
        columns = slice_columns(columns, 0, min(columns.count, max_bytes // record_overhead + 1))
    ends = (record_sizes(columns) + record_overhead).cumsum()
    count = int(np.searchsorted(ends, max_bytes, side="right"))
    return count, int(ends[max(count, 1) - 1])


def binary_rows(rows: npt.NDArray[np.uint8]) -> pa.BinaryArray:
    """Return the rows of a matrix of bytes as the values of a binary array, without a copy."""
    count, width = rows.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(rows)])


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column of a table as one array; copies only if the column has several chunks."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def records_of(columns: Columns, first_offset: int) -> list[Record]:
    """Return one object per record of stamped columns, for reads so small that the cost does not matter."""
    count = columns.count
    keys = [None] * count if columns.keys is None else columns.keys.to_pylist()
    headers = [b""] * count if columns.headers is None else columns.headers.to_pylist()
    timestamps = effective_timestamps(columns).to_pylist()
    return [
        Record(payload=value, key=key, timestamp=ms, headers=decode_headers(encoded), offset=offset)
        for offset, (value, key, ms, encoded) in enumerate(
            zip(columns.values.to_pylist(), keys, timestamps, headers, strict=True), first_offset
        )
    ]


def encode_headers(headers: Sequence[Header]) -> bytes:
    """Encode each header as u32 length and UTF-8 bytes of its key, i32 length (-1: null) and bytes of its value."""
    if not headers:
        return b""
    parts: list[bytes] = []
    for header in headers:
        try:
            key, value = header
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"a header is {str(header)[:80]!r}, not a pair of a key and a value") from error
        if not isinstance(key, str):
            raise InvalidArgument(f"a header key is {type(key).__name__}, not str: {str(key)[:80]!r}")
        if value is not None and not isinstance(value, bytes):
            raise InvalidArgument(f"the value of header {key[:80]!r} is {type(value).__name__}, not bytes")
        try:
            name = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"header key {key!r} cannot be written as UTF-8") from error
        parts += (len(name).to_bytes(4, "little"), name)
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts += (len(value).to_bytes(4, "little"), value)
    return b"".join(parts)


def decode_headers(data: Buffer) -> tuple[Header, ...]:
    """Decode what `encode_headers` made; raises `CorruptBatch` for any other bytes."""
    if not data:
        return ()
    data = bytes(data)
    headers: list[Header] = []
    position = 0
    while position < len(data):
        length, position = _length_at(data, position)
        name = _bytes_at(data, position, length)
        position += length
        try:
            key = name.decode()
        except UnicodeDecodeError as error:
            raise CorruptBatch(f"header key {name[:80]!r} is not UTF-8") from error
        length, position = _length_at(data, position)
        if length == 0xFFFFFFFF:
            headers.append((key, None))
            continue
        headers.append((key, _bytes_at(data, position, length)))
        position += length
    return tuple(headers)


def headers_to_arrow(headers: pa.BinaryArray | None, count: int) -> pa.ListArray:
    """Return headers as list<struct<key: string, value: binary>>; the list is null where a record has no headers."""
    if headers is None:
        return pa.nulls(count, HEADERS_TYPE)
    keys: list[str] = []
    values: list[bytes | None] = []
    offsets = np.zeros(len(headers) + 1, np.int32)
    for i, encoded in enumerate(headers.to_pylist(), 1):
        for key, value in decode_headers(encoded or b""):
            keys.append(key)
            values.append(value)
        offsets[i] = len(keys)
    items = pa.StructArray.from_arrays(
        [pa.array(keys, pa.string()), binary_array(values)], fields=list(HEADERS_TYPE.value_type)
    )
    without = pa.array(offsets[1:] == offsets[:-1])
    return pa.ListArray.from_arrays(pa.array(offsets), items, mask=without)


def decode_arrow_headers(headers: pa.ChunkedArray) -> list[tuple[Header, ...]]:
    """Return the headers of each record of a column that `headers_to_arrow` made."""
    found: list[tuple[Header, ...]] = []
    for chunk in headers.chunks:
        if chunk.null_count == len(chunk):
            found += [()] * len(chunk)
            continue
        pairs = list(zip(*(part.to_pylist() for part in chunk.flatten().flatten()), strict=True))
        ends = np.cumsum(pc.fill_null(pc.list_value_length(chunk), 0).to_numpy()).tolist()
        found += (tuple(pairs[start:end]) for start, end in zip([0, *ends], ends, strict=False))
    return found


def headers_from_arrow(headers: pa.ListArray) -> pa.BinaryArray | None:
    """Encode a column like that of `headers_to_arrow`; a null list and an empty one both mean no headers."""
    encoded = []
    for items in headers.to_pylist():
        pairs = []
        for item in items or ():
            if item is None or item["key"] is None:
                raise InvalidArgument("a header has no key: give every header a key, or leave it out")
            pairs.append((item["key"], item["value"]))
        encoded.append(encode_headers(pairs))
    return binary_array(encoded) if any(encoded) else None


def _length_at(data: bytes, position: int) -> tuple[int, int]:
    return int.from_bytes(_bytes_at(data, position, 4), "little"), position + 4


def _bytes_at(data: bytes, position: int, length: int) -> bytes:
    if length > len(data) - position:
        raise CorruptBatch(f"headers of {len(data)} bytes end early: {length} bytes were expected at byte {position}")
    return data[position : position + length]


def binary_array(values: Sequence[bytes | None]) -> pa.BinaryArray:
    """Return values as an Arrow array; raises `RecordTooLarge` if they do not fit into one."""
    array = pa.array(values, pa.binary())
    if isinstance(array, pa.ChunkedArray):
        raise RecordTooLarge(
            f"{len(values)} records have more than {COLUMN_BYTES_MAX} bytes: append them in smaller groups"
        )
    return array


def _bytes_array(what: str, values: Sequence[bytes | None]) -> pa.BinaryArray:
    """Return values as an Arrow array; raises `InvalidArgument` for text, which Arrow would accept as bytes."""
    for kind in set(map(type, values)):
        if kind is not type(None) and not issubclass(kind, bytes):
            raise InvalidArgument(f"the {what} of a record is {kind.__name__}, not bytes")
    return binary_array(values)


def times_of(values: Sequence[int | None]) -> pa.Int64Array:
    """Return timestamps as an Arrow array, checked."""
    try:
        times = pa.array(values, pa.int64())
    except (OverflowError, pa.ArrowException) as error:
        raise InvalidArgument(f"a timestamp is not a number of milliseconds in 64 bits: {error}") from error
    check_times(times)
    return times


def check_times(times: pa.Int64Array) -> None:
    """Raise `InvalidArgument` if a timestamp is farther from 1970 than `TIMESTAMP_MS_MAX`."""
    bounds = pc.min_max(times)
    for ms in (bounds["min"].as_py(), bounds["max"].as_py()):
        if ms is not None and abs(ms) > TIMESTAMP_MS_MAX:
            raise InvalidArgument(
                f"a timestamp is {ms}: it is in milliseconds since 1970, and at most {TIMESTAMP_MS_MAX} either way"
            )


def _concat_binary(arrays: Sequence[Any]) -> pa.BinaryArray:
    size = sum(map(binary_size, arrays))
    if size > COLUMN_BYTES_MAX:
        raise RecordTooLarge(f"joined records have {size} bytes, more than {COLUMN_BYTES_MAX}: join fewer at a time")
    return pa.concat_arrays(arrays)


def _concat_optional(parts: Sequence[tuple[Any, int]], absent: bytes | None) -> pa.BinaryArray | None:
    if all(array is None for array, _ in parts):
        return None
    filler = pa.scalar(absent, pa.binary())
    return _concat_binary([pa.repeat(filler, count) if array is None else array for array, count in parts])


def _concat_timestamps(parts: Sequence[Columns]) -> pa.Int64Array | None:
    if all(part.timestamps is None for part in parts):
        return None
    return pa.concat_arrays(
        [
            effective_timestamps(p) if p.append_runs or p.timestamps is not None else pa.nulls(p.count, pa.int64())
            for p in parts
        ]
    )


def _merge_runs(runs: Iterator[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for count, append_ms in runs:
        if merged and merged[-1][1] == append_ms:
            merged[-1] = (merged[-1][0] + count, append_ms)
        else:
            merged.append((count, append_ms))
    return tuple(merged)
