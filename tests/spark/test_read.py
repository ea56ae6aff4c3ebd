"""Batch reads: Kafka's columns and options, mistakes told at once, and losses told apart."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from devtools.servers.weed import S3Server
from llog.api.leaderless import LeaderlessLogWriter, SharedAppendGroup
from llog.config import Settings
from llog.config.loading import load_settings
from llog.engines.object.retention import trim
from llog.model import Record, TimestampType, TopicPartition
from llog.runtime import SystemRuntime
from llog.spark import register
from llog.spark.streams import run_stream
from tests.spark.conftest import message_of
from tests.spark.logs import LogOnDisk

KAFKA_COLUMNS = "key binary,value binary,topic string,partition int,offset bigint,timestamp timestamp,timestampType int"
HEADERS = "headers array<struct<key:string,value:binary>>"


def load(spark: SparkSession, log: LogOnDisk, **options: str) -> DataFrame:
    return spark.read.format("llog").options(**log.options, **options).load()


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((row.partition, row.offset) for row in frame.select("partition", "offset").collect())


def schema_of(frame: DataFrame) -> str:
    return ",".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema.fields)


def test_every_column_is_as_with_kafka(spark: SparkSession, log: LogOnDisk) -> None:
    log.create("t")
    log.create("appended", time=TimestampType.APPEND)
    full = Record(payload=b"v", key=b"k", timestamp=1_700_000_000_123, headers=(("h", b"1"), ("n", None)))
    log.append("t", 0, full, Record(payload=None, timestamp=0))
    log.append("appended", 0, "x")

    rows = load(spark, log, subscribe="t", includeHeaders="true")
    assert schema_of(rows) == f"{KAFKA_COLUMNS},{HEADERS}"
    first, second = rows.orderBy("offset").collect()
    assert (first.key, first.value, first.topic, first.partition, first.offset) == (b"k", b"v", "t", 0, 1)
    assert first.timestamp.replace(tzinfo=UTC) == datetime.fromtimestamp(1_700_000_000.123, UTC)
    assert [(header.key, header.value) for header in first.headers] == [("h", b"1"), ("n", None)]
    assert (second.key, second.value, second.timestampType, second.headers) == (None, None, 0, None)

    [appended] = load(spark, log, subscribe="appended").collect()
    assert schema_of(load(spark, log, subscribe="appended")) == KAFKA_COLUMNS
    assert appended.timestampType == 1

    projected = spark.read.format("llog").options(**log.options, subscribe="t").schema("value binary, offset bigint")
    assert [tuple(row) for row in projected.load().collect()] == [(b"v", 1), (None, 2)]
    with pytest.raises(PySparkException) as error:
        spark.read.format("llog").options(**log.options, subscribe="t").schema("value string").load().count()
    assert "column value string is not one of llog's" in message_of(error)


def test_where_reading_starts_and_ends(spark: SparkSession, log: LogOnDisk) -> None:
    log.create("t", 2)
    log.create("u")
    now = SystemRuntime().now_ms()
    old = [Record(payload=b"%d" % n, timestamp=now - 3_600_000 + n) for n in range(3)]
    new = [Record(payload=b"%d" % n, timestamp=now - 60_000 + n) for n in range(2)]
    for partition in (0, 1):
        log.append("t", partition, *old)
        log.append("t", partition, *new)
    log.append("u", 0, "u")

    assert places(load(spark, log, subscribe="t")) == [(p, o) for p in (0, 1) for o in range(1, 6)]
    assert load(spark, log, subscribe="t,u").count() == 11
    assert load(spark, log, subscribePattern="[t-u]").count() == 11
    assert load(spark, log, subscribePattern="x.*").count() == 0
    assert places(load(spark, log, assign='{"t": [1]}')) == [(1, o) for o in range(1, 6)]

    def read(**options: str) -> list[tuple[int, int]]:
        return places(load(spark, log, subscribe="t", **options))

    by_offset = read(
        startingOffsets='{"t": {"0": 2, "1": -2}}', endingOffsets='{"t": {"0": -1, "1": 3}}', minPartitions="4"
    )
    assert by_offset == [(0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2)]
    late = [(0, 4), (0, 5), (1, 4), (1, 5)]
    early = [(p, o) for p in (0, 1) for o in (1, 2, 3)]
    assert read(startingOffsets="-10m") == late
    assert read(startingTimestamp=str(now - 60_000)) == late
    assert read(endingTimestamp=str(now - 60_000)) == early
    times = f'{{"t": {{"0": {now - 60_000}, "1": {now - 60_000 + 1}}}}}'
    assert read(startingOffsetsByTimestamp=times) == [(0, 4), (0, 5), (1, 5)]
    assert read(endingOffsetsByTimestamp=times) == [*early[:3], *early[3:], (1, 4)]
    assert read(startingTimestamp=str(now + 10**9), startingOffsetsByTimestampStrategy="latest") == []
    with pytest.raises(PySparkException) as error:
        read(startingTimestamp=str(now + 10**9))
    assert "no record of t/0 has the starting timestamp" in message_of(error)


def test_as_many_tasks_as_asked_for(spark: SparkSession, log: LogOnDisk) -> None:
    log.create("t")
    log.append("t", 0, *map(str, range(20)))
    rows = load(spark, log, subscribe="t", minPartitions="5")
    assert rows.rdd.getNumPartitions() == 5
    assert [value for [value] in rows.select(rows.value.cast("string")).collect()] == [str(n) for n in range(20)]


def test_mistakes_are_told_when_the_frame_is_made(spark: SparkSession, log: LogOnDisk, tmp_path: Path) -> None:
    log.create("t")

    def refusal(**options: str) -> str:
        with pytest.raises(PySparkException) as error:
            load(spark, log, **options)
        return message_of(error)

    assert "there is no topic 'missing'" in refusal(subscribe="t,missing")
    assert "partition 7 of topic 't', which has 1" in refusal(assign='{"t": [7]}')
    assert "did you mean startingOffsets?" in refusal(subscribe="t", startingOffset="earliest")
    assert "option failOnDataLoss must be true or false: 'no'" in refusal(subscribe="t", failOnDataLoss="no")
    (tmp_path / "file").write_text("")
    unreachable = {"meta": f"sqlite://{tmp_path / 'file' / 'meta.sqlite'}", "blobs": log.options["blobs"]}
    with pytest.raises(PySparkException) as error:
        spark.read.format("llog").options(**unreachable, subscribe="t").load()
    assert "LLOG_META is sqlite:" in message_of(error)
    with pytest.raises(PySparkException) as error:
        load(spark, log, subscribe="t", startingOffsets="latest").count()
    assert "cannot be 'latest' in a batch read" in message_of(error)
    assert (
        spark.read.format("llog")
        .options(**log.options, **{"subscribe": "t", "kafka.bootstrap.servers": "x"})
        .load()
        .count()
        == 0
    )


def test_losses_by_retention_and_damage_are_told_apart_and_can_be_gone_without(
    spark: SparkSession, log: LogOnDisk
) -> None:
    log.create("trimmed")
    log.append("trimmed", 0, "a", "b")
    log.append("trimmed", 0, "c", "d")
    explicit = '{"trimmed": {"0": 1}}'
    log.do(lambda opened: trim(opened, TopicPartition("trimmed", 0), 3))
    assert places(load(spark, log, subscribe="trimmed")) == [(0, 3), (0, 4)]
    with pytest.raises(PySparkException) as error:
        load(spark, log, subscribe="trimmed", startingOffsets=explicit).count()
    assert "2 records of trimmed/0 from offset 1 on are gone by retention: it starts at 3" in message_of(error)
    rest = load(spark, log, subscribe="trimmed", startingOffsets=explicit, failOnDataLoss="false")
    assert places(rest) == [(0, 3), (0, 4)]

    log.create("damaged")
    before = set(log.blob_files("wal"))
    log.append("damaged", 0, "a", "b")
    [blob] = set(log.blob_files("wal")) - before
    log.append("damaged", 0, "c")
    data = blob.read_bytes()
    for harm in (lambda: blob.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]), blob.unlink):
        harm()
        with pytest.raises(PySparkException) as error:
            load(spark, log, subscribe="damaged").count()
        assert "2 records of damaged/0, offsets 1 to 2, are damaged" in message_of(error)
        assert blob.name in message_of(error)
        assert places(load(spark, log, subscribe="damaged", failOnDataLoss="false")) == [(0, 3)]


def test_a_slow_read_outlives_compaction_and_collection(spark: SparkSession, log: LogOnDisk, tmp_path: Path) -> None:
    """The log is compacted and collected, twice, while the tasks are half way through what was planned."""
    log.create("t")
    payloads = [f"{n:04}" + "x" * 100_000 for n in range(500)]  # more than is fetched ahead
    for first in range(0, 500, 100):
        log.append("t", 0, *payloads[first : first + 100])
    rows = load(spark, log, subscribe="t")
    started, go = tmp_path / "started", tmp_path / "go"

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import time

        for batch in batches:
            started.touch()
            while not go.exists():
                time.sleep(0.05)
            yield batch.select(["value"])

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: rows.mapInArrow(slowly, "value binary").collect())
        while not started.exists():
            assert not reading.done(), reading.result()
        wal = log.blob_files("wal")
        log.compact("t")
        results = [log.collect(), log.collect()]
        assert [(result.deleted, result.waiting) for result in results] == [(0, len(wal))] * 2
        go.touch()
        assert sorted(row.value.decode() for row in reading.result()) == payloads


@pytest.fixture
def restored(spark: SparkSession) -> Iterator[None]:
    """For tests that register other settings: the session has its own again for the next one."""
    yield
    register(spark)


def test_settings_are_those_that_the_driver_has_when_a_format_is_named(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The processes that Spark plans in were started before, without them."""
    register(spark)
    monkeypatch.setenv("LLOG_DATA_DIR", str(tmp_path / "own"))
    rows = spark.sql("select 'a' as value")
    rows.write.format("llog").options(topic="t", createTopicPartitions="1").save()
    assert [row.value for row in spark.read.format("llog").option("subscribe", "t").load().collect()] == [b"a"]
    source = spark.readStream.format("llog").options(subscribe="t", startingOffsets="earliest").load()
    writing = source.select("value").writeStream.format("llog").option("topic", "t")
    run_stream(writing.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start)
    assert LogOnDisk(tmp_path / "own").payloads("t") == ["a", "a"]

    monkeypatch.setenv("LLOG_DATA_DIR", str(tmp_path / "none"))
    with pytest.raises(PySparkException) as error:
        spark.read.load(format="llog", subscribe="t")
    assert "there is no log" in message_of(error)


