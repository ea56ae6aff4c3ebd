"""The data source `llog`: what Spark calls. Options are checked and offsets resolved before any task starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from llog.config import Settings
from llog.log.log import Log
from llog.log.opening import require_log
from llog.log.pins import pin, release
from llog.log.records import Topic
from llog.spark import broker_client
from llog.spark.broker_source import BrokerTask, plan_broker_tasks, read_broker_task
from llog.spark.fetcher import PIN_LEASE_MS, fetch_runs
from llog.spark.offsets import (
    Opened,
    Range,
    read_bounds,
    remaining_topics,
    resolve_position,
    selected_partitions,
    selected_topics,
    within_bounds,
)
from llog.spark.options import ReadOptions, read_options, write_options
from llog.spark.planner import ReadTask, plan_tasks
from llog.spark.process import iterate, run
from llog.spark.schema import chosen_columns, source_schema, to_arrow

T = TypeVar("T")


class LlogDataSource(DataSource):  # type: ignore[misc]
    """`spark.read|readStream|write|writeStream.format("llog")`, with the options and the schema of `kafka`."""

    settings: Settings | None = None
    """Those of the driver, which `register` adds; without them, those of whatever process Spark calls this class in."""

    @classmethod
    def name(cls) -> str:
        return "llog"

    def schema(self) -> StructType:
        """Called by load(), unless the user names a schema: the place where mistakes show up first."""
        options = read_options(self.options, streaming=None, settings=self.settings)
        run_read(options, lambda log: _check_selection(log, options))
        return source_schema(include_headers=options.include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        return LlogReader(read_options(self.options, streaming=False, settings=self.settings), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from llog.spark.stream import LlogStreamReader

        return LlogStreamReader(dict(self.options), schema, self.settings)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from llog.spark.sink import LlogWriter

        return LlogWriter(write_options(self.options, streaming=False, settings=self.settings), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from llog.spark.sink import LlogStreamWriter

        return LlogStreamWriter(write_options(self.options, streaming=True, settings=self.settings), schema, overwrite)


class LlogReader(DataSourceReader):  # type: ignore[misc]
    """A batch read: of a snapshot that is pinned when it is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = chosen_columns(schema)

    def partitions(self) -> list[ReadTask] | list[BrokerTask]:
        return run_read(self._options, self._plan)

    async def _plan(self, log: Opened) -> list[ReadTask] | list[BrokerTask]:
        options = self._options
        topics = await selected_topics(log, options.selection)
        if not isinstance(log, Log):
            ranges = await self._ranges(log, topics)
            return await plan_broker_tasks(log, ranges, topics, min_tasks=options.min_partitions)
        pinned = await pin(log, "spark batch read", PIN_LEASE_MS)
        try:
            return await self._plan_pinned(log, topics, pinned)
        except BaseException:
            await release(log, pinned)
            raise

    async def _plan_pinned(self, log: Log, topics: dict[str, Topic], pinned: str) -> list[ReadTask]:
        options = self._options
        return await plan_tasks(
            log,
            await self._ranges(log, topics),
            topics,
            pin=pinned,
            task_bytes_max=options.partition_bytes_max,
            min_tasks=options.min_partitions,
            fail_on_data_loss=options.fail_on_data_loss,
        )

    async def _ranges(self, log: Opened, topics: dict[str, Topic]) -> list[Range]:
        options = self._options
        bounds = await read_bounds(log, selected_partitions(options.selection, topics))
        starts = await resolve_position(log, options.start, bounds, is_start=True)
        ends = await resolve_position(log, options.end, bounds, is_start=False)
        return [
            within_bounds(Range(tp, starts[tp], ends[tp]), bounds[tp], fail_on_data_loss=options.fail_on_data_loss)
            for tp in bounds
        ]

    def read(self, partition: ReadTask | BrokerTask) -> Iterator[pa.RecordBatch]:
        return read_task(self._options, self._columns, partition)


def run_read(options: ReadOptions, use: Callable[[Opened], Awaitable[T]]) -> T:
    """The result of `use` on the log, which must be there, or on the broker that the options name."""
    if options.broker is not None:
        return broker_client.run(options.broker, options.settings.client_name, use)
    require_log(options.settings)
    return run(options.settings, use, reads_only=True)


def read_task(options: ReadOptions, columns: tuple[str, ...], task: ReadTask | BrokerTask) -> Iterator[pa.RecordBatch]:
    """The Arrow batches of one task."""
    if isinstance(task, BrokerTask):
        name = options.settings.client_name
        yield from read_broker_task(task, columns, client_name=name, fail_on_data_loss=options.fail_on_data_loss)
        return
    batches = iterate(
        options.settings,
        lambda log: fetch_runs(log, task.runs, pin=task.pin, fail_on_data_loss=options.fail_on_data_loss),
        reads_only=True,
    )
    for planned, batch in batches:
        yield to_arrow(batch, columns, planned.topic.timestamp_type)


async def _check_selection(log: Opened, options: ReadOptions) -> None:
    """Raises if a topic or partition that is named is not there, unless the read is to go on without."""
    look_up = selected_topics if options.fail_on_data_loss else remaining_topics
    selected_partitions(options.selection, await look_up(log, options.selection))
