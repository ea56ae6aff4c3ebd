"""Materializes a topic of keyed change events as a table of current rows: `llog pipeline materialize`.

The table is a Delta table. Tasks reduce their records to the last of each key, the driver merges these into the table
by key, and the commit of the merge also moves the position (see `delta.py`). So every merge takes effect once or not at
all, whenever the job is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llog.config import Settings
from llog.errors import ConfigurationError
from llog.spark.fetcher import fetch_ranges
from llog.spark.jobs.lake.decoder import Decoding, decoded_columns, decoder
from llog.spark.jobs.lake.delta import DeltaState, delta
from llog.spark.jobs.lake.topic_table import (
    Limits,
    Parallel,
    TablePosition,
    check_source,
    local_directory,
    planned_step,
    source_of,
    target_of,
)
from llog.spark.planner import ReadTask
from llog.spark.process import iterate, run
from llog.spark.schema import to_arrow

_READ: Final = ("key", "value", "partition", "offset", "timestamp")
_TASK_BYTES: Final = 64 << 20
_OP: Final = "op"
_DELETES: Final = ("DELETE", "delete", "d")
_DELETED: Final = "_deleted"
_LOG_COLUMNS: Final = (
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", pa.timestamp("us", tz="UTC")),
)


class MaterializeOptions(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    to: str
    key: tuple[str, ...] = ()
    """The decoded columns that identify a row; without any, the record's key does."""
    decoding: Decoding | None = None
    commit_bytes: int = 256 << 20
    """About how many stored bytes of records go into one merge, which the driver holds in memory."""
    allow_gaps: bool = False


class MaterializeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one run."""

    topic: str
    table: str
    records: int
    inserted: int
    updated: int
    deleted: int
    skipped: int
    """The number of records without a key, which belong to no row."""
    commits: int
    seconds: float
    positions: dict[int, int]


class Columns(msgspec.Struct, frozen=True):
    """The columns of the rows, and how values are decoded into them."""

    decoding: Decoding | None
    key: tuple[str, ...]

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify a row, as the table names them."""
        if self.decoding is None or not self.key:
            return ("key",)
        names = self.decoding.columns.names
        placed = decoded_columns(self._own, self.decoding)
        return tuple(placed[names.index(each)].name for each in self.key)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*self._own, *decoded_columns(self._own, self.decoding)])

    @property
    def _own(self) -> list[pa.Field]:
        fields = [pa.field("key", pa.binary()), pa.field("value", pa.binary())]
        if self.decoding is not None:
            fields.append(pa.field("_error", pa.string()))
        return [*fields, *_LOG_COLUMNS]


class TaskChanges(msgspec.Struct, frozen=True):
    """The result of a task: the last change of each key, as an Arrow stream."""

    changes: bytes
    records: int
    skipped: int


def materialize(
    settings: Settings,
    options: MaterializeOptions,
    parallel: Parallel,
    *,
    committed: Callable[[TablePosition], None] = lambda position: None,
) -> MaterializeResult:
    """Apply the records up to the present end of the topic to the table. `committed` is called after every merge.

    The job may be killed at any point and run again. If two work on one table, one of them raises `StaleWrite`.
    """
    began = time.monotonic()
    columns = _columns(options)
    root = local_directory(options.to, "a materialized table")
    source = run(settings, lambda log: source_of(log, options.topic))
    target = run(settings, lambda log: target_of(log, source))
    state = DeltaState(root, source, columns.schema, ())
    limits = Limits(commit_bytes_max=options.commit_bytes, task_bytes_max=_TASK_BYTES, allow_gaps=options.allow_gaps)
    table = state.open()
    stored = position = state.position(table)
    if position is not None:
        check_source(str(root), position, source)
    counts = dict.fromkeys(("records", "inserted", "updated", "deleted", "skipped", "commits"), 0)
    while True:
        with planned_step(settings, source, position, target, limits) as step:
            if not step.tasks:
                break
            work = partial(reduce_task, settings=settings, columns=columns, fail_on_data_loss=not options.allow_gaps)
            reduced = parallel(work, step.tasks)
        changes = last_of_each([pa.ipc.open_stream(each.changes).read_all() for each in reduced], columns.identity)
        properties = state.properties(stored, step.after)
        merge = partial(_merge, changes=changes, columns=columns, properties=properties)
        table, metrics = state.commit(table, stored, merge)
        counts["records"] += sum(each.records for each in reduced)
        counts["skipped"] += sum(each.skipped for each in reduced)
        for name in ("inserted", "updated", "deleted"):
            counts[name] += metrics.get(f"num_target_rows_{name}", 0)
        # Delta does not commit a merge that changes nothing: then the table keeps its position, and the next merge
        # moves it.
        position = step.after
        if (now := state.position(table)) != stored:
            stored = now
            counts["commits"] += 1
            committed(step.after)
    return MaterializeResult(
        topic=options.topic,
        table=str(root),
        seconds=time.monotonic() - began,
        positions={} if position is None else position.offsets,
        **counts,
    )


