"""Tables as RocksDB stores them: definitions, and rows by primary key.

A definition is JSON under `table/<name>`. Rows are stored under the table's number, which is never reused, so a table
that is dropped and created again starts empty. Definitions are few and kept in memory.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import msgspec
import pyarrow as pa

from llog.base.decoders import json_decoder
from llog.cdc.changes import TableShape
from llog.engines.rocksdb.keys import COUNTERS, LAST_TABLE, ROWS, TABLES, after, row_prefix, table_key
from llog.engines.rocksdb.store import RocksStore
from llog.errors import SqlError, TableExists, TableNotFound
from llog.sql.tables.rows import TYPES, RowCodec, arrow_type, can_be_key

PAGE_ROWS: Final = 20_000


class Column(msgspec.Struct, frozen=True):
    name: str
    type: str
    """The type as DuckDB spells it."""
    nullable: bool = True
    default: str | None = None
    """An SQL expression."""


class TableDefinition(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    name: str
    number: int
    ddl: str
    """The CREATE TABLE statement as DuckDB spells it."""
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]
    checked: bool = False
    """Whether the table has constraints that only DuckDB can check: UNIQUE, CHECK."""

    @cached_property
    def codec(self) -> RowCodec:
        return RowCodec([(column.name, column.type) for column in self.columns], self.primary_key)

    @cached_property
    def shape(self) -> TableShape:
        json = frozenset(column.name for column in self.columns if column.type == "JSON")
        return TableShape(self.name, self.codec.names, self.primary_key, json)

    @cached_property
    def prefix(self) -> bytes:
        return row_prefix(self.number)

    @property
    def unqualified_name(self) -> str:
        return self.name.rpartition(".")[2]


def check_definition(definition: TableDefinition) -> TableDefinition:
    """Return the definition. Raises `SqlError` if rows of such a table could not be stored or identified."""
    what = f"table {definition.name!r}"
    if not definition.primary_key:
        raise SqlError(
            f"{what} has no primary key, by which events identify rows",
            hint="add PRIMARY KEY to a column, or PRIMARY KEY (a, b)",
        )
    for column in definition.columns:
        if arrow_type(column.type) is None:
            raise SqlError(
                f"column {column.name!r} of {what} has the unsupported type {column.type}", hint=f"use one of {TYPES}"
            )
        if column.name in definition.primary_key and not can_be_key(column.type):
            raise SqlError(
                f"column {column.name!r} of {what} has type {column.type}, which a primary key cannot contain",
                hint="use an integer, DECIMAL, VARCHAR, UUID, or a time",
            )
    folded = [column.name.lower() for column in definition.columns]
    if len(set(folded)) < len(folded):
        raise SqlError(f"{what} has two columns of the same name: {', '.join(folded)}")
    return definition


class TableStore:
    """Definitions and rows. A caller that changes them holds the writer's lock of `Tables`."""

    def __init__(self, store: RocksStore) -> None:
        self.store = store
        self._mutex = threading.Lock()
        self._known: dict[str, TableDefinition] = {}
        for _, value in store.below(ROWS, TABLES):
            definition = json_decoder(TableDefinition).decode(value)
            self._known[definition.name.lower()] = definition

    def definitions(self) -> dict[str, TableDefinition]:
        """Return all definitions by name, in the order of the names."""
        with self._mutex:
            return {each.name: each for each in sorted(self._known.values(), key=lambda each: each.name)}

    def find(self, name: str) -> TableDefinition | None:
        return self._known.get(name.lower())

    def definition(self, name: str) -> TableDefinition:
        """Return the definition, ignoring the case of the name. `TableNotFound` suggests similar names."""
        found = self._known.get(name.lower())
        if found is None:
            close = difflib.get_close_matches(name, self.definitions(), n=3)
            raise TableNotFound(
                f"there is no table {name!r}"
                + (f": did you mean {', '.join(close)}?" if close else ": SHOW TABLES lists them")
            )
        return found

    def definitions_numbered(self, numbers: Sequence[int]) -> list[TableDefinition]:
        with self._mutex:
            return [each for each in self._known.values() if each.number in numbers] if numbers else []

    def next_number(self) -> int:
        last = self.store.get(COUNTERS, LAST_TABLE)
        return 1 + (0 if last is None else int.from_bytes(last, "little"))

    def add(self, definition: TableDefinition) -> None:
        if self.find(definition.name) is not None:
            raise TableExists(f"table {definition.name!r} exists already")
        changes = self.store.changes()
        changes.put(ROWS, table_key(definition.name), msgspec.json.encode(definition))
        changes.put(COUNTERS, LAST_TABLE, definition.number.to_bytes(8, "little"))
        self.store.write(changes, sync=True)
        with self._mutex:
            self._known[definition.name.lower()] = definition

    def remove(self, definition: TableDefinition) -> None:
        changes = self.store.changes()
        changes.delete(ROWS, table_key(definition.name))
        changes.delete_range(ROWS, definition.prefix, after(definition.prefix))
        self.store.write(changes, sync=True)
        with self._mutex:
            del self._known[definition.name.lower()]

    def has_no_rows_between(self, keys: Sequence[bytes]) -> bool:
        """Whether no row surely lies between the lowest and the highest of these keys.

        One read instead of many when keys increase with every insert.
        """
        return self.store.is_empty(ROWS, min(keys), max(keys))

    def rows(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self.store.get_all(ROWS, keys)

    def pages(self, definition: TableDefinition) -> Iterator[pa.Table]:
        """Yield all rows, page by page. Rows that are written meanwhile may or may not be among them."""
        start, stop = definition.prefix, after(definition.prefix)
        while found := self.store.items(ROWS, start, stop, PAGE_ROWS):
            yield definition.codec.decode([value for _, value in found], definition.name)
            if len(found) < PAGE_ROWS:
                return
            start = found[-1][0] + b"\0"
