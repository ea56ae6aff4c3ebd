"""The newest offset of every key of some records, in little memory: the basis of key compaction.

Keys are found by a 64-bit hash and then compared byte by byte, so keys whose hashes collide stay apart. An entry takes
20 bytes and its key. No Python loop runs over records: Arrow and numpy do nearly all of the work without the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import binary_offsets, binary_size

ABSENT: Final = -1
ENTRY_BYTES: Final = 20
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_WORD: Final = 8

Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class NewestOffsets(NamedTuple):
    """Every key once, with its newest offset, in the order of the hashes."""

    hashes: Hashes
    offsets: Numbers
    keys: pa.BinaryArray

    @property
    def bytes(self) -> int:
        return len(self.hashes) * ENTRY_BYTES + binary_size(self.keys)

    def of(self, keys: pa.BinaryArray) -> Numbers:
        """Return the newest offset of each of these keys, or `ABSENT`. No key may be null."""
        found = np.full(len(keys), ABSENT, np.int64)
        hashes = hashes_of(keys)
        at = np.searchsorted(self.hashes, hashes)
        rows = np.arange(len(keys))
        while True:
            rows = rows[at[rows] < len(self.hashes)]
            rows = rows[self.hashes[at[rows]] == hashes[rows]]
            if not len(rows):
                return found
            same = _equal(keys.take(pa.array(rows)), self.keys.take(pa.array(at[rows])))
            found[rows[same]] = self.offsets[at[rows[same]]]
            # Another key has this hash: the wanted key may be the next one.
            rows = rows[~same]
            at[rows] += 1


def newest_of(keys: pa.BinaryArray, offsets: Numbers) -> NewestOffsets:
    """Return the last offset of each key. No key may be null, and offsets must ascend."""
    return _last_of_each(hashes_of(keys), offsets, keys)


def merge(parts: Sequence[NewestOffsets]) -> NewestOffsets:
    """Merge the parts into one. Later parts must have higher offsets."""
    return _last_of_each(
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        pa.concat_arrays([part.keys for part in parts]),
    )


def no_offsets() -> NewestOffsets:
    return NewestOffsets(np.empty(0, np.uint64), np.empty(0, np.int64), pa.array([], pa.binary()))


def hashes_of(keys: pa.BinaryArray) -> Hashes:
    """Return a 64-bit hash of every key, computed eight bytes at a time over all keys."""
    if not len(keys):
        return np.empty(0, np.uint64)
    offsets = binary_offsets(keys).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.zeros(last - first + _WORD, np.uint8)
    if last > first:
        data[:-_WORD] = np.frombuffer(keys.buffers()[2], np.uint8, last - first, first)
    words: Hashes = np.ndarray(len(data) - _WORD + 1, "<u8", data, strides=(1,))
    starts, lengths = offsets[:-1] - first, np.diff(offsets)
    hashes = lengths.astype(np.uint64) * _GOLDEN
    rows = np.flatnonzero(lengths)
    position = 0
    while len(rows):
        word = words[starts[rows] + position]
        # Mask the bytes of a key's last word that are not its own.
        missing = np.maximum(_WORD - (lengths[rows] - position), 0).astype(np.uint64)
        word &= np.uint64(0xFFFFFFFFFFFFFFFF) >> (missing * np.uint64(8))
        mixed = (hashes[rows] ^ word) * _MIX_1
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX_2
        hashes[rows] = mixed ^ (mixed >> np.uint64(32))
        position += _WORD
        rows = rows[lengths[rows] > position]
    return hashes


def _last_of_each(hashes: Hashes, offsets: Numbers, keys: pa.BinaryArray) -> NewestOffsets:
    order = np.argsort(hashes, kind="stable")
    ordered = keys.take(pa.array(order))
    same_hash = hashes[order[1:]] == hashes[order[:-1]]
    same = same_hash & _equal(ordered.slice(1), ordered.slice(0, max(len(ordered) - 1, 0)))
    if not (same == same_hash).all():
        # Some hashes collide: sort by key as well, so that equal keys are neighbours.
        table = pa.table({"hash": hashes, "key": keys, "offset": offsets})
        by: list[tuple[str, str]] = [("hash", "ascending"), ("key", "ascending"), ("offset", "ascending")]
        order = pc.sort_indices(table, sort_keys=by).to_numpy()
        ordered = keys.take(pa.array(order))
        same = _equal(ordered.slice(1), ordered.slice(0, len(ordered) - 1))
    last = order[np.append(~same, True)] if len(order) else order
    return NewestOffsets(hashes[last], offsets[last], keys.take(pa.array(last)))


def _equal(left: pa.BinaryArray, right: pa.BinaryArray) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.equal(left, right).to_numpy(zero_copy_only=False)
    return found.astype(np.bool_)
