"""Batch reads of a keyed log: columns, ranges, one task for each segment, and mistakes told before any task."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from llog.errors import ConfigurationError, DataLoss
from llog.keyed import Segment, SyncKeyedLog
from llog.spark.keyed import SCHEMA, KeyedTask, LlogKeyedReader, SegmentRange, keyed_options, pack_tasks
from tests.spark.conftest import message_of

COLUMNS = "key binary,sequence bigint,value binary,append_time timestamp,segment bigint"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file://{tmp_path_factory.mktemp('keyed')}/log"


@pytest.fixture(scope="module")
def log(url: str) -> Iterator[SyncKeyedLog]:
    """Three segments with the sequences 0 to 5, 6 to 11 and 12 to 17; in each, two records of three keys."""
    with SyncKeyedLog.open(url) as log:
        for part in range(3):
            keys = (b"a/1", b"a/\xff", b"b")
            log.append([(key, b"%d.%d" % (part, n)) for n in range(2) for key in keys])
            if part < 2:
                log.seal_segment()
        yield log


def load(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("llog-keyed").options(url=url, **options).load()


def sequences(frame: DataFrame) -> list[int]:
    return sorted(row.sequence for row in frame.collect())


def test_a_read_has_every_record_once_in_one_task_for_each_segment(
    spark: SparkSession, url: str, log: SyncKeyedLog
) -> None:
    frame = load(spark, url, maxPartitionBytes="1")
    assert ",".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema.fields) == COLUMNS
    assert frame.rdd.getNumPartitions() == 3
    rows = sorted(frame.collect(), key=lambda row: row.sequence)
    assert [row.sequence for row in rows] == list(range(18))
    assert [(bytes(row.key), bytes(row.value), row.segment) for row in rows[6:9]] == [
        (b"a/1", b"1.0", 1),
        (b"a/\xff", b"1.0", 1),
        (b"b", b"1.0", 1),
    ]
    when = log.segments()[0].start_time_ms
    assert abs(rows[0].append_time.replace(tzinfo=UTC).timestamp() * 1000 - when) < 60_000
    assert load(spark, url).rdd.getNumPartitions() == 1


def test_keys_prefixes_sequences_and_times_choose_what_is_read(
    spark: SparkSession, url: str, log: SyncKeyedLog
) -> None:
    raw = base64.urlsafe_b64encode(b"a/\xff").decode()
    assert sequences(load(spark, url, key="b", startingSequence="3", endingSequence="17")) == [5, 8, 11, 14]
    assert sequences(load(spark, url, keyBase64=raw)) == [1, 4, 7, 10, 13, 16]
    assert sequences(load(spark, url, prefix="a/", startingSequence="14")) == [15, 16]
    assert sequences(load(spark, url, prefixBase64=raw, endingSequence="6")) == [1, 4]
    assert sequences(load(spark, url, key="unknown")) == []
    last = log.segments()[2].start_time_ms
    later = str(last + 60_000)
    assert sequences(load(spark, url, startingTimestamp="-1h", endingTimestamp=later)) == list(range(18))
    assert sequences(load(spark, url, startingTimestamp=later)) == []
    assert sequences(load(spark, url, startingSequence="9", endingSequence="3")) == []
    frame = spark.read.format("llog-keyed").options(url=url, key="b").schema("value binary, segment bigint").load()
    assert sorted((bytes(row.value), row.segment) for row in frame.collect())[:2] == [(b"0.0", 0), (b"0.1", 0)]


def test_the_setting_names_the_log_where_the_option_does_not(
    spark: SparkSession, url: str, log: SyncKeyedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLOG_KEYED", url)
    assert keyed_options({}).url == url
    assert keyed_options({"url": "file:///elsewhere"}).url == "file:///elsewhere"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kye": "a"}, "did you mean key?"),
        ({"key": "a", "prefix": "b"}, "give one of the options key, keyBase64, prefix, prefixBase64"),
        ({"keyBase64": "+"}, "option keyBase64"),
        ({"startingSequence": "-1"}, "option startingSequence"),
        ({"endingTimestamp": "noon"}, "option endingTimestamp"),
        ({"startingTimestamp": "-10x"}, "option startingTimestamp"),
        ({"url": "http://x"}, "must start with file://"),
        ({"url": "memory://x"}, "Spark runs in several"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace("?", r"\?")):
        keyed_options({"url": "file:///x", **options})


def test_without_an_address_the_error_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLOG_KEYED", raising=False)
    with pytest.raises(ConfigurationError, match="give the option url"):
        keyed_options({})


def test_mistakes_and_a_log_that_is_not_there_are_told_by_load(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException) as error:
        load(spark, f"file://{tmp_path}/nothing")
    assert "there is no keyed log at" in message_of(error)
    with pytest.raises(PySparkException) as error:
        load(spark, f"file://{tmp_path}/nothing", startingSequence="x")
    assert "option startingSequence" in message_of(error)
    named = spark.read.format("llog-keyed").option("url", f"file://{tmp_path}/nothing").schema("key binary").load()
    with pytest.raises(PySparkException) as error:
        named.collect()
    assert "there is no keyed log at" in message_of(error)


def _segment(segment_id: int, size: int, records: int = 10) -> Segment:
    start, when = 10 * segment_id, 1000 * segment_id
    return Segment(
        segment_id=segment_id,
        start_seq=start,
        end_seq=start + records,
        start_time_ms=when,
        end_time_ms=when + 1000,
        records=records,
        size=size,
    )


def _ids(tasks: list[KeyedTask]) -> list[list[int]]:
    return [[wanted.segment_id for wanted in task.ranges] for task in tasks]


def test_small_neighbours_share_a_task_and_large_segments_do_not() -> None:
    options = keyed_options({"url": "file:///x", "maxPartitionBytes": "100"})
    segments = [_segment(n, size) for n, size in enumerate((40, 60, 1, 500, 50, 50))]
    assert _ids(pack_tasks(segments, 60, options)) == [[0, 1], [2], [3], [4, 5]]
    assert _ids(pack_tasks([_segment(0, 0, records=0)], 0, options)) == [[]]


def test_a_key_in_many_segments_has_a_bounded_number_of_tasks() -> None:
    options = keyed_options({"url": "file:///x", "key": "k"})
    segments = [_segment(n, 1 << 40) for n in range(1000)]
    tasks = pack_tasks(segments, 10_000, options)
    assert len(tasks) == 63
    assert [each for ids in _ids(tasks) for each in ids] == list(range(1000))
    assert all(len(task.ranges) == 1 for task in pack_tasks(segments[:60], 600, options))


def test_pieces_end_where_the_log_ended_when_it_was_planned() -> None:
    options = keyed_options({"url": "file:///x", "startingSequence": "5", "endingSequence": "100"})
    [task] = pack_tasks([_segment(0, 1), _segment(1, 1)], 17, options)
    assert task.ranges == (SegmentRange(0, 5, 10), SegmentRange(1, 10, 17))


def test_a_segment_that_is_deleted_after_the_plan_is_a_loss_that_is_told(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/log"
    with SyncKeyedLog.open(url) as log:
        log.append([(b"k", b"1")])
        log.seal_segment()
        log.append([(b"k", b"2")])
        log.seal_segment()
        reader = LlogKeyedReader(keyed_options({"url": url, "key": "k", "maxPartitionBytes": "1"}), SCHEMA)
        first, second = reader.partitions()
        log.delete_segments(1)
        with pytest.raises(DataLoss, match="segment 0"):
            list(reader.read(first))
        [batch] = reader.read(second)
        assert batch.column("value").to_pylist() == [b"2"]
        assert batch.column("append_time").to_pylist()[0] > datetime(2020, 1, 1, tzinfo=UTC)
