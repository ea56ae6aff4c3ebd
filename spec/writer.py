"""The writer: put the blob, put the index entry of the append before, CAS the control record.

An append that the partition admits inline puts no blob: its record is in the control record, and then in its index
entry.
"""

from __future__ import annotations

from collections.abc import Iterator

from spec.partition import (
    FAR,
    INLINE,
    LOST_BYTES,
    WAL,
    BlobName,
    Control,
    Pending,
    State,
    Writer,
    admits_inline,
    put_blob,
    put_pending,
    with_process,
)

Steps = Iterator[tuple[str, State]]


def writer_steps(state: State, number: int, me: Writer, mutation: str | None) -> Steps:
    value = (me.id, me.sequence)

    def become(after: State, **changes: object) -> State:
        return with_process(after, number, me._replace(**changes))  # type: ignore[arg-type]

    def acknowledge(after: State, offset: int, seen: Control) -> State:
        if offset > len(after.log) or after.log[offset - 1] != value:
            after = after._replace(fault=f"{value} was acknowledged at offset {offset}, where it was not committed")
        return become(after, pc="put", left=me.left - 1, sequence=me.sequence + 1, blob=None, seen=seen)

    if me.pc == "put":
        if me.left:
            for label, name, after in _puts(state, me, mutation):
                if mutation == "ack-before-cas":
                    yield f"{label} and acknowledges", acknowledge(after, me.seen.next_offset, me.seen)
                else:
                    yield label, become(after, pc="index", blob=name)
    elif me.pc == "read":
        mine = next((p for p in state.control.producers if p[:2] == value), None)
        if mine is not None and mutation != "no-writer-dedup":
            yield "reads that it has committed, acknowledges", acknowledge(state, mine[2], state.control)
        else:
            yield "reads the control record", become(state, pc="index", seen=state.control)
    elif me.pc == "index":
        assert me.blob is not None
        if not _may_commit(state, me, mutation):
            for label, name, after in _puts(state, me, mutation):
                yield f"may not commit the blob it has put, {label} again", become(after, blob=name)
            return
        after = state
        if mutation != "no-pending-recovery":
            pending = me.seen.pending
            if pending is not None and pending.blob[0] == INLINE and mutation == "inline-entry-without-bytes":
                pending = pending._replace(blob=(LOST_BYTES, *pending.blob[1:]))
            after = put_pending(state, pending, unconditional=mutation == "index-unconditional")
        yield "puts the index entry of the append before", become(after, pc="commit")
    elif me.pc == "commit":
        yield from _commit(state, number, me, mutation)


def _puts(state: State, me: Writer, mutation: str | None) -> Iterator[tuple[str, BlobName, State]]:
    """Put the writer's blob, with the lowest stamp that it may choose or, by a clock that is far ahead, the highest."""

    def put(stamp: int, after: State) -> tuple[BlobName, State]:
        name = (WAL, me.id, me.sequence, stamp, me.seen.repairs)
        return name, put_blob(after, name, ((me.id, me.sequence),))

    if state.inline_max and admits_inline(state, me.seen):
        yield "needs no blob", (INLINE, me.id, me.sequence, 0, 0), state
    yield "puts its blob", *put(me.seen.floor + 1, state)
    if state.jumps:
        stamp = FAR if mutation == "ceiling-ignored" else max(me.seen.ceiling, me.seen.floor + 1)
        yield "puts its blob by a clock that is ahead", *put(stamp, state._replace(jumps=state.jumps - 1))


def _may_commit(state: State, me: Writer, mutation: str | None) -> bool:
    assert me.blob is not None
    if me.blob[0] == INLINE:
        return admits_inline(state, me.seen) or mutation == "inline-not-judged-again"
    stamp, repairs = me.blob[3:]
    if stamp <= me.seen.floor or (stamp > me.seen.ceiling and mutation != "ceiling-ignored"):
        return False
    return repairs == me.seen.repairs or mutation == "repair-unnoticed"


def _commit(state: State, number: int, me: Writer, mutation: str | None) -> Steps:
    assert me.blob is not None
    look_again = me._replace(pc="read")
    if state.control != me.seen:
        yield "loses its CAS", with_process(state, number, look_again)
        return
    offset, others = me.seen.next_offset, tuple(p for p in me.seen.producers if p[0] != me.id)
    is_inline = me.blob[0] == INLINE
    total = me.seen.inline_total + is_inline
    control = me.seen._replace(
        next_offset=offset + 1,
        pending=Pending(offset, offset, me.blob, total),
        producers=tuple(sorted((*others, (me.id, me.sequence, offset)))),
        inline_total=total,
        inline_full=not is_inline and bool(state.inline_max) and not admits_inline(state, me.seen),
    )
    after = state._replace(control=control, log=(*state.log, (me.id, me.sequence)))
    done = me._replace(pc="put", left=me.left - 1, sequence=me.sequence + 1, blob=None, seen=control)
    yield f"commits offset {offset}", with_process(after, number, done)
    if state.losses:
        after = after._replace(losses=state.losses - 1)
        yield f"commits offset {offset}, its answer is lost", with_process(after, number, look_again)
