"""Compaction, retention and collection on Spark: the same outcome as without it, however many partitions and blobs
there are.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from llog.batch.columns import columns_of
from llog.cli.main import main
from llog.config import Settings
from llog.engines.object.collector import CollectorOptions, list_partitions, references
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.partition_keys import find_keys
from llog.engines.object.reader import Reader
from llog.engines.object.sink import SinkUploader
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.errors import ConfigurationError
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.keys import ROOT, WAL, sink_key
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.log.pins import pin, release
from llog.log.records import Manifest, Sink, encode
from llog.model import Record, TopicPartition
from llog.runtime import stamp_of, uuid7
from llog.spark.jobs.collect import SparkCollector, collect, wal_prefixes
from llog.spark.jobs.compact import TOGETHER_BYTES_MAX, CompactionInput, assign_tasks, compact_lagging
from llog.spark.jobs.retain import retain_topics
from llog.spark.jobs.runner import DEFAULT_STEPS, StepFailure, run_round
from llog.spark.jobs.tasks import StepResult

R = TypeVar("R")
NOW = CollectorOptions(grace_ms=0)


def on(settings: Settings, use: Callable[[Log], Awaitable[R]]) -> R:
    async def opened() -> R:
        async with opened_log(settings) as log:
            return await use(log)

    return asyncio.run(opened())


async def append(log: Log, tps: Iterable[TopicPartition], payload: str, writer: Writer | None = None) -> None:
    """One blob that holds a record for each of the partitions."""
    records = [Record(payload=payload.encode())]
    results = await (writer or Writer(log)).append(
        [AppendGroup(topic=tp.topic, partition=tp.partition, records=records) for tp in tps]
    )
    assert not [each for each in results if isinstance(each, Exception)]


async def payloads(log: Log, tp: TopicPartition) -> list[str]:
    reader = Reader(log)
    start = (await reader.bounds(tp)).log_start_offset
    return [value.decode() async for batch in reader.iter_from(tp, start) for value in batch.columns.values.to_pylist()]


async def blobs(log: Log) -> set[str]:
    return {
        info.name
        async for page in log.blobs.list(ROOT)
        for info in page
        if stamp_of(info.name) and "log-id" not in info.name
    }


async def named(log: Log) -> set[str]:
    return {name async for name in references(log, await list_partitions(log))}


async def put_orphans(log: Log, count: int) -> set[str]:
    stamp = log.runtime.now_ms() - 10_000
    names = [WAL + uuid7(stamp - number, log.runtime.random()) for number in range(count)]
    await asyncio.gather(*(log.blobs.put(name, [b"garbage"]) for name in names))
    return set(names)


# --- compact


def test_compaction_keeps_every_record_and_reads_each_shared_blob_once(
    spark: SparkSession, log_settings: Settings
) -> None:
    sharers = [[TopicPartition("orders", first + number) for number in range(20)] for first in range(0, 200, 20)]

    async def fill(log: Log) -> set[str]:
        await Catalog(log).create("orders", 200)

        async def one(tps: list[TopicPartition]) -> None:
            writer = Writer(log)
            for number in range(12):
                await append(log, tps, f"{number}", writer)

        await asyncio.gather(*map(one, sharers))
        return await named(log)

    before = on(log_settings, fill)
    assert len(before) == 120
    summary = compact_lagging(spark, log_settings)

    async def check(log: Log) -> None:
        compacted = before - await named(log)
        assert len(compacted) >= 110
        assert summary.total.blob_reads == len(compacted)
        for tp in (tp for tps in sharers for tp in tps):
            assert await payloads(log, tp) == [f"{number}" for number in range(12)]
            report = await verify(log, tp)
            assert report.healthy
            assert report.pieces <= 2

    on(log_settings, check)
    assert summary.partitions == summary.total.runs == 200
    assert summary.total.records >= 200 * 11
    assert summary.tasks > 1
    assert not summary.total.failures
    assert compact_lagging(spark, log_settings).total.runs == 0


def test_compaction_goes_on_in_rounds_until_a_long_backlog_is_done(spark: SparkSession, tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), compactor_max_offsets_per_run=5)
    tp = TopicPartition("orders", 0)

    async def fill(log: Log) -> None:
        await Catalog(log).create("orders", 1)
        writer = Writer(log)
        for number in range(21):
            await append(log, [tp], f"{number}", writer)

    on(settings, fill)
    summary = compact_lagging(spark, settings)
    assert summary.total.runs == 4
    assert summary.rounds >= 4
    assert on(settings, lambda log: payloads(log, tp)) == [f"{number}" for number in range(21)]


def test_a_damaged_slice_is_told_and_the_other_partitions_are_compacted(
    spark: SparkSession, log_settings: Settings
) -> None:
    tps = [TopicPartition("orders", number) for number in range(4)]

    async def fill(log: Log) -> None:
        await Catalog(log).create("orders", 4)
        for tp in tps:
            for number in range(4):
                await append(log, [tp], f"{number}")
        [lost] = [name async for name in references(log, [await find_keys(log, tps[0])])][1:2]
        await log.blobs.delete_many([lost])

    on(log_settings, fill)
    summary = compact_lagging(spark, log_settings)
    assert len(summary.total.damaged) == 1
    assert summary.total.damaged[0].startswith("orders/0: ")
    assert on(log_settings, lambda log: payloads(log, tps[3])) == ["0", "1", "2", "3"]
    assert summary.total.records >= 9


def inputs(*groups: tuple[int, int]) -> list[CompactionInput]:
    """For each (partitions, bytes each), partitions that all share one blob."""
    return [
        CompactionInput(TopicPartition(f"t{group}", number), size, (f"blob{group}", f"own{group}-{number}"))
        for group, (count, size) in enumerate(groups)
        for number in range(count)
    ]


def test_partitions_that_share_blobs_are_given_to_one_task() -> None:
    tasks = assign_tasks(inputs((7, 10), (1, 10), (5, 10), (3, 10)), 3)
    assert len(tasks) == 3
    assert sorted(tp for task in tasks for tp in task) == sorted(
        each.tp for each in inputs((7, 10), (1, 10), (5, 10), (3, 10))
    )
    for topic in ("t0", "t1", "t2", "t3"):
        assert sum(any(tp.topic == topic for tp in task) for task in tasks) == 1
    assert sorted(len(task) for task in tasks) == [4, 5, 7]


def test_sharers_of_more_than_a_task_should_do_are_spread() -> None:
    sizes = [
        sum(TOGETHER_BYTES_MAX // 4 for _ in task) for task in assign_tasks(inputs((64, TOGETHER_BYTES_MAX // 4)), 4)
    ]
    assert sizes == [4 * TOGETHER_BYTES_MAX] * 4


def test_thousands_of_partitions_without_bytes_are_spread_evenly() -> None:
    tasks = assign_tasks([CompactionInput(TopicPartition("t", number), 0, ()) for number in range(5000)], 8)
    assert [len(task) for task in tasks] == [625] * 8


# --- retain


def test_retention_trims_the_topics_that_have_limits_and_no_others(spark: SparkSession, log_settings: Settings) -> None:
    async def fill(log: Log) -> None:
        catalog = Catalog(log)
        await catalog.create("bounded", 40, retention_bytes=0)
        await catalog.create("kept", 3)
        tps = [TopicPartition("bounded", number) for number in range(40)]
        tps += [TopicPartition("kept", number) for number in range(3)]
        writer = Writer(log)
        for number in range(3):
            await append(log, tps, f"{number}", writer)

    on(log_settings, fill)
    result = retain_topics(spark, log_settings)
    assert (result.partitions, result.trimmed, result.records, result.failures) == (40, 40, 120, ())

    async def check(log: Log) -> None:
        bounds = await Reader(log).bounds(TopicPartition("bounded", 39))
        assert bounds.log_start_offset == bounds.next_offset == 4
        assert await payloads(log, TopicPartition("kept", 2)) == ["0", "1", "2"]

    on(log_settings, check)
    assert retain_topics(spark, log_settings).trimmed == 0


# --- collect


def test_collection_deletes_exactly_the_blobs_that_nothing_names(spark: SparkSession, log_settings: Settings) -> None:
    tps = [TopicPartition("orders", number) for number in range(200)]
    spared: set[str] = set()

    async def fill(log: Log) -> set[str]:
        catalog = Catalog(log)
        await catalog.create("orders", 200)
        await catalog.create("gone", 1)
        writer = Writer(log)
        for number in range(4):
            await append(log, tps, f"{number}", writer)
            await append(log, [TopicPartition("gone", 0)], f"{number}", writer)
        await Compactor(log).compact_many([*tps[:100], TopicPartition("gone", 0)])
        await append(log, [tps[7]], "pending only", writer)
        await catalog.delete("gone")
        await catalog.create("gone", 2)
        opened = await SinkUploader(log, "open").upload([(tps[0], columns_of([Record(payload=b"x")]))])
        manifested = (await put_orphans(log, 1)).pop()
        record = Sink(batch=0, manifest=Manifest(blobs=(manifested,), since={}))
        await log.meta.put(sink_key("named"), encode(record))
        spared.update({opened.blob, manifested, *await named(log)})
        await put_orphans(log, 2500)
        return await blobs(log)

    before = on(log_settings, fill)
    result = SparkCollector(spark, log_settings).collect_once(NOW)
    assert on(log_settings, blobs) == spared
    assert result.candidates == len(before)
    assert result.deleted == len(before - spared) >= 2500
    assert result.referenced == len(spared)
    assert result.waiting == 0

    async def check(log: Log) -> None:
        assert (await payloads(log, tps[7]))[-1] == "pending only"
        assert all([(await verify(log, tp)).healthy for tp in tps[::20]])

    on(log_settings, check)
    assert SparkCollector(spark, log_settings).collect_once(NOW).deleted == 0


def test_what_could_fill_a_gap_is_kept_and_told(spark: SparkSession, log_settings: Settings) -> None:
    tps = [TopicPartition("orders", number) for number in range(40)]

    async def fill(log: Log) -> tuple[set[str], set[str]]:
        await Catalog(log).create("orders", 40)
        for tp in tps:
            for number in range(3):
                await append(log, [tp], f"{number}")
        keys = await find_keys(log, tps[33])
        await log.meta.delete(keys.entry(2))
        ancient = [WAL + uuid7(1_000_000_000_000 + number, log.runtime.random()) for number in range(5)]
        await asyncio.gather(*(log.blobs.put(name, [b"garbage"]) for name in ancient))
        return await blobs(log), set(ancient)

    before, ancient = on(log_settings, fill)
    result = SparkCollector(spark, log_settings).collect_once(NOW)
    assert (result.deleted, result.kept) == (5, 1)
    assert [(gap.partition, gap.start_offset, gap.end_offset) for gap in result.gaps] == [(33, 2, 2)]
    assert on(log_settings, blobs) == before - ancient
    [failure] = collect(spark, log_settings, {"grace_ms": 0}).failures
    assert "orders/33 offsets 2 to 2" in failure


def test_young_blobs_are_left_alone(spark: SparkSession, log_settings: Settings) -> None:
    orphans = on(log_settings, lambda log: put_orphans(log, 3))
    result = SparkCollector(spark, log_settings).collect_once(CollectorOptions(grace_ms=60_000))
    assert (result.candidates, result.deleted) == (0, 0)
    assert on(log_settings, blobs) == orphans


def test_blobs_wait_for_the_pins_that_were_alive_when_they_were_found_and_for_no_later_ones(
    spark: SparkSession, log_settings: Settings
) -> None:
    collector = SparkCollector(spark, log_settings)

    async def first(log: Log) -> tuple[set[str], str]:
        return await put_orphans(log, 5), await pin(log, "a reader")

    early, early_pin = on(log_settings, first)
    held = collector.collect_once(NOW)
    assert (held.waiting, held.deleted) == (5, 0)

    async def second(log: Log) -> tuple[set[str], str]:
        return await put_orphans(log, 3), await pin(log, "another reader")

    late, late_pin = on(log_settings, second)
    assert collector.collect_once(NOW).waiting == 8
    on(log_settings, lambda log: release(log, early_pin))
    freed = collector.collect_once(NOW)
    assert (freed.waiting, freed.deleted) == (3, 5)
    assert on(log_settings, blobs) == late
    on(log_settings, lambda log: release(log, late_pin))
    assert collector.collect_once(NOW).deleted == 3
    assert early
    assert on(log_settings, blobs) == set()


def test_the_prefixes_of_shared_blobs_cover_every_old_stamp_once() -> None:
    oldest, limit = 1_700_000_000_123, 1_702_592_000_456
    prefixes = wal_prefixes(oldest, limit)
    assert 1 < len(prefixes) <= 256
    source = random.Random(7)
    for stamp in [oldest, limit - 1, *(source.randrange(oldest, limit) for _ in range(500))]:
        name = WAL + uuid7(stamp, source)
        assert sum(name.startswith(prefix) for prefix in prefixes) == 1
    assert wal_prefixes(limit, oldest) == []


# --- rounds


def test_a_step_that_fails_is_told_in_one_line_and_the_others_go_on(
    spark: SparkSession, log_settings: Settings
) -> None:
    async def fill(log: Log) -> str:
        catalog = Catalog(log)
        await catalog.create("bounded", 2, retention_bytes=0)
        await append(log, [TopicPartition("bounded", 0)], "first")
        keys = await find_keys(log, TopicPartition("bounded", 1))
        await log.meta.put(keys.control, b"not a control record")
        return keys.control

    control = on(log_settings, fill)
    compacted, retained, collected = run_round(spark, log_settings, DEFAULT_STEPS, {"collect": {"grace_ms": 0}})
    for failed in (compacted, collected):
        assert isinstance(failed, StepFailure)
        assert failed.error.startswith(f"metadata key {control} does not hold a Control")
        assert "\n" not in failed.error
    assert isinstance(retained, StepResult)
    assert ("trimmed", "1") in retained.rows
    assert len(retained.failures) == 1
    assert control in retained.failures[0]


# --- the command


def llog(settings: Settings, *arguments: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llog.cli.main", "--data-dir", settings.data_dir, "pipeline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


async def small_log(log: Log) -> None:
    await Catalog(log).create("orders", 3)
    writer = Writer(log)
    for number in range(3):
        await append(log, [TopicPartition("orders", p) for p in range(3)], f"{number}", writer)


def test_one_round_as_a_command_prints_its_table_and_exits_0(log_settings: Settings) -> None:
    on(log_settings, small_log)
    done = llog(log_settings, "run", "--once", "--option", "collect.grace=0ms", "--master", "local[2]")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["STEP", "SECONDS", "RESULT"]
    assert [line.split()[0] for line in lines[1:]] == ["compact", "retain", "collect"]
    # The newest append of a partition waits, unless a minute has passed since.
    compacted = re.search(r"partitions 3, blobs written 3, records (6|9),", lines[1])
    assert compacted is not None, lines[1]
    assert f"deleted {int(compacted[1]) // 3} " in lines[3]


@pytest.mark.parametrize("interval", ["1h", "1ms"])
def test_the_service_ends_with_0_when_it_is_terminated_between_rounds_or_within_a_step(
    log_settings: Settings, interval: str
) -> None:
    on(log_settings, small_log)
    command = [sys.executable, "-m", "llog.cli.main", "--data-dir", log_settings.data_dir, "pipeline", "run"]
    service = subprocess.Popen(
        [*command, "--interval", interval, "--master", "local[1]"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert service.stdout is not None
        for line in service.stdout:
            if line.startswith("collect"):
                break
        time.sleep(0.3)  # without a pause between rounds, a step has begun and waits for Spark
        service.send_signal(signal.SIGTERM)
        _, stderr = service.communicate(timeout=120)
    finally:
        service.kill()
    assert (service.returncode, stderr) == (0, "llog: terminated\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--master", "nonsense://x"], "--master is 'nonsense://x': it must be local"),
        (["--master", "local[0]"], "--master is 'local[0]'"),
        (["--conf", "spark.driver.memory"], "--conf is 'spark.driver.memory': write it like"),
        (["--conf", "driver.memory=4g"], "--conf is 'driver.memory=4g': write it like"),
        (["--option", "grace"], "--option is 'grace': write it like collect.grace=1h"),
        (["--option", "collect.grac=1h"], "collect.grace is the only option"),
        (["--option", "dust.colour=red"], "there is no step 'dust'"),
        (["--steps", "compact,shred"], "there is no step 'shred' in the pipeline: there are compact, retain, collect"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(arguments: list[str], told: str, log_settings: Settings) -> None:
    result = CliRunner().invoke(main, ["--data-dir", log_settings.data_dir, "pipeline", "run", "--once", *arguments])
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_setting_that_spark_refuses_is_a_readable_error(log_settings: Settings) -> None:
    done = llog(log_settings, "compact", "--master", "local[1]", "--conf", "spark.scheduler.mode=abc")
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("llog: Spark did not start with --master local[1] --conf spark.scheduler.mode=abc: ")
    assert "The value 'abc' in the config" in told


def test_without_spark_the_command_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, log_settings: Settings
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    result = CliRunner().invoke(main, ["--data-dir", log_settings.data_dir, "pipeline", "compact"])
    assert result.exit_code == 2
    assert 'pip install "leaderless-log[spark]"' in result.stderr


def test_a_log_in_memory_is_refused_because_tasks_run_elsewhere(spark: SparkSession) -> None:
    with pytest.raises(ConfigurationError, match="only this process can see"):
        compact_lagging(spark, Settings(meta="memory://x", blobs="memory://x"))
