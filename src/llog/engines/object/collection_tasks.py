"""The reads of a collection that is spread over processes, as on Spark.

Each process confirms what it has read before it hands the result on, for nobody else can. The order is that of
`collector.py`, and each part is done in all processes before the next begins.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from llog.engines.object.clocks import Window
from llog.engines.object.collector import (
    Span,
    alive_pin_ids,
    partitions,
    raise_floors,
    raise_sink_floors,
    references,
    sink_references,
)
from llog.engines.object.gaps import Gaps
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.stores.meta import all_confirmed, confirmed

# --- in the process that leads


async def enumerate_partitions(log: Log) -> list[PartitionKeys]:
    return await confirmed(log.meta, lambda: partitions(log))


async def raise_all_sink_floors(log: Log, run: Window, sink_open_ms: int) -> dict[str, Span]:
    return await confirmed(log.meta, lambda: raise_sink_floors(log, run, sink_open_ms))


async def read_pins(log: Log, run: Window) -> frozenset[str]:
    return await confirmed(log.meta, lambda: alive_pin_ids(log, run))


# --- in any process, each for a share of the partitions


async def raise_floors_of(log: Log, share: Sequence[PartitionKeys], run: Window) -> int:
    return await confirmed(log.meta, lambda: raise_floors(log, share, run))


def names_in_sinks(log: Log) -> AsyncIterator[str]:
    return all_confirmed(log.meta, sink_references(log))


def names_in(log: Log, share: Sequence[PartitionKeys], gaps: Gaps) -> AsyncIterator[str]:
    """What these partitions name; the gaps of their indexes are added to `gaps` on the way."""
    return all_confirmed(log.meta, references(log, share, gaps))
