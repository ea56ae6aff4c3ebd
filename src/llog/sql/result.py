"""The result of a statement, and the names that a shell can complete. Needs no extra to import."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa


class Result(NamedTuple):
    kind: str
    """SELECT, INSERT, CREATE TOPIC, CONSUME, …"""
    table: pa.Table | None = None
    """The rows, if the statement gives any."""
    changed: int = 0
    """Rows changed, or records appended."""
    warnings: tuple[str, ...] = ()
    """What the statement left undone although it succeeded."""
    member: str | None = None
    """The name that CONSUME made up for a session without one: an ACK may name it."""


class Names(NamedTuple):
    tables: dict[str, tuple[str, ...]]
    """Table → its columns."""
    topics: tuple[str, ...]
    groups: tuple[str, ...]
