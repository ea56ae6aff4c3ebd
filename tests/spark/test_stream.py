"""Streams: from llog, into llog, and through it, over restarts and changes of what is read."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from llog.errors import ConfigurationError
from llog.groups.groups import Groups
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.model import Record, TopicPartition
from llog.spark import register
from llog.spark.streams import run_stream
from tests.spark.conftest import message_of
from tests.spark.logs import LogOnDisk

T = TypeVar("T")


def stream(spark: SparkSession, log: LogOnDisk, **options: str) -> DataFrame:
    given = {**log.options, "startingOffsets": "earliest", **options}
    return spark.readStream.format("llog").options(**given).load()


def into(log: LogOnDisk, frame: DataFrame, checkpoint: Path, topic: str, **options: str) -> StreamingQuery:
    """Runs the frame into a topic, as far as there are records now."""
    writing = frame.writeStream.format("llog").options(**log.options, topic=topic, **options)
    return run_stream(writing.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start)


def eventually(query: StreamingQuery, is_so: Callable[[], bool]) -> None:
    """Until it is so; a query that fails says why."""
    while not is_so():
        query.processAllAvailable()
        assert query.isActive


def test_a_stream_from_topic_to_topic_goes_on_where_it_was(spark: SparkSession, log: LogOnDisk, tmp_path: Path) -> None:
    log.create("a", 2)
    log.create("b", 2)
    full = Record(payload=b"v", key=b"k", timestamp=5, headers=(("h", b"1"),))
    log.append("a", 1, full)
    log.append("a", 0, *map(str, range(5)))

    def copy() -> StreamingQuery:
        source = stream(
            spark, log, subscribe="a", includeHeaders="true", maxOffsetsPerTrigger="2", groupIdForCommit="copier"
        )
        return into(log, source.drop("topic"), tmp_path / "checkpoint", "b")

    batches = [progress.batchId for progress in copy().recentProgress if progress.numInputRows]
    assert batches == [0, 1, 2]  # the first takes one of each partition
    assert log.payloads("b", 2) == [*map(str, range(5)), "v"]
    [copied] = log.records("b", 1)
    assert (copied.key, copied.timestamp, copied.headers) == (b"k", 5, (("h", b"1"),))

    async def position(opened: Log) -> int | None:
        return await (await Groups(opened).partition("copier", TopicPartition("a", 0))).position()

    assert log.do(position) in (4, 5, 6)  # may trail the last batch, never lead it

    log.append("a", 0, "5", "6")
    log.do(lambda opened: Catalog(opened).add_partitions("a", 3))
    log.append("a", 2, "new partition")
    log.do(lambda opened: Catalog(opened).add_partitions("b", 3))
    copy()
    assert log.payloads("b", 3) == [*map(str, range(7)), "v", "new partition"]
    copy()
    assert log.payloads("b", 3) == [*map(str, range(7)), "v", "new partition"]
    assert log.problems("b", 3) == []


def test_topics_and_partitions_that_appear_while_a_stream_runs_are_read(
    spark: SparkSession, log: LogOnDisk, tmp_path: Path
) -> None:
    log.create("in-1")
    log.append("in-1", 0, "first")
    log.create("out")
    source = stream(spark, log, subscribePattern="in-.*", minOffsetsPerTrigger="1", maxTriggerDelay="1m")
    writing = source.select("value").writeStream.format("llog").options(**log.options, topic="out")
    query = writing.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        eventually(query, lambda: log.payloads("out") == ["first"])
        log.create("in-2")
        log.append("in-2", 0, "second")
        eventually(query, lambda: log.payloads("out") == ["first", "second"])
        log.do(lambda opened: Catalog(opened).add_partitions("in-1", 2))
        log.append("in-1", 1, "third")
        eventually(query, lambda: log.payloads("out") == ["first", "second", "third"])

        log.delete("in-2")
        with pytest.raises(StreamingQueryException) as error:
            query.awaitTermination()
        assert "topic 'in-2' was deleted while it was read" in message_of(error)
    finally:
        query.stop()

    log.create("in-2")
    log.append("in-2", 0, "again")
    lenient = stream(spark, log, subscribePattern="in-.*", failOnDataLoss="false", maxBytesPerTrigger="1KiB")
    into(log, lenient.select("value"), tmp_path / "checkpoint", "out")
    assert log.payloads("out") == ["first", "second", "third", "again"]


def test_a_batch_that_no_row_is_left_of_is_no_obstacle(spark: SparkSession, log: LogOnDisk, tmp_path: Path) -> None:
    log.create("a")
    log.create("b")
    log.append("a", 0, "x", "y")

    def keep_z() -> None:
        kept = stream(spark, log, subscribe="a").select("value").where("value = binary('z')")
        into(log, kept, tmp_path / "checkpoint", "b")

    keep_z()
    log.append("a", 0, "z")
    keep_z()
    assert log.payloads("b") == ["z"]


def test_mistakes_in_a_stream_are_told_in_words(spark: SparkSession, log: LogOnDisk, tmp_path: Path) -> None:
    log.create("t")
    log.append("t", 0, "x")
    with pytest.raises(PySparkException) as error:
        stream(spark, log, subscribe="missing")
    assert "there is no topic 'missing'" in message_of(error)
    with pytest.raises(PySparkException) as error:
        stream(spark, log, subscribe="t", maxOffsetsPerTriger="1")
    assert "did you mean maxOffsetsPerTrigger?" in message_of(error)

    # What only a stream refuses, and what an explicit schema keeps from being seen by load(), ends the query.
    def failure(frame: DataFrame, name: str, **options: str) -> str:
        with pytest.raises(PySparkException) as error:
            into(log, frame, tmp_path / name, **{"topic": "t", **options})
        return message_of(error)

    assert "option endingOffsets is not for a stream" in failure(
        stream(spark, log, subscribe="t", endingOffsets="latest").select("value"), "1"
    )
    given = {**log.options, "subscribe": "missing", "startingOffsets": "earliest"}
    unseen = spark.readStream.format("llog").schema("value binary").options(**given).load()
    assert "there is no topic 'missing'" in failure(unseen, "2")
    values = stream(spark, log, subscribe="t").select("value")
    assert "there is no topic 'nowhere'" in failure(values, "3", topic="nowhere")
    assert "column 'value' must be binary or string, not int" in failure(values.selectExpr("1 as value"), "4")
    assert "option writeId is for batch writes" in failure(values, "5", writeId="w")
    assert log.payloads("t") == ["x"]


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_a_stream_that_would_rewrite_rows_is_refused_when_it_is_built(
    spark: SparkSession, log: LogOnDisk, mode: str
) -> None:
    log.create("a")
    counts = stream(spark, log, subscribe="a").groupBy("value").count()
    with pytest.raises(ConfigurationError, match="foreachBatch, with a writeId"):
        counts.writeStream.format("llog").outputMode(mode)
    with pytest.raises(ConfigurationError, match="foreachBatch, with a writeId"):
        counts.writeStream.outputMode(mode).format("llog")
    with pytest.raises(ConfigurationError, match="foreachBatch, with a writeId"):
        counts.writeStream.start(format="llog", outputMode=mode)
    counts.writeStream.format("memory").outputMode(mode)
    counts.writeStream.format("llog").outputMode("append")


def test_options_of_kafka_are_warned_of_once_per_read_and_write_in_the_driver(
    spark: SparkSession, log: LogOnDisk, tmp_path: Path
) -> None:
    log.create("a")
    log.create("b")
    log.append("a", 0, *map(str, range(4)))
    kafkas = {"kafka.bootstrap.servers": "x:9092", "groupIdPrefix": "g"}

    def warnings_of(act: Callable[[], T]) -> tuple[T, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = act()
        assert all(each.filename == __file__ for each in caught)
        return result, [str(each.message) for each in caught]

    expected = ["llog ignores the options groupIdPrefix, kafka.bootstrap.servers: there is no Kafka broker in the path"]
    read, of_read = warnings_of(lambda: stream(spark, log, subscribe="a", maxOffsetsPerTrigger="1", **kafkas))
    writing = read.writeStream.format("llog").options(**log.options, topic="b").trigger(availableNow=True)
    checkpointed = writing.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query, of_write = warnings_of(lambda: checkpointed.start(**kafkas))
    query.awaitTermination()
    assert len(log.payloads("b")) == 4
    assert (of_read, of_write) == (expected, expected)

    frame, of_read = warnings_of(lambda: spark.read.load(format="llog", subscribe="b", **log.options, **kafkas))
    _, of_write = warnings_of(lambda: frame.write.format("llog").options(**log.options, **kafkas).save(topic="a"))
    assert (of_read, of_write) == (expected, expected)
    _, of_others = warnings_of(lambda: frame.write.format("noop").options(**kafkas).mode("append").save())
    assert of_others == []


def test_the_sums_of_a_stream_are_written_once_by_batch(spark: SparkSession, log: LogOnDisk, tmp_path: Path) -> None:
    """As the refusal of output modes says."""
    log.create("a")
    log.create("sums")
    log.append("a", 0, "x", "y", "x")

    def write(rows: DataFrame, batch: int) -> None:
        for _ in range(2):  # as a batch that is repeated
            saving = rows.selectExpr("value as key", "cast(count as string) as value").write.format("llog")
            saving.options(**log.options, topic="sums", writeId=f"sums-{batch}").save()

    counts = stream(spark, log, subscribe="a").groupBy("value").count()
    writing = counts.writeStream.outputMode("update").foreachBatch(write)
    run_stream(writing.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start)
    assert sorted(log.payloads("sums")) == ["1", "2"]


@pytest.fixture
def slow_python(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """An interpreter for the data source whose first process for a stream starts later than Spark waits; makes a
    directory then.
    """
    late = tmp_path / "late"
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
  *python_streaming_source_runner*) mkdir {shlex.quote(str(late))} 2>/dev/null && sleep 11 ;;
esac
exec {shlex.quote(sys.executable)} "$@"
"""
    )
    python.chmod(0o755)
    context = spark.sparkContext
    before, context.pythonExec = context.pythonExec, str(python)
    register(spark)
    yield late
    context.pythonExec = before
    register(spark)


def test_a_stream_whose_python_process_starts_too_late_is_started_again(
    spark: SparkSession, log: LogOnDisk, slow_python: Path, tmp_path: Path
) -> None:
    log.create("a")
    log.create("b")
    log.append("a", 0, "first", "second")
    into(log, stream(spark, log, subscribe="a").select("value"), tmp_path / "checkpoint", "b")
    assert slow_python.exists()
    assert log.payloads("b") == ["first", "second"]
