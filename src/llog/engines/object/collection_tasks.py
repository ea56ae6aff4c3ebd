"""The reads of a collection that is spread over processes, as on Spark.

Each process confirms its reads before it hands on the result, because no other process can. The steps are those of
`collector.py`, and each step ends in all processes before the next begins.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from llog.engines.object.clocks import Window
from llog.engines.object.collector import (
    StampRange,
    alive_pin_ids,
    list_partitions,
    raise_floors,
    raise_sink_floors,
    references,
    sink_references,
)
from llog.engines.object.gaps import Gaps
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.stores.meta import iterate_confirmed, read_confirmed

# --- in the leading process


async def enumerate_partitions(log: Log) -> list[PartitionKeys]:
    return await read_confirmed(log.meta, lambda: list_partitions(log))


async def raise_all_sink_floors(log: Log, run: Window, sink_open_ms: int) -> dict[str, StampRange]:
    return await read_confirmed(log.meta, lambda: raise_sink_floors(log, run, sink_open_ms))


async def read_pins(log: Log, run: Window) -> frozenset[str]:
    return await read_confirmed(log.meta, lambda: alive_pin_ids(log, run))


# --- in any process, each for a share of the partitions


async def raise_floors_of(log: Log, share: Sequence[PartitionKeys], run: Window) -> int:
    return await read_confirmed(log.meta, lambda: raise_floors(log, share, run))


def sink_referenced_names(log: Log) -> AsyncIterator[str]:
    return iterate_confirmed(log.meta, sink_references(log))


def referenced_names(log: Log, share: Sequence[PartitionKeys], gaps: Gaps) -> AsyncIterator[str]:
    """Iterate over the blobs that these partitions name; the gaps of their indexes are added to `gaps`."""
    return iterate_confirmed(log.meta, references(log, share, gaps))
