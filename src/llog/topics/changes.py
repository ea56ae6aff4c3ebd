"""What a statement changed in one table: the input of the router."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from llog.topics.events import Op


class TableShape(NamedTuple):
    """A table as its events need it: names in the table's order."""

    name: str
    columns: tuple[str, ...]
    primary_key: tuple[str, ...]
    json: frozenset[str] = frozenset()
    """The columns whose text is JSON."""


class Change(NamedTuple):
    """Rows of one table changed by one kind of operation; `rows` holds the new rows, for DELETE the deleted ones."""

    table: TableShape
    op: Op
    rows: pa.Table
    old: pa.Table | None = None
    """For UPDATE: the rows as they were, in the order of `rows`; None if no route needs them."""
