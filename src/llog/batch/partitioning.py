"""The partitioner for whole columns: the same partitions as `model.partition_for_key`, without a loop over records."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_M = np.uint32(0x5BD1E995)
_SEED = 0x9747B28C


def partitions_for_keys(keys: pa.BinaryArray, partitions: int) -> npt.NDArray[np.int64]:
    """Return the partition of every key; -1 for keys that are null."""
    offsets = np.frombuffer(keys.buffers()[1], dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(
        np.int64
    )
    data = np.frombuffer(keys.buffers()[2] or b"", dtype=np.uint8)
    lengths = np.diff(offsets)
    hashes = np.empty(len(keys), dtype=np.uint32)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        positions = offsets[:-1][rows, None] + np.arange(length)
        hashes[rows] = _murmur2(data[positions] if length else np.empty((len(rows), 0), dtype=np.uint8))
    chosen = (hashes & np.uint32(0x7FFFFFFF)).astype(np.int64) % partitions
    if keys.null_count:
        chosen[keys.is_null().to_numpy(zero_copy_only=False)] = -1
    return chosen


def _murmur2(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return Kafka's murmur2 of rows of equal length. Unsigned arithmetic wraps, as the hash requires."""
    count, length = rows.shape
    h = np.full(count, (_SEED ^ length) & 0xFFFFFFFF, dtype=np.uint32)
    whole = length & ~3
    words = np.ascontiguousarray(rows[:, :whole]).view("<u4") if whole else np.empty((count, 0), dtype=np.uint32)
    for column in range(words.shape[1]):
        k = words[:, column] * _M
        k = (k ^ (k >> np.uint32(24))) * _M
        h = (h * _M) ^ k
    if whole < length:
        rest = np.zeros(count, dtype=np.uint32)
        for byte, column in enumerate(range(whole, length)):
            rest |= rows[:, column].astype(np.uint32) << np.uint32(8 * byte)
        h = (h ^ rest) * _M
    h = (h ^ (h >> np.uint32(13))) * _M
    return h ^ (h >> np.uint32(15))
