"""The sink's tasks and drivers. A restarted driver is one more driver, with its own attempt at the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from spec.sink import DONE, PARTITIONS, TODO, Driver, Record, Sink, State, Task, Upload, Uploads, with_process

Steps = Iterator[tuple[str, State]]


def task_steps(state: State, number: int, me: Task, mutation: str | None) -> Steps:
    """Open the sink's record, then put the task's blob with the lowest stamp that it may choose."""
    late = mutation == "sink-opened-after-upload"
    if me.pc == "start":
        begun = any(isinstance(p, Driver) and p.attempt == me.attempt and p.batch >= me.batch for p in state.procs)
        if begun:
            if late:
                yield from _upload(state, number, me, "open")
            else:
                yield from _open(state, number, me, "put")
    elif me.pc == "open":
        yield from _open(state, number, me, "done")
    elif me.pc == "put":
        yield from _upload(state, number, me, "done")


def _open(state: State, number: int, me: Task, following: str) -> Steps:
    """Open the sink's record. A new one has the lowest floor: the code takes the clock's, which may be arbitrarily far
    behind.
    """
    sink = state.sink or Sink()
    opened = me._replace(pc=following, seen=sink if following == "put" else Sink())
    yield "opens the sink", with_process(state._replace(sink=sink), number, opened)


def _upload(state: State, number: int, me: Task, following: str) -> Steps:
    low, high = me.seen.floor + 1, max(me.seen.ceiling, me.seen.floor + 1)
    for label, stamp, jumps in (("", low, 0), (" by a clock that is ahead", high, 1))[: 1 + bool(state.jumps)]:
        upload = Upload(me.batch, me.attempt, me.task, me.run, stamp, me.partitions, me.seen.repairs)
        after = state._replace(blobs=tuple(sorted({*state.blobs, upload})), jumps=state.jumps - jumps)
        done = me._replace(pc=following, seen=Sink(), upload=upload)
        yield f"puts its blob{label}", with_process(after, number, done)


def driver_steps(
    state: State, number: int, me: Driver, mutation: str | None, *, batches: int, tasks: int, forgets: bool
) -> Steps:
    def become(after: State, **changes: object) -> State:
        return with_process(after, number, me._replace(**changes))  # type: ignore[arg-type]

    if me.pc == "tasks":
        for uploads in _task_uploads(state, me, tasks):
            # Without an upload, no task has opened the sink.
            after = state if uploads else state._replace(sink=state.sink or Sink())
            yield "has an upload of every task", become(after, pc="read", uploads=uploads)
    elif me.pc == "read":
        yield from _read(state, number, me, mutation, batches, forgets)
    elif me.pc == "publish":
        assert me.seen is not None
        if state.sink != me.seen:
            yield "loses its CAS", become(state, pc="read", seen=None)
            return
        published = me.seen._replace(batch=me.batch, manifest=me.uploads or None)
        first = state.chosen[me.batch] is None
        chosen = tuple(
            me.uploads if first and batch == me.batch else uploads for batch, uploads in enumerate(state.chosen)
        )
        after = state._replace(sink=published, chosen=chosen)
        # Whatever the answer, if any, the driver reads the record again, which decides.
        yield "publishes its manifest", become(after, pc="read", seen=None)
    elif me.pc == "apply":
        yield from _apply(state, number, me, mutation, batches, forgets)
    elif me.pc == "finish":
        assert me.seen is not None
        sink = state.sink
        any_batch = mutation == "sink-clears-any-manifest"
        if sink is not None and sink.manifest is not None and (sink.batch == me.seen.batch or any_batch):
            state = state._replace(sink=sink._replace(manifest=None))
        if mutation == "sink-cleared-before-applied":
            yield "clears the manifest", become(state, pc="apply")
        else:
            yield "clears the manifest", _after_manifest(state, number, me, batches, forgets)
    elif me.pc == "forget":
        forgotten = state._replace(sink=None)
        yield "forgets the sink", become(forgotten, pc="done", uploads=())
        if state.losses:
            forgotten = forgotten._replace(losses=state.losses - 1)
            following = "read" if mutation == "sink-published-again-after-forget" else "forget"
            yield "forgets the sink, its answer is lost", become(forgotten, pc=following)


def _task_uploads(state: State, me: Driver, tasks: int) -> Iterator[Uploads]:
    """Iterate over every way to take one upload of each task, from any of its runs."""
    runs: list[list[Upload]] = [[] for _ in range(tasks)]
    for task in state.procs:
        if isinstance(task, Task) and (task.attempt, task.batch) == (me.attempt, me.batch) and task.pc == "done":
            assert task.upload is not None
            runs[task.task].append(task.upload)
    yield from product(*runs)


def _read(state: State, number: int, me: Driver, mutation: str | None, batches: int, forgets: bool) -> Steps:
    """Read the record, which may have a manifest to apply first, of this batch or of an earlier one."""
    sink = state.sink
    if sink is None:
        yield "finds no sink, fails", with_process(state, number, me._replace(pc="failed", uploads=()))
        return
    publishing = me._replace(pc="publish", seen=sink)
    if mutation == "sink-own-attempt" and sink.batch == me.batch and sink.manifest not in (None, me.uploads):
        yield "reads another attempt's manifest", with_process(state, number, publishing)
    elif sink.manifest is not None:
        todo = tuple(
            TODO if any(partition in upload.partitions for upload in sink.manifest) else DONE
            for partition in PARTITIONS
        )
        following = "finish" if mutation == "sink-cleared-before-applied" else "apply"
        applying = me._replace(pc=following, seen=sink, partitions=todo)
        yield f"reads the manifest of batch {sink.batch}", with_process(state, number, applying)
    elif sink.batch >= me.batch and not (mutation == "sink-batch-goes-back" and sink.batch > me.batch):
        yield f"reads batch {sink.batch}", _after_manifest(state, number, me._replace(seen=sink), batches, forgets)
    elif not all(_may_commit(sink, upload, mutation) for upload in me.uploads):
        yield "may not commit an upload, fails", with_process(state, number, me._replace(pc="failed", uploads=()))
    else:
        yield f"reads batch {sink.batch}", with_process(state, number, publishing)


def _may_commit(sink: Sink, upload: Upload, mutation: str | None) -> bool:
    if upload.stamp <= sink.floor and mutation != "sink-floor-unchecked":
        return False
    return upload.stamp <= sink.ceiling and (upload.repairs == sink.repairs or mutation == "sink-repair-unnoticed")


def _after_manifest(state: State, number: int, me: Driver, batches: int, forgets: bool) -> State:
    """Return the state after the record's manifest was applied, which was of this batch, an older or a newer one."""
    assert me.seen is not None
    if me.seen.batch < me.batch:
        return with_process(state, number, me._replace(pc="read", seen=None, partitions=()))
    if me.seen.batch > me.batch:
        return with_process(state, number, Driver(me.attempt, me.batch, "failed"))
    state = state._replace(returned=tuple(sorted({*state.returned, me.batch})))
    if me.batch + 1 < batches:
        return with_process(state, number, Driver(me.attempt, me.batch + 1, "tasks"))
    if forgets:
        return with_process(state, number, Driver(me.attempt, me.batch, "forget", me.uploads))
    return with_process(state, number, Driver(me.attempt, me.batch, "done"))


