"""The states of producers in one partition, and what must be true of them.

Producers number their records. A broker appends a group with the parts of several producers by one CAS. The control
record's `pending` names the producers of the newest append, each with its state after it; whoever replaces or clears
`pending` first puts these states under keys of their own, one for each producer and end offset. Blobs and the index are
left out: `partition.py` has them. Every part has one record, so a part and its record are one value.
"""

from __future__ import annotations

from typing import NamedTuple

Part = tuple[int, int]
"""A record: (producer, sequence). Sequences begin at 0."""

Remembered = tuple[tuple[int, int], ...]
"""The last appends of one producer, oldest first: (sequence, offset)."""

KEPT = 2
"""The number of appends that a state remembers."""


class Pending(NamedTuple):
    """The newest append: its offsets, and the state of each of its producers after it."""

    start: int
    end: int
    states: tuple[tuple[int, Remembered], ...]


class Control(NamedTuple):
    """The control record. It never returns to an earlier value, so a CAS compares the value."""

    next_offset: int = 1
    pending: Pending | None = None
    expired: int = 0
    """Keys that end at or below this offset count as missing."""


class Key(NamedTuple):
    """The key of a producer's state, and its value. It never changes, because nobody puts another state under it."""

    producer: int
    end: int
    state: Remembered


class Broker(NamedTuple):
    """A broker that appends. `seen` and `states` are exact for each other: read together, or from its own last CAS."""

    id: int
    pc: str
    left: int
    group: tuple[Part, ...] = ()
    seen: Control = Control()
    states: tuple[tuple[int, Remembered], ...] | None = None
    """The states of the producers that it knows; None if it has to read."""


class Clearer(NamedTuple):
    """A compactor, retention, or the deletion of a topic: it clears `pending`."""

    id: int
    pc: str
    left: int
    seen: Control = Control()


class Upkeep(NamedTuple):
    """Expires producers, and deletes the keys that are not needed any more."""

    id: int
    pc: str
    left: int
    seen: tuple[Key, ...] = ()
    """The keys that it has listed."""


Process = Broker | Clearer | Upkeep


class OldState(NamedTuple):
    """The state of a server when it was paused. When it wakes, it answers reads from this state."""

    control: Control
    keys: tuple[Key, ...]


class State(NamedTuple):
    """The stores, the processes, and what the checks need: no process reads `log` or `old_enough`."""

    control: Control
    keys: tuple[Key, ...]
    log: tuple[Part, ...]
    acknowledged: tuple[int, ...]
    """The number of sequences of each producer that were acknowledged, without a gap."""
    procs: tuple[Process, ...]
    losses: int
    pauses: int
    old: OldState | None = None
    old_enough: int = 0
    """The highest offset that was rightly expired: I8 holds for retries of younger records."""
    fault: str | None = None


def with_process(state: State, number: int, process: Process) -> State:
    return state._replace(procs=(*state.procs[:number], process, *state.procs[number + 1 :]))


def put_keys(state: State, pending: Pending | None, mutation: str | None) -> State:
    """Put the states that `pending` names, each under its key if the key is absent."""
    keys = list(state.keys)
    for producer, remembered in pending.states if pending else ():
        end = remembered[-1][1]
        if mutation == "mutable-producer-key":
            keys = [key for key in keys if key.producer != producer]
        elif any(key[:2] == (producer, end) for key in keys):
            continue
        keys.append(Key(producer, end, remembered))
    return state._replace(keys=tuple(sorted(keys)))


def state_of(producer: int, control: Control, keys: tuple[Key, ...]) -> Remembered:
    """Return the producer's newest state, in `pending` or under its highest key, unless it has expired."""
    found = [(key.end, key.state) for key in keys if key.producer == producer]
    found += [(state[-1][1], state) for other, state in _pending_states(control) if other == producer]
    end, state = max(found, default=(0, ()))
    return state if end > control.expired else ()


def _pending_states(control: Control) -> tuple[tuple[int, Remembered], ...]:
    return control.pending.states if control.pending else ()


def record_commit(state: State, control: Control, parts: tuple[Part, ...]) -> State:
    """Return the state after a CAS that appended these parts, with a fault if that was wrong."""
    fault = state.fault
    for part in parts:
        younger = state.log[state.old_enough :]
        before = [sequence for producer, sequence in younger if producer == part[0]]
        if part in younger:
            fault = fault or f"{part} was appended twice: {(*state.log, part)}"
        elif before and part[1] != before[-1] + 1:
            fault = fault or f"{part} was appended after sequence {before[-1]}"
        elif not before and part[1] != 0:
            fault = fault or f"{part} was appended, although its producer was not known"
        state = state._replace(log=(*state.log, part))
    return state._replace(control=control, fault=fault)


def violation(state: State, mutation: str | None) -> str | None:
    return state.fault
