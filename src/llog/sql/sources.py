"""The sources of topics, as SQL calls the tables whose changes a route turns into events."""

from __future__ import annotations

from collections.abc import Callable

from llog.cdc.outbox import drop_topic
from llog.cdc.routes import Route
from llog.engines.rocksdb.store import Changes
from llog.errors import InvalidArgument
from llog.log.catalog import Catalog
from llog.log.records import Topic
from llog.sql.commands.sources import AddSource, DropSource
from llog.sql.tables.tables import Tables
from llog.sql.workers.thread_pools import Pool, ThreadPools


class Sources:
    """Changes the routes from tables to topics, for statements."""

    def __init__(self, tables: Tables, catalog: Catalog, threads: ThreadPools) -> None:
        self.routes = tables.router.routes
        self._tables = tables
        self._catalog = catalog
        self._threads = threads

    async def add(self, statement: AddSource) -> None:
        """Add routes, replacing those of the same topic, table and op. Raises `SqlError` for an unfit expression."""
        topic = await self._catalog.get(statement.topic)

        def work() -> None:
            with self._tables.lock_writes("ALTER TOPIC"):  # so that the table is not dropped meanwhile
                table = self._tables.definition(statement.table).name
                self._tables.check_route(table, statement.where, statement.partition_by)
                routes = [
                    Route(
                        topic=topic.name,
                        directory=topic.directory,
                        engine=topic.engine,
                        partitions=topic.partitions,
                        table=table,
                        op=op.name,  # type: ignore[arg-type]  # the names of `Op`
                        payload=statement.options.get("payload", "key"),
                        preview=statement.options.get("preview", 0),
                        where=statement.where,
                        partition_by=statement.partition_by,
                    )
                    for op in statement.ops
                ]
                self._change(lambda changes: self.routes.put(changes, routes))

        await self._threads.run(Pool.CHANGE, work)

    async def drop(self, statement: DropSource) -> None:
        topic = await self._catalog.get(statement.topic)

        def work() -> None:
            table = self._tables.definition(statement.table).name
            dropped: list[Route] = []
            with self._tables.lock_writes("ALTER TOPIC"):
                self._change(
                    lambda changes: dropped.extend(self.routes.drop(changes, topic.directory, table, statement.ops))
                )
            if not dropped:
                raise InvalidArgument(f"{table} is not a source of topic {topic.name!r}: SHOW ROUTES lists the sources")

        await self._threads.run(Pool.CHANGE, work)

    async def forget(self, topic: Topic) -> None:
        """Drop the routes to a deleted topic, and the events that wait for it in the outbox."""

        def work(changes: Changes) -> None:
            self.routes.drop_topic(changes, topic.directory)
            drop_topic(changes, topic.directory)

        await self._threads.run(Pool.CHANGE, lambda: self._change(work))

    async def follow(self) -> None:
        """Update the routes from the catalog, whose topics may have been deleted or have more partitions now."""
        topics = await self._catalog.all_topics()
        await self._threads.run(Pool.CHANGE, lambda: self._change(lambda changes: self.routes.follow(changes, topics)))

    def _change(self, fill: Callable[[Changes], object]) -> None:
        store = self._tables.store
        with store.mutex:
            changes = store.changes()
            fill(changes)
            if len(changes):
                store.write(changes, sync=True)
            self.routes.reload()  # deleting a topic of this store drops its stored routes, too
