"""The pipeline's jobs lose all their processes, or one of many, at any moment; the next run goes on from there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from deltalake import DeltaTable

from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.writer import Writer
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.log import Log
from llog.model import Record, TopicPartition
from tests.pipeline.lake_tools import DAY_MS, rows_of, table_rows
from tests.spark.logs import LogOnDisk

KILLS = 3
LIMIT_S = 480
SEED = int(os.environ.get("LLOG_TEST_SEED") or random.randrange(10**6))
PARTITIONS = 2
APPENDS = 150
RECORDS = 10
"""Of one append."""
LOCAL = ("--master", "local[2]")


class Job:
    """A command of the pipeline in processes of its own, and what it printed."""

    def __init__(self, log: LogOnDisk, arguments: Sequence[str], settings: dict[str, str]) -> None:
        self._told = log.blobs.parent / "job.log"
        command = [sys.executable, "-m", "llog.cli.main", "pipeline", *arguments]
        stores = {"LLOG_META": log.options["meta"], "LLOG_BLOBS": log.options["blobs"]}
        # A dead process holds its claims for so long.
        environment = os.environ | stores | {"LLOG_SESSION_TIMEOUT_MS": "1000"} | settings
        with self._told.open("wb") as told:
            self._process = subprocess.Popen(
                command, start_new_session=True, stdout=told, stderr=subprocess.STDOUT, env=environment
            )

    def told(self) -> str:
        return self._told.read_text(errors="replace")

    def check_runs(self) -> None:
        assert self._process.poll() is None, f"ended with {self._process.returncode}: {self.told()[-5000:]}"

    def wait_for(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.check_runs()
            time.sleep(0.05)

    def end(self) -> int:
        return self._process.wait(LIMIT_S)

    def processes(self, kind: str = "") -> list[psutil.Process]:
        """Those whose command line has this in it, parents first. Python workers have left the process group."""
        found = []
        for each in [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]:
            with suppress(psutil.Error):  # gone by now
                if kind in " ".join(each.cmdline()):
                    found.append(each)
        return found

    def kill(self) -> None:
        if self._process.poll() is None:
            everything = self.processes()
            for each in everything:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            self._process.wait()
            psutil.wait_procs(everything, timeout=60)


@contextmanager
def job(log: LogOnDisk, *arguments: str, **settings: str) -> Iterator[Job]:
    """All of its processes are gone when this ends."""
    started = Job(log, arguments, settings)
    try:
        yield started
    finally:
        started.kill()


def run_and_kill(
    log: LogOnDisk, chance: random.Random, done: Callable[[], int], *arguments: str, **settings: str
) -> None:
    """Kills everything that the job consists of, some moment after it got ahead by three steps."""
    goal = done() + 3
    with job(log, *arguments, **settings) as killed:
        killed.wait_for(lambda: done() >= goal)
        time.sleep(chance.uniform(0, 1))
        killed.check_runs()


@pytest.fixture
def chance() -> random.Random:
    print(f"LLOG_TEST_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture
def log(tmp_path: Path) -> LogOnDisk:
    """Each record unlike any other."""
    log = LogOnDisk(tmp_path)
    log.do(partial(fill, made=numbered))
    return log


async def fill(log: Log, made: Callable[[int], Record]) -> None:
    """Many small extents."""
    await Catalog(log).create("events", PARTITIONS)
    writer = Writer(log)
    for number in range(APPENDS):
        for partition in range(PARTITIONS):
            first = (number * PARTITIONS + partition) * RECORDS
            records = [made(n) for n in range(first, first + RECORDS)]
            await writer.append([AppendGroup(topic="events", partition=partition, records=records)])


def numbered(n: int) -> Record:
    value = None if n % 11 == 0 else b"value-%d " % n * (n % 5 + 1)
    return Record(payload=value, key=b"%d" % n, timestamp=1_750_000_000_000 + n // 1000 * DAY_MS)


# --- exports

COMMITS = {"delta": "_delta_log/*.json", "iceberg": "events/metadata/snap-*.avro", "parquet": "_llog/[0-9]*.json"}


def commits(kind: str, table: Path) -> int:
    """How many were begun, one after the other: all but the last are part of the table."""
    return len(list(table.glob(COMMITS[kind])))


@pytest.mark.parametrize("kind", ["delta", "iceberg", "parquet"])
def test_an_export_that_is_killed_again_and_again_adds_every_record_once(
    kind: str, log: LogOnDisk, tmp_path: Path, chance: random.Random
) -> None:
    expected = rows_of(log.settings, "events", PARTITIONS)
    assert len(expected) == PARTITIONS * APPENDS * RECORDS
    table = tmp_path / "table"
    arguments = ["export", "events", "--format", kind, "--to", str(table), *LOCAL, "--max-bytes"]
    for _ in range(KILLS):
        run_and_kill(log, chance, lambda: commits(kind, table), *arguments, "1KiB")
        there = table_rows(kind, table)
        assert 0 < len(there) < len(expected)
        assert set(there) <= set(expected)
        assert len(set(there)) == len(there)
    with job(log, *arguments, "100KiB") as last:
        assert last.end() == 0, last.told()
    assert table_rows(kind, table) == expected
    assert list(table.glob("_llog/staging-*")) == []  # only the format Parquet has such
    assert log.problems("events", PARTITIONS) == []


# --- materialized tables

Rows = dict[bytes, tuple[int, int, bytes]]
"""Partition, offset and value by key."""


def changed(n: int) -> Record:
    """Few keys, each in one partition, which come and go; some records have none."""
    partition, chance = n // RECORDS % PARTITIONS, random.Random(n)
    key = None if n % 13 == 0 else b"%d-%d" % (partition, chance.randrange(200))
    return Record(payload=None if chance.random() < 0.3 else b"value-%d" % n, key=key)


def rows_below(records: list[list[Record]], ends: Sequence[int | None]) -> Rows:
    """What the rows are after the records of each partition up to an offset that is not included."""
    rows: Rows = {}
    for partition, end in enumerate(ends):
        for record in records[partition]:
            assert record.offset is not None
            if record.key is None or record.offset >= (end or 0):
                continue
            rows.pop(record.key, None)
            if record.payload is not None:
                rows[record.key] = partition, record.offset, record.payload
    return rows


def positions(table: Path) -> list[int | None]:
    """What the table itself says about how far it is."""
    opened = DeltaTable(str(table))
    return [opened.transaction_version(f"llog/{partition}") for partition in range(PARTITIONS)]


def materialized(table: Path) -> Rows:
    names = ("key", "partition", "offset", "value")
    found = DeltaTable(str(table)).to_pyarrow_table().select(names).to_pylist()
    rows = {row["key"]: (row["partition"], row["offset"], row["value"]) for row in found}
    assert len(rows) == len(found)
    return rows


def test_a_materialization_that_is_killed_again_and_again_holds_the_rows_of_its_position(
    tmp_path: Path, chance: random.Random
) -> None:
    log = LogOnDisk(tmp_path)
    log.do(partial(fill, made=changed))
    records = contents(log)
    everything = [APPENDS * RECORDS + 1] * PARTITIONS
    table = tmp_path / "table"
    arguments = ["materialize", "events", "--to", str(table), *LOCAL, "--max-bytes"]
    for _ in range(KILLS):
        run_and_kill(log, chance, lambda: commits("delta", table), *arguments, "1KiB")
        assert positions(table) != everything
        assert materialized(table) == rows_below(records, positions(table)) != {}
    with job(log, *arguments, "100KiB") as last:
        assert last.end() == 0, last.told()
    assert positions(table) == everything
    assert materialized(table) == rows_below(records, everything)
    assert log.problems("events", PARTITIONS) == []


# --- compaction


def runs_of(appends: int) -> dict[str, str]:
    """Blobs of so few appends make many rounds."""
    return {"LLOG_COMPACTOR_MAX_OFFSETS_PER_RUN": str(appends * RECORDS)}


def waiting(log: LogOnDisk) -> list[int]:
    """How many appends of each partition are not compacted."""

    async def lags(opened: Log) -> list[int]:
        compactor = Compactor(opened)
        return [(await compactor.lag(TopicPartition("events", p))).offsets // RECORDS for p in range(PARTITIONS)]

    return log.do(lags)


def contents(log: LogOnDisk) -> list[list[Record]]:
    return [log.records("events", partition) for partition in range(PARTITIONS)]


def check_contents(log: LogOnDisk, records: list[list[Record]]) -> None:
    """As they were; a run that was killed may have left entries that it had replaced, which do no harm."""
    assert contents(log) == records
    assert [problem for problem in log.problems("events", PARTITIONS) if not problem.harmless] == []


def check_compacted(log: LogOnDisk, records: list[list[Record]]) -> None:
    assert max(waiting(log)) <= 1  # the newest append waits for the next one
    check_contents(log, records)
    log.collect()  # and none of it lies where only a killed run knew of it
    check_contents(log, records)
    assert log.problems("events", PARTITIONS) == []


def test_a_compaction_that_is_killed_again_and_again_keeps_every_record(log: LogOnDisk, chance: random.Random) -> None:
    records = contents(log)
    for _ in range(KILLS):
        run_and_kill(log, chance, lambda: -sum(waiting(log)), "compact", *LOCAL, **runs_of(2))
        check_contents(log, records)
    assert min(waiting(log)) > 1
    with job(log, "compact", *LOCAL) as last:
        assert last.end() == 0, last.told()
    check_compacted(log, records)


def test_a_compaction_that_loses_an_executor_ends_well_and_the_next_one_does_what_is_left(log: LogOnDisk) -> None:
    records = contents(log)
    everything = sum(waiting(log))
    with job(log, "compact", "--master", "local-cluster[2,1,1024]", **runs_of(8)) as hurt:
        hurt.wait_for(lambda: sum(waiting(log)) < everything)
        executors = hurt.processes("CoarseGrainedExecutorBackend")
        assert len(executors) == 2
        executors[0].kill()
        assert hurt.end() == 0, hurt.told()
        assert "Lost executor" in hurt.told()
        assert "Traceback" not in hurt.told()
    check_contents(log, records)
    # What the lost executor had claimed was left to it.
    with job(log, "compact", *LOCAL) as last:
        assert last.end() == 0, last.told()
    check_compacted(log, records)
