"""Routes: which changes of which tables become events of which topics. Stored as JSON at `route/<topic>/<table>/<op>`.

The owner process has all of them in memory. Methods that change routes add to the `Changes` of their caller, which
holds the store's mutex and calls `reload` after the write. So a route is dropped with its topic in one WriteBatch, and
a table that has routes cannot be dropped. A route names its topic's directory, so that a topic that was deleted and
created again does not inherit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from llog.cdc.events import Op, PayloadMode
from llog.engines.rocksdb.keys import META, ROUTE_PREFIX, ROUTES, after, meta_key, route_key, route_prefix
from llog.errors import TopicNotFound
from llog.log.catalog import ROCKSDB
from llog.log.records import Topic, decode, encode

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import Changes, RocksStore


class Route(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Turns one kind of change of one table into events of one topic."""

    topic: str
    directory: str
    engine: str
    partitions: int
    table: str
    op: Literal["INSERT", "UPDATE", "DELETE"]
    payload: Literal["key", "full", "diff"] = "key"
    preview: int = 0
    """For payload `key`: how many characters of the row's JSON the payload includes."""
    where: str | None = None
    """SQL over the new row, or the old one for DELETE; None for every row."""
    partition_by: str | None = None
    """SQL, one expression or several; None for the primary key."""

    @property
    def mode(self) -> PayloadMode:
        return PayloadMode[self.payload.upper()]

    @property
    def is_relayed(self) -> bool:
        """Whether events go through the outbox: only those of `rocksdb` topics commit with the rows they describe."""
        return self.engine != ROCKSDB


def route_clauses(where: str | None, partition_by: str | None) -> str:
    """Return the expressions of a route as ALTER TOPIC writes them."""
    clauses = (where and f"WHERE {where}", partition_by and f"PARTITION BY ({partition_by})")
    return " ".join(clause for clause in clauses if clause)


class Routes:
    """All routes of one store."""

    def __init__(self, store: RocksStore) -> None:
        self._store = store
        self._by_change: dict[tuple[str, Op], tuple[Route, ...]] = {}
        self._needing_old: frozenset[str] = frozenset()
        self.reload()

    def reload(self) -> None:
        """Read all routes from the store."""
        by_change: dict[tuple[str, Op], list[Route]] = {}
        for route in self.all():
            by_change.setdefault((route.table, Op[route.op]), []).append(route)
        self._by_change = {change: tuple(routes) for change, routes in by_change.items()}
        self._needing_old = frozenset(
            route.table
            for (_, op), routes in by_change.items()
            for route in routes
            if op is Op.UPDATE and route.payload == "diff"
        )

    def all(self) -> list[Route]:
        """Return all stored routes by topic, table and op."""
        return self._below(ROUTE_PREFIX)

    def of(self, table: str, op: Op) -> tuple[Route, ...]:
        return self._by_change.get((table, op), ())

    def needs_old(self, table: str) -> bool:
        """Return whether a route of the table's updates has payload `diff`."""
        return table in self._needing_old

    def put(self, changes: Changes, routes: Iterable[Route]) -> None:
        """Store routes, replacing those of the same topic, table and op; raise `TopicNotFound` if a topic of this store
        was deleted meanwhile.
        """
        for route in routes:
            if not route.is_relayed and self._store.get(META, meta_key(route.directory)) is None:
                raise TopicNotFound(
                    f"topic {route.topic!r} was deleted: a route to it would refuse every change of {route.table}"
                )
            changes.put(ROUTES, route_key(route.directory, route.table, route.op), encode(route))

    def drop(self, changes: Changes, directory: str, table: str, ops: Sequence[Op] = ()) -> list[Route]:
        """Drop the routes of these ops, or of all ops if none is named; return the dropped routes."""
        names = {op.name for op in ops or Op}
        return self._drop(
            changes, [each for each in self._below(route_prefix(directory)) if each.table == table and each.op in names]
        )

    def drop_topic(self, changes: Changes, directory: str) -> list[Route]:
        dropped = self._below(route_prefix(directory))
        changes.delete_range(ROUTES, route_prefix(directory), after(route_prefix(directory)))
        return dropped

    def follow(self, changes: Changes, topics: Iterable[Topic]) -> bool:
        """Bring routes in line with `topics`, all topics of the catalog; return whether anything had to change.

        Until then, the route of a topic that got more partitions uses the old number, and the route of a deleted topic
        makes events that the relay drops.
        """
        by_directory = {topic.directory: topic for topic in topics}
        changed = False
        for route in self.all():
            topic = by_directory.get(route.directory)
            if topic is None:
                self._drop(changes, [route])
            elif topic.partitions != route.partitions:
                self.put(changes, [msgspec.structs.replace(route, partitions=topic.partitions)])
            else:
                continue
            changed = True
        return changed

    def _below(self, prefix: bytes) -> list[Route]:
        return [decode(Route, value, key.decode()) for key, value in self._store.below(ROUTES, prefix)]

    def _drop(self, changes: Changes, routes: list[Route]) -> list[Route]:
        for route in routes:
            changes.delete(ROUTES, route_key(route.directory, route.table, route.op))
        return routes
