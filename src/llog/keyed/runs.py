"""Runs: the records of one key from one append, as the value of one SlateDB entry. docs/keyed-format.md defines every
byte.

 0  1  format, 1                          16  8  sequence of the first record (u64)
 1  1  flags: 1 there are deltas          24  8  records of the key in the segment up to the last of this run (u64)
 2  2  zero                               32  8  append time, ms since 1970 (i64)
 4  4  crc32c of all other bytes          40  …  flag 1: deltas u32[n], sequence minus first sequence
 8  4  record count n (u32, >= 1)                lengths u32[n] of the values
12  4  zero                                      values, one after the other

All numbers are little-endian. Without deltas, the sequences are dense. The entry's key carries the last sequence, so
the first entry at or after a sequence holds it; and the cumulative count gives the number of records before a run
without reading them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from awscrt.checksums import crc32c

from llog.batch.columns import COLUMN_BYTES_MAX, binary_offsets, binary_size
from llog.errors import CorruptBatch
from llog.keyed.encoding import entry_prefix, listing_key, sequence_suffix

Integers = npt.NDArray[np.int64]

HEAD_BYTES: Final = 40
RUN_BYTES_MAX: Final = 1 << 20
"""Longer runs are cut, so that reading one record never costs much more than this. A single longer value is a run of
its own.
"""
RUN_RECORDS_MAX: Final = 1 << 16
RUN_KEY_BYTES_MAX: Final = 64 << 20
"""The limit of a run's key bytes, counted with each of its records, as an Arrow column repeats them."""

DELTAS: Final = 1
_FORMAT: Final = 1
_CHECKED: Final = struct.Struct("<IIQQq")
_HEAD: Final = np.dtype(
    [
        ("format", "u1"),
        ("flags", "u1"),
        ("zero", "<u2"),
        ("crc", "<u4"),
        ("count", "<u4"),
        ("zero2", "<u4"),
        ("first", "<u8"),
        ("total", "<u8"),
        ("append_ms", "<i8"),
    ]
)
_PLAIN: Final = bytes((_FORMAT, 0, 0, 0))
_WITH_DELTAS: Final = bytes((_FORMAT, DELTAS, 0, 0))

SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("append_time", pa.timestamp("ms", "UTC"), nullable=False),
    ]
)
"""The schema of the batches that scans yield."""


class WriteBatch(Protocol):
    """A write batch that takes the entries of an append."""

    def put(self, key: bytes, value: bytes) -> None: ...


class GroupedRecords(NamedTuple):
    """The records of one append, grouped by key; those of a key stay in order. `positions` count from the start of the
    append.
    """

    keys: list[bytes]
    """The key of each run; neighbours have the same key if a run was cut."""
    starts: Integers
    """The row where each run begins, and, at the end, the number of records."""
    positions: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint32]
    ends: Integers
    """Where each value ends in `data`, preceded by where the first begins."""
    data: memoryview
    size: int
    """Bytes of all keys and values, a key counted with each of its records."""

    @property
    def count(self) -> int:  # type: ignore[override]  # hides tuple.count, which nobody needs here
        return len(self.positions)


class Run(NamedTuple):
    """One run of an append: its key, its first and last position in the append, its number of records, and the bytes
    that are stored after the head.
    """

    key: bytes
    first: int
    last: int
    records: int
    deltas: bytes
    body: bytes


def group_by_key(keys: pa.BinaryArray, values: pa.BinaryArray) -> GroupedRecords:
    """Group the records of an append, which has some, and no nulls. Records that already lie key by key are not
    copied.
    """
    encoded = keys.dictionary_encode()
    codes = encoded.indices.to_numpy()
    distinct: list[bytes] = encoded.dictionary.to_pylist()
    positions = np.arange(len(codes), dtype=np.uint32)
    if len(distinct) > 1 and (codes[1:] < codes[:-1]).any():
        order = np.argsort(codes, kind="stable")
        codes, positions = codes[order], order.astype(np.uint32)
        values = values.take(pa.array(order))
    ends = binary_offsets(values).astype(np.int64)
    begins = np.flatnonzero(np.diff(codes, prepend=-1))
    starts = np.append(begins, len(codes))
    size = int(ends[-1] - ends[0]) + binary_size(keys)
    limits = _record_limits(distinct)
    if (ends[starts[1:]] - ends[starts[:-1]]).max() > RUN_BYTES_MAX or (np.diff(starts) > limits).any():
        starts = _cut_long_runs(starts, ends, limits)
    data = values.buffers()[2]
    return GroupedRecords(
        [distinct[code] for code in codes[starts[:-1]].tolist()],
        starts,
        positions,
        np.diff(ends).astype(np.uint32),
        ends,
        memoryview(b"") if data is None else memoryview(data),
        size,
    )


