"""The exactly-once sink on two partitions: its record, and what must be true of it in every state.

As in the partition, values stand for versions: the sink's record never returns to an earlier value, nor does a
partition's next offset.
"""

from __future__ import annotations

from typing import NamedTuple

PARTITIONS = (0, 1)
FAR = 9
"""As in the partition: the stamp of a clock that is far ahead."""
NEAR = 1
"""As in the partition: the ceiling that a repair sets."""


class Upload(NamedTuple):
    """A blob that one run of a task has put, identified by all its fields. It holds one record per partition."""

    batch: int
    attempt: int
    task: int
    run: int
    stamp: int
    partitions: tuple[int, ...]
    repairs: int
    """The number of repairs that the task knew."""

    def __str__(self) -> str:
        return f"task {self.task} run {self.run} of attempt {self.attempt} at batch {self.batch}"


Uploads = tuple[Upload, ...]


class Sink(NamedTuple):
    """The sink's record; `manifest` is None once it is applied."""

    batch: int = -1
    manifest: Uploads | None = None
    floor: int = 0
    ceiling: int = FAR
    repairs: int = 0


class Record(NamedTuple):
    """A record in a partition. Its index entry names the upload until it is `compacted`."""

    upload: Upload
    compacted: bool


class Partition(NamedTuple):
    """A partition to which only the sink appends: its next offset is the number of records. `sequences` holds the
    appended batches.
    """

    records: tuple[Record, ...] = ()
    sequences: tuple[int, ...] = ()


class Task(NamedTuple):
    """One run of a task; `seen` is the record that it read when it opened the sink."""

    attempt: int
    batch: int
    task: int
    run: int
    partitions: tuple[int, ...]
    pc: str
    seen: Sink = Sink()
    upload: Upload | None = None

    def __str__(self) -> str:
        return f"task {self.task} run {self.run} of attempt {self.attempt} at batch {self.batch}"


class Driver(NamedTuple):
    """A driver. `partitions` holds the next offset that it read of each partition, TODO or DONE."""

    attempt: int
    batch: int
    pc: str
    uploads: Uploads = ()
    seen: Sink | None = None
    partitions: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        return f"driver {self.attempt}"


TODO, DONE = "todo", "done"


class Compactor(NamedTuple):
    """Compacts one partition, once."""

    partition: int
    pc: str

    def __str__(self) -> str:
        return f"compactor of partition {self.partition}"


class OldState(NamedTuple):
    """The state of a server when it was paused. When it wakes, it answers reads from this state, although it no longer
    leads.
    """

    sink: Sink | None
    partitions: tuple[Partition, ...]


class Collector(NamedTuple):
    pc: str
    left: int
    candidate: Upload | None = None
    old: OldState | None = None
    """The state from which any of its reads may be answered."""
    stale: bool = False
    """Whether a read was answered from it, which the collector learns when it confirms its reads."""

    def __str__(self) -> str:
        return "collector"


class Repairer(NamedTuple):
    """Sets the floor and the ceiling of a sink whose clocks were wrong."""

    left: int

    def __str__(self) -> str:
        return "repair"


Process = Task | Driver | Compactor | Collector | Repairer


class State(NamedTuple):
    """The stores and the processes. `chosen` (the uploads published first for each batch) and `returned` are for the
    checks.
    """

    sink: Sink | None
    partitions: tuple[Partition, ...]
    blobs: tuple[Upload, ...]
    procs: tuple[Process, ...]
    losses: int
    jumps: int
    """How many more blobs a task may stamp by a clock that is far ahead."""
    chosen: tuple[Uploads | None, ...]
    returned: tuple[int, ...]
    pauses: int = 0
    """How many more servers may be paused."""


def with_process(state: State, number: int, process: Process) -> State:
    return state._replace(procs=(*state.procs[:number], process, *state.procs[number + 1 :]))


def violation(state: State) -> str | None:
    if state.sink is not None:
        missing = [upload for upload in state.sink.manifest or () if upload not in state.blobs]
        if missing:
            return f"the manifest names a blob that is gone: {missing[0]}"
    for number, partition in enumerate(state.partitions):
        for record in partition.records:
            if not record.compacted and record.upload not in state.blobs:
                return f"a record of partition {number} is in a blob that is gone: {record.upload}"
        for batch, chosen in enumerate(state.chosen):
            found = tuple(record.upload for record in partition.records if record.upload.batch == batch)
            whole = tuple(upload for upload in chosen or () if number in upload.partitions)
            if found != whole and (found or batch in state.returned):
                returned = "reported as written" if batch in state.returned else "published"
                return f"partition {number} has of batch {batch}: {_names(found)}; {returned} were: {_names(whole)}"
    return None


def _names(uploads: Uploads) -> str:
    return ", ".join(map(str, uploads)) or "nothing"