def _apply(state: State, number: int, me: Driver, mutation: str | None, batches: int, forgets: bool) -> Steps:
    """Append to all partitions at a time: read the control record, then CAS it; producer = sink, sequence = batch."""
    assert me.seen is not None
    if all(counter == DONE for counter in me.partitions):
        if mutation == "sink-cleared-before-applied":
            yield "has applied all", _after_manifest(state, number, me, batches, forgets)
        else:
            yield "has applied all", with_process(state, number, me._replace(pc="finish"))
        return
    for partition, counter in enumerate(me.partitions):

        def become(after: State, counter: int | str, partition: int = partition) -> State:
            counters = (*me.partitions[:partition], counter, *me.partitions[partition + 1 :])
            return with_process(after, number, me._replace(partitions=counters))

        there = state.partitions[partition]
        if counter == TODO:
            if me.seen.batch in there.sequences and mutation != "sink-no-producer-dedup":
                yield f"finds partition {partition} applied", become(state, DONE)
            elif there.sequences and me.seen.batch < there.sequences[-1]:
                yield (
                    f"is out of order in partition {partition}, fails",
                    with_process(state, number, Driver(me.attempt, me.batch, "failed")),
                )
            else:
                yield f"reads the control record of {partition}", become(state, len(there.records))
        elif counter != DONE:
            if counter != len(there.records):
                yield f"loses its CAS on partition {partition}", become(state, TODO)
                continue
            after = _append(state, partition, me.seen)
            yield f"appends to partition {partition}", become(after, DONE)
            if state.losses:
                after = after._replace(losses=state.losses - 1)
                yield f"appends to partition {partition}, its answer is lost", become(after, TODO)


def _append(state: State, number: int, sink: Sink) -> State:
    there = state.partitions[number]
    records = tuple(Record(upload, False) for upload in sink.manifest or () if number in upload.partitions)
    grown = there._replace(records=there.records + records, sequences=(*there.sequences, sink.batch))
    return state._replace(partitions=(*state.partitions[:number], grown, *state.partitions[number + 1 :]))
