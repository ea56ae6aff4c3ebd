"""A Delta table. The position is kept where Delta keeps such things: the table's application transactions.

There is one for each partition, whose version is the next offset. They are part of the commit that adds the records and
survive checkpoints and the clean-up of old log entries. Delta does not reject a transaction that was committed before,
and rebases appends on whatever was committed meanwhile; so a commit is tried on the version that was read, once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa

from llog.errors import ConfigurationError, StaleWrite, WrongStore
from llog.spark.jobs.extras import optional_module
from llog.spark.jobs.lake.files import PARTITIONED_BY, LakeFile, Layout, Shape, sync_parents
from llog.spark.jobs.lake.topic_table import Position, Source

T = TypeVar("T")

_ATTEMPTS: Final = 5
_LOG: Final = "llog.log"
_TOPIC: Final = "llog.topic"
_INCARNATION: Final = "llog.incarnation"


def delta() -> Any:
    return optional_module("deltalake", "lake", "a Delta table")


class DeltaState:
    """A table and the position in it."""

    def __init__(self, root: Path, source: Source, schema: pa.Schema, partitioned_by: Sequence[str]) -> None:
        self._delta = delta()
        self.root = root
        self._source = source
        self._schema = schema
        self._partitioned_by = list(partitioned_by)

    def open(self) -> Any:
        """The table as it is now; made if there is none."""
        exceptions = self._delta.exceptions
        try:
            table = self._delta.DeltaTable(str(self.root))
        except exceptions.TableNotFoundError:
            self.root.mkdir(parents=True, exist_ok=True)
            marks = {_LOG: self._source.log_id, _TOPIC: self._source.topic}
            marks[_INCARNATION] = str(self._source.incarnation)
            try:
                self._delta.DeltaTable.create(
                    str(self.root),
                    self._schema,
                    mode="error",
                    partition_by=self._partitioned_by,
                    configuration=marks,
                    raise_if_key_not_exists=False,
                )
            except (exceptions.DeltaError, exceptions.CommitFailedError):
                pass  # made by another just now; if not, opening says why
            table = self._delta.DeltaTable(str(self.root))
        self._check_columns(table)
        return table

    def position(self, table: Any) -> Position | None:
        marks = table.metadata().configuration
        if _TOPIC not in marks:
            raise WrongStore(f"{self.root} is a Delta table that llog has not made: write to a new one")
        found = {p: table.transaction_version(_app_id(p)) for p in range(self._source.partitions)}
        offsets = {partition: offset for partition, offset in found.items() if offset is not None}
        known = Position(marks[_LOG], marks[_TOPIC], int(marks[_INCARNATION]), offsets)
        if not offsets:
            same = (known.log_id, known.topic, known.incarnation)
            source = (self._source.log_id, self._source.topic, self._source.incarnation)
            return None if same == source else known
        return known

    def properties(self, before: Position | None, after: Position) -> Any:
        """What a commit carries to move the position from one to the other."""
        known = {} if before is None else before.offsets
        moved = {p: offset for p, offset in after.offsets.items() if known.get(p) != offset}
        return self._delta.CommitProperties(
            custom_metadata={"llog.position": msgspec.json.encode(after).decode()},
            max_commit_retries=0,
            app_transactions=[self._delta.Transaction(_app_id(p), offset) for p, offset in moved.items()],
        )

    def commit(self, table: Any, before: Position | None, attempt: Callable[[Any], T]) -> tuple[Any, T]:
        """Runs `attempt` on the table, again if somebody committed something else (an optimisation, say) meanwhile.

        `StaleWrite` if the position is no longer `before`. Returns the table after the commit and what `attempt`
        returned.
        """
        for last in (*[False] * (_ATTEMPTS - 1), True):
            try:
                result = attempt(table)
            except self._delta.exceptions.CommitFailedError as error:
                table = self.open()
                if last or self.position(table) != before:
                    raise StaleWrite(f"another exporter has committed to {self.root} since: this one stops") from error
                continue
            return self.open(), result
        raise AssertionError("unreachable")

    def _check_columns(self, table: Any) -> None:
        there = {field.name: str(field.type) for field in table.schema().fields}
        wanted = {field.name: str(field.type) for field in self._delta.Schema.from_arrow(self._schema).fields}
        if there != wanted:
            raise ConfigurationError(
                f"{self.root} has the columns {_named(there)}, not {_named(wanted)}: "
                "write to another table, or with the options it was begun with"
            )


class DeltaTable:
    """The target of an export."""

    def __init__(self, root: Path, source: Source, shape: Shape, file_bytes: int) -> None:
        self._state = DeltaState(root, source, shape.schema, PARTITIONED_BY)
        self._layout = Layout(directory=str(root), shape=shape, file_bytes=file_bytes)
        self._table: Any = None
        self._before: Position | None = None

    def position(self) -> Position | None:
        self._table = self._state.open()
        self._before = self._state.position(self._table)
        return self._before

    def begin(self) -> Layout:
        return self._layout

    def commit(self, position: Position, files: Sequence[LakeFile]) -> None:
        root = self._state.root
        sync_parents(root, files)
        actions = [_added(file) for file in files]
        properties = self._state.properties(self._before, position)

        def attempt(table: Any) -> None:
            table.create_write_transaction(
                actions,
                "append",
                self._layout.shape.schema,
                partition_by=list(PARTITIONED_BY),
                commit_properties=properties,
            )

        try:
            self._table, _ = self._state.commit(self._table, self._before, attempt)
        except StaleWrite:
            # At the very position that was wanted, the files could be the table's after all.
            if self._state.position(self._state.open()) != position:
                for file in files:
                    os.unlink(root / file.name)
            raise
        self._before = position


def _added(file: LakeFile) -> Any:
    action = optional_module("deltalake.transaction", "lake", "a Delta table").AddAction
    stats = {
        "numRecords": file.records,
        "minValues": {"offset": file.start_offset},
        "maxValues": {"offset": file.end_offset},
    }
    return action(
        path=file.name,
        size=file.bytes,
        partition_values=file.partition_values,
        modification_time=time.time_ns() // 1_000_000,
        data_change=True,
        stats=msgspec.json.encode(stats).decode(),
    )


def _app_id(partition: int) -> str:
    return f"llog/{partition}"


def _named(columns: dict[str, str]) -> str:
    return "(" + ", ".join(columns) + ")"
