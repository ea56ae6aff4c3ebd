"""Statements as data: the parser returns them, and a session runs them. No I/O.

llog's own statements are in `commands/`. A `Parameter` stands for a value until `parameters.bind` replaces it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

Statement = msgspec.Struct
"""A `TableStatement`, or the struct of any other command."""


class Parameter(msgspec.Struct, frozen=True):
    """Stands for a value. `place` is its number, from 0, or its name."""

    place: int | str


class StartKind(StrEnum):
    LATEST = "latest"
    EARLIEST = "earliest"
    OFFSET = "offset"
    AFTER = "after"
    TIMESTAMP = "timestamp"


class StartAt(msgspec.Struct, frozen=True):
    """Where to read from. `value` is an offset, or ms since 1970 for TIMESTAMP."""

    kind: StartKind
    value: int | str | Parameter | None = None


class TableStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A statement that DuckDB understands.

    `tables` are those it reads or writes (`schema.name`), `topics` those it reads by FROM TOPIC.
    """

    kind: str
    """CREATE TABLE, DROP TABLE, INSERT, UPDATE, DELETE or SELECT."""
    sql: str
    """The text for DuckDB: tables have their schema, and the names of `topics` and `system` stand for those."""
    target: str | None = None
    """The table that the statement creates, drops or changes."""
    tables: tuple[str, ...] = ()
    topics: dict[str, str] = {}
    """Name in `sql` → topic."""
    system: dict[str, str] = {}
    """Name in `sql` → system table (`topics`, `topic_offsets`, `routes`, `partitions`)."""
    columns: tuple[str, ...] = ()
    """INSERT: the named columns; empty for all."""
    values: tuple[tuple[Any, ...], ...] | None = None
    """The rows of an INSERT … VALUES with nothing but plain literals and parameters; else None."""
    if_exists: bool = False
    """Whether it says DROP TABLE IF EXISTS or CREATE TABLE IF NOT EXISTS."""
    conflict: bool = False
    """Whether an INSERT has ON CONFLICT, OR REPLACE or OR IGNORE."""
    returning: bool = False
    parameters: tuple[int | str, ...] = ()
    """The places of the parameters: all numbers, which are `$1`, `$2` … in `sql`, or all names."""