@pytest.mark.usefixtures("restored")
def test_settings_that_are_given_stay(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(spark, Settings(data_dir=str(tmp_path / "given")))
    monkeypatch.setenv("LLOG_DATA_DIR", str(tmp_path / "other"))
    spark.sql("select 'a' as value").write.format("llog").options(topic="t", createTopicPartitions="1").save()
    assert LogOnDisk(tmp_path / "given").payloads("t") == ["a"]


def test_a_read_needs_no_bucket_but_only_a_way_to_the_server(
    spark: SparkSession, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3_server.create_bucket("spark-read")
    environment = {
        "LLOG_META": f"sqlite://{tmp_path}/meta.sqlite",
        "LLOG_S3_ENDPOINT_URL": s3_server.endpoint,
        "LLOG_S3_REGION_NAME": s3_server.region,
        "LLOG_S3_ACCESS_KEY_ID": s3_server.access_key,
        "LLOG_S3_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    bucket = {"LLOG_BLOBS": f"s3://spark-read/{tmp_path.name}"}
    with LeaderlessLogWriter(load_settings(environment=environment | bucket)) as writer:
        writer.create_topic("t", 2)
        for partition in (0, 1):
            writer.append_shared([SharedAppendGroup(topic="t", partition=partition, payloads=["a", "b"])])
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    register(spark)
    frame = spark.read.format("llog").option("subscribe", "t").load()
    assert sorted((row.partition, bytes(row.value)) for row in frame.collect()) == [
        (partition, value) for partition in (0, 1) for value in (b"a", b"b")
    ]
    stream = spark.readStream.format("llog").options(subscribe="t", startingOffsets="earliest").load()
    found: list[bytes] = []
    writing = stream.writeStream.foreachBatch(lambda rows, _: found.extend(bytes(row.value) for row in rows.collect()))
    run_stream(writing.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start)
    assert sorted(found) == [b"a", b"a", b"b", b"b"]
    with pytest.raises(PySparkException) as error:
        spark.sql("select 'c' as value").write.format("llog").option("topic", "t").save()
    assert "set LLOG_S3_BUCKET=bucket or LLOG_BLOBS=" in message_of(error)


def test_a_read_makes_no_log(spark: SparkSession, tmp_path: Path) -> None:
    log = LogOnDisk(tmp_path / "none")
    with pytest.raises(PySparkException) as error:
        load(spark, log, subscribe="t")
    assert f"LLOG_META is {log.options['meta']}: there is no log" in message_of(error)
    given = spark.readStream.format("llog").options(**log.options, subscribe="t").schema("value binary").load()
    writing = given.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(PySparkException) as error:
        run_stream(writing.trigger(availableNow=True).start)
    assert "there is no log" in message_of(error)
    assert not (tmp_path / "none").exists()
