"""The result of a statement, and the names that the shell completes. Importable without the extra `sql`."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa


class Result(NamedTuple):
    kind: str
    """SELECT, INSERT, CREATE TOPIC, CONSUME, …"""
    table: pa.Table | None = None
    """The rows, if the statement returns any."""
    changed: int = 0
    """Rows changed, or records appended."""
    warnings: tuple[str, ...] = ()
    """What a statement that succeeded left undone."""
    member: str | None = None
    """The name that CONSUME generated because the session has none; an ACK may pass it."""


class Names(NamedTuple):
    """What a statement may name."""

    tables: dict[str, tuple[str, ...]]
    """Table → its columns."""
    topics: tuple[str, ...]
    groups: tuple[str, ...]
