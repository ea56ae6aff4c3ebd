"""The partition's processes put together: configurations, and the broken variants that must be caught."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spec.collecting import collector_steps, trimmer_steps
from spec.compacting import compactor_steps
from spec.partition import Collector, Compactor, Control, Process, State, Trimmer, Writer, violation
from spec.search import Result, explore
from spec.writing import writer_steps


class Partition(NamedTuple):
    """How many processes there are, and how often each appends or runs."""

    writers: int = 1
    appends: int = 1
    compactors: int = 0
    compactions: int = 1
    collectors: int = 0
    collections: int = 1
    trims: int = 0
    losses: int = 0
    """CAS answers that may be lost."""
    written: int = 0
    """Offsets that are there, in the index, at the start."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._asdict().items() if value) or "nothing"

    def search(self, mutation: str | None, states_max: int) -> Result:
        return explore(
            initial(self),
            lambda state: steps(state, mutation),
            lambda state: violation(state, mutation),
            states_max,
        )


def initial(shape: Partition) -> State:
    state = State(Control(), (), 1, None, (), (), (), shape.losses, None)
    for offset in range(1, shape.written + 1):
        state = _written(state, offset)
    procs: list[Process] = [Writer(number, "put", shape.appends, 1, None, state.control) for number in range(shape.writers)]
    procs += [Compactor(number, "start", shape.compactions) for number in range(shape.compactors)]
    procs += [Collector(number, "list", shape.collections) for number in range(shape.collectors)]
    if shape.trims:
        procs.append(Trimmer(0, "raise", shape.trims))
    return state._replace(procs=tuple(procs))


def _written(state: State, offset: int) -> State:
    """One more append by a writer that is gone, its index entry in place."""
    from spec.partition import WAL, put_blob, put_entry

    name = (WAL, -1, offset, 1)
    state = put_entry(put_blob(state, name, ((-1, offset),)), offset, offset, name)
    return state._replace(control=state.control._replace(counter=offset + 1), log=(*state.log, (-1, offset)))


def steps(state: State, mutation: str | None) -> Iterator[tuple[str, State]]:
    for number, process in enumerate(state.procs):
        if isinstance(process, Writer):
            name, found = "writer", writer_steps(state, number, process, mutation)
        elif isinstance(process, Compactor):
            name, found = "compactor", compactor_steps(state, number, process, mutation)
        elif isinstance(process, Collector):
            name, found = "collector", collector_steps(state, number, process, mutation)
        else:
            name, found = "trimmer", trimmer_steps(state, number, process, mutation)
        for label, after in found:
            yield f"{name} {process.id} {label}", after
