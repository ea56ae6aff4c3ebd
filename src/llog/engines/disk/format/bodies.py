"""Encodes columns of records as the bodies of frames, and decodes frames into columns without gaps."""

from __future__ import annotations

import numpy as np

from llog.batch.columns import Columns, byte_size, cut_columns, record_sizes, timestamp_bounds
from llog.batch.format import BATCH_BYTES_MAX, Codec, decode, encode
from llog.engines.disk.format.frames import (
    KIND_BATCH,
    KIND_NONE,
    Body,
    LocatedFrame,
    Scan,
    check_body,
    checksum_from_rest,
)
from llog.errors import CorruptBatch, RecordTooLarge

RecordRun = tuple[int, Columns]
"""(start offset, consecutive records)"""


def encode_body(columns: Columns, codec: Codec = Codec.NONE) -> Body:
    """Encode columns, which have records and append times, as the body of a frame."""
    append_ms = [ms for _, ms in columns.append_runs]
    _, timestamp_max = timestamp_bounds(columns)
    parts = encode(columns, codec)
    crc = checksum_from_rest(parts[0], int.from_bytes(parts[0][4:8], "little"))
    return Body(parts, sum(map(len, parts)), crc, columns.count, append_ms[0], max(append_ms), timestamp_max)


def encode_bodies(columns: Columns, codec: Codec, frame_bytes: int) -> list[Body]:
    """Encode one append as the bodies of its frames. Each holds at least one record, and up to `frame_bytes` of records
    before compression.

    Raises `RecordTooLarge` if the append is larger than a batch may be.
    """
    arrays = (columns.values, columns.keys, columns.timestamps, columns.headers)
    size = sum(array.nbytes for array in arrays if array is not None)
    if size <= frame_bytes or columns.count == 1:
        return [encode_body(columns, codec)]
    if size > BATCH_BYTES_MAX:
        raise RecordTooLarge(
            f"an append of {columns.count} records has {size} bytes, more than {BATCH_BYTES_MAX}: append fewer at "
            "a time"
        )
    overhead = -(-(size - byte_size(columns)) // columns.count)
    ends = (record_sizes(columns) + overhead).cumsum()
    edges, end = [0], 0
    while edges[-1] < columns.count:
        edges.append(max(int(np.searchsorted(ends, end + frame_bytes, "right")), edges[-1] + 1))
        end = int(ends[edges[-1] - 1])
    return [encode_body(part, codec) for part in cut_columns(columns, edges)]


def decode_frame(scan: Scan, located: LocatedFrame) -> list[RecordRun]:
    """Return the records of a frame: one part, or several if key compaction has left gaps between them.

    Raises `CorruptBatch` if the frame is damaged.
    """
    frame = located.frame
    if frame.records == 0:
        return []
    if frame.kind != KIND_BATCH:
        known = f"{KIND_NONE} (none) or {KIND_BATCH} (bytes-batch-v1)"
        raise CorruptBatch(f"a frame has a body of kind {frame.kind}, not {known}")
    body = scan.unchecked_body(located)
    # `decode` checks the batch against the crc32c in it; this checks that the batch belongs to the frame.
    check_body(frame, checksum_from_rest(body, int.from_bytes(body[4:8], "little")))
    columns = decode(body)
    if columns.count != frame.records:
        raise CorruptBatch(f"a frame says that it has {frame.records} records, its body has {columns.count}")
    if not frame.sparse:
        return [(frame.base_offset, columns)]
    offsets = scan.offsets(located)
    starts = np.flatnonzero(np.diff(offsets) != 1) + 1
    edges = [0, *starts.tolist(), frame.records]
    firsts = (frame.base_offset + offsets[edges[:-1]].astype(np.int64)).tolist()
    return list(zip(firsts, cut_columns(columns, edges), strict=True))
