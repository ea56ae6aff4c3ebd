"""SQL and rocksdb topics beside RocksDB: inserts with a route against bare write batches, consumes, and groups.

Baseline and llog take turns. Figures are medians, except that those of consumes are means, since some consumes read
ahead for the next ones. Everything runs in this process, on the event loop that brokers use.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import rocksdict
import uvloop

from bench.report import Report
from llog.config import Settings
from llog.engines.rocksdb.keys import FAMILIES
from llog.engines.rocksdb.store import Changes
from llog.groups.options import ConsumeOptions, Start
from llog.log.opening import opened_log
from llog.sql.database import Database
from llog.sql.session import DatabaseSession

ROWS = 1000
SCHEMA = """
CREATE TABLE chat.messages (id BIGINT PRIMARY KEY, user_id VARCHAR NOT NULL, body VARCHAR, created TIMESTAMP);
CREATE TOPIC app.new_messages;
ALTER TOPIC app.new_messages ADD SOURCE chat.messages ON INSERT WITH (payload = 'key');
"""
INSERT = "INSERT INTO chat.messages VALUES (?, ?, ?, ?)"
Puts = list[tuple[str, bytes, bytes]]


def batch(first: int, rows: int = ROWS) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(first, first + rows), pa.int64()),
            "user_id": [f"user-{number % 97}" for number in range(rows)],
            "body": ["so much to say, and so little time to say it in"] * rows,
            "created": pa.array([1_760_000_000_000_000] * rows, pa.timestamp("us")),
        }
    )


class Recorder:
    """Records all puts while its context is active."""

    def __init__(self) -> None:
        self.puts: Puts = []
        self._put, self._put_all = Changes.put, Changes.put_all

    def __enter__(self) -> Recorder:
        puts, put, put_all = self.puts, self._put, self._put_all

        def record_put(changes: Changes, family: str, key: bytes, value: bytes) -> None:
            puts.append((family, key, value))
            put(changes, family, key, value)

        def record_put_all(changes: Changes, family: str, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
            puts.extend(zip([family] * len(keys), keys, values, strict=True))
            put_all(changes, family, keys, values)

        Changes.put, Changes.put_all = record_put, record_put_all  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Changes.put, Changes.put_all = self._put, self._put_all  # type: ignore[method-assign]


class Bare:
    """The baseline: RocksDB by itself."""

    def __init__(self, directory: Path) -> None:
        def options() -> Any:
            family_options = rocksdict.Options(raw_mode=True)
            family_options.create_if_missing(True)
            family_options.create_missing_column_families(True)
            return family_options

        self._db = rocksdict.Rdict(str(directory), options(), column_families={name: options() for name in FAMILIES})
        self._handles = {name: self._db.get_column_family_handle(name) for name in FAMILIES}
        self._durable = rocksdict.WriteOptions()
        self._durable.sync = True

    def write(self, puts: Puts) -> float:
        """Return the seconds of one synced WriteBatch."""
        start = time.perf_counter()
        changes = rocksdict.WriteBatch(raw_mode=True)
        for family, key, value in puts:
            changes.put(key, value, self._handles[family])
        self._db.write(changes, self._durable)
        return time.perf_counter() - start


async def inserts(session: DatabaseSession, bare: Bare, report: Report, rounds: int) -> None:
    many: list[tuple[float, float]] = []
    for number in range(rounds + 5):
        given = batch(number * ROWS)
        with Recorder() as recorder:
            start = time.perf_counter()
            await session.insert("chat.messages", given)
            seconds = time.perf_counter() - start
        many.append((bare.write(recorder.puts), seconds))
        assert len(recorder.puts) >= 2 * ROWS
    _report_ratio(report, f"INSERT of {ROWS} rows (Arrow), one route", many[5:], ROWS, 0.4)
    single: list[tuple[float, float]] = []
    for number in range(10 * rounds + 20):
        with Recorder() as recorder:
            start = time.perf_counter()
            await session.execute(INSERT, [10_000_000 + number, "ann", "hello", None])
            seconds = time.perf_counter() - start
        single.append((bare.write(recorder.puts), seconds))
    _report_ratio(report, "INSERT of one row, prepared, durable, one route", single[20:], 1, 0.3)


def _report_ratio(report: Report, measure: str, pairs: list[tuple[float, float]], rows: int, at_least: float) -> None:
    base, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(base / ours for base, ours in pairs)
    report.ratio(measure, f"{rows / ours:,.0f} rows/s", f"the same WriteBatch {rows / base:,.0f}/s", ratio, at_least)


async def consumes(database: Database, report: Report, rounds: int) -> None:
    dispatcher = database.dispatcher

    async def consume(group: str) -> float:
        call = ConsumeOptions(
            topic="app.new_messages", group=group, member="bench", limit=ROWS, start=Start("earliest"), wait_ms=0
        )
        start = time.perf_counter()
        found = await dispatcher.consume(call)
        seconds = time.perf_counter() - start
        assert found.num_rows == ROWS
        await dispatcher.ack("app.new_messages", group, {0: found["offset"][-1].as_py()}, "bench")
        return seconds

    for _ in range(12):  # libraries load some of their parts on first use
        await consume("warm")
    alone = [await consume("alone") for _ in range(rounds)]
    speed = ROWS * len(alone) / sum(alone)
    report.ratio(f"CONSUME of {ROWS}", f"{speed:,.0f} events/s", "500,000 events/s", speed / 500_000, 1.0)
    names = [f"group-{number}" for number in range(100)]
    for name in names:
        await consume(name)
    turns = [(await consume("one"), await consume(names[number % 100])) for number in range(rounds)]
    one, others = (statistics.mean(each) for each in zip(*turns, strict=True))
    report.limit("a consume of one of 100 groups / of one group", others / one, 1.5, "times")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--directory", type=Path, default=None, help="a directory on the disk to measure; default: temporary files"
    )
    arguments = parser.parse_args()
    report = Report("durable topics, in process")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        settings = Settings(data_dir=str(Path(directory, "log")))
        bare = Bare(Path(directory, "bare"))
        async with opened_log(settings) as log:
            database = Database(log, settings)
            session = database.session()
            await session.execute(SCHEMA)
            await inserts(session, bare, report, arguments.rounds)
            await consumes(database, report, arguments.rounds)
            await session.close()
            await database.close()
    report.print()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
