"""Descriptions of how a partition and a blob are stored, for people to read; the log itself does not use them."""

from __future__ import annotations

import msgspec

from llog.batch.format import HEADER_BYTES, BatchHeader, peek
from llog.batch.shared import MAGIC as SHARED_MAGIC
from llog.batch.shared import PREFIX_BYTES, BlobHeader, header_length, unpack_header
from llog.engines.object.partition_keys import find_keys
from llog.errors import BlobNotFound, InvalidArgument, PartitionNotInitialized
from llog.log.engine import Description
from llog.log.keys import end_offset_of
from llog.log.log import Log
from llog.log.records import Compaction, CompactionCursor, CompactorClaim, Control, IndexEntry, decode
from llog.model import TopicPartition
from llog.stores.meta import prefix_end


class EntryDescription(msgspec.Struct, frozen=True, kw_only=True):
    start_offset: int
    end_offset: int
    version: int
    entry: IndexEntry


class PartitionDescription(Description, frozen=True, kw_only=True):
    """The metadata records of a partition as they are stored. Each is read on its own, at a slightly different
    moment.
    """

    directory: str
    control: Control
    control_version: int
    cursor: int | None
    compaction: Compaction | None
    claim: CompactorClaim | None
    """The claim of the compactor that works on the partition now."""
    entries: tuple[EntryDescription, ...]
    more_from: int | None
    """The offset at which the next page of entries begins; None if there are no more."""


class BlobDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A blob, with its header: `shared` if it has one that lists its bodies, otherwise `batch`, that of its batch."""

    name: str
    size: int
    modified_ms: int
    shared: BlobHeader | None = None
    batch: BatchHeader | None = None


async def describe_partition(
    log: Log, tp: TopicPartition, max_entries: int = 100, *, from_offset: int = 0
) -> PartitionDescription:
    """Describe a partition, with up to `max_entries` index entries that end at `from_offset` or above."""
    if max_entries < 1:
        raise InvalidArgument(f"max_entries must be 1 or more: {max_entries}")
    keys = await find_keys(log, tp)
    control = await log.meta.get(keys.control)
    if control is None:
        raise PartitionNotInitialized(f"partition {tp} has no control record")
    cursor = await log.meta.get(keys.cursor)
    compaction = await log.meta.get(keys.compaction)
    claim = await log.meta.get(keys.claim)
    found = await log.meta.range(keys.entry(max(from_offset, 0)), prefix_end(keys.index), max_entries + 1)
    entries = []
    for item in found[:max_entries]:
        entry, end = decode(IndexEntry, item.value, item.key), end_offset_of(item.key)
        entries.append(
            EntryDescription(start_offset=end - entry.msg_count + 1, end_offset=end, version=item.version, entry=entry)
        )
    return PartitionDescription(
        topic=tp.topic,
        partition=tp.partition,
        directory=keys.directory,
        control=decode(Control, control.value, control.key),
        control_version=control.version,
        cursor=None if cursor is None else decode(CompactionCursor, cursor.value, cursor.key).offset,
        compaction=None if compaction is None else decode(Compaction, compaction.value, compaction.key),
        claim=None if claim is None else decode(CompactorClaim, claim.value, keys.claim),
        entries=tuple(entries),
        more_from=entries[-1].end_offset + 1 if len(found) > max_entries else None,
    )


async def describe_blob(log: Log, name: str) -> BlobDescription:
    """Describe a blob by its header; raise `CorruptBatch` if the header is damaged or the blob is not a log's."""
    info = await log.blobs.head(name)
    if info is None:
        raise BlobNotFound(f"blob {name!r} is not in {log.blobs.uri}")
    start = await log.blobs.get_range(name, 0, min(info.size, max(PREFIX_BYTES, HEADER_BYTES)))
    described = BlobDescription(name=name, size=info.size, modified_ms=info.modified_ms)
    if bytes(start[: len(SHARED_MAGIC)]) == SHARED_MAGIC:
        header = unpack_header(await log.blobs.get_range(name, 0, min(info.size, header_length(start))))
        return msgspec.structs.replace(described, shared=header)
    return msgspec.structs.replace(described, batch=peek(start))
