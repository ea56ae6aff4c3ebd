"""The sink's two sides, called as Spark calls them, with what goes wrong in between."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from llog.errors import ConfigurationError, StaleWrite, TopicNotFound, WrongEngine
from llog.log.catalog import DISK, Catalog
from llog.log.keys import sink_key
from llog.log.log import Log
from llog.log.records import Manifest, Sink, decode, encode
from llog.spark import sink as writing
from llog.spark.options import write_options
from llog.spark.sink import LlogStreamWriter, LlogWriter, UploadMessage
from tests.spark.logs import LogOnDisk

SCHEMA = StructType().add("partition", IntegerType()).add("value", StringType())


@pytest.fixture
def topic(disk: LogOnDisk, monkeypatch: pytest.MonkeyPatch) -> LogOnDisk:
    disk.create("t", 2)
    context = SimpleNamespace(getLocalProperty=lambda name: "q1" if name == "sql.streaming.queryId" else None)
    monkeypatch.setattr(writing, "TaskContext", SimpleNamespace(get=lambda: context))
    return disk


def stream_writer(disk: LogOnDisk) -> LlogStreamWriter:
    options = write_options({**disk.options, "topic": "t", "checkpointLocation": "/c"}, streaming=True)
    return LlogStreamWriter(options, SCHEMA, False)


def batch_writer(disk: LogOnDisk, **options: str) -> LlogWriter:
    return LlogWriter(write_options({**disk.options, "topic": "t", **options}, streaming=False), SCHEMA, False)


def write_rows(writer: LlogStreamWriter | LlogWriter, *values: str, partition: int = 0) -> UploadMessage:
    """What one task makes of these rows, on its own copy of the writer; the message crosses processes, too."""
    batch = pa.RecordBatch.from_pydict(
        {"partition": pa.array([partition] * len(values), pa.int32()), "value": pa.array(values, pa.string())}
    )
    copy: LlogWriter = pickle.loads(pickle.dumps(writer))
    message: UploadMessage = pickle.loads(pickle.dumps(copy.write(iter([batch] if values else []))))
    return message


def test_a_batch_that_is_committed_again_with_other_rows_keeps_the_first(topic: LogOnDisk) -> None:
    first = [write_rows(stream_writer(topic), "a"), write_rows(stream_writer(topic), "b", partition=1)]
    stream_writer(topic).commit(first, 0)
    again = [write_rows(stream_writer(topic), "recomputed", "differently"), write_rows(stream_writer(topic))]
    stream_writer(topic).commit(again, 0)
    stream_writer(topic).commit([write_rows(stream_writer(topic), "c")], 1)
    assert topic.payloads("t", 2) == ["a", "c", "b"]
    with pytest.raises(StaleWrite, match=r"sink query-q1 has come to batch 1: batch 0 is a leftover"):
        stream_writer(topic).commit(first, 0)
    assert topic.payloads("t", 2) == ["a", "c", "b"]


@pytest.mark.parametrize("applied", [False, True])
def test_a_driver_that_died_after_its_manifest_is_finished_by_the_next_whatever_that_computed(
    topic: LogOnDisk, applied: bool
) -> None:
    """Between the manifest and its application, and (`applied`) between that and its end."""
    died = [write_rows(stream_writer(topic), "a"), write_rows(stream_writer(topic), "b", partition=1)]
    manifest = Manifest(
        blobs=tuple(upload.blob for message in died for upload in message.uploads), since={"t/0": 1, "t/1": 1}
    )
    if applied:
        stream_writer(topic).commit(died, 0)

    async def leave(log: Log) -> None:
        key = sink_key("query-q1")
        found = await log.meta.get(key)
        assert found is not None
        record = decode(Sink, found.value, key)
        await log.meta.put(key, encode(Sink(batch=0, manifest=manifest, touched_ms=record.touched_ms)))

    topic.do(leave)
    stream_writer(topic).commit([write_rows(stream_writer(topic), "x", "y", "z")], 0)
    assert topic.payloads("t", 2) == ["a", "b"]
    assert topic.problems("t", 2) == []


def test_a_batch_without_rows_counts_and_writes_nothing(topic: LogOnDisk) -> None:
    stream_writer(topic).commit([write_rows(stream_writer(topic)), None], 0)
    stream_writer(topic).commit([write_rows(stream_writer(topic), "a")], 1)
    for options in ({"writeId": "empty"}, {}):
        writer = batch_writer(topic, **options)
        writer.commit([write_rows(writer)])
    assert topic.payloads("t", 2) == ["a"]


def test_a_write_with_an_id_is_done_once_and_without_one_each_time(topic: LogOnDisk) -> None:
    for values in (["a", "b"], ["another", "result"]):
        writer = batch_writer(topic, writeId="load-7")
        writer.commit([write_rows(writer, *values)])
    assert topic.payloads("t", 2) == ["a", "b"]
    for _ in range(2):
        writer = batch_writer(topic)
        writer.commit([write_rows(writer, "c")])
    assert topic.payloads("t", 2) == ["a", "b", "c", "c"]


def test_a_large_task_uploads_several_blobs_and_keeps_its_order(topic: LogOnDisk) -> None:
    writer = batch_writer(topic, uploadBytes="1KiB")
    batches = [
        pa.RecordBatch.from_pydict({"partition": pa.array([0], pa.int32()), "value": pa.array([f"{n:0600}"])})
        for n in range(9)
    ]
    message = writer.write(iter(batches))
    assert len(message.uploads) == 5
    writer.commit([message])
    assert [int(payload) for payload in topic.payloads("t")] == list(range(9))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": StringType()}, "a column 'value' is needed"),
        ({"value": IntegerType()}, "column 'value' must be binary or string, not int"),
        ({"vlaue": StringType()}, "a column 'value' is needed to write to llog, which takes key, value, topic"),
        ({"value": StringType(), "VALUE": StringType()}, "two columns have the same name"),
        ({"value": StringType(), "partition": LongType()}, "column 'partition' must be int, not bigint"),
        ({"value": StringType(), "headers": ArrayType(StringType())}, "column 'headers' must be array<struct<key"),
        ({"value": StringType(), "timestamp": StringType()}, "column 'timestamp' must be timestamp, not string"),
    ],
)
def test_columns_that_cannot_be_written_are_refused_before_any_task(
    topic: LogOnDisk, columns: dict[str, DataType], message: str
) -> None:
    schema = StructType([StructField(name, kind) for name, kind in columns.items()])
    with pytest.raises(ConfigurationError, match=message):
        LlogWriter(write_options({**topic.options, "topic": "t"}, streaming=False), schema, False)


def test_what_else_is_refused_before_any_task(topic: LogOnDisk) -> None:
    with pytest.raises(ConfigurationError, match="appended to, not overwritten"):
        LlogWriter(write_options({**topic.options, "topic": "t"}, streaming=False), SCHEMA, True)
    with pytest.raises(ConfigurationError, match="name the topic to write to"):
        LlogWriter(write_options(topic.options, streaming=False), SCHEMA, False)
    with pytest.raises(TopicNotFound, match="'missing'"):
        LlogStreamWriter(write_options({**topic.options, "topic": "missing"}, streaming=True), SCHEMA, False)
    with pytest.raises(ConfigurationError, match="foreachBatch, with a writeId"):
        LlogStreamWriter(write_options({**topic.options, "topic": "t"}, streaming=True), SCHEMA, True)


def test_columns_that_are_not_for_a_log_are_ignored(topic: LogOnDisk) -> None:
    wide = (
        StructType()
        .add("value", BinaryType())
        .add("offset", LongType())
        .add("Note", LongType())
        .add("note", LongType())
    )
    writer = LlogWriter(write_options({**topic.options, "topic": "t"}, streaming=False), wide, False)
    row = pa.RecordBatch.from_pydict({"value": pa.array([b"a"]), "offset": pa.array([7]), "Note": pa.array([1])})
    writer.commit([writer.write(iter([row]))])
    assert topic.payloads("t", 2) == ["a"]


def test_a_topic_on_disk_is_refused_before_any_task_starts(disk: LogOnDisk) -> None:
    async def create(log: Log) -> None:
        await Catalog(log).create("t", engine=DISK)

    disk.do(create)
    with pytest.raises(WrongEngine, match="which Spark can read but not write"):
        batch_writer(disk)
    with pytest.raises(WrongEngine, match="which Spark can read but not write"):
        stream_writer(disk)
