"""Writes the columns `key`, `value`, `topic`, `partition`, `headers` and `timestamp`, as Kafka's sink, exactly once.

A stream is one sink, named by its query id, so that a restart from its checkpoint continues it. A batch write is a sink
of its own: with a `writeId`, it takes effect once, however often it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from llog.engines.object.sink import SinkUploader, Upload, forget_sink, publish
from llog.errors import ConfigurationError, InvalidArgument, LlogError
from llog.log.log import Log
from llog.log.opening import writer_options
from llog.spark.offsets import logger
from llog.spark.options import WriteOptions
from llog.spark.process import run, run_patiently
from llog.spark.rows import RowGroups, get_or_create_topic
from llog.spark.write_modes import APPEND_ONLY

_KINDS: dict[str, tuple[str, ...]] = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": ("array<struct<key:string,value:binary>>",),
    "timestamp": ("timestamp",),
}


class UploadMessage(WriterCommitMessage):  # type: ignore[misc]
    """The uploads of one task, and their sink."""

    def __init__(self, sink: str, uploads: tuple[Upload, ...]) -> None:
        self.sink = sink
        self.uploads = uploads


class LlogWriter(DataSourceArrowWriter):  # type: ignore[misc]
    """A batch write."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ConfigurationError("llog is a log: it can be appended to, not overwritten. Use mode('append')")
        _check(options, schema)
        self._options = options
        self._sink = f"write-{options.write_id}" if options.write_id else f"once-{uuid4()}"
        run(options.settings, lambda log: _prepare(log, options))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> UploadMessage:
        return _upload(self._options, self._sink, iterator)

    def commit(self, messages: Sequence[UploadMessage | None]) -> None:
        uploads = _uploads(messages)
        settings = self._options.settings
        if uploads or self._options.write_id:
            run_patiently(settings, lambda log: publish(log, self._sink, 0, uploads))
        if self._options.write_id is None:
            # In a call of its own: if it were repeated with the publication, a finished write would look stale.
            try:
                run_patiently(settings, lambda log: forget_sink(log, self._sink))
            except LlogError as error:
                logger.warning("llog could not forget the finished write %s: %s", self._sink, error)

    def abort(self, messages: Sequence[UploadMessage | None]) -> None:
        """Leave the uploads to the collector: Spark also aborts after a commit that may have taken effect."""


class LlogStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """The writes of a stream. Tasks and commits run on different copies, which only the messages connect."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ConfigurationError(APPEND_ONLY)
        _check(options, schema)
        self._options = options
        run(options.settings, lambda log: _prepare(log, options))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> UploadMessage:
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        if not query:
            raise InvalidArgument("this stream has no query id, which names its sink: start it with writeStream")
        return _upload(self._options, f"query-{query}", iterator)

    def commit(self, messages: Sequence[UploadMessage | None], batchId: int) -> None:
        sinks = {message.sink for message in messages if message is not None}
        if len(sinks) != 1:
            raise InvalidArgument(f"batch {batchId} was written for {len(sinks)} queries instead of one")
        sink, uploads = sinks.pop(), _uploads(messages)
        run_patiently(self._options.settings, lambda log: publish(log, sink, batchId, uploads))

    def abort(self, messages: Sequence[UploadMessage | None], batchId: int) -> None:
        """Leave the uploads to the collector: Spark also aborts after a commit that may have taken effect."""


def _check(options: WriteOptions, schema: StructType) -> None:
    """Raise if the rows cannot be written, before any task starts."""
    written = [(field.name.lower(), field.dataType) for field in schema.fields if field.name.lower() in _KINDS]
    columns = dict(written)
    if len(columns) != len(written):
        raise ConfigurationError("two columns have the same name but for their case")
    for name, kind in columns.items():
        if kind.simpleString() not in _KINDS[name]:
            raise ConfigurationError(f"column {name!r} must be {' or '.join(_KINDS[name])}, not {kind.simpleString()}")
    if "value" not in columns:
        raise ConfigurationError(
            f"a column 'value' is needed to write to llog, which takes {', '.join(_KINDS)} and ignores any other"
        )
    if options.topic is None and "topic" not in columns:
        raise ConfigurationError("name the topic to write to: by the option topic, or a column 'topic'")


async def _prepare(log: Log, options: WriteOptions) -> None:
    """Create the topic of the option `topic` if it does not exist and may be created."""
    if options.topic is not None:
        await get_or_create_topic(log, options.topic, options.create_topic_partitions)


def _upload(options: WriteOptions, sink: str, batches: Iterator[pa.RecordBatch]) -> UploadMessage:
    """Upload all rows of one task, in blobs of about `upload_bytes`."""
    groups, codec = RowGroups(options), writer_options(options.settings).codec

    async def flush(log: Log) -> Upload:
        return await SinkUploader(log, sink, codec=codec).upload(groups.take())

    uploads = []
    for batch in batches:
        run(options.settings, lambda log, batch=batch: groups.add(log, batch))  # type: ignore[misc]
        if groups.size >= options.upload_bytes:
            uploads.append(run(options.settings, flush))
    if groups.size:
        uploads.append(run(options.settings, flush))
    return UploadMessage(sink, tuple(uploads))


def _uploads(messages: Sequence[UploadMessage | None]) -> list[Upload]:
    return [upload for message in messages if message is not None for upload in message.uploads]
