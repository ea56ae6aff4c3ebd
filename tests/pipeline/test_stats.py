"""Statistics against logs whose numbers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from llog.api.leaderless import LeaderlessLogCompactor, LeaderlessLogWriter, SharedAppendGroup
from llog.cli.main import main
from llog.config import Settings
from llog.errors import ConfigurationError, InvalidArgument
from llog.groups.groups import Groups
from llog.log.opening import opened_log
from llog.model import Record, TopicPartition
from llog.spark.jobs.stats.bill import BlobCounts, estimate
from llog.spark.jobs.stats.charts import draw
from llog.spark.jobs.stats.output import SCHEMA, write_parquet
from llog.spark.jobs.stats.stats import Stats, gather, stats
from llog.spark.jobs.stats.timeline import STEPS_MAX, Timeline

APPENDS = 4


@pytest.fixture
def orders(log_settings: Settings) -> Settings:
    """Topic `orders`: 4 appends of 30 records with 10 keys to partition 0, of 10 records with 2 other keys to partition
    1. Each append is a blob.
    """
    settings = msgspec.structs.replace(log_settings, inline_max_bytes=0)
    with LeaderlessLogWriter(settings) as writer:
        writer.create_topic("orders", 2)
        writer.create_topic("empty", 1)
        for _ in range(APPENDS):
            writer.append_shared([_group(0, 30, 10), _group(1, 10, 2)])
    return log_settings


def _group(partition: int, records: int, keys: int) -> SharedAppendGroup:
    payloads = [Record(payload=b"x" * 100, key=f"p{partition}-{n % keys}".encode()) for n in range(records)]
    return SharedAppendGroup(topic="orders", partition=partition, payloads=payloads)


async def _measured(settings: Settings, **options: Any) -> Stats:
    async with opened_log(settings) as log:
        return await gather(log, **options)


async def test_the_index_gives_records_bytes_skew_and_lag(orders: Settings) -> None:
    measured = await _measured(orders)
    topic = next(each for each in measured.topics if each.topic == "orders")
    assert (topic.partitions, topic.records, topic.lag_records) == (2, 160, 160)
    assert topic.record_skew == pytest.approx(120 / 80)
    assert topic.bytes > 160 * 100
    first, second = [each for each in measured.partitions if each.topic == "orders"]
    assert (first.records, first.entries, first.lag_entries) == (120, APPENDS, APPENDS)
    assert (second.records, second.entries, second.lag_entries) == (40, APPENDS, APPENDS)
    assert first.bytes + second.bytes == topic.bytes == measured.blobs.bytes
    assert (measured.blobs.shared, measured.blobs.compacted) == (APPENDS, 0)
    moments = measured.timelines["orders"].moments()
    assert sum(moment.records for moment in moments) == pytest.approx(160)
    assert sum(moment.bytes for moment in moments) == pytest.approx(topic.bytes)


async def test_a_topic_without_records_has_no_rate_and_no_skew(orders: Settings) -> None:
    measured = await _measured(orders, topic="empty")
    (topic,) = measured.topics
    assert (topic.records, topic.record_skew, topic.records_per_hour) == (0, None, None)
    assert measured.dollars_month == 0


async def test_compacted_records_no_longer_lag_and_keep_their_first_append_time(orders: Settings) -> None:
    before = await _measured(orders, topic="orders")
    with LeaderlessLogCompactor(orders) as compactor:
        assert compactor.compact_once("orders", 0, force=True).records == 120
    after = await _measured(orders, topic="orders")
    first, second = after.partitions
    assert (first.records, first.entries, first.lag_records, first.lag_bytes) == (120, 1, 0, 0)
    assert second.lag_records == 40
    assert first.first_append_ms == before.partitions[0].first_append_ms
    assert (after.blobs.shared, after.blobs.compacted) == (APPENDS, 1)
    assert sum(moment.records for moment in after.timelines["orders"].moments()) == pytest.approx(160)


async def test_lag_of_groups_is_told_by_partition(orders: Settings) -> None:
    async with opened_log(orders) as log:
        await (await Groups(log).partition("billing", TopicPartition("orders", 0))).commit(101)
        measured = await gather(log)
    (lag,) = measured.groups
    assert (lag.group, lag.topic, lag.partition, lag.lag) == ("billing", "orders", 0, 20)


def test_the_bill_counts_storage_and_requests_at_the_given_prices() -> None:
    counts = BlobCounts(shared=1500, compacted=500, bytes=10 << 30, slices=4000)
    prices = {"storage": 0.02, "put": 0.005, "get": 0.0004, "list": 0.005}
    lines = {line.item: line for line in estimate(counts, gets=8000, span_ms=15 * 86_400_000, prices=prices)}
    assert lines["storage"].dollars_month == pytest.approx(10 * 0.02)
    assert lines["put"].quantity == 2000
    assert lines["put"].dollars_month == pytest.approx(2 * 2 * 0.005)  # twice what half a month had
    assert lines["get"].dollars_month == pytest.approx(2 * 8 * 0.0004)
    assert lines["list"].quantity == 2


async def test_an_unknown_price_is_refused(orders: Settings) -> None:
    with pytest.raises(InvalidArgument, match="there is no price 'post'"):
        await _measured(orders, prices={"post": 1.0})


def test_a_timeline_stays_bounded_and_loses_nothing() -> None:
    timeline = Timeline()
    day_ms = 86_400_000
    for day in range(1000):
        timeline.add(day * day_ms, day * day_ms, 1, 10)
    timeline.add(0, 1000 * day_ms, 500, 5000)
    moments = timeline.moments()
    assert len(moments) <= STEPS_MAX
    assert sum(moment.records for moment in moments) == pytest.approx(1500)
    assert sum(moment.bytes for moment in moments) == pytest.approx(15_000)


async def test_runs_add_files_to_one_table(orders: Settings, tmp_path: Path) -> None:
    measured = await _measured(orders)
    paths = {write_parquet(measured, tmp_path / "stats") for _ in range(2)}
    assert len(paths) == 2
    assert all(pq.read_schema(path) == SCHEMA for path in paths)
    found = duckdb.sql(
        f"SELECT partition, value FROM '{tmp_path}/stats/*.parquet' "
        "WHERE scope = 'partition' AND topic = 'orders' AND metric = 'records' ORDER BY ALL"
    ).fetchall()
    assert found == [(0, 120.0), (0, 120.0), (1, 40.0), (1, 40.0)]


async def test_a_directory_that_is_a_file_is_refused(orders: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_parquet(await _measured(orders), tmp_path / "file")


async def test_charts_are_drawn_for_full_and_for_empty_logs(orders: Settings, tmp_path: Path) -> None:
    empty = await _measured(Settings(data_dir=str(tmp_path / "nothing")))
    for name, measured in (("full", await _measured(orders)), ("empty", empty)):
        for path in draw(measured, tmp_path / name):
            assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command_without_keys_prints_and_writes(orders: Settings, tmp_path: Path) -> None:
    arguments = ["--data-dir", orders.data_dir, "pipeline", "stats", "--no-keys", "--price", "storage=1.5"]
    shown = CliRunner().invoke(main, [*arguments, "--to", str(tmp_path / "out"), "--plot", str(tmp_path / "png")])
    assert shown.exit_code == 0, shown.output
    assert "orders/0" in shown.stdout
    assert "1.5" in shown.stdout
    assert pa.concat_tables(map(pq.read_table, (tmp_path / "out").iterdir())).num_rows > 20
    assert len(list((tmp_path / "png").iterdir())) == 4
    told = CliRunner().invoke(main, [*arguments, "--json"])
    decoded = msgspec.json.decode(told.stdout)
    assert {each["topic"]: each["records"] for each in decoded["topics"]} == {"empty": 0, "orders": 160}


def test_a_malformed_price_is_bad_input(orders: Settings) -> None:
    arguments = ["--data-dir", orders.data_dir, "pipeline", "stats", "--no-keys", "--price", "storage"]
    assert CliRunner().invoke(main, arguments).exit_code == 2


def test_the_step_counts_keys_with_spark(orders: Settings, spark: SparkSession, tmp_path: Path) -> None:
    done = stats(spark, orders, {"to": str(tmp_path / "out")})
    assert ("records", "160") in done.rows
    (path,) = (tmp_path / "out").iterdir()
    found = duckdb.sql(f"SELECT scope, topic, partition, value FROM '{path}' WHERE metric = 'keys'").fetchall()
    assert set(found) == {
        ("topic", "orders", None, 12.0),
        ("topic", "empty", None, 0.0),
        ("partition", "orders", 0, 10.0),
        ("partition", "orders", 1, 2.0),
        ("partition", "empty", 0, 0.0),
    }


def test_the_step_refuses_unknown_options(orders: Settings, spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="no option 'two'"):
        stats(spark, orders, {"two": "x"})
