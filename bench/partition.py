"""The object engine beside the bare disk: a flush, encoding, and a read of a whole partition.

`python -m bench.partition [--rounds N]`. Baselines and their counterparts take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.blobs import bare
from bench.logs import BenchLog, records
from bench.report import Report, rate
from llog.batch.columns import Columns, stamp
from llog.batch.format import encode
from llog.engines.object.reader import Reader
from llog.engines.object.snapshot import Snapshot, take_snapshot
from llog.engines.object.writer import Writer
from llog.errors import LlogError
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.model import TopicPartition

FLUSH_BYTES = 8 << 20
RECORD_BYTES = 1000
TP = TopicPartition("bench", 0)


async def flush(writer: Writer, columns: Columns) -> float:
    """Return the seconds of one durable append: blob and commit."""
    started = time.perf_counter()
    for result in await writer.append([AppendGroup(topic=TP.topic, partition=TP.partition, records=columns)]):
        if isinstance(result, LlogError):
            raise result
    return time.perf_counter() - started


async def catch_up(log: Log, expected: int) -> float:
    """Return the seconds of a read of the whole partition, including checksums."""
    started, count = time.perf_counter(), 0
    reader = Reader(log)
    start, _ = await reader.bounds(TP)
    async for batch in reader.iter_from(TP, start):
        count += batch.columns.count
    if count != expected:
        raise SystemExit(f"{count} records were read of the {expected} that were written")
    return time.perf_counter() - started


def read_bare(blobs: Path, extents: Snapshot) -> float:
    """Return the seconds of a bare pread of the same ranges, without lookups and checks."""
    started = time.perf_counter()
    for extent in extents:
        descriptor = os.open(blobs / extent.data_uri, os.O_RDONLY)
        os.pread(descriptor, extent.byte_length, extent.byte_offset)
        os.close(descriptor)
    return time.perf_counter() - started


def time_encoding(columns: Columns) -> float:
    started = time.perf_counter()
    encode(columns)
    return time.perf_counter() - started


def time_copying(content: bytes) -> float:
    started = time.perf_counter()
    bytearray(content)
    return time.perf_counter() - started


async def measure(report: Report, directory: Path, rounds: int) -> None:
    target = BenchLog(directory / "log")
    target.directory.mkdir()
    count = FLUSH_BYTES // RECORD_BYTES
    columns, content = records(count, RECORD_BYTES), os.urandom(FLUSH_BYTES)
    async with opened_log(target.settings) as log:
        await Catalog(log).create(TP.topic)
        writer = Writer(log)
        await flush(writer, columns)
        flush_s, bare_s = [], []
        for number in range(rounds):
            flush_s.append(await flush(writer, columns))
            bare_s.append(bare(directory / f"bare-{number}", content))
        taken, held = _medians(flush_s, bare_s)
        against = f"bare write + fsync {held * 1000:,.1f} ms"
        report.compare("flush of 8 MiB", f"{taken * 1000:,.1f} ms", against, taken / held)

        total = (rounds + 1) * count
        extents = await take_snapshot(log, TP, *await Reader(log).bounds(TP))
        read_s, pread_s = [], []
        for _ in range(rounds):
            read_s.append(await catch_up(log, total))
            pread_s.append(read_bare(target.blobs, extents))
        taken, held = _medians(read_s, pread_s)
        size = total * RECORD_BYTES
        report.compare("catch-up read", rate(size, taken), f"pread {rate(size, held)}", held / taken)

    for record_bytes in (1000, 100):
        part = stamp(records(FLUSH_BYTES // record_bytes, record_bytes), 1)
        encode_s, copy_s = [], []
        for _ in range(rounds):
            encode_s.append(time_encoding(part))
            copy_s.append(time_copying(content))
        taken, held = _medians(encode_s, copy_s)
        what = f"encoding, {record_bytes:,} B records"
        report.compare(what, rate(FLUSH_BYTES, taken), f"copying {rate(FLUSH_BYTES, held)}", held / taken)


def _medians(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    return statistics.median(first), statistics.median(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--directory", type=Path, default=None, help="a directory on the disk to measure; default: temporary files"
    )
    arguments = parser.parse_args()
    report = Report("bench.partition")
    with tempfile.TemporaryDirectory(prefix="llog-bench-", dir=arguments.directory) as directory:
        asyncio.run(measure(report, Path(directory), arguments.rounds))
    report.print()


if __name__ == "__main__":
    main()
