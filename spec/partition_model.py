"""The partition's processes together, in the numbers of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spec.collector import collector_steps, damager_steps, repairer_steps, trimmer_steps
from spec.compactor import compactor_steps
from spec.partition import (
    COMPACTED,
    INLINE,
    WAL,
    Collector,
    Compactor,
    Control,
    Damager,
    Pending,
    Process,
    Repairer,
    State,
    Trimmer,
    Writer,
    admits_inline,
    put_blob,
    put_entry,
    put_pending,
    violation,
)
from spec.search import Result, describe, explore
from spec.writer import writer_steps


class PartitionShape(NamedTuple):
    """The number of processes of each kind, and how often each appends or runs."""

    writers: int = 0
    appends: int = 1
    compactors: int = 0
    compactions: int = 1
    collectors: int = 0
    collections: int = 1
    trims: int = 0
    losses: int = 0
    """The number of CAS answers that may be lost."""
    jumps: int = 0
    """The number of blobs that a writer may stamp by a clock that is far ahead."""
    repairs: int = 0
    written: int = 0
    """The number of offsets at the start: the last one is pending, the others are in the index."""
    damages: int = 0
    """The number of index entries that may be lost."""
    pauses: int = 0
    """The number of servers that may be paused, and wake to answer a collector's reads from their old state."""
    inline: int = 0
    """The most inline records of the partition; 0 if all appends put blobs."""
    compacted: int = 0
    """The number of offsets at the start, below those of `written`, that have a COMPACTED entry each; with them,
    compactors merge.
    """
    stalled_repairs: int = 0
    """The number of repairs that may stall before they put an entry that another repair has put back meanwhile."""
    stalled: bool = False
    """Whether the first compactor read the control record before the last offset was written."""

    def __str__(self) -> str:
        return describe("partition", self)

    def search(self, mutation: str | None, states_max: int) -> Result:
        return explore(
            initial(self),
            lambda state: steps(state, mutation),
            lambda state: violation(state, mutation),
            states_max,
        )


def initial(shape: PartitionShape) -> State:
    state = State(Control(), (), 1, None, (), (), (), shape.losses, shape.jumps, None, pauses=shape.pauses)
    state = state._replace(inline_max=shape.inline)
    for offset in range(1, shape.compacted + 1):
        name = (COMPACTED, shape.compactors, offset, 0, 0)
        state = put_entry(put_blob(state, name, ((shape.writers, offset),)), offset, offset, name, 0)
        state = state._replace(
            control=state.control._replace(next_offset=offset + 1),
            log=(*state.log, (shape.writers, offset)),
            cursor=offset + 1,
            merges=True,
        )
    for offset in range(shape.compacted + 1, shape.compacted + shape.written + 1):
        state = _with_append(state, shape.writers, offset)
    procs: list[Process] = [
        Writer(number, "put", shape.appends, 1, None, state.control) for number in range(shape.writers)
    ]
    procs += [Compactor(number, "start", shape.compactions) for number in range(shape.compactors)]
    if shape.stalled:
        compactor = Compactor(0, "look", shape.compactions - 1, limit=shape.written - 1, position=1)
        procs[shape.writers] = compactor
    procs += [Collector(number, "list", shape.collections) for number in range(shape.collectors)]
    if shape.trims:
        procs.append(Trimmer(0, "raise", shape.trims))
    if shape.damages:
        procs.append(Damager(0, shape.damages, shape.stalled_repairs))
    if shape.repairs:
        procs.append(Repairer(0, shape.repairs))
    return state._replace(procs=tuple(procs))


def _with_append(state: State, writer: int, offset: int) -> State:
    """Return the state after one more append by a writer that has ended since: inline, if that is admitted."""
    state = put_pending(state, state.control.pending)
    is_inline = bool(state.inline_max) and admits_inline(state, state.control)
    name = (INLINE, writer, offset, 0, 0) if is_inline else (WAL, writer, offset, 1, 0)
    if not is_inline:
        state = put_blob(state, name, ((writer, offset),))
    total = state.control.inline_total + is_inline
    control = state.control._replace(
        next_offset=offset + 1, pending=Pending(offset, offset, name, total), inline_total=total
    )
    return state._replace(control=control, log=(*state.log, (writer, offset)))


def steps(state: State, mutation: str | None) -> Iterator[tuple[str, State]]:
    for number, process in enumerate(state.procs):
        if isinstance(process, Writer):
            name, found = "writer", writer_steps(state, number, process, mutation)
        elif isinstance(process, Compactor):
            name, found = "compactor", compactor_steps(state, number, process, mutation)
        elif isinstance(process, Collector):
            name, found = "collector", collector_steps(state, number, process, mutation)
        elif isinstance(process, Repairer):
            name, found = "repair", repairer_steps(state, number, process)
        elif isinstance(process, Trimmer):
            name, found = "trimmer", trimmer_steps(state, number, process, mutation)
        else:
            name, found = "damage", damager_steps(state, number, process)
        for label, after in found:
            yield f"{name} {process.id} {label}", after
