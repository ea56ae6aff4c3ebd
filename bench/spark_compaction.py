"""Compaction on Spark beside the same reads and durable writes in plain Python, its requests, and a second slot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.logs import BenchLog, fill
from bench.report import Report, rate
from llog.engines.object.reader import Reader
from llog.engines.object.snapshot import Snapshot, take_snapshot
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.model import TopicPartition

PARTITIONS = 50
BLOBS = 200
BLOB_BYTES = 8 << 20
RECORD_BYTES = 1000
SMALL_BLOBS = 2_000
SMALL_PARTITIONS = 10
SMALL_RECORDS = 10


def measure(report: Report, directory: Path, scale: float) -> None:
    blobs = int(BLOBS * scale)
    log = BenchLog(directory / "large")
    log.directory.mkdir()
    count = BLOB_BYTES // PARTITIONS // RECORD_BYTES
    fill(log, "bench", partitions=PARTITIONS, blobs=blobs, count=count, size=RECORD_BYTES)
    size = blobs * PARTITIONS * count * RECORD_BYTES
    copies = {slots: log.copy(directory / f"large-{slots}") for slots in (1, 2)}
    plain = _copy_plainly(log, directory / "plain")
    two, one = (_run_in_process(copies[slots], slots) for slots in (2, 1))
    what = f"compaction, {blobs:,} blobs of 8 MiB, {PARTITIONS} partitions"
    report.ratio(what, rate(size, two["seconds"]), f"plain Python {rate(size, plain)}", plain / two["seconds"], 0.3)
    report.ratio(
        "two task slots",
        rate(size, two["seconds"]),
        f"one slot {rate(size, one['seconds'])}",
        one["seconds"] / two["seconds"],
        1.3,
    )

    small_blobs = int(SMALL_BLOBS * scale)
    small = BenchLog(directory / "small")
    small.directory.mkdir()
    fill(small, "bench", partitions=SMALL_PARTITIONS, blobs=small_blobs, count=SMALL_RECORDS, size=RECORD_BYTES)
    done = _run_in_process(small, 2)
    # Partitions that share small blobs are one task: each blob is read once, and each partition is put once.
    report.limit(f"reads to compact {small_blobs:,} small blobs", done["blob_reads"], small_blobs, "requests")
    report.limit(f"puts of {SMALL_PARTITIONS} partitions", done["runs"], SMALL_PARTITIONS, "requests")


def _copy_plainly(log: BenchLog, target: Path) -> float:
    """Return the seconds to read every slice and write one durable file per partition, as every compactor must."""
    snapshots = log.do(_slices)
    target.mkdir()
    started = time.perf_counter()
    for snapshot in snapshots:
        slices = []
        for extent in snapshot:
            with open(log.blobs / extent.data_uri, "rb", buffering=0) as file:
                slices.append(os.pread(file.fileno(), extent.byte_length, extent.byte_offset))
        with open(target / str(snapshot.tp.partition), "wb", buffering=0) as file:
            for part in slices:
                file.write(part)
            os.fsync(file.fileno())
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - started


async def _slices(log: Log) -> list[Snapshot]:
    topic = await Catalog(log).get("bench")
    snapshots = []
    for partition in range(topic.partitions):
        tp = TopicPartition("bench", partition)
        snapshots.append(await take_snapshot(log, tp, *await Reader(log).bounds(tp)))
    return snapshots


def _run_in_process(log: BenchLog, slots: int) -> dict[str, float]:
    """Compact the log in a Spark session of its own, after a warm-up on another log."""
    warm = BenchLog(log.directory / "warm")
    warm.directory.mkdir()
    fill(warm, "warm", partitions=4, blobs=4, count=10, size=10)
    command = [sys.executable, "-m", "bench.spark_compaction", str(slots), str(warm.directory), str(log.directory)]
    answer = subprocess.run(command, check=True, capture_output=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def _compact(slots: int, warm: BenchLog, log: BenchLog) -> dict[str, float]:
    from llog.spark.jobs.compact import compact_lagging
    from llog.spark.session import spark_session

    spark = spark_session("llog-bench", master=f"local[{slots}]")
    compact_lagging(spark, warm.settings)
    started = time.perf_counter()
    total = compact_lagging(spark, log.settings).total
    seconds = time.perf_counter() - started
    if total.failures or total.damaged:
        raise SystemExit(f"compaction failed: {total.failures or total.damaged}")
    return {"seconds": seconds, "blob_reads": total.blob_reads, "runs": total.runs}


if __name__ == "__main__":
    print(json.dumps(_compact(int(sys.argv[1]), BenchLog(Path(sys.argv[2])), BenchLog(Path(sys.argv[3])))))
