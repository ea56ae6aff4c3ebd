"""The collector, the repair of clocks, the trimmer that raises the log start, and damage to the index.

There is no clock: any blob may be old enough at any time, and any blob could fill a gap. So a collector may judge any
blob, by its stamp once the floor is at or above it, or by its age alone once the ceiling is below its stamp.

The collector's reads may be answered from an old state. A CAS never is, and the confirmation after the reads shows
it.
"""

from __future__ import annotations

from collections.abc import Iterator

from spec.partition import (
    COMPACTED,
    FAR,
    INLINE,
    NEAR,
    BlobName,
    Collector,
    Damager,
    OldState,
    Repairer,
    State,
    Trimmer,
    entry_at,
    has_gap,
    is_inside,
    put_entry,
    with_process,
)

Steps = Iterator[tuple[str, State]]

_MARKS = ("pending", "breadcrumb", "index")


def collector_steps(state: State, number: int, me: Collector, mutation: str | None) -> Steps:
    def become(after: State, pc: str) -> State:
        return with_process(after, number, me._replace(pc=pc))

    idle = Collector(me.id, "list", me.left)
    if state.pauses and me.left and me.old is None:
        paused = me._replace(old=OldState(state.control, state.entries, state.breadcrumb))
        yield "has a server paused", with_process(state._replace(pauses=state.pauses - 1), number, paused)
    if me.pc == "list":
        if me.left:
            first = _MARKS[0] if mutation in ("no-floor", "no-remark") else "floor"
            for blob in state.blobs:
                listed = Collector(me.id, first, me.left - 1, blob.name, me.old)
                yield f"lists {name_of(blob.name)}", with_process(state, number, listed)
                if blob.name[3] == FAR:
                    first_of_far = _MARKS[0] if mutation == "far-stamp-judged-by-age" else "ceiling"
                    listed = listed._replace(pc=first_of_far)
                    yield f"lists {name_of(blob.name)}, stamped far ahead", with_process(state, number, listed)
        return
    assert me.candidate is not None
    if me.pc == "floor":
        following = "delete" if mutation == "no-remark" else _MARKS[0]
        floor = max(state.control.floor, me.candidate[3])
        for ceiling in {max(state.control.ceiling, floor + 1), max(state.control.ceiling, FAR)}:
            raised = state._replace(control=state.control._replace(floor=floor, ceiling=ceiling))
            yield f"raises the floor to {floor} and the ceiling to {ceiling}", become(raised, following)
    elif me.pc == "ceiling" or me.pc in _MARKS:
        yield from _reads(state, number, me, mutation, idle, state, "")
        if me.old is not None:
            old = state._replace(**me.old._asdict())
            yield from _reads(state, number, me._replace(stale=True), mutation, idle, old, " in an old state")
    elif me.pc == "delete":
        kept = tuple(blob for blob in state.blobs if blob.name != me.candidate)
        yield f"deletes {name_of(me.candidate)}", with_process(state._replace(blobs=kept), number, idle)


def _reads(
    state: State, number: int, me: Collector, mutation: str | None, idle: Collector, seen: State, where: str
) -> Steps:
    """Take one read of the mark, which is answered from the state `seen`."""

    def become(pc: str) -> State:
        return with_process(state, number, me._replace(pc=pc))

    assert me.candidate is not None
    if me.pc == "ceiling":
        if me.candidate[3] > seen.control.ceiling:
            yield f"finds the ceiling below it{where}", become(_MARKS[0])
        else:
            yield f"finds the ceiling not below it{where}", with_process(state, number, idle)
    elif me.candidate in _references(seen, me.pc, mutation):
        yield f"finds it in {me.pc}{where}", with_process(state, number, idle)
    elif me.pc != _MARKS[-1]:
        yield f"does not find it in {me.pc}{where}", become(_MARKS[_MARKS.index(me.pc) + 1])
    elif has_gap(seen) and mutation != "mark-ignores-gaps":
        yield f"finds a gap that it could fill{where}", with_process(state, number, idle)
    elif me.stale and mutation != "no-confirm":
        yield f"does not find it in index{where}, and cannot confirm its reads", with_process(state, number, idle)
    else:
        yield f"does not find it in index{where}", become("floor" if mutation == "no-remark" else "delete")


def _references(state: State, where: str, mutation: str | None) -> set[BlobName]:
    if mutation == f"mark-ignores-{where}":
        return set()
    if where == "pending":
        return {state.control.pending.blob} if state.control.pending else set()
    if where == "breadcrumb":
        return {state.breadcrumb.blob} if state.breadcrumb else set()
    return {entry.blob for entry in state.entries}


