"""The changes of a statement to one table: the input of the router."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa

from llog.cdc.events import Op


class TableShape(NamedTuple):
    """The parts of a table's definition that its events need, with names in the table's order."""

    name: str
    columns: tuple[str, ...]
    primary_key: tuple[str, ...]
    json: frozenset[str] = frozenset()
    """The columns whose text is JSON."""


class FewRows:
    """At most `FEW` rows. A column of text, integers or booleans may be a list; every other one is an Arrow array."""

    def __init__(self, columns: Mapping[str, pa.Array | list[Any]], build_table: Callable[[], pa.Table]) -> None:
        self._columns = columns
        self._build_table = build_table

    @property
    def num_rows(self) -> int:
        return len(next(iter(self._columns.values())))

    def column(self, name: str) -> pa.Array | list[Any]:
        return self._columns[name]

    @cached_property
    def table(self) -> pa.Table:
        return self._build_table()


class Change(NamedTuple):
    """Rows of one table changed by one kind of operation; `rows` holds the new rows, for DELETE the deleted ones."""

    table: TableShape
    op: Op
    rows: pa.Table | FewRows
    old: pa.Table | None = None
    """For UPDATE: the rows as they were, in the order of `rows`; None if no route needs them."""


def table_of(rows: pa.Table | FewRows) -> pa.Table:
    return rows.table if isinstance(rows, FewRows) else rows
