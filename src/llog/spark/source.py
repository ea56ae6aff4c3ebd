"""The data source `llog`: what Spark calls. Options are checked and offsets resolved before any task starts."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from llog.partition.log import Log
from llog.partition.pins import pin
from llog.spark.fetching import PIN_LEASE_MS, fetch_runs, report_loss
from llog.spark.offsets import (
    Range,
    read_bounds,
    resolve_position,
    selected_partitions,
    selected_topics,
    within_bounds,
)
from llog.spark.options import ReadOptions, read_options, write_options
from llog.spark.planning import ReadTask, plan_tasks
from llog.spark.process import iterate, run
from llog.spark.schema import chosen_columns, source_schema, to_arrow


class LlogDataSource(DataSource):  # type: ignore[misc]
    """`spark.read|readStream|write|writeStream.format("llog")`, with the options and the schema of `kafka`."""

    @classmethod
    def name(cls) -> str:
        return "llog"

    def schema(self) -> StructType:
        # Called when a DataFrame is made: errors in what is common to batch and stream show up at load().
        value = str(self.options.get("includeheaders", "false")).strip().lower()
        return source_schema(include_headers=value == "true")

    def reader(self, schema: StructType) -> DataSourceReader:
        return LlogReader(read_options(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        # Spark hides an error that is raised here behind one of its own: the stream reader checks its options on first use.
        from llog.spark.stream import LlogStreamReader

        return LlogStreamReader(dict(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from llog.spark.writing import LlogWriter

        return LlogWriter(write_options(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from llog.spark.writing import LlogStreamWriter

        return LlogStreamWriter(write_options(self.options, streaming=True), schema, overwrite)


class LlogReader(DataSourceReader):  # type: ignore[misc]
    """A batch read: of a snapshot that is pinned when it is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = chosen_columns(schema)

    def partitions(self) -> list[ReadTask]:
        return run(self._options.settings, self._plan)

    async def _plan(self, log: Log) -> list[ReadTask]:
        options = self._options
        topics = await selected_topics(log, options.selection)
        pinned = await pin(log, "spark batch read", PIN_LEASE_MS)
        bounds = await read_bounds(log, selected_partitions(options.selection, topics))
        starts = await resolve_position(log, options.start, bounds, is_start=True)
        ends = await resolve_position(log, options.end, bounds, is_start=False)
        ranges: list[Range] = []
        for tp in bounds:
            wanted, lost = within_bounds(
                tp, starts[tp], ends[tp], bounds[tp], fail_on_data_loss=options.fail_on_data_loss
            )
            ranges.append(wanted)
            if lost:
                report_loss(lost)
        return await plan_tasks(
            log,
            ranges,
            topics,
            pin=pinned,
            task_bytes_max=options.partition_bytes_max,
            min_tasks=options.min_partitions,
        )

    def read(self, partition: ReadTask) -> Iterator[pa.RecordBatch]:
        return read_task(self._options, self._columns, partition)


def read_task(options: ReadOptions, columns: tuple[str, ...], task: ReadTask) -> Iterator[pa.RecordBatch]:
    """The Arrow batches of one task."""
    batches = iterate(
        options.settings,
        lambda log: fetch_runs(log, task.runs, pin=task.pin, fail_on_data_loss=options.fail_on_data_loss),
    )
    for planned, batch in batches:
        yield to_arrow(batch, columns, planned.time_type)
