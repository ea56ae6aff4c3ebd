"""Statements as data: what the parser makes of SQL text, and what a session runs. No I/O.

`commands/` has the statements of llog's own. A value that a statement gets as a parameter is a `Parameter` until
`parameters.bind` puts the value in its place.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

Statement = msgspec.Struct
"""A `TableStatement`, or the statement of any other command."""


class Parameter(msgspec.Struct, frozen=True):
    """Stands for a value. `place` is its number, counted from 0, or its name."""

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
    """In DuckDB's dialect, names qualified, topics and system tables replaced by the names in `topics` and `system`."""
    target: str | None = None
    """The table that is created, dropped or changed."""
    tables: tuple[str, ...] = ()
    topics: dict[str, str] = {}
    """Name in `sql` → topic."""
    system: dict[str, str] = {}
    """Name in `sql` → system table (`topics`, `topic_offsets`, `routes`, `partitions`)."""
    columns: tuple[str, ...] = ()
    """INSERT: the columns that are given; none: all."""
    values: tuple[tuple[Any, ...], ...] | None = None
    """INSERT … VALUES of plain literals and parameters only: the rows. None: it takes DuckDB to know them."""
    if_exists: bool = False
    """DROP TABLE IF EXISTS, or CREATE TABLE IF NOT EXISTS."""
    conflict: bool = False
    """INSERT with ON CONFLICT, OR REPLACE or OR IGNORE."""
    returning: bool = False
    parameters: tuple[int | str, ...] = ()
    """Their places: all numbers, which are `$1`, `$2` … in `sql`, or all names."""
