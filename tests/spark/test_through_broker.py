"""Reads through a broker: topics of every engine, in batches and as a stream, with nothing but its address."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from llog.errors import DataLoss, StoreUnavailable
from llog.model import TopicPartition
from llog.spark import broker_log
from llog.spark.broker_log import BrokerTask
from llog.spark.options import read_options
from llog.spark.source import run_read
from llog.spark.source_log import Range
from tests.broker.test_process import Running, running
from tests.spark.conftest import message_of


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, "serve") as server:
        yield server


def produce(broker: Running, topic: str, partition: int, *records: object) -> None:
    item = {"topic": topic, "partition": partition, "records": records}
    [answer] = broker.client.post("/produce", json={"topic_partitions": [item]}).json()["topic_partitions"]
    assert "error" not in answer, answer


def create(broker: Running, topic: str, **asked: object) -> None:
    assert broker.client.post("/topics", json={"name": topic, **asked}).status_code == 201


def options(broker: Running, **given: str) -> dict[str, str]:
    return {"broker": str(broker.client.base_url), **given}


def read(spark: SparkSession, broker: Running, **given: str) -> DataFrame:
    return spark.read.format("llog").options(**options(broker, **given)).load()


def rows(frame: DataFrame) -> list[Any]:
    return [(row.topic, row.partition, row.offset, bytes(row.value).decode()) for row in frame.collect()]


def test_topics_of_every_engine_are_read_as_if_there_were_no_broker(spark: SparkSession, broker: Running) -> None:
    create(broker, "disk", engine="disk", partitions=2, timestamp_type="append")
    create(broker, "object")
    create(broker, "rocksdb", engine="rocksdb")
    full = {"value": "v", "key": "k", "timestamp": 5, "headers": [["h", "x"]]}
    topics = ("disk", "object", "rocksdb")
    for topic in topics:
        produce(broker, topic, 0, *map(str, range(10)), full)
    produce(broker, "disk", 1, "other")
    found = sorted(rows(read(spark, broker, subscribe="disk,object,rocksdb", minPartitions="7")))
    expected = [(topic, 0, n + 1, f"{n}" if n < 10 else "v") for topic in topics for n in range(11)]
    assert found == sorted([*expected, ("disk", 1, 1, "other")])
    frame = read(spark, broker, subscribePattern="disk|object", includeHeaders="true").where("offset = 11")
    by_topic = {row.topic: row for row in frame.collect()}
    for row in by_topic.values():
        assert bytes(row.key) == b"k"
        assert [(header.key, bytes(header.value)) for header in row.headers] == [("h", b"x")]
    assert (by_topic["object"].timestampType, by_topic["object"].timestamp.timestamp()) == (0, 0.005)
    assert by_topic["disk"].timestampType == 1
    assert by_topic["disk"].timestamp.year > 2000
    starts = {"startingOffsets": '{"object": {"0": 4}}', "endingOffsets": '{"object": {"0": 6}}'}
    assert [row[3] for row in rows(read(spark, broker, subscribe="object", **starts))] == ["3", "4"]
    late = str(int(time.time() * 1000) - 3_600_000)
    assert len(rows(read(spark, broker, subscribe="disk", startingTimestamp=late))) == 12


def test_a_stream_goes_on_where_it_was(spark: SparkSession, broker: Running, tmp_path: Path) -> None:
    create(broker, "t", engine="disk", partitions=2)
    produce(broker, "t", 0, *map(str, range(5)))
    batches: list[list[str]] = []

    def keep(frame: DataFrame, _: int) -> None:
        batches.append(sorted(bytes(row.value).decode() for row in frame.collect()))

    def run() -> None:
        given = options(broker, subscribe="t", startingOffsets="earliest", maxOffsetsPerTrigger="3")
        source = spark.readStream.format("llog").options(**given).load()
        writing = source.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writing.trigger(availableNow=True).start().awaitTermination()

    run()
    assert batches == [["0", "1", "2"], ["3", "4"]]
    produce(broker, "t", 0, "5")
    produce(broker, "t", 1, "6")
    run()
    assert batches[2:] == [["5", "6"]]


def test_a_disk_topic_without_a_broker_says_what_to_give(spark: SparkSession, broker: Running, tmp_path: Path) -> None:
    create(broker, "t", engine="disk")
    data = tmp_path / "llog-data"
    stores = {"meta": f"sqlite://{data / 'meta.sqlite'}", "blobs": f"file://{data / 'blobs'}"}
    with pytest.raises(PySparkException) as error:
        spark.read.format("llog").options(**stores, subscribe="t").load()
    assert "option broker" in message_of(error)
    with pytest.raises(PySparkException) as error:
        read(spark, broker, subscribe="missing")
    assert "there is no topic 'missing'" in message_of(error)


@pytest.mark.parametrize("happens", ["deletion", "creation again", "a smaller log"])
def test_what_is_gone_when_a_task_comes_for_it_is_a_loss(broker: Running, happens: str) -> None:
    create(broker, "t")
    produce(broker, "t", 0, "a", "b")
    address = str(broker.client.base_url).rstrip("/")
    topic = run_read(read_options(options(broker, subscribe="t"), streaming=False), lambda log: log.topic("t"))
    stop = 9 if happens == "a smaller log" else 3
    task = BrokerTask(address, [(topic, Range(TopicPartition("t", 0), 1, stop))])
    if happens != "a smaller log":
        assert broker.client.delete("/topics/t").status_code == 204
    if happens == "creation again":
        create(broker, "t")
        produce(broker, "t", 0, "c", "d")
    strict, lenient = (
        read_options(options(broker, subscribe="t", failOnDataLoss=fails), streaming=False)
        for fails in ("true", "false")
    )
    with pytest.raises(DataLoss, match="Set failOnDataLoss=false"):
        list(task.read(strict, ("value",)))
    found = list(task.read(lenient, ("value",)))
    assert [batch["value"].to_pylist() for batch in found] == ([[b"a", b"b"]] if happens == "a smaller log" else [])


def test_a_broker_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_log, "_ATTEMPTS", 2)
    given = read_options({"broker": "http://127.0.0.1:9", "subscribe": "t"}, streaming=False)
    with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:9 does not answer"):
        run_read(given, lambda log: log.topics())


@pytest.mark.parametrize("address", ["localhost:8080", "ftp://host", "http://user:secret@host", "http://"])
def test_an_address_that_is_none_is_refused_without_its_secrets(spark: SparkSession, address: str) -> None:
    with pytest.raises(PySparkException) as error:
        spark.read.format("llog").options(broker=address, subscribe="t").load()
    assert "option broker" in message_of(error)
    assert "secret" not in message_of(error)
