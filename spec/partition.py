"""One partition as the stores hold it, and what must be true of it in every state.

Versions that only distinguish "changed" from "unchanged" are omitted: the control record, the cursor and the breadcrumb
never return to an earlier value, so a CAS compares the value. An index entry can return to one (deleted, and put again
by a stalled writer), so it has a version, the lowest that no process holds for its key. A blob's name consists of its
process, its number among that process's blobs, its stamp, and the number of repairs that its writer knew (the code
draws names at random, and a writer keeps that number beside the name). Equal situations are therefore equal states,
however they came about.
"""

from __future__ import annotations

from typing import NamedTuple

Value = tuple[int, int]
"""A record: (writer, sequence)."""

BlobName = tuple[str, int, int, int, int]
"""(kind, process, number, stamp, repairs). Compacted blobs have stamp 0: a breadcrumb protects them, not a floor.

An append without a blob has a name of kind `INLINE`: its record rides with the name, and exists wherever the name is.
"""

WAL, COMPACTED, INLINE, LOST_BYTES = "w", "c", "i", "l"

FAR = 9
"""The stamp of a clock that is far ahead."""
NEAR = 1
"""The ceiling that a repair sets: above the repaired floor, which is 0, and below `FAR`."""


class Pending(NamedTuple):
    start: int
    end: int
    blob: BlobName
    total: int = 0
    """The partition's running total of inline records, this append included."""


class Control(NamedTuple):
    """The control record; `producers` has (writer, sequence, offset) of each writer's last append.

    A blob may be committed if its stamp is above the floor and not above the ceiling, and if its writer knew of the
    last repair.
    """

    next_offset: int = 1
    log_start: int = 1
    pending: Pending | None = None
    floor: int = 0
    ceiling: int = FAR
    repairs: int = 0
    producers: tuple[tuple[int, int, int], ...] = ()
    inline_total: int = 0
    inline_compacted: int = 0
    """The running totals of inline records: of all appends, and of those that are compacted or trimmed."""
    inline_full: bool = False
    """Whether appends put blobs until no inline record is left."""


class Entry(NamedTuple):
    """An index entry under the key `end`."""

    end: int
    start: int
    blob: BlobName
    version: int
    total: int = 0

    @property
    def compacted(self) -> bool:
        return self.blob[0] == COMPACTED


class Breadcrumb(NamedTuple):
    """The compaction's breadcrumb; `expected` is the version of the entry under the key `end` when the run was
    chosen.
    """

    state: str
    start: int
    end: int
    blob: BlobName
    expected: int
    total: int = 0
    """The running total of inline records at the end of the run."""
    merge: bool = False
    """Whether the run consists of COMPACTED entries."""


class Blob(NamedTuple):
    name: BlobName
    values: tuple[Value, ...]


class Writer(NamedTuple):
    """A writer. It knows a control record from the start, which may be old."""

    id: int
    pc: str
    left: int
    sequence: int
    blob: BlobName | None
    seen: Control


class Compactor(NamedTuple):
    id: int
    pc: str
    left: int
    limit: int = 0
    position: int = 0
    cursor: int = 0
    sources: tuple[BlobName, ...] = ()
    breadcrumb: Breadcrumb | None = None


class OldState(NamedTuple):
    """The state of a server when it was paused. When it wakes, it answers reads from this state, although it no longer
    leads.
    """

    control: Control
    entries: tuple[Entry, ...]
    breadcrumb: Breadcrumb | None


class Collector(NamedTuple):
    id: int
    pc: str
    left: int
    candidate: BlobName | None = None
    old: OldState | None = None
    """The state from which any of its reads may be answered."""
    stale: bool = False
    """Whether a read was answered from it, which the collector learns when it confirms its reads."""


class Trimmer(NamedTuple):
    id: int
    pc: str
    left: int
    start: int = 0


class Repairer(NamedTuple):
    """Sets the floor and the ceiling of a partition whose clocks were wrong."""

    id: int
    left: int


class Damager(NamedTuple):
    """Makes index entries vanish, and is the operator who puts them back."""

    id: int
    left: int
    stalls: int = 0
    """How many more repairs may stall before they put an entry that another repair has put back meanwhile."""
    stalled: Entry | None = None
    """The entry that a stalled repair is about to put."""
    placed: Entry | None = None
    """The entry that a stalled repair has put, at which it looks again."""
    covered: bool = False
    """Whether the repair has found its entry inside another one."""


Process = Writer | Compactor | Collector | Trimmer | Repairer | Damager


class State(NamedTuple):
    """The stores and the processes. `log` holds the committed values in order, for the checks; no process reads it."""

    control: Control
    entries: tuple[Entry, ...]
    cursor: int
    breadcrumb: Breadcrumb | None
    blobs: tuple[Blob, ...]
    log: tuple[Value, ...]
    procs: tuple[Process, ...]
    losses: int
    jumps: int
    """How many more blobs a writer may stamp by a clock that is far ahead."""
    fault: str | None
    lost: tuple[Entry, ...] = ()
    """Index entries that vanished and were not put back."""
    pauses: int = 0
    """How many more servers may be paused."""
    inline_max: int = 0
    """The most inline records that a partition may have; 0 if all appends put blobs."""
    merges: bool = False
    """Whether compactors merge COMPACTED entries."""


