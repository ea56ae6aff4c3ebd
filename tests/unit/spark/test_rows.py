"""Rows of a DataFrame become columns by partition, as Kafka's sink would place them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from llog.batch.columns import records_of, stamp
from llog.errors import InvalidArgument, TopicNotFound
from llog.model import Record, TopicPartition, partition_for_key
from llog.spark.options import WriteOptions, write_options
from llog.spark.rows import RowGroups
from tests.spark.logs import LogOnDisk
from tests.unit.world import TP, World

APPEND_MS = 1_700_000_000_000


@pytest.fixture
def options(tmp_path: Path) -> WriteOptions:
    return write_options({**LogOnDisk(tmp_path).options, "topic": TP.topic}, streaming=False)


async def add_rows(world: World, options: WriteOptions, **columns: pa.Array) -> dict[TopicPartition, list[Record]]:
    groups = RowGroups(options)
    await groups.add(world.log, pa.RecordBatch.from_pydict(columns))
    assert groups.size > 0
    found = {tp: records_of(stamp(part, APPEND_MS), 1) for tp, part in groups.take()}
    assert groups.size == 0
    assert groups.take() == []
    return found


async def test_keys_place_rows_as_kafka_does_and_keep_their_order(world: World, options: WriteOptions) -> None:
    keys = [f"key-{n % 7}" for n in range(50)]
    found = await add_rows(world, options, KEY=pa.array(keys), value=pa.array([str(n) for n in range(50)]))
    for tp, records in found.items():
        numbers = [int(record.payload or b"") for record in records]
        assert numbers == sorted(numbers)
        assert numbers == [n for n in range(50) if partition_for_key(keys[n].encode(), 4) == tp.partition]


async def test_a_named_partition_wins_over_the_key_and_null_does_not(world: World, options: WriteOptions) -> None:
    by_key = partition_for_key(b"k", 4)
    named = (by_key + 1) % 4
    found = await add_rows(
        world,
        options,
        key=pa.array([b"k", b"k"]),
        value=pa.array([b"a", b"b"]),
        partition=pa.array([named, None], pa.int32()),
    )
    assert {tp.partition: records[0].payload for tp, records in found.items()} == {named: b"a", by_key: b"b"}


@pytest.mark.parametrize("partition", [4, -2])
async def test_a_partition_that_is_not_there_is_refused(world: World, options: WriteOptions, partition: int) -> None:
    with pytest.raises(InvalidArgument, match=f"partition {partition} of topic 'orders', which has 4"):
        await add_rows(world, options, value=pa.array([b"a"]), partition=pa.array([partition], pa.int32()))


async def test_rows_without_keys_stay_together_and_reach_all_partitions_in_time(
    world: World, options: WriteOptions
) -> None:
    reached = set()
    for _ in range(64):
        found = await add_rows(world, options, value=pa.array([b"a", b"b", b"c"]))
        [(tp, records)] = found.items()
        assert [record.payload for record in records] == [b"a", b"b", b"c"]
        reached.add(tp.partition)
    assert reached == {0, 1, 2, 3}


async def test_every_column_arrives_whatever_arrow_type_spark_chose(world: World, options: WriteOptions) -> None:
    when = datetime(2024, 5, 6, 7, 8, 9, 123_999, UTC)
    headers = pa.array(
        [[{"key": "h", "value": b"1"}, {"key": "n", "value": None}], None],
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    found = await add_rows(
        world,
        options,
        key=pa.array(["ä", None], pa.large_string()),
        value=pa.array([None, "v"], pa.large_string()),
        timestamp=pa.array([when, None], pa.timestamp("us", tz="UTC")),
        headers=headers,
        partition=pa.array([2, 2], pa.int32()),
    )
    [first, second] = found[TopicPartition(TP.topic, 2)]
    assert (first.key, first.payload, first.headers) == ("ä".encode(), None, (("h", b"1"), ("n", None)))
    assert first.timestamp == int(when.timestamp() * 1000)
    assert (second.key, second.payload, second.headers, second.timestamp) == (None, b"v", (), APPEND_MS)


async def test_both_runs_of_the_hour_that_a_clock_is_set_back_by_keep_their_times(
    world: World, options: WriteOptions
) -> None:
    times = [datetime(2025, 11, 2, hour, 30, 0, 123_999, UTC) for hour in (4, 5, 6, 7)]  # 01:30 twice in New York
    found = await add_rows(
        world,
        options,
        value=pa.array(["a", "b", "c", "d"]),
        timestamp=pa.array(times, pa.timestamp("us", tz="America/New_York")),
        partition=pa.array([2] * 4, pa.int32()),
    )
    assert [record.timestamp for record in found[TopicPartition(TP.topic, 2)]] == [
        int(time.timestamp()) * 1000 + 123 for time in times
    ]


async def test_a_topic_column_spreads_rows_over_topics_which_are_created_if_asked_for(
    world: World, tmp_path: Path
) -> None:
    stores = LogOnDisk(tmp_path).options
    columns = {"topic": pa.array(["orders", "new", "orders"]), "value": pa.array(["1", "2", "3"])}
    with pytest.raises(TopicNotFound, match="'new'"):
        await add_rows(world, write_options(stores, streaming=False), **columns)
    creating = write_options({**stores, "createTopicPartitions": "3"}, streaming=False)
    found = await add_rows(world, creating, **columns)
    payloads = {
        name: [record.payload for tp, records in found.items() if tp.topic == name for record in records]
        for name in ("orders", "new")
    }
    assert payloads == {"orders": [b"1", b"3"], "new": [b"2"]}
    assert (await world.catalog.get("new")).partitions == 3
    with pytest.raises(InvalidArgument, match="a row has no topic"):
        await add_rows(world, creating, topic=pa.array([None], pa.string()), value=pa.array(["1"]))
