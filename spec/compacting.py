"""The compactor. Its breadcrumb goes blob → index → delete → cursor → cleared, and whoever finds it goes on from
there.
"""

from __future__ import annotations

from collections.abc import Iterator

from spec.partition import (
    COMPACTED,
    Compactor,
    Crumb,
    Entry,
    State,
    Value,
    entry_at,
    put_blob,
    put_entry,
    put_pending,
    values_of,
    with_process,
)

Steps = Iterator[tuple[str, State]]


def compactor_steps(state: State, number: int, me: Compactor, mutation: str | None) -> Steps:
    def become(after: State, process: Compactor) -> State:
        return with_process(after, number, process)

    idle = Compactor(me.id, "start", me.left)
    if me.pc == "start":
        if me.left:
            yield from _settle(state, number, me)
    elif me.pc == "look":
        if state.crumb is not None:
            yield from _resume(state, number, me, state.crumb, mutation)
        else:
            yield "reads the cursor", become(state, me._replace(pc="scan", cursor=state.cursor))
    elif me.pc == "scan":
        yield from _scan(state, number, me, mutation)
    elif me.pc == "crumb":
        assert me.crumb is not None
        if state.crumb is not None:
            yield "finds another breadcrumb", become(state, idle)
        else:
            following = "check" if me.crumb.state == "blob" and mutation != "no-cursor-check" else me.crumb.state
            yield "puts its breadcrumb", become(state._replace(crumb=me.crumb), me._replace(pc=following))
    elif me.pc == "check":
        assert me.crumb is not None
        highest = entry_at(state, me.crumb.end)
        if state.cursor == me.crumb.start and highest is not None and highest.version == me.crumb.expected:
            yield "finds its run still the next one", become(state, me._replace(pc="blob"))
        else:
            yield "finds its run overtaken, clears", become(_cleared(state, me.crumb), idle)
    else:
        assert me.crumb is not None
        yield from _go_on(state, number, me, me.crumb, idle, mutation)


def _settle(state: State, number: int, me: Compactor) -> Steps:
    """Reads the control record and puts the index entry of `pending`; an idle partition's is cleared."""
    control = state.control
    after = put_pending(state, control.pending)
    looking = me._replace(pc="look", left=me.left - 1, position=control.log_start, limit=control.counter)
    if control.pending is not None:
        cleared = after._replace(control=control._replace(pending=None))
        yield "indexes pending and clears it", with_process(cleared, number, looking)
        looking = looking._replace(limit=control.pending.start)
    yield "reads the control record, indexes pending", with_process(after, number, looking)


def _scan(state: State, number: int, me: Compactor, mutation: str | None) -> Steps:
    """Chooses the run of WAL entries from the cursor on, as one atomic range read."""
    position = max(me.cursor, me.position)
    run: list[Entry] = []
    passed = 0
    for entry in state.entries:
        if not position <= entry.end < me.limit:
            continue
        first = run[0].start if run else position
        if entry.compacted:
            if entry.start <= first:
                run, passed = [], entry.end + 1
            break
        if not run:
            if entry.start > position:
                break  # a gap: somebody has moved on since
            passed = entry.start
        elif entry.start != run[-1].end + 1:
            break
        run.append(entry)
    idle = Compactor(me.id, "start", me.left)
    if passed > me.cursor:
        if state.cursor == me.cursor:
            state = state._replace(cursor=passed)
        yield f"moves the cursor to {passed}", with_process(state, number, idle)
    elif len(run) >= 2:
        crumb = Crumb("blob", run[0].start, run[-1].end, (COMPACTED, me.id, me.left, 0, 0), run[-1].version)
        chosen = me._replace(crumb=crumb, sources=tuple(entry.blob for entry in run), limit=0, position=0, cursor=0)
        if mutation == "blob-before-breadcrumb":
            values = _concatenated(state, chosen)
            if values is None:
                return
            state = put_blob(state, crumb.blob, values)
            chosen = chosen._replace(crumb=crumb._replace(state="index"))
        label = f"chooses offsets {crumb.start} to {crumb.end}"
        yield label, with_process(state, number, chosen._replace(pc="crumb"))