def reduce_task(task: ReadTask, *, settings: Settings, columns: Columns, fail_on_data_loss: bool) -> TaskChanges:
    """Reduce the records of one task, on an executor, to the last change of each key, which it holds in memory."""
    converter = _ChangeConverter(columns)
    kept: list[pa.Table] = []
    waiting = records = skipped = 0
    batches = iterate(
        settings, lambda log: fetch_ranges(log, task.ranges, pin=task.pin, fail_on_data_loss=fail_on_data_loss)
    )
    for located, batch in batches:
        changes = converter.convert(to_arrow(batch, _READ, located.topic.timestamp_type))
        records += batch.columns.count
        skipped += batch.columns.count - changes.num_rows
        kept.append(changes)
        waiting += changes.nbytes
        if waiting > _TASK_BYTES:
            kept = [last_of_each(kept, columns.identity)]
            waiting = 0
    schema = pa.schema([*columns.schema, pa.field(_DELETED, pa.bool_())])
    changes = last_of_each(kept, columns.identity) if kept else schema.empty_table()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_table(changes)
    return TaskChanges(sink.getvalue().to_pybytes(), records, skipped)


def last_of_each(parts: Sequence[pa.Table], identity: Sequence[str]) -> pa.Table:
    """Return the last row of every key: by offset within a partition, by time between partitions.

    A key has rows in several partitions only if partitions were added.
    """
    table = pa.concat_tables(parts)
    if table.num_rows == 0:
        return table
    # First the last row of each partition: within a partition, times may go backwards.
    latest = _last(table.sort_by("offset"), [*identity, "partition"])
    return _last(latest.sort_by([("timestamp", "ascending"), ("partition", "ascending")]), identity)


def _last(table: pa.Table, by: Sequence[str]) -> pa.Table:
    index = pa.array(np.arange(table.num_rows))
    keys = table.select(list(dict.fromkeys(by))).append_column("_index", index)
    found = keys.group_by(list(dict.fromkeys(by)), use_threads=False).aggregate([("_index", "max")])
    return table.take(found.column("_index_max"))


class _ChangeConverter:
    """Converts records of the log to changes of rows; records without a key are left out."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._schema = pa.schema([*columns.schema, pa.field(_DELETED, pa.bool_())])
        self._decode = None
        self._decoded: list[str] = []
        decoding = columns.decoding
        if decoding is not None:
            self._decoded = decoding.columns.names
            if decoding.kind == "json" and _OP not in self._decoded:
                decoding = msgspec.structs.replace(
                    decoding, columns=decoding.columns.append(pa.field(_OP, pa.string())), lenient=(_OP,)
                )
            self._decode = decoder(decoding)

    def convert(self, records: pa.RecordBatch) -> pa.Table:
        value = records.column("value")
        deleted = value.is_null()
        own_columns = {name: records.column(name) for name in records.schema.names}
        arrays: list[pa.Array] = []
        if self._decode is not None:
            rows, wrong = self._decode(value)
            fields = dict(zip((field.name for field in rows.type), rows.flatten(), strict=True))
            own_columns["value"] = pc.if_else(wrong.is_valid(), value, pa.scalar(None, pa.binary()))
            own_columns["_error"] = wrong
            arrays = [fields[name] for name in self._decoded]
            if _OP in fields and pa.types.is_string(fields[_OP].type):
                is_delete = pc.is_in(fields[_OP], pa.array(_DELETES))
                deleted = pc.or_(deleted, is_delete)
        own = [own_columns[name] for name in self._schema.names[: len(own_columns)]]
        changes = pa.Table.from_arrays([*own, *arrays, deleted], schema=self._schema)
        for name in self._columns.identity:
            changes = changes.filter(changes.column(name).is_valid())
        return changes


def _merge(table: Any, *, changes: pa.Table, columns: Columns, properties: Any) -> dict[str, int]:
    names = {_quote(name): f"s.{_quote(name)}" for name in columns.schema.names}
    same = " AND ".join(f"t.{_quote(name)} = s.{_quote(name)}" for name in columns.identity)
    merge = table.merge(changes, same, source_alias="s", target_alias="t", commit_properties=properties)
    merge = merge.when_matched_delete(f"s.{_DELETED}").when_matched_update(names)
    metrics: dict[str, int] = merge.when_not_matched_insert(names, predicate=f"NOT s.{_DELETED}").execute()
    return metrics


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _columns(options: MaterializeOptions) -> Columns:
    columns = Columns(options.decoding, options.key)
    names = columns.schema.names
    if len({name.lower() for name in names}) < len(names):
        raise ConfigurationError(f"two columns have the same name but for their case: {', '.join(names)}")
    for name in options.key:
        if options.decoding is None or name not in options.decoding.columns.names:
            raise ConfigurationError(f"--key {name!r} is not a decoded column: name it in --schema, and use --decode")
        kind = options.decoding.columns.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind):
            raise ConfigurationError(f"--key {name!r} is of type {kind}, which cannot identify a row")
    return columns


def current_rows(to: str, limit: int | None = None) -> pa.Table:
    """Return the current rows of a materialized table."""
    root = local_directory(to, "a materialized table")
    try:
        table = delta().DeltaTable(str(root))
    except delta().exceptions.TableNotFoundError as error:
        raise ConfigurationError(f"there is no table in {root}: materialize a topic first") from error
    rows = table.to_pyarrow_dataset()
    return rows.to_table() if limit is None else rows.head(limit)
