"""Statements as data: what `parser.py` makes of SQL text, and what a session runs. No I/O.

A value that a statement was given as a parameter is a `Parameter` until `grammar.bind` has put the value in its place.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from llog.cdc.events import Op


class Parameter(msgspec.Struct, frozen=True):
    """A place for a value: its number, counted from 0, or its name."""

    place: int | str


class StartKind(StrEnum):
    LATEST = "latest"
    EARLIEST = "earliest"
    OFFSET = "offset"
    AFTER = "after"
    TIMESTAMP = "timestamp"


class StartAt(msgspec.Struct, frozen=True):
    """Where to read from. `value` is an offset, or a time in ms since 1970 for TIMESTAMP (text as written until it is
    bound).
    """

    kind: StartKind
    value: int | str | Parameter | None = None


class CreateTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    if_not_exists: bool = False
    partitions: int | Parameter = 1
    options: dict[str, Any] = {}


class DropTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    if_exists: bool = False


class ClearTopic(msgspec.Struct, frozen=True, kw_only=True):
    """Removes every record; offsets go on from where they were."""

    topic: str


class AddSource(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    table: str
    ops: tuple[Op, ...]
    where: str | None = None
    """SQL, as written."""
    partition_by: str | None = None
    """SQL, as written: one expression, or several with commas."""
    options: dict[str, Any] = {}


class DropSource(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    table: str
    ops: tuple[Op, ...] = ()
    """None: all of them."""


class SetTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    options: dict[str, Any]


class SettleOutbox(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the events of an outbox that nobody can tell of are in the topic."""

    topic: str
    partition: int | Parameter
    appended: bool


class Consume(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    group: str | Parameter | None = None
    member: str | Parameter | None = None
    partition: int | Parameter | None = None
    start: StartAt | None = None
    limit: int | Parameter | None = None
    wait: str | int | Parameter | None = None
    """A duration as written ('5 seconds', '500ms') or ms."""
    options: dict[str, Any] = {}


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    group: str | Parameter
    member: str | Parameter | None = None
    upto: tuple[tuple[int | Parameter | None, int | Parameter], ...]
    """(partition, offset); the partition is None if none was written."""


class ResetGroup(msgspec.Struct, frozen=True, kw_only=True):
    group: str | Parameter
    topic: str
    partition: int | Parameter | None = None
    start: StartAt


class Shown(StrEnum):
    TOPICS = "topics"
    TABLES = "tables"
    ROUTES = "routes"
    GROUPS = "consumer groups"
    PARTITIONS = "partitions"


class Show(msgspec.Struct, frozen=True, kw_only=True):
    what: Shown


class Describe(msgspec.Struct, frozen=True, kw_only=True):
    """A table, or a topic (`is_topic` if the word TOPIC was written)."""

    name: str
    is_topic: bool = False


class InsertTopic(msgspec.Struct, frozen=True, kw_only=True):
    """`INSERT INTO TOPIC t [(columns)] VALUES … | SELECT …`."""

    topic: str
    columns: tuple[str, ...] = ()
    select: TableStatement
    """The query that gives the rows; its parameters are those of the statement."""


class Begin(msgspec.Struct, frozen=True):
    pass


class Commit(msgspec.Struct, frozen=True):
    pass


class Rollback(msgspec.Struct, frozen=True):
    pass


class TableStatement(msgspec.Struct, frozen=True, kw_only=True):
    """A statement that DuckDB understands. `tables` are those it reads or writes (`schema.name`), `topics` those read
    by FROM TOPIC.
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


Statement = (
    CreateTopic
    | DropTopic
    | ClearTopic
    | AddSource
    | DropSource
    | SetTopic
    | SettleOutbox
    | Consume
    | Ack
    | ResetGroup
    | Show
    | Describe
    | InsertTopic
    | Begin
    | Commit
    | Rollback
    | TableStatement
)
