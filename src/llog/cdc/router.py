"""The router: turns table changes into events, in the WriteBatch that makes the changes.

Topics of engine `rocksdb` get their records in that WriteBatch, those of other engines through the outbox. In both
cases the router chooses the partition, and a partition has the events of one change in the order of its rows, followed
by those of later changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import FEW
from llog.batch.partitioning import partitions_for_keys
from llog.cdc.changes import Change, table_of
from llog.cdc.events import Op, encode_event_headers, event_header_column
from llog.cdc.message_ids import MessageIds
from llog.cdc.outbox import OutboxWriter
from llog.cdc.payloads import Texts, diff_payloads, full_payloads, key_payloads, keys_of, to_list
from llog.cdc.routes import Route, Routes, route_clauses
from llog.errors import InvalidArgument, PartitionNotInitialized, SqlError, SqlMemoryExceeded, SqlWorkerEnded
from llog.runtime import Runtime

if TYPE_CHECKING:
    from llog.engines.rocksdb.logs import StagedWrites
    from llog.engines.rocksdb.store import RocksStore


class Evaluator(Protocol):
    """Runs the SQL of routes."""

    def select(
        self, table: str, rows: pa.Table, where: str | None, key: str | None
    ) -> tuple[npt.NDArray[np.int64], pa.StringArray | None]:
        """Return the indexes of the rows for which `where` is true, in order, and the text of `key` for each of them,
        if `key` is given.

        Several expressions of `key` are joined by \\x1f.
        """
        ...


class Router:
    """Applies the routes of one store. The caller of `add` holds the store's mutex, as `StagedWrites` does."""

    def __init__(self, store: RocksStore, runtime: Runtime, evaluator: Evaluator) -> None:
        self.routes = Routes(store)
        self._runtime = runtime
        self._evaluator = evaluator
        self._ids = MessageIds(store, runtime)
        self._outbox = OutboxWriter(store)

    def has_routes(self, table: str, op: Op) -> bool:
        return bool(self.routes.of(table, op))

    def needs_old(self, table: str) -> bool:
        """Return whether updates of the table must include the old rows."""
        return self.routes.needs_old(table)

    def add(self, staged: StagedWrites, changes: Sequence[Change]) -> bool:
        """Add the events of these changes, one for each row and route; return whether some are for the relay, which the
        caller pokes after the commit.

        An UPDATE that changes nothing is an event, too; payload `diff` then has the key alone. WHERE and PARTITION BY
        see the new row, or the old one for DELETE.
        """
        now_ms = self._runtime.now_ms()
        relayed = added = False
        for change in changes:
            if change.rows.num_rows:
                rows = _Rows(change)
                for route in self.routes.of(change.table.name, change.op):
                    if self._route(staged, route, rows, now_ms):
                        added = True
                        relayed |= route.is_relayed
        if added:
            self._ids.put(staged.changes)
        return relayed

    def _route(self, staged: StagedWrites, route: Route, rows: _Rows, now_ms: int) -> bool:
        """Add the events of one route; return whether there were any."""
        chosen_by: pa.StringArray | None = None
        choose_by = route.partition_by if route.partitions > 1 else None
        if route.where is not None or choose_by is not None:
            kept, chosen_by = self._select(route, table_of(rows.change.rows), choose_by)
            if not len(kept):
                return False
            if len(kept) < rows.change.rows.num_rows:
                rows = rows.take(kept)
        keys = rows.keys
        count = len(keys)
        ranges = self._ids.take(count, now_ms)
        op, mode, table = rows.change.op, route.mode, route.table
        payloads = rows.payloads(route)
        if route.partitions == 1 and count <= FEW:
            headers = encode_event_headers(op, mode, table, chain(*ranges))
            parts = iter((_Part(0, _to_bytes(payloads), _to_bytes(keys), headers),))
        else:
            keys = _to_array(keys)
            columns = _to_array(payloads), keys, event_header_column(op, mode, table, ranges)
            parts = iter((_Part(0, *columns),))
            if route.partitions > 1:
                choosing = keys if chosen_by is None else pc.fill_null(chosen_by, "")
                parts = _by_partition(partitions_for_keys(choosing, route.partitions), columns)
        for part in parts:
            if route.is_relayed:
                self._outbox.add(
                    staged.changes,
                    route.directory,
                    part.partition,
                    to_list(part.values),
                    keys=to_list(part.keys),
                    headers=to_list(part.headers),
                    now_ms=now_ms,
                )
                continue
            try:
                staged.append(
                    route.directory,
                    part.partition,
                    part.values,
                    keys=part.keys,
                    headers=part.headers,
                    now_ms=now_ms,
                    what=f"{route.topic}/{part.partition}",
                )
            except PartitionNotInitialized:
                self.routes.reload()
                if route in self.routes.of(table, op):
                    raise
                return False  # the topic was deleted, and this route with it
        return True

    def _select(
        self, route: Route, rows: pa.Table, choose_by: str | None
    ) -> tuple[npt.NDArray[np.int64], pa.StringArray | None]:
        try:
            return self._evaluator.select(route.table, rows, route.where, choose_by)
        except SqlError as error:
            ours = isinstance(error, SqlMemoryExceeded | SqlWorkerEnded)
            raise type(error)(
                f"topic {route.topic!r} takes {route.op} of {route.table} {route_clauses(route.where, choose_by)}, "
                f"which fails for a changed row: {error.message}",
                hint=error.hint
                if ours
                else "change the row, or repeat ALTER TOPIC … ADD SOURCE with expressions that hold for every row: "
                "TRY_CAST, coalesce",
            ) from error