def iter_runs(grouped: GroupedRecords) -> Iterator[Run]:
    """Yield the runs of an append; loops over runs, not over records."""
    positions, lengths, data = grouped.positions, grouped.lengths, grouped.data
    firsts = positions[grouped.starts[:-1]].tolist()
    lasts = positions[grouped.starts[1:] - 1].tolist()
    places = grouped.ends[grouped.starts].tolist()
    for number, (start, stop) in enumerate(pairwise(grouped.starts.tolist())):
        first, last = firsts[number], lasts[number]
        deltas = b""
        if last - first != stop - start - 1:
            deltas = (positions[start:stop] - np.uint32(first)).tobytes()
        body = lengths[start:stop].tobytes() + data[places[number] : places[number + 1]]
        yield Run(grouped.keys[number], first, last, stop - start, deltas, body)


def encode(run: Run, base: int, total: int, append_ms: int) -> bytes:
    """Encode a run. `base` is the sequence of position 0 of its append; `total` the number of records that the key has
    in the segment, including this run.
    """
    checked = b"".join((_CHECKED.pack(run.records, 0, base + run.first, total, append_ms), run.deltas, run.body))
    begin = _WITH_DELTAS if run.deltas else _PLAIN
    return b"".join((begin, crc32c(checked, crc32c(begin)).to_bytes(4, "little"), checked))


def put_runs(
    batch: WriteBatch, segment_id: int, grouped: GroupedRecords, counts: dict[bytes, int], base: int, append_ms: int
) -> None:
    """Put the entries of an append, and list the keys that are new to the segment. Updates `counts`, the records by
    key.
    """
    put = batch.put
    for run in iter_runs(grouped):
        before = counts[run.key]
        if not before:
            put(listing_key(segment_id, run.key), b"")
        counts[run.key] = total = before + run.records
        put(entry_prefix(segment_id, run.key) + sequence_suffix(base + run.last), encode(run, base, total, append_ms))


class RunHead(NamedTuple):
    """The head of a run, known before its records are decoded."""

    records: int
    first: int
    total: int
    append_ms: int


def decode_head(value: bytes) -> RunHead:
    """Decode the head of a run without verifying its checksum, which `decode` does."""
    head = _heads([value])[0]
    return RunHead(int(head["count"]), int(head["first"]), int(head["total"]), int(head["append_ms"]))


def unpacked_size(entry_key: bytes, value: bytes) -> int:
    """Return about how many bytes a run's records take in Arrow, which repeats the key."""
    return len(value) + len(entry_key) * int.from_bytes(value[8:12], "little")


def sequences_of(value: bytes) -> Integers:
    """Return the sequences of one run, in order."""
    _check([value])
    return _sequences(_heads([value]), [value])


