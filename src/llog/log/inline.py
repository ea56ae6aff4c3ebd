"""Inline appends: records so small that they need no blob of their own.

Their batch rides as a `data:` address where other appends name their blob: in `pending` of the control record, and then
in the index entry. A partition counts its inline bytes by a running total in its entries. The control record has the
total of all appends (`inline_total`), and that of the entries which upkeep has replaced or removed
(`inline_compacted`): the difference bounds what the partition holds in the metadata store.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable
from typing import Final

import msgspec

from llog.base.histogram import BYTES_BOUNDS, Histogram
from llog.batch.columns import Columns, byte_size
from llog.batch.format import HEADER_BYTES
from llog.errors import CorruptBatch
from llog.log.records import Control

PREFIX: Final = "data:;base64,"
_SECTIONS_BYTES: Final = 96
_RECORD_BYTES: Final = 24
"""About the most bytes that a batch adds: for its sections, and for the offsets and timestamp of each record."""


class InlineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may be inline, in bytes of batches."""

    group_bytes_max: int = 0
    """The most for one append to one partition; 0 makes every append put a blob."""
    flush_bytes_max: int = 256 << 10
    partition_bytes_max: int = 256 << 10

    def fit(self, sizes: Iterable[int]) -> bool:
        """Return whether a flush of groups of these sizes (`batch_bytes_max`) may be inline, if its partitions admit
        it.
        """
        total = 0
        for size in sizes:
            total += size
            if size > self.group_bytes_max or total > self.flush_bytes_max:
                return False
        return bool(self.group_bytes_max)

    def admit(self, control: Control, size: int) -> bool:
        """Return whether the partition takes `size` more inline bytes. One that was full takes none until it is
        empty, so that its appends do not change their way with every compaction.
        """
        waiting = inline_bytes(control)
        return waiting == 0 if control.inline_full else waiting + size <= self.partition_bytes_max


class AppendCounts:
    """The number of appends that went each way, and the sizes of their blobs, for metrics."""

    def __init__(self) -> None:
        self.inline = 0
        self.inline_bytes = 0
        self.blob = 0
        self.blob_bytes = Histogram(BYTES_BOUNDS)
        """The sizes of the shared blobs that were put, as stored."""
        self.full = 0
        """Appends that were small enough to be inline, but whose partitions were full."""


def batch_bytes_max(columns: Columns) -> int:
    """Return a size that the batch of these records does not exceed before compression. Sizes may be added up: joined
    records need no more.
    """
    return HEADER_BYTES + _SECTIONS_BYTES + _RECORD_BYTES * columns.count + byte_size(columns)


def inline_bytes(control: Control) -> int:
    """Return how many inline bytes of the partition upkeep has not yet replaced or removed."""
    return control.inline_total - control.inline_compacted


def is_inline(data_uri: str) -> bool:
    return data_uri.startswith(PREFIX)


def to_inline(batch: bytes) -> str:
    """Return the address that contains the batch."""
    return PREFIX + b2a_base64(batch, newline=False).decode("ascii")


def from_inline(data_uri: str) -> bytes:
    """Return the batch in such an address; raise `CorruptBatch` if it is damaged."""
    try:
        return msgspec.convert(data_uri[len(PREFIX) :], bytes)
    except msgspec.ValidationError as error:
        raise CorruptBatch(f"inline records cannot be decoded: {error}") from error


def describe_address(data_uri: str) -> str:
    """Return the address for people: that of a blob, without inline bytes."""
    return "inline" if is_inline(data_uri) else data_uri