def repairer_steps(state: State, number: int, me: Repairer) -> Steps:
    """Set the lowest possible floor: the code never goes below the store's present time, but safety does not depend on
    that.
    """
    if me.left:
        repaired = state.control._replace(floor=0, ceiling=NEAR, repairs=state.control.repairs + 1)
        yield (
            "sets floor and ceiling",
            with_process(state._replace(control=repaired), number, Repairer(me.id, me.left - 1)),
        )


def trimmer_steps(state: State, number: int, me: Trimmer, mutation: str | None) -> Steps:
    """Raise the log start to any existing offset, then delete the entries that end below it."""
    control = state.control
    if me.pc == "raise" and me.left:
        for start in range(control.log_start + 1, control.next_offset + 1):
            kept = control.pending if control.pending and control.pending.end >= start else None
            below = [entry.total for entry in state.entries if entry.end < start]
            if control.pending is not None and kept is None:
                below.append(control.pending.total)
            counted = max([control.inline_compacted, *below])
            raised = state._replace(control=control._replace(log_start=start, pending=kept, inline_compacted=counted))
            after = Trimmer(me.id, "delete", me.left - 1, start)
            yield f"raises the log start to {start}", with_process(raised, number, after)
    elif me.pc == "delete":
        end = me.start + 1 if mutation == "trim-one-too-many" else me.start
        kept_entries = tuple(entry for entry in state.entries if entry.end >= end)
        after = Trimmer(me.id, "raise", me.left)
        yield "deletes the entries below", with_process(state._replace(entries=kept_entries), number, after)


def damager_steps(state: State, number: int, me: Damager) -> Steps:
    """Lose any index entry that names a blob, and put lost entries back whose keys are free and whose offsets are not
    trimmed.
    """
    if me.left:
        for entry in state.entries:
            if entry.blob[0] == INLINE:
                continue  # Nothing could put it back: its record is lost with it.
            left = tuple(other for other in state.entries if other != entry)
            after = state._replace(entries=left, lost=tuple(sorted((*state.lost, entry))))
            yield f"loses the entry at {entry.end}", with_process(after, number, me._replace(left=me.left - 1))
    for entry in state.lost:
        if entry_at(state, entry.end) is not None or entry.end < state.control.log_start:
            continue
        if any(is_inside(entry, other) for other in (*state.entries, *state.lost)):
            continue  # A repair fills gaps, with the longest entry that it can prove.
        puts = {f"puts the entry at {entry.end} back": (entry.start, entry.blob, entry.total)}
        run = state.breadcrumb
        if run is not None and run.merge and run.state == "index" and run.end == entry.end:
            puts[f"puts the breadcrumb's entry at {entry.end}"] = (run.start, run.blob, run.total)
        for label, put in puts.items():
            lost = tuple(other for other in state.lost if other != entry)
            mended = put_entry(state, entry.end, *put)._replace(lost=lost)
            yield label, mended
            if me.stalls:
                stalled = me._replace(stalls=me.stalls - 1, stalled=entry)
                yield f"{label}, while another repair stalls", with_process(mended, number, stalled)
    yield from _stalled_repair_steps(state, number, me)


def _stalled_repair_steps(state: State, number: int, me: Damager) -> Steps:
    """Put an entry that was put back long ago, look at what covers it, and delete it if another entry does."""
    if me.stalled is not None:
        entry = me.stalled
        ended = me._replace(stalled=None)
        if entry_at(state, entry.end) is not None:
            yield f"finds an entry at {entry.end} after a stall", with_process(state, number, ended)
            return
        after = put_entry(state, entry.end, entry.start, entry.blob, entry.total)
        placed = ended._replace(placed=entry_at(after, entry.end))
        yield f"puts the entry at {entry.end} after a stall", with_process(after, number, placed)
    elif me.placed is not None and not me.covered:
        covered = any(is_inside(me.placed, other) for other in state.entries)
        looked = me._replace(covered=True) if covered else me._replace(placed=None)
        yield f"looks for an entry that covers the one at {me.placed.end}", with_process(state, number, looked)
    elif me.placed is not None:
        ended = me._replace(placed=None, covered=False)
        left = tuple(entry for entry in state.entries if entry != me.placed)
        yield f"deletes the entry at {me.placed.end}", with_process(state._replace(entries=left), number, ended)


def name_of(name: BlobName) -> str:
    kind, process, which, *_ = name
    return f"the {'compacted ' if kind == COMPACTED else ''}blob {process}.{which}"
