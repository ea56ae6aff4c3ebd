"""The data source `llog`, as Spark calls it. Options are checked and offsets resolved before any task starts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from llog.api import portal
from llog.config import Settings
from llog.log.opening import require_log
from llog.log.records import Topic
from llog.spark.broker_log import BrokerLog, broker_client
from llog.spark.offsets import (
    remaining_topics,
    resolve_offsets,
    selected_partitions,
    selected_topics,
    within_bounds,
)
from llog.spark.options import ReadOptions, read_options, write_options
from llog.spark.process import run, run_patiently
from llog.spark.schema import chosen_columns, source_schema
from llog.spark.source_log import Range, SourceLog, SourceTask
from llog.spark.stored_log import StoredLog

T = TypeVar("T")


class LlogDataSource(DataSource):  # type: ignore[misc]
    """`spark.read|readStream|write|writeStream.format("llog")`, with the options and the schema of `kafka`."""

    settings: Settings | None = None
    """The settings of the driver, which `register` adds; or those of the process that uses the class."""

    @classmethod
    def name(cls) -> str:
        return "llog"

    def schema(self) -> StructType:
        """Return the schema. `load()` calls this unless the user names a schema: mistakes show up here first."""
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
    """A batch read of a snapshot, which is pinned when the read is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = chosen_columns(schema)

    def partitions(self) -> Sequence[SourceTask]:
        return run_read(self._options, self._plan)

    async def _plan(self, log: SourceLog) -> Sequence[SourceTask]:
        topics = await selected_topics(log, self._options.selection)
        pin = await log.pin("spark batch read")
        try:
            return await log.plan(await self._ranges(log, topics), topics, self._options, pin=pin)
        except BaseException:
            await log.release(pin)
            raise

    async def _ranges(self, log: SourceLog, topics: dict[str, Topic]) -> list[Range]:
        options = self._options
        bounds = await log.bounds(selected_partitions(options.selection, topics))
        starts = await resolve_offsets(log, options.start, bounds, is_start=True)
        ends = await resolve_offsets(log, options.end, bounds, is_start=False)
        return [
            within_bounds(Range(tp, starts[tp], ends[tp]), bounds[tp], fail_on_data_loss=options.fail_on_data_loss)
            for tp in bounds
        ]

    def read(self, partition: SourceTask) -> Iterator[pa.RecordBatch]:
        return partition.read(self._options, self._columns)


def run_read(options: ReadOptions, use: Callable[[SourceLog], Coroutine[Any, Any, T]], *, patiently: bool = False) -> T:
    """Return the result of `use` on the broker that the options name, or on the log's stores, which must exist.

    `patiently` tries again for some seconds if a store fails, as a broker's client always does.
    """
    settings = options.settings
    if options.broker is not None:
        return portal.run(use(BrokerLog(broker_client(options.broker, settings.client_name))))
    require_log(settings)
    run_stored = run_patiently if patiently else run
    return run_stored(settings, lambda log: use(StoredLog(log)), reads_only=True)


async def _check_selection(log: SourceLog, options: ReadOptions) -> None:
    """Raise if a named topic or partition does not exist, unless `failOnDataLoss` is false."""
    look_up = selected_topics if options.fail_on_data_loss else remaining_topics
    selected_partitions(options.selection, await look_up(log, options.selection))
