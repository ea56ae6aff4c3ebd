"""Spark: reads beside Parquet and Kafka, compaction beside plain Python, planning over a million index entries.

`python -m bench.spark [--quick] [--only read|kafka|compaction|planning]` runs once, with two task slots; `--quick`
takes a tenth of the data. The sides of a ratio take turns, so that a machine that gets busy favours neither. The first
run of each is a warm-up.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession

from bench import spark_compaction, spark_kafka, spark_planning
from bench.logs import BenchLog, compact_all, fill
from bench.report import Report, rate
from bench.turns import in_turns
from llog.spark.session import spark_session

PARTITIONS = 8
APPEND_BYTES = 8 << 20
ROUNDS = 5
STREAM_BATCHES = 4


class ReadCase(msgspec.Struct, frozen=True):
    """The records to read, and the part of Parquet's rate that the batch read should reach."""

    record_bytes: int
    of_parquet: float

    @property
    def name(self) -> str:
        return f"{self.record_bytes:,} B records"


READ_CASES = (ReadCase(1000, 0.7), ReadCase(100, 0.5))
STREAM_OF_BATCH = 0.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--only", choices=("read", "kafka", "compaction", "planning"), help="one part")
    parser.add_argument(
        "--directory", type=Path, default=None, help="a directory on the disk to measure; default: temporary files"
    )
    arguments = parser.parse_args()
    scale = 0.1 if arguments.quick else 1.0
    report = Report(f"bench.spark, {'a tenth of the' if arguments.quick else 'all'} data, local[2]")
    report.note("load when it began", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="llog-bench-", dir=arguments.directory) as temporary:
        directory = Path(temporary)
        if arguments.only in (None, "planning"):
            spark_planning.measure(report, directory / "planning", scale)
        if arguments.only in (None, "compaction"):
            spark_compaction.measure(report, directory, scale)
        if arguments.only in (None, "read"):
            measure_reads(report, directory, int(1e9 * scale))
        if arguments.only in (None, "kafka"):
            cache = (arguments.directory or directory) / "kafka-jars"
            spark_kafka.measure(report, directory / "kafka", int(1e9 * scale), cache)
    report.note("load when it ended", f"{os.getloadavg()[0]:.1f}")
    report.print()
    sys.exit(1 if report.missed else 0)


def measure_reads(report: Report, directory: Path, size: int) -> None:
    logs = [(reading, create_log(directory, reading, size)) for reading in READ_CASES]
    spark = spark_session("llog-bench", master="local[2]")
    for reading, log in logs:
        parquet = str(log.directory / "parquet")
        load_frame(spark, log).write.option("compression", "none").parquet(parquet)
        batch_records = -(-load_frame(spark, log).count() // STREAM_BATCHES)
        seconds = in_turns(
            {
                "llog": partial(drain, partial(load_frame, spark, log)),
                "parquet": partial(drain, partial(spark.read.parquet, parquet)),
                "stream": partial(stream_seconds, spark, log, batch_records),
            },
            ROUNDS,
        )
        batch = seconds.median("llog")
        report.ratio(
            f"batch read, {reading.name}",
            rate(size, batch),
            f"Parquet {rate(size, seconds.median('parquet'))}",
            seconds.ratio("parquet", "llog"),
            reading.of_parquet,
        )
        report.ratio(
            f"AvailableNow, {reading.name}",
            rate(size, seconds.median("stream")),
            f"batch read {rate(size, batch)}",
            seconds.ratio("llog", "stream"),
            STREAM_OF_BATCH,
        )
    spark.stop()


def create_log(directory: Path, reading: ReadCase, size: int) -> BenchLog:
    """Create a log with a topic of about `size` bytes, all of it compacted."""
    log = BenchLog(directory / f"records-{reading.record_bytes}")
    log.directory.mkdir()
    count = APPEND_BYTES // PARTITIONS // reading.record_bytes
    blobs = -(-size // (count * PARTITIONS * reading.record_bytes))
    fill(log, "bench", partitions=PARTITIONS, blobs=blobs, count=count, size=reading.record_bytes)
    compact_all(log, "bench", PARTITIONS)
    return log


def load_frame(spark: SparkSession, log: BenchLog) -> DataFrame:
    return spark.read.format("llog").options(**log.options).option("subscribe", "bench").load()


def drain(load: Callable[[], DataFrame]) -> float:
    """Return the seconds until Spark has read every row and column."""
    started = time.perf_counter()
    load().write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def stream_seconds(spark: SparkSession, log: BenchLog, batch_records: int) -> float:
    """Return the seconds that Spark reports for the batches of a stream over all records."""
    stream = spark.readStream.format("llog").options(**log.options).option("subscribe", "bench")
    rows = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", batch_records).load()
    with tempfile.TemporaryDirectory(dir=log.directory) as checkpoint:
        query = (
            rows.writeStream.format("noop").trigger(availableNow=True).option("checkpointLocation", checkpoint).start()
        )
        query.awaitTermination()
        return sum(float(progress["durationMs"].get("addBatch", 0)) for progress in query.recentProgress) / 1000


if __name__ == "__main__":
    main()
