"""The configurations that `python -m spec` searches, each to its end: none is cut."""

from __future__ import annotations

from typing import Final

from spec.partition_model import PartitionShape
from spec.producer_model import ProducerShape
from spec.search import Configuration
from spec.sink_model import BOTH, EACH, EMPTY, SECOND, SinkShape

SMALL: Final[tuple[Configuration, ...]] = (
    PartitionShape(writers=2, appends=2, losses=1),
    PartitionShape(writers=2, collectors=1, collections=2, losses=1),
    PartitionShape(writers=1, appends=2, collectors=1, collections=2, jumps=1, repairs=1),
    PartitionShape(writers=1, appends=3, compactors=1, collectors=1),
    PartitionShape(compactors=2, collectors=1, trims=1, written=2),
    PartitionShape(compactors=3, written=4, stalled=True),
    PartitionShape(writers=1, collectors=1, collections=2, damages=2, written=2),
    PartitionShape(compactors=1, collectors=1, damages=1, written=3),
    PartitionShape(writers=1, appends=2, collectors=1, pauses=1),
    PartitionShape(compactors=1, collectors=1, trims=1, pauses=1, written=2),
    PartitionShape(writers=2, appends=2, losses=1, inline=2),
    PartitionShape(writers=1, appends=2, compactors=1, inline=1),
    PartitionShape(compactors=2, trims=1, written=3, inline=2),
    PartitionShape(compactors=2, compactions=2, compacted=3),
    PartitionShape(compactors=3, compacted=4),
    PartitionShape(compactors=2, collectors=1, trims=1, compacted=3),
    ProducerShape(sequences=3, losses=1),
    ProducerShape(producers=2, sequences=1, losses=1, clears=1),
    ProducerShape(clears=2, losses=1),
    ProducerShape(clears=1, upkeeps=1),
    ProducerShape(clears=1, pauses=1),
    SinkShape((BOTH, BOTH), losses=1),
    SinkShape((BOTH,), runs=2, collections=1, pauses=1),
    SinkShape((BOTH, EMPTY), batches=2),
    SinkShape((BOTH, SECOND), batches=2),
    SinkShape((BOTH, SECOND), collections=1),
    SinkShape((BOTH,), runs=2, collections=2),
    SinkShape((BOTH,), runs=2, collections=1, jumps=1, repairs=1),
    SinkShape((BOTH,), runs=2, compactions=True, collections=1, losses=1, forgets=True),
)

LARGER: Final[tuple[Configuration, ...]] = (
    PartitionShape(writers=2, collectors=1, jumps=1, repairs=1),
    PartitionShape(writers=1, collectors=2, jumps=2, repairs=2),
    PartitionShape(writers=1, compactors=1, collectors=1, jumps=1, repairs=1, written=2),
    PartitionShape(writers=2, appends=2, collectors=1, losses=1),
    PartitionShape(writers=2, compactors=1, collectors=1, written=2),
    PartitionShape(writers=1, compactors=2, collectors=1, written=2),
    PartitionShape(compactors=2, collectors=1, trims=1, written=3),
    PartitionShape(writers=1, appends=2, compactors=2, trims=1, written=2),
    PartitionShape(writers=1, compactors=3, written=3),
    PartitionShape(writers=1, compactors=1, collectors=1, damages=1, written=2),
    PartitionShape(compactors=2, collectors=1, trims=1, damages=1, written=2),
    PartitionShape(writers=1, compactors=1, collectors=1, pauses=1, written=1),
    PartitionShape(writers=1, collectors=1, collections=2, jumps=1, repairs=1, pauses=1),
    PartitionShape(writers=2, appends=2, compactors=1, losses=1, inline=2),
    PartitionShape(writers=1, appends=2, compactors=2, written=2, inline=2),
    PartitionShape(writers=1, compactors=1, collectors=1, written=2, inline=1),
    PartitionShape(writers=1, appends=2, compactors=1, compactions=2, trims=1, written=1, inline=2),
    PartitionShape(writers=1, compactors=1, compactions=2, collectors=1, written=2, compacted=2),
    PartitionShape(compactors=3, trims=1, compacted=3),
    PartitionShape(compactors=2, collectors=1, pauses=1, compacted=3),
    PartitionShape(compactors=2, collectors=1, damages=1, compacted=3, stalled_repairs=1),
    PartitionShape(compactors=2, compactions=2, damages=1, compacted=3, stalled_repairs=1),
    PartitionShape(compactors=2, compactions=2, damages=2, compacted=3),
    ProducerShape(brokers=3, groups=1, clears=1, losses=1),
    ProducerShape(sequences=3, groups=3, clears=1, losses=1),
    ProducerShape(producers=2, clears=1),
    ProducerShape(clears=1, upkeeps=2, pauses=1),
    ProducerShape(upkeeps=1, losses=1, pauses=1),
    SinkShape((BOTH, BOTH, SECOND), losses=1),
    SinkShape((EACH, SECOND), collections=1),
    SinkShape((BOTH, SECOND), compactions=True, collections=1),
    SinkShape((BOTH, SECOND), collections=1, jumps=1, repairs=1),
    SinkShape((BOTH,), batches=2, runs=2, collections=1),
    SinkShape((BOTH, SECOND), batches=2, collections=1),
)
