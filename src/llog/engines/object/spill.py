"""Copies of inline records in a blob, for a snapshot that is too large to carry them.

Nothing names the blob, so the snapshot's pin keeps it, as it keeps what the index named before: the collector deletes
it once every pin that was alive when it was first met has ended. Its header has the offsets of the records, so that a
repair may use it as a proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llog.batch.shared import pack
from llog.engines.object.reader import decode_range
from llog.engines.object.snapshot import Snapshot
from llog.log.inline import from_inline, is_inline
from llog.log.keys import WAL
from llog.log.log import Log
from llog.runtime import uuid7

_WRITER: Final = "snapshot"


async def spill_inline(log: Log, snapshots: Sequence[tuple[Snapshot, str]]) -> None:
    """Put the inline records of these snapshots, each with its topic's directory, into one blob, and let the snapshots
    lead there. Take the pin before.
    """
    places = [
        (snapshot, directory, position, extent)
        for snapshot, directory in snapshots
        for position, extent in enumerate(snapshot)
        if is_inline(extent.data_uri)
    ]
    if not places:
        return
    now = log.runtime.now_ms()
    blob = WAL + uuid7(now, log.runtime.random())
    groups = []
    for snapshot, directory, _, extent in places:
        data = from_inline(extent.data_uri)
        columns = decode_range(snapshot.tp, extent.start_offset, extent.end_offset, extent, data)
        groups.append((snapshot.tp, directory, columns))
    start_offsets = [extent.start_offset for *_, extent in places]
    parts, bodies = pack(groups, writer=_WRITER, created_at_ms=now, start_offsets=start_offsets)
    await log.blobs.put(blob, parts)
    for (snapshot, _, position, _), body in zip(places, bodies, strict=True):
        snapshot.move(position, log.data_uri(blob), body.body_offset, body.body_length)
