"""What a statement gives, and the names that there are to complete. Nothing here needs an extra."""

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


class Names(NamedTuple):
    tables: dict[str, tuple[str, ...]]
    """With their columns."""
    topics: tuple[str, ...]
    groups: tuple[str, ...]