def decode(keys: Sequence[bytes], values: Sequence[bytes]) -> pa.RecordBatch:
    """Decode the records of these runs, one run after the other; `keys` are their log keys. Raises `CorruptBatch` if
    bytes are damaged.
    """
    _check(values)
    heads = _heads(values)
    counts = heads["count"].astype(np.int64)
    widths = _widths(heads)
    bodies = HEAD_BYTES + counts * 4 * widths
    tables = zip(values, (bodies - counts * 4).tolist(), bodies.tolist(), strict=True)
    lengths = np.frombuffer(b"".join([value[start:stop] for value, start, stop in tables]), "<u4")
    data = b"".join([memoryview(value)[start:] for value, start in zip(values, bodies.tolist(), strict=True)])
    if int(lengths.sum(dtype=np.int64)) != len(data):
        raise CorruptBatch(f"runs have {len(data)} bytes of values, but their lengths add up to {lengths.sum()}")
    total = int(counts.sum())
    key_lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    key_data = b"".join([key * count for key, count in zip(keys, counts.tolist(), strict=True)])
    return pa.RecordBatch.from_arrays(
        [
            _binary(np.repeat(key_lengths, counts), key_data, total),
            pa.array(_sequences(heads, values)),
            _binary(lengths, data, total),
            pa.array(np.repeat(heads["append_ms"], counts).astype("datetime64[ms]")).cast(SCHEMA.field(3).type),
        ],
        schema=SCHEMA,
    )


def _heads(values: Sequence[bytes]) -> npt.NDArray[Any]:
    joined = b"".join([value[:HEAD_BYTES] for value in values])
    if len(joined) != HEAD_BYTES * len(values):
        raise CorruptBatch(f"a run has less than the {HEAD_BYTES} bytes of its head: the database is damaged")
    heads = np.frombuffer(joined, _HEAD)
    if (heads["format"] != _FORMAT).any() or (heads["flags"] > DELTAS).any() or heads["zero"].any():
        raise CorruptBatch("a run has an unknown format or unknown flags: damaged, or written by a newer version")
    return heads


def _check(values: Sequence[bytes]) -> None:
    for value in values:
        view = memoryview(value)
        stored, computed = int.from_bytes(view[4:8], "little"), crc32c(view[8:], crc32c(view[:4]))
        if stored != computed:
            raise CorruptBatch(
                f"a run of {len(value)} bytes has checksum {computed:08x}, but its head says {stored:08x}"
            )
    heads = _heads(values)
    sizes = np.fromiter(map(len, values), np.int64, len(values))
    if (heads["count"] < 1).any() or (HEAD_BYTES + heads["count"] * 4 * _widths(heads) > sizes).any():
        raise CorruptBatch("a run ends before the tables of its records do: the database is damaged")


def _widths(heads: npt.NDArray[Any]) -> Integers:
    """Return how many numbers each record has in the tables: its length, and its delta if the run has deltas."""
    return 1 + heads["flags"].astype(np.int64)


def _sequences(heads: npt.NDArray[Any], values: Sequence[bytes]) -> Integers:
    counts = heads["count"].astype(np.int64)
    begins = np.cumsum(counts) - counts
    deltas = np.arange(int(counts.sum())) - np.repeat(begins, counts)
    for number in np.flatnonzero(heads["flags"]).tolist():
        begin, count = int(begins[number]), int(counts[number])
        deltas[begin : begin + count] = np.frombuffer(values[number], "<u4", count, HEAD_BYTES)
    found: Integers = np.repeat(heads["first"].astype(np.int64), counts) + deltas
    return found


def _binary(lengths: npt.NDArray[Any], data: bytes, count: int) -> pa.BinaryArray:
    if len(data) > COLUMN_BYTES_MAX:
        raise CorruptBatch(f"{count} records have {len(data)} bytes, more than an Arrow column holds")
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)], 0)


def _record_limits(keys: Sequence[bytes]) -> Integers:
    lengths = np.fromiter(map(len, keys), np.int64, len(keys))
    limits: Integers = np.minimum(RUN_RECORDS_MAX, RUN_KEY_BYTES_MAX // np.maximum(lengths, 1))
    return limits


def _cut_long_runs(starts: Integers, ends: Integers, limits: Integers) -> Integers:
    """Return `starts` with the runs that are too long cut; loops over runs and cuts."""
    cut: list[int] = []
    for (start, stop), limit in zip(pairwise(starts.tolist()), limits.tolist(), strict=True):
        while start < stop:
            cut.append(start)
            fits = int(np.searchsorted(ends, ends[start] + RUN_BYTES_MAX, side="right")) - 1
            start = min(stop, start + limit, max(fits, start + 1))
    return np.array([*cut, int(starts[-1])])
