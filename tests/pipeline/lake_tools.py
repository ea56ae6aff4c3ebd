"""Topics with known records, what tables hold of them, and exporters that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import duckdb

from llog.api.leaderless import LeaderlessLogReader, LeaderlessLogWriter, SharedAppendGroup
from llog.config import Settings
from llog.model import Record

DAY_MS = 86_400_000
Row = tuple[int, int, bytes | None, bytes | None]
"""Partition, offset, key and value."""


def append(settings: Settings, topic: str, partition: int, records: Sequence[Record]) -> None:
    with LeaderlessLogWriter(settings) as writer:
        writer.initialize_partition(topic, partition)
        writer.append_shared([SharedAppendGroup(topic=topic, partition=partition, payloads=records)])


def numbered(start: int, stop: int) -> list[Record]:
    """Records over several days, some without a key or a value."""
    return [
        Record(
            payload=None if n % 11 == 0 else b"value-%d" % n,
            key=None if n % 7 == 0 else b"key-%d" % (n % 5),
            timestamp=1_750_000_000_000 + (n // 8) * DAY_MS // 2,
        )
        for n in range(start, stop)
    ]


def rows_of(settings: Settings, topic: str, partitions: int = 2) -> list[Row]:
    """What the log itself says."""
    rows: list[Row] = []
    with LeaderlessLogReader(settings) as reader:
        for partition in range(partitions):
            first, stop = reader.bounds(topic, partition)
            for record in reader.read_range(topic, partition, first, stop):
                assert record.offset is not None
                rows.append((partition, record.offset, record.key, record.payload))
    return sorted(rows, key=lambda row: row[:2])


def table_rows(kind: str, directory: Path) -> list[Row]:
    """What DuckDB finds in a table."""
    columns = 'partition, "offset", key, value'
    if kind == "parquet":
        found = duckdb.sql(f"select {columns} from read_parquet('{directory}/**/*.parquet') order by 1, 2")
    elif kind == "delta":
        from deltalake import DeltaTable

        rows = DeltaTable(str(directory)).to_pyarrow_table()
        found = duckdb.from_arrow(rows).query("rows", f"select {columns} from rows order by 1, 2")
    else:
        from llog.spark.jobs.lake.iceberg import read_table

        rows = read_table(directory, "events")
        found = duckdb.from_arrow(rows).query("rows", f"select {columns} from rows order by 1, 2")
    return [(row[0], row[1], row[2], row[3]) for row in found.fetchall()]


def kill_until_done(code: str, *, kills: int, seed: int) -> int:
    """Runs a program that prints a line when it begins to work, kills it at some moment after that, `kills` times, then
    lets it end.

    Returns how often it was really killed and not done before.
    """
    chance = random.Random(seed)
    killed = 0
    for attempt in range(kills + 1):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, env=os.environ.copy()
        )
        assert process.stdout is not None
        process.stdout.readline()
        if attempt < kills:
            time.sleep(chance.uniform(0, 0.4))
            os.killpg(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        process.stdout.close()
        if attempt == kills:
            assert process.returncode == 0
    return killed
