"""A Delta table. Its position is stored in the table's application transactions.

There is one transaction for each partition, whose version is the next offset. Transactions are part of the commit that
adds the records, and survive checkpoints and the removal of old log entries. Delta does not reject a transaction that
was committed before, and rebases appends on later commits; so a commit is tried once, on the version that was read.
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
from llog.spark.jobs.lake.files import PARTITIONED_BY, LakeFile, Layout, Shape, sync_parents
from llog.spark.jobs.lake.topic_table import Source, TablePosition
from llog.spark.jobs.tasks import optional_module

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
        """Return the current table; create it if it does not exist."""
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
                pass  # another process has just created it; if not, opening it fails
            table = self._delta.DeltaTable(str(self.root))
        self._check_columns(table)
        return table

    def position(self, table: Any) -> TablePosition | None:
        marks = table.metadata().configuration
        if _TOPIC not in marks:
            raise WrongStore(f"{self.root} is a Delta table that llog did not create: write to a new one")
        found = {p: table.transaction_version(_app_id(p)) for p in range(self._source.partitions)}
        offsets = {partition: offset for partition, offset in found.items() if offset is not None}
        known = TablePosition(marks[_LOG], marks[_TOPIC], int(marks[_INCARNATION]), offsets)
        if not offsets:
            same = (known.log_id, known.topic, known.incarnation)
            source = (self._source.log_id, self._source.topic, self._source.incarnation)
            return None if same == source else known
        return known

    def properties(self, before: TablePosition | None, after: TablePosition) -> Any:
        """Return the properties of a commit that moves the position from one to the other."""
        known = {} if before is None else before.offsets
        moved = {p: offset for p, offset in after.offsets.items() if known.get(p) != offset}
        return self._delta.CommitProperties(
            custom_metadata={"llog.position": msgspec.json.encode(after).decode()},
            max_commit_retries=0,
            app_transactions=[self._delta.Transaction(_app_id(p), offset) for p, offset in moved.items()],
        )

    def commit(self, table: Any, before: TablePosition | None, attempt: Callable[[Any], T]) -> tuple[Any, T]:
        """Run `attempt` on the table and return the table after the commit, with the result of `attempt`.

        The attempt is repeated if something else, such as an optimisation, was committed meanwhile. Raises `StaleWrite`
        if the position is no longer `before`.
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
                f"{self.root} has the columns {_format_columns(there)}, not {_format_columns(wanted)}: "
                "write to another table, or with the options it was begun with"
            )


class DeltaTable:
    """The target of an export."""

    def __init__(self, root: Path, source: Source, shape: Shape, file_bytes: int) -> None:
        self._state = DeltaState(root, source, shape.schema, PARTITIONED_BY)
        self._layout = Layout(directory=str(root), shape=shape, file_bytes=file_bytes)
        self._table: Any = None
        self._before: TablePosition | None = None

    def position(self) -> TablePosition | None:
        self._table = self._state.open()
        self._before = self._state.position(self._table)
        return self._before

    def begin(self) -> Layout:
        return self._layout

    def commit(self, position: TablePosition, files: Sequence[LakeFile]) -> None:
        root = self._state.root
        sync_parents(root, files)
        actions = [_add_action(file) for file in files]
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
            # At the wanted position, the files may belong to the table after all.
            if self._state.position(self._state.open()) != position:
                for file in files:
                    os.unlink(root / file.name)
            raise
        self._before = position


def _add_action(file: LakeFile) -> Any:
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


def _format_columns(columns: dict[str, str]) -> str:
    return "(" + ", ".join(columns) + ")"