def _resume(state: State, number: int, me: Compactor, crumb: Crumb, mutation: str | None) -> Steps:
    """Goes on with the breadcrumb it found, or gives it up if its run was trimmed or is no longer there."""
    idle = Compactor(me.id, "start", me.left)
    resumed = Compactor(me.id, crumb.state, me.left, crumb=crumb)
    trimmed = me.position > crumb.end
    if crumb.state == "blob":
        run = [entry for entry in state.entries if crumb.start <= entry.end <= crumb.end]
        starts = [crumb.start, *(entry.end + 1 for entry in run)]
        whole = [entry.start for entry in run] == starts[:-1] and starts[-1] == crumb.end + 1
        if trimmed or not whole or any(entry.compacted for entry in run) or run[-1].version != crumb.expected:
            yield "gives up a run that is gone", with_process(_cleared(state, crumb), number, idle)
            return
        following = "blob" if mutation == "no-cursor-check" else "check"
        resumed = resumed._replace(pc=following, sources=tuple(entry.blob for entry in run))
    elif crumb.state == "index" and trimmed:
        following = "clear" if mutation == "abandon-without-rewrite" else "give-up"
        yield "finds a trimmed run about to be published", with_process(state, number, resumed._replace(pc=following))
        return
    yield f"resumes in state {crumb.state}", with_process(state, number, resumed)


def _go_on(state: State, number: int, me: Compactor, crumb: Crumb, idle: Compactor, mutation: str | None) -> Steps:
    def become(after: State, process: Compactor) -> State:
        return with_process(after, number, process)

    if me.pc == "blob":
        values = _concatenated(state, me)
        if values is None:
            yield "misses a source, clears", become(_cleared(state, crumb), idle)
        else:
            yield "puts the compacted blob", become(put_blob(state, crumb.blob, values), me._replace(pc="to index"))
    elif me.pc in ("to index", "to delete", "to cursor"):
        if state.crumb != crumb:
            yield "has been overtaken", become(state, idle)
        else:
            crumb = crumb._replace(state=me.pc.removeprefix("to "))
            advanced = me._replace(pc=crumb.state, crumb=crumb, sources=())
            yield f"advances its breadcrumb to {crumb.state}", become(state._replace(crumb=crumb), advanced)
    elif me.pc == "index":
        if mutation == "delete-before-compacted":
            yield "deletes the lower entries first", become(_deleted(state, crumb), me._replace(pc="publish"))
        else:
            yield from _publish(state, number, me, crumb)
    elif me.pc == "publish":
        yield from _publish(state, number, me, crumb)
    elif me.pc == "give-up":
        found = entry_at(state, crumb.end)
        if found is not None and found.blob == crumb.blob:
            yield "finds it published after all", become(state, me._replace(pc="index"))
        elif found is not None and found.version == crumb.expected:
            rewritten = put_entry(state, found.end, found.start, found.blob)
            yield "rewrites the highest entry", become(rewritten, me._replace(pc="clear"))
        else:
            yield "finds the highest entry changed", become(state, me._replace(pc="clear"))
    elif me.pc == "delete":
        yield "deletes the lower entries", become(_deleted(state, crumb), me._replace(pc="to cursor"))
    elif me.pc == "cursor":
        raised = state._replace(cursor=max(state.cursor, crumb.end + 1))
        yield "raises the cursor", become(raised, me._replace(pc="clear"))
    elif me.pc == "clear":
        yield "clears its breadcrumb", become(_cleared(state, crumb), idle)


def _publish(state: State, number: int, me: Compactor, crumb: Crumb) -> Steps:
    found = entry_at(state, crumb.end)
    if found is not None and found.version == crumb.expected:
        after = put_entry(state, crumb.end, crumb.start, crumb.blob)
        yield "makes the highest entry COMPACTED", with_process(after, number, me._replace(pc="to delete"))
    elif found is not None and found.blob == crumb.blob:
        yield "finds it COMPACTED already", with_process(state, number, me._replace(pc="to delete"))
    else:
        yield "finds the highest entry changed", with_process(state, number, me._replace(pc="clear"))


def _concatenated(state: State, me: Compactor) -> tuple[Value, ...] | None:
    values: tuple[Value, ...] = ()
    for source in me.sources:
        found = values_of(state, source)
        if found is None:
            return None
        values += found
    return values


def _deleted(state: State, crumb: Crumb) -> State:
    return state._replace(entries=tuple(e for e in state.entries if not crumb.start <= e.end < crumb.end))


def _cleared(state: State, crumb: Crumb) -> State:
    return state._replace(crumb=None) if state.crumb == crumb else state