def with_process(state: State, number: int, process: Process) -> State:
    return state._replace(procs=(*state.procs[:number], process, *state.procs[number + 1 :]))


def entry_at(state: State, end: int) -> Entry | None:
    return next((entry for entry in state.entries if entry.end == end), None)


def is_inside(entry: Entry, other: Entry) -> bool:
    """Return whether the offsets of the entry lie inside those of another one with a higher end."""
    return other.start <= entry.start and entry.end < other.end


def put_entry(state: State, end: int, start: int, blob: BlobName, total: int) -> State:
    """Put the entry under a version that no process holds for this key."""
    held = {entry.version for entry in state.entries if entry.end == end}
    held |= {
        breadcrumb.expected
        for breadcrumb in (state.breadcrumb, *(p.breadcrumb for p in state.procs if isinstance(p, Compactor)))
        if breadcrumb is not None and breadcrumb.end == end
    }
    held |= {
        p.placed.version for p in state.procs if isinstance(p, Damager) and p.placed is not None and p.placed.end == end
    }
    version = next(number for number in range(1, len(held) + 2) if number not in held)
    others = [entry for entry in state.entries if entry.end != end]
    return state._replace(entries=tuple(sorted([*others, Entry(end, start, blob, version, total)])))


def put_pending(state: State, pending: Pending | None, *, unconditional: bool = False) -> State:
    """Put the index entry of a pending append, if there is none under its key."""
    if pending is None or (entry_at(state, pending.end) is not None and not unconditional):
        return state
    return put_entry(state, pending.end, pending.start, pending.blob, pending.total)


def admits_inline(state: State, control: Control) -> bool:
    """Return whether one more inline record may be appended: a partition that was full must be empty first."""
    waiting = control.inline_total - control.inline_compacted
    return waiting == 0 if control.inline_full else waiting < state.inline_max


def values_of(state: State, name: BlobName) -> tuple[Value, ...] | None:
    if name[0] == INLINE:
        return ((name[1], name[2]),)
    return next((blob.values for blob in state.blobs if blob.name == name), None)


def put_blob(state: State, name: BlobName, values: tuple[Value, ...]) -> State:
    if values_of(state, name) is not None:
        return state
    return state._replace(blobs=tuple(sorted([*state.blobs, Blob(name, values)])))


def has_gap(state: State) -> bool:
    """Return whether neither an entry nor the pending append covers some offset."""
    spans = [(entry.start, entry.end) for entry in state.entries]
    if state.control.pending is not None:
        spans.append((state.control.pending.start, state.control.pending.end))
    offsets = range(state.control.log_start, state.control.next_offset)
    return any(not any(start <= offset <= end for start, end in spans) for offset in offsets)


def read(state: State, offset: int, mutation: str | None) -> Value | None:
    """Return what an undisturbed reader gets for the offset now, or will get when lost entries are put back."""
    for entry in state.entries:
        if entry.start <= offset <= entry.end:
            values = values_of(state, entry.blob)
            if values is not None:
                return values[offset - entry.start]
            if mutation == "reader-no-fallthrough":
                return None
    pending = state.control.pending
    if pending is not None and pending.start <= offset <= pending.end:
        values = values_of(state, pending.blob)
        return None if values is None else values[offset - pending.start]
    for entry in state.lost:
        values = values_of(state, entry.blob)
        if entry.start <= offset <= entry.end and values is not None:
            return values[offset - entry.start]
    return None


def violation(state: State, mutation: str | None) -> str | None:
    if state.fault is not None:
        return state.fault
    if len(set(state.log)) != len(state.log):
        return f"a value was committed twice: {state.log}"
    for offset in range(state.control.log_start, state.control.next_offset):
        found = read(state, offset, mutation)
        if found != state.log[offset - 1]:
            return f"offset {offset} was committed with {state.log[offset - 1]} and reads {found}"
    compacted = [entry for entry in state.entries if entry.compacted]
    for entry in compacted:
        if values_of(state, entry.blob) is None and not any(
            is_inside(entry, other) for other in (*compacted, *state.lost)
        ):
            return f"the COMPACTED entry of offsets {entry.start} to {entry.end} names a blob that is gone"
        for other in compacted:
            if entry.end < other.end and entry.start < other.start <= entry.end:
                return f"COMPACTED entries overlap: {entry.start} to {entry.end}, {other.start} to {other.end}"
    if state.cursor > state.control.next_offset:
        return "the cursor passed the next offset"
    return _inline_violation(state)


def _inline_violation(state: State) -> str | None:
    """Check that the control record never counts fewer inline records than there are, nor more than are allowed."""
    control = state.control
    waiting = control.inline_total - control.inline_compacted
    if not 0 <= waiting <= state.inline_max:
        return f"the control record counts {waiting} inline records; {state.inline_max} are allowed"
    compacted = [entry for entry in state.entries if entry.compacted]
    present = {
        entry.end
        for entry in state.entries
        if entry.blob[0] == INLINE
        and entry.end >= control.log_start
        and not any(other.start <= entry.start and entry.end <= other.end for other in compacted)
    }
    pending = control.pending
    if pending is not None and pending.blob[0] == INLINE and entry_at(state, pending.end) is None:
        present.add(pending.end)
    if len(present) > waiting:
        return f"there are inline records at {sorted(present)}, but the control record counts {waiting}"
    return None
