"""The sink's processes together with a compactor and a collector, in the numbers of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spec.search import Result, describe, explore
from spec.sink import (
    FAR,
    NEAR,
    PARTITIONS,
    Collector,
    Compactor,
    Driver,
    OldState,
    Partition,
    Process,
    Repairer,
    State,
    Task,
    violation,
    with_process,
)
from spec.sink_driver import driver_steps, task_steps

Steps = Iterator[tuple[str, State]]

BOTH = ((0, 1),)
"""One task, which writes to both partitions."""
EACH = ((0,), (1,))
"""Two tasks, one partition each."""
SECOND = ((1,),)
"""One task, which writes only to the second partition: another attempt may divide the records differently."""
EMPTY: tuple[tuple[int, ...], ...] = ()


class SinkShape(NamedTuple):
    """`attempts` holds one entry per driver: the partitions to which each of its tasks writes."""

    attempts: tuple[tuple[tuple[int, ...], ...], ...]
    batches: int = 1
    runs: int = 1
    """The runs of each task of the first driver, speculative or repeated."""
    compactions: bool = False
    collections: int = 0
    losses: int = 0
    forgets: bool = False
    """Whether the driver deletes the sink's record at the end, as a write that nobody can repeat does."""
    jumps: int = 0
    """The number of blobs that a task may stamp by a clock that is far ahead."""
    repairs: int = 0
    pauses: int = 0
    """The number of servers that may be paused, and wake to answer the collector's reads from their old state."""

    def __str__(self) -> str:
        return describe("sink", self)

    def search(self, mutation: str | None, states_max: int) -> Result:
        return explore(initial(self), lambda state: steps(state, self, mutation), violation, states_max)


def initial(shape: SinkShape) -> State:
    procs: list[Process] = []
    for attempt, tasks in enumerate(shape.attempts):
        procs.append(Driver(attempt, 0, "tasks"))
        for batch in range(shape.batches):
            for task, partitions in enumerate(tasks):
                runs = range(shape.runs if attempt == 0 else 1)
                procs += [Task(attempt, batch, task, run, partitions, "start") for run in runs]
    if shape.compactions:
        procs += [Compactor(partition, "start") for partition in PARTITIONS]
    if shape.collections:
        procs.append(Collector("list", shape.collections))
    if shape.repairs:
        procs.append(Repairer(shape.repairs))
    chosen = (None,) * shape.batches
    empty = (Partition(),) * len(PARTITIONS)
    return State(None, empty, (), tuple(procs), shape.losses, shape.jumps, chosen, (), shape.pauses)


def steps(state: State, shape: SinkShape, mutation: str | None) -> Steps:
    for number, process in enumerate(state.procs):
        if isinstance(process, Task):
            found = task_steps(state, number, process, mutation)
        elif isinstance(process, Driver):
            found = driver_steps(
                state,
                number,
                process,
                mutation,
                batches=shape.batches,
                tasks=len(shape.attempts[process.attempt]),
                forgets=shape.forgets,
            )
        elif isinstance(process, Compactor):
            found = _compactor_steps(state, number, process)
        elif isinstance(process, Repairer):
            found = _repairer_steps(state, number, process)
        else:
            found = _collector_steps(state, number, process, mutation)
        for label, after in found:
            yield f"{process} {label}", after


def _compactor_steps(state: State, number: int, me: Compactor) -> Steps:
    """Compact the whole partition at once; the partition's model shows how that is done safely."""
    there = state.partitions[me.partition]
    if me.pc == "start" and there.records:
        compacted = there._replace(records=tuple(record._replace(compacted=True) for record in there.records))
        partitions = (*state.partitions[: me.partition], compacted, *state.partitions[me.partition + 1 :])
        after = state._replace(partitions=partitions)
        yield "compacts it", with_process(after, number, me._replace(pc="done"))


def _repairer_steps(state: State, number: int, me: Repairer) -> Steps:
    if me.left and state.sink is not None:
        repaired = state.sink._replace(floor=0, ceiling=NEAR, repairs=state.sink.repairs + 1)
        yield "sets floor and ceiling", with_process(state._replace(sink=repaired), number, Repairer(me.left - 1))


def _collector_steps(state: State, number: int, me: Collector, mutation: str | None) -> Steps:
    def become(after: State, pc: str) -> State:
        return with_process(after, number, me._replace(pc=pc))

    idle = Collector("list", me.left)
    if state.pauses and me.left and me.old is None:
        paused = me._replace(old=OldState(state.sink, state.partitions))
        yield "has a server paused", with_process(state._replace(pauses=state.pauses - 1), number, paused)
    if me.pc == "list":
        if me.left:
            for upload in state.blobs:
                listed = Collector("floor", me.left - 1, upload, me.old)
                yield f"lists the blob of {upload}", with_process(state, number, listed)
                if upload.stamp == FAR:
                    listed = listed._replace(pc="ceiling")
                    yield f"lists the blob of {upload}, stamped far ahead", with_process(state, number, listed)
        return
    assert me.candidate is not None
    if me.pc == "delete":
        kept = tuple(upload for upload in state.blobs if upload != me.candidate)
        yield "deletes the blob", with_process(state._replace(blobs=kept), number, idle)
        return
    if me.pc == "floor" and state.sink is not None:
        sink = state.sink
        if mutation != "sink-no-floor":
            floor = max(sink.floor, me.candidate.stamp)
            sink = sink._replace(floor=floor, ceiling=max(sink.ceiling, floor + 1))
        yield "raises the sink's floor", become(state._replace(sink=sink), "manifest")
    else:
        yield from _collector_reads(state, number, me, mutation, state, "")
    if me.old is not None:
        seen = state._replace(**me.old._asdict())
        yield from _collector_reads(state, number, me._replace(stale=True), mutation, seen, " in an old state")


def _collector_reads(state: State, number: int, me: Collector, mutation: str | None, seen: State, where: str) -> Steps:
    """One read, which is answered from the state that is seen."""

    def become(pc: str) -> State:
        return with_process(state, number, me._replace(pc=pc))

    assert me.candidate is not None
    idle = with_process(state, number, Collector("list", me.left))
    if me.pc == "floor":
        if seen.sink is None:  # Otherwise the CAS decides, which fails on an old state.
            yield f"finds no sink{where}", become("manifest")
    elif me.pc == "ceiling":
        if seen.sink is None or me.candidate.stamp > seen.sink.ceiling:
            yield f"finds the ceiling below it{where}", become("manifest")
        else:
            yield f"finds the ceiling not below it{where}", idle
    elif me.pc == "manifest":
        named = seen.sink.manifest if seen.sink is not None else None
        if me.candidate in (named or ()) and mutation != "mark-ignores-manifest":
            yield f"finds it in the manifest{where}", idle
        else:
            yield f"does not find it in the manifest{where}", become("partition 0")
    else:
        partition = int(me.pc.removeprefix("partition "))
        records = seen.partitions[partition].records
        if any(record.upload == me.candidate and not record.compacted for record in records):
            yield f"finds it in {me.pc}{where}", idle
        elif partition != PARTITIONS[-1]:
            yield f"does not find it in {me.pc}{where}", become(f"partition {partition + 1}")
        elif me.stale and mutation != "sink-no-confirm":
            yield f"does not find it in {me.pc}{where}, and cannot confirm its reads", idle
        else:
            yield f"does not find it in {me.pc}{where}", become("delete")