class _Part(NamedTuple):
    """The events for one partition, as lists if they are few."""

    partition: int
    values: list[bytes] | pa.BinaryArray
    keys: list[bytes] | pa.BinaryArray
    headers: list[bytes] | pa.BinaryArray


class _Rows:
    """Changed rows, rendered when first needed, so that routes share keys and payloads."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self._payloads: dict[tuple[str, int], Texts] = {}

    def take(self, indexes: npt.NDArray[np.int64]) -> _Rows:
        """Return the rows at these indexes."""
        rows, old = table_of(self.change.rows).take(indexes), self.change.old
        return _Rows(self.change._replace(rows=rows, old=None if old is None else old.take(indexes)))

    @cached_property
    def keys(self) -> Texts:
        return keys_of(self.change.table, self.change.rows)

    def payloads(self, route: Route) -> Texts:
        wanted = route.payload, route.preview
        if wanted not in self._payloads:
            self._payloads[wanted] = self._render_payloads(route)
        return self._payloads[wanted]

    def _render_payloads(self, route: Route) -> Texts:
        shape, op, rows, old = self.change
        if route.payload == "full" or (route.payload == "diff" and op is Op.INSERT):
            return full_payloads(shape, rows)
        if route.payload == "key" or op is Op.DELETE:
            return key_payloads(shape, rows, route.preview if route.payload == "key" else 0)
        if old is None:
            raise InvalidArgument(
                f"an update of {shape.name} has no old rows, which topic {route.topic!r} with payload 'diff' needs"
            )
        return diff_payloads(shape, table_of(rows), old)


def _to_bytes(texts: Texts) -> list[bytes]:
    return [text.encode() for text in to_list(texts)]


def _to_array(texts: Texts) -> pa.BinaryArray:
    return (pa.array(texts, pa.string()) if isinstance(texts, list) else texts).view(pa.binary())


def _by_partition(partitions: npt.NDArray[np.int64], columns: Sequence[pa.BinaryArray]) -> Iterator[_Part]:
    """Yield the events of each partition, in their order."""
    order = np.argsort(partitions, kind="stable")
    ordered = partitions[order]
    starts = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    sorted_columns = [column.take(pa.array(order)) for column in columns]
    for start, stop in pairwise(starts):
        yield _Part(int(ordered[start]), *(column.slice(start, stop - start) for column in sorted_columns))
