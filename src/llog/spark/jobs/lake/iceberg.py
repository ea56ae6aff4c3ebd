"""An Iceberg table in a catalog of its own: `catalog.sqlite` in the directory, beside the table's files.

The position is a table property, set in the transaction that adds the files, so that it outlives the expiry of
snapshots; the snapshot's summary repeats it. By default, PyIceberg rebases an append that lost a race, and both appends
would count: a property of the table turns that off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import pyarrow as pa

from llog.errors import ConfigurationError, StaleWrite, WrongStore
from llog.spark.jobs.lake.files import PARTITIONED_BY, LakeFile, Layout, Shape, sync_parents
from llog.spark.jobs.lake.topic_table import TablePosition
from llog.spark.jobs.tasks import optional_module

NAMESPACE: Final = "llog"
_POSITION: Final = "llog.position"
_PROPERTIES: Final = {
    "llog.format": "1",
    "commit.retry.num-retries": "0",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}
_ATTEMPTS: Final = 5
_NAME: Final = re.compile(r"[A-Za-z0-9_]+")


def open_catalog(root: Path) -> Any:
    """Open or create the catalog of a directory of tables, which are all in the namespace `llog`."""
    optional_module("pyiceberg", "lake", "an Iceberg table")
    sql = optional_module("pyiceberg.catalog.sql", "lake", "an Iceberg table")
    root.mkdir(parents=True, exist_ok=True)
    catalog = sql.SqlCatalog("llog", uri=f"sqlite:///{root / 'catalog.sqlite'}", warehouse=f"file://{quote(str(root))}")
    catalog.create_namespace_if_not_exists(NAMESPACE)
    return catalog


def table_name(topic: str, name: str | None) -> str:
    """Return the given name of the table, or the topic's name with `_` for characters that SQL does not allow."""
    found = name or re.sub(r"[^A-Za-z0-9_]", "_", topic)
    if not _NAME.fullmatch(found):
        raise ConfigurationError(f"--name {found!r} is not a table name: letters, digits and '_'")
    return found


class IcebergTable:
    """The target of an export."""

    def __init__(self, root: Path, name: str, shape: Shape, file_bytes: int) -> None:
        self._catalog = open_catalog(root)
        self._errors = optional_module("pyiceberg.exceptions", "lake", "an Iceberg table")
        self._name = (NAMESPACE, name)
        self._where = f"{root} ({name})"
        self._shape = shape
        self._directory = root / name / "data"
        self._location = f"file://{root / name}"
        self._file_bytes = file_bytes
        self._table: Any = None
        self._before: TablePosition | None = None

    def position(self) -> TablePosition | None:
        self._table = self._open()
        self._before = self._position()
        return self._before

    def begin(self) -> Layout:
        # Iceberg learns the partition of an added file from its statistics: the columns must be in it.
        return Layout(directory=str(self._directory), shape=self._shape, file_bytes=self._file_bytes, partitioned_by=())

    def commit(self, position: TablePosition, files: Sequence[LakeFile]) -> None:
        sync_parents(self._directory, files)
        for last in (*[False] * (_ATTEMPTS - 1), True):
            try:
                self._attempt(position, files)
            except self._errors.CommitFailedException as error:
                self._table = self._open()
                if last or self._position() != self._before:
                    # At the wanted position, the files may belong to the table after all.
                    if self._position() != position:
                        for file in files:
                            os.unlink(self._directory / file.name)
                    raise StaleWrite(
                        f"another exporter has committed to {self._where} since: this one stops"
                    ) from error
                continue
            self._before = position
            return

    def _attempt(self, position: TablePosition, files: Sequence[LakeFile]) -> None:
        encoded = msgspec.json.encode(position).decode()
        with self._table.transaction() as transaction:
            transaction.set_properties({_POSITION: encoded})
            transaction.add_files(
                [f"file://{self._directory / file.name}" for file in files],
                snapshot_properties={_POSITION: encoded},
                check_duplicate_files=False,  # would read all manifests; names are new and the position is checked
            )

    def _position(self) -> TablePosition | None:
        properties = self._table.properties
        if "llog.format" not in properties:
            raise WrongStore(f"{self._where} is an Iceberg table that llog did not create: write to a new one")
        text = properties.get(_POSITION)
        return None if text is None else msgspec.json.decode(text, type=TablePosition)

    def _open(self) -> Any:
        """Return the current table; create it if it does not exist."""
        try:
            table = self._catalog.load_table(self._name)
        except self._errors.NoSuchTableError:
            try:
                self._catalog.create_table(
                    self._name, schema=self._shape.schema, location=self._location, properties=_PROPERTIES
                )
            except self._errors.TableAlreadyExistsError:
                pass  # another process has just created it
            table = self._catalog.load_table(self._name)
        if not table.spec().fields and table.current_snapshot() is None:
            table = self._partition_table(table)
        if table.properties.get("commit.retry.num-retries") != "0":
            raise ConfigurationError(
                f"{self._where} has commit.retry.num-retries set to other than 0: two exporters could write "
                "records twice. Set it to 0"
            )
        there = [field.name for field in table.schema().fields]
        if there != self._shape.schema.names:
            raise ConfigurationError(
                f"{self._where} has the columns {there}, not {self._shape.schema.names}: "
                "export to another table, or with the options it was begun with"
            )
        return table

    def _partition_table(self, table: Any) -> Any:
        try:
            with table.update_spec() as update:
                for column in PARTITIONED_BY:
                    update.add_identity(column)
        except (self._errors.CommitFailedException, ValueError):
            pass  # another process has just done it
        return self._catalog.load_table(self._name)


def read_table(root: Path, name: str) -> pa.Table:
    """Return all rows of a table, for tools without an Iceberg catalog."""
    return open_catalog(root).load_table((NAMESPACE, name)).scan().to_arrow()
