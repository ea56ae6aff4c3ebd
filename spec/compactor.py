"""The compactor. Its breadcrumb goes blob → index → delete → cursor → cleared; a compactor that finds it continues from
there. A merge, whose run consists of COMPACTED entries, goes blob → index → delete → cleared.
"""

from __future__ import annotations

from collections.abc import Iterator

from spec.partition import (
    COMPACTED,
    INLINE,
    Breadcrumb,
    Compactor,
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
            yield from _index_pending(state, number, me)
    elif me.pc == "look":
        if state.breadcrumb is not None:
            yield from _resume(state, number, me, state.breadcrumb, mutation)
        else:
            yield "reads the cursor", become(state, me._replace(pc="scan", cursor=state.cursor))
    elif me.pc == "scan":
        yield from _scan(state, number, me, mutation)
        if state.merges:
            yield from _scan_for_merges(state, number, me)
    elif me.pc == "breadcrumb":
        assert me.breadcrumb is not None
        if state.breadcrumb is not None:
            yield "finds another breadcrumb", become(state, idle)
        else:
            unchecked = "no-merge-check" if me.breadcrumb.merge else "no-cursor-check"
            following = "check" if me.breadcrumb.state == "blob" and mutation != unchecked else me.breadcrumb.state
            after = state._replace(breadcrumb=me.breadcrumb)
            if mutation == "inline-counted-early":
                after = _count_inline(after, me.breadcrumb, mutation)
            yield "puts its breadcrumb", become(after, me._replace(pc=following))
    elif me.pc == "check":
        assert me.breadcrumb is not None
        if me.breadcrumb.merge:
            yield from _check_merge(state, number, me, me.breadcrumb, mutation)
            return
        highest = entry_at(state, me.breadcrumb.end)
        if state.cursor == me.breadcrumb.start and highest is not None and highest.version == me.breadcrumb.expected:
            yield "finds its run still the next one", become(state, me._replace(pc="blob"))
        else:
            yield "finds its run overtaken, clears", become(_clear(state, me.breadcrumb), idle)
    else:
        assert me.breadcrumb is not None
        yield from _continue(state, number, me, me.breadcrumb, idle, mutation)


def _index_pending(state: State, number: int, me: Compactor) -> Steps:
    """Read the control record and put the index entry of `pending`, which an idle partition also clears."""
    control = state.control
    after = put_pending(state, control.pending)
    looking = me._replace(pc="look", left=me.left - 1, position=control.log_start, limit=control.next_offset)
    if control.pending is not None:
        cleared = after._replace(control=control._replace(pending=None))
        yield "indexes pending and clears it", with_process(cleared, number, looking)
        looking = looking._replace(limit=control.pending.start)
    yield "reads the control record, indexes pending", with_process(after, number, looking)


def _scan(state: State, number: int, me: Compactor, mutation: str | None) -> Steps:
    """Choose the run of WAL entries from the cursor on, by one atomic range read."""
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
                break  # a gap: another process has moved the cursor or the log start
            passed = entry.start
        elif entry.start != run[-1].end + 1:
            break
        run.append(entry)
    idle = Compactor(me.id, "start", me.left)
    if passed > me.cursor:
        if state.cursor == me.cursor:
            state = state._replace(cursor=passed)
        yield f"moves the cursor to {passed}", with_process(state, number, idle)
    elif len(run) >= 2 or any(entry.blob[0] == INLINE for entry in run):
        blob = (COMPACTED, me.id, me.left, 0, 0)
        breadcrumb = Breadcrumb("blob", run[0].start, run[-1].end, blob, run[-1].version, run[-1].total)
        chosen = me._replace(
            breadcrumb=breadcrumb, sources=tuple(entry.blob for entry in run), limit=0, position=0, cursor=0
        )
        if mutation == "blob-before-breadcrumb":
            values = _join_sources(state, chosen)
            if values is None:
                return
            state = put_blob(state, breadcrumb.blob, values)
            chosen = chosen._replace(breadcrumb=breadcrumb._replace(state="index"))
        label = f"chooses offsets {breadcrumb.start} to {breadcrumb.end}"
        yield label, with_process(state, number, chosen._replace(pc="breadcrumb"))


def _scan_for_merges(state: State, number: int, me: Compactor) -> Steps:
    """Choose any run of COMPACTED entries below the cursor that follow one another, by one atomic range read."""
    found = [entry for entry in state.entries if me.position <= entry.end < me.cursor]
    for first in range(len(found)):
        for last in range(first, len(found)):
            entry = found[last]
            if not entry.compacted or (last > first and entry.start != found[last - 1].end + 1):
                break
            if last > first:
                blob = (COMPACTED, me.id, me.left, 0, 0)
                breadcrumb = Breadcrumb(
                    "blob", found[first].start, entry.end, blob, entry.version, entry.total, merge=True
                )
                sources = tuple(each.blob for each in found[first : last + 1])
                chosen = Compactor(me.id, "breadcrumb", me.left, sources=sources, breadcrumb=breadcrumb)
                label = f"chooses to merge offsets {breadcrumb.start} to {breadcrumb.end}"
                yield label, with_process(state, number, chosen)


def _check_merge(state: State, number: int, me: Compactor, breadcrumb: Breadcrumb, mutation: str | None) -> Steps:
    """Read the whole run again, and what may cover it from above."""
    run = [entry for entry in state.entries if breadcrumb.start <= entry.end <= breadcrumb.end]
    covered = any(entry.end > breadcrumb.end and entry.start <= breadcrumb.end for entry in state.entries)
    if mutation == "merge-inside-another":
        covered = False
    if not covered and _is_whole(run, breadcrumb) and all(entry.compacted for entry in run):
        checked = me._replace(pc="blob", sources=tuple(entry.blob for entry in run))
        yield "finds its run unchanged", with_process(state, number, checked)
    else:
        idle = Compactor(me.id, "start", me.left)
        yield "finds its run changed, clears", with_process(_clear(state, breadcrumb), number, idle)


def _is_whole(run: list[Entry], breadcrumb: Breadcrumb) -> bool:
    """Return whether the entries follow one another over the whole run, and the highest one is unchanged."""
    starts = [breadcrumb.start, *(entry.end + 1 for entry in run)]
    whole = [entry.start for entry in run] == starts[:-1] and starts[-1] == breadcrumb.end + 1
    return whole and run[-1].version == breadcrumb.expected


def _resume(state: State, number: int, me: Compactor, breadcrumb: Breadcrumb, mutation: str | None) -> Steps:
    """Continue from the breadcrumb, or give it up if its run was trimmed or has changed."""
    idle = Compactor(me.id, "start", me.left)
    resumed = Compactor(me.id, breadcrumb.state, me.left, breadcrumb=breadcrumb)
    trimmed = me.position > breadcrumb.end
    if breadcrumb.state == "blob":
        if breadcrumb.merge and not trimmed:
            yield "resumes a merge", with_process(state, number, resumed._replace(pc="check"))
            return
        run = [entry for entry in state.entries if breadcrumb.start <= entry.end <= breadcrumb.end]
        if trimmed or not _is_whole(run, breadcrumb) or any(entry.compacted for entry in run):
            yield "gives up a run that is gone", with_process(_clear(state, breadcrumb), number, idle)
            return
        following = "blob" if mutation == "no-cursor-check" else "check"
        resumed = resumed._replace(pc=following, sources=tuple(entry.blob for entry in run))
    elif breadcrumb.state == "index" and trimmed:
        following = "clear" if mutation == "abandon-without-rewrite" else "give-up"
        yield "finds a trimmed run about to be published", with_process(state, number, resumed._replace(pc=following))
        return
    yield f"resumes in state {breadcrumb.state}", with_process(state, number, resumed)


def _continue(
    state: State, number: int, me: Compactor, breadcrumb: Breadcrumb, idle: Compactor, mutation: str | None
) -> Steps:
    def become(after: State, process: Compactor) -> State:
        return with_process(after, number, process)

    if me.pc == "blob":
        values = _join_sources(state, me)
        if values is None:
            yield "misses a source, clears", become(_clear(state, breadcrumb), idle)
        else:
            yield (
                "puts the compacted blob",
                become(put_blob(state, breadcrumb.blob, values), me._replace(pc="to index")),
            )
    elif me.pc in ("to index", "to delete", "to cursor"):
        if state.breadcrumb != breadcrumb:
            yield "has been overtaken", become(state, idle)
        else:
            breadcrumb = breadcrumb._replace(state=me.pc.removeprefix("to "))
            advanced = me._replace(pc=breadcrumb.state, breadcrumb=breadcrumb, sources=())
            yield (
                f"advances its breadcrumb to {breadcrumb.state}",
                become(state._replace(breadcrumb=breadcrumb), advanced),
            )
    elif me.pc == "index":
        if mutation == "delete-before-compacted":
            yield (
                "deletes the lower entries first",
                become(_delete_lower_entries(state, breadcrumb), me._replace(pc="publish")),
            )
        else:
            yield from _publish(state, number, me, breadcrumb)
    elif me.pc == "publish":
        yield from _publish(state, number, me, breadcrumb)
    elif me.pc == "give-up":
        found = entry_at(state, breadcrumb.end)
        if found is not None and found.blob == breadcrumb.blob:
            yield "finds it published after all", become(state, me._replace(pc="index"))
        elif found is not None and found.version == breadcrumb.expected:
            rewritten = put_entry(state, found.end, found.start, found.blob, found.total)
            yield "rewrites the highest entry", become(rewritten, me._replace(pc="clear"))
        else:
            yield "finds the highest entry changed", become(state, me._replace(pc="clear"))
    elif me.pc == "delete":
        yield (
            "deletes the lower entries",
            become(
                _delete_lower_entries(state, breadcrumb), me._replace(pc="clear" if breadcrumb.merge else "to cursor")
            ),
        )
    elif me.pc == "cursor":
        raised = state._replace(cursor=max(state.cursor, breadcrumb.end + 1))
        yield "raises the cursor", become(raised, me._replace(pc="count" if state.inline_max else "clear"))
    elif me.pc == "count":
        counted = _count_inline(state, breadcrumb, mutation)
        yield "counts the inline records of its run as compacted", become(counted, me._replace(pc="clear"))
    elif me.pc == "clear":
        yield "clears its breadcrumb", become(_clear(state, breadcrumb), idle)


def _publish(state: State, number: int, me: Compactor, breadcrumb: Breadcrumb) -> Steps:
    found = entry_at(state, breadcrumb.end)
    if found is not None and found.version == breadcrumb.expected:
        after = put_entry(state, breadcrumb.end, breadcrumb.start, breadcrumb.blob, breadcrumb.total)
        yield "makes the highest entry COMPACTED", with_process(after, number, me._replace(pc="to delete"))
    elif found is not None and found.blob == breadcrumb.blob:
        yield "finds it COMPACTED already", with_process(state, number, me._replace(pc="to delete"))
    elif found is None and breadcrumb.merge and breadcrumb.end >= state.control.log_start:
        # The entry was lost, perhaps after a twin had published it: nothing goes on until a repair has put it back.
        yield "misses the highest entry", with_process(state, number, Compactor(me.id, "start", me.left))
    else:
        yield "finds the highest entry changed", with_process(state, number, me._replace(pc="clear"))


def _join_sources(state: State, me: Compactor) -> tuple[Value, ...] | None:
    values: tuple[Value, ...] = ()
    for source in me.sources:
        found = values_of(state, source)
        if found is None:
            return None
        values += found
    return values


def _delete_lower_entries(state: State, breadcrumb: Breadcrumb) -> State:
    return state._replace(entries=tuple(e for e in state.entries if not breadcrumb.start <= e.end < breadcrumb.end))


def _count_inline(state: State, breadcrumb: Breadcrumb, mutation: str | None) -> State:
    """Raise the count to the run's last total: a maximum, so that a run which is resumed counts once."""
    control = state.control
    counted = max(control.inline_compacted, breadcrumb.total)
    if mutation == "inline-counted-twice":
        counted = control.inline_compacted + breadcrumb.end - breadcrumb.start + 1
    return state._replace(control=control._replace(inline_compacted=counted))


def _clear(state: State, breadcrumb: Breadcrumb) -> State:
    return state._replace(breadcrumb=None) if state.breadcrumb == breadcrumb else state
