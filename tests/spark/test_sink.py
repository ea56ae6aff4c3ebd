"""Batch writes: Kafka's columns, once if asked for, and mistakes told before any task."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from llog.model import partition_for_key
from tests.spark.conftest import message_of
from tests.spark.logs import LogOnDisk


def save(log: LogOnDisk, frame: DataFrame, **options: str) -> None:
    frame.write.format("llog").options(**log.options, **options).mode("append").save()


def test_rows_arrive_with_every_column_where_their_keys_or_columns_say(spark: SparkSession, log: LogOnDisk) -> None:
    log.create("t", 3)
    log.create("u")
    rows = spark.sql(
        """
        select 't' as topic, concat('k', id) as key, cast(id as string) as value, cast(null as int) as partition,
               timestamp '2024-05-06 07:08:09.123' as timestamp,
               array(named_struct('key', 'h', 'value', binary('1'))) as headers
        from range(0, 100, 1, 3)
        union all select 'u', null, 'elsewhere', 0, null, null
        union all select 't', 'k1', null, 2, null, null
        """
    )
    save(log, rows)
    found = [(p, record) for p in range(3) for record in log.records("t", p)]
    placed = [(p, record) for p, record in found if record.payload is not None]
    assert sorted(int(record.payload or b"") for _, record in placed) == list(range(100))
    assert all(p == partition_for_key(record.key or b"", 3) for p, record in placed)
    stamp = int(datetime(2024, 5, 6, 7, 8, 9, 123_000, UTC).timestamp() * 1000)
    assert {(record.timestamp, record.headers) for _, record in placed} == {(stamp, (("h", b"1"),))}
    [(_, mark)] = [(p, record) for p, record in found if record.payload is None]
    assert (mark.key, mark in log.records("t", 2)) == (b"k1", True)
    assert log.payloads("u") == ["elsewhere"]

    copied = spark.read.format("llog").options(**log.options, subscribe="t", includeHeaders="true").load()
    save(log, copied, topic="copy", createTopicPartitions="3")
    for partition in range(3):
        assert sorted(log.records("copy", partition), key=str) == sorted(log.records("t", partition), key=str)
    assert log.problems("t", 3) == log.problems("copy", 3) == []


def test_a_write_with_an_id_is_done_once(spark: SparkSession, log: LogOnDisk) -> None:
    log.create("t")
    for seed in (1, 2):
        rows = spark.range(0, 50, 1, 2).selectExpr(f"cast(id + floor(rand({seed}) * 1000) * 1000 as string) as value")
        save(log, rows, topic="t", writeId="load-2024-05")
        if seed == 1:
            first = log.payloads("t")
    assert log.payloads("t") == first
    assert len(first) == 50
    save(log, spark.range(0).selectExpr("cast(id as string) as value"), topic="t", writeId="nothing")
    assert len(log.payloads("t")) == 50


def test_the_default_mode_appends_and_columns_that_are_not_for_a_log_are_ignored(
    spark: SparkSession, log: LogOnDisk, tmp_path: Path
) -> None:
    log.create("t")
    rows = spark.sql("select 'a' as value, 1 as number, 'x' as Note, 'y' as note")
    rows.write.format("llog").options(**log.options, topic="t").save()
    rows.write.mode("errorifexists").save(format="llog", **log.options, topic="t")
    assert log.payloads("t") == ["a", "a"]
    # Other formats keep the mode that they have by default.
    spark.range(1).write.format("parquet").save(str(tmp_path / "table"))
    with pytest.raises(PySparkException, match="PATH_ALREADY_EXISTS"):
        spark.range(1).write.format("parquet").save(str(tmp_path / "table"))


def test_mistakes_are_told_before_any_task(spark: SparkSession, log: LogOnDisk) -> None:
    log.create("t")
    ran = spark.sparkContext.accumulator(0)

    def counted(batches):  # type: ignore[no-untyped-def]
        for batch in batches:
            ran.add(1)
            yield batch

    rows = spark.range(3).selectExpr("cast(id as string) as value").mapInArrow(counted, "value string")

    def refusal(frame: DataFrame, **options: str) -> str:
        with pytest.raises(PySparkException) as error:
            save(log, frame, **options)
        return message_of(error)

    assert "there is no topic 'missing'" in refusal(rows, topic="missing")
    assert "name the topic to write to" in refusal(rows)
    assert "did you mean topic?" in refusal(rows, topik="t")
    assert "a column 'value' is needed" in refusal(rows.withColumnRenamed("value", "vlaue"), topic="t")
    with pytest.raises(PySparkException, match="appended to, not overwritten"):
        rows.write.format("llog").options(**log.options, topic="t").mode("overwrite").save()
    assert ran.value == 0
    assert log.payloads("t") == []
    beyond = rows.selectExpr("value", "7 as partition")
    assert "a row names partition 7 of topic 't', which has 1" in refusal(beyond, topic="t")
    assert log.payloads("t") == []
