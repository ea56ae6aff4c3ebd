"""Spark loses processes without notice, and every record still arrives once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from llog.engines.object.reader import Reader
from llog.model import TopicPartition
from tests.spark.logs import LogOnDisk

RECORDS = 24_000
KILLS = 4
LIMIT_S = 480

# Where a row goes is left to chance: what a killed run has computed is never what the next one computes.
_COPY = """
import sys
from llog.spark.session import spark_session
meta, blobs, checkpoint, limit = sys.argv[1:]
spark = spark_session("copy", master="local[2]", fast_start=True)
stores = {"meta": meta, "blobs": blobs}
rows = spark.readStream.format("llog").options(**stores, subscribe="in", startingOffsets="earliest")
rows = rows.option("maxOffsetsPerTrigger", limit).option("minPartitions", "2").load()
rows = rows.selectExpr("value", "cast(floor(rand() * 3) as int) as partition")
writing = rows.writeStream.format("llog").options(**stores, topic="out", checkpointLocation=checkpoint)
writing.trigger(availableNow=True).start().awaitTermination()
"""

_SLOW_WRITE = """
import sys, time
from pathlib import Path
from llog.spark.session import spark_session
meta, blobs, directory = sys.argv[1:]
spark = spark_session("slow", master="local-cluster[2,1,1024]", fast_start=True)
stores = {"meta": meta, "blobs": blobs}
def wait(batches):
    from pyspark import TaskContext
    for batch in batches:
        Path(directory, f"started-{TaskContext.get().partitionId()}").touch()
        while not Path(directory, "go").exists():
            time.sleep(0.05)
        yield batch
rows = spark.read.format("llog").options(**stores, subscribe="in", minPartitions="2").load().select("value")
rows.mapInArrow(wait, "value binary").write.format("llog").options(**stores, topic="out").mode("append").save()
"""


@pytest.fixture
def log(tmp_path: Path) -> LogOnDisk:
    log = LogOnDisk(tmp_path)
    log.create("in", 2)
    log.create("out", 3)
    for partition in (0, 1):
        for first in range(partition, RECORDS, 2000):
            log.append("in", partition, *map(str, range(first, min(first + 2000, RECORDS), 2)))
    return log


@contextmanager
def driver(log: LogOnDisk, code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A driver with a process group of its own, which is gone when this ends."""
    command = [sys.executable, "-c", code, log.options["meta"], log.options["blobs"], *arguments]
    with open(errors_of(log), "wb") as errors:
        process = subprocess.Popen(command, start_new_session=True, stderr=errors)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the JVM, too
        process.wait()


def errors_of(log: LogOnDisk) -> Path:
    return log.blobs.parent / "driver.log"


def check_runs(log: LogOnDisk, process: subprocess.Popen[bytes]) -> None:
    assert process.poll() is None, errors_of(log).read_text()[-5000:]


def finish(log: LogOnDisk, process: subprocess.Popen[bytes]) -> None:
    assert process.wait(LIMIT_S) == 0, errors_of(log).read_text()[-5000:]


def executors_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # gone by now
            if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                found.append(child)
    return found


def arrived(log: LogOnDisk) -> int:
    async def count(reader: Reader) -> int:
        return sum([(await reader.bounds(TopicPartition("out", p))).next_offset - 1 for p in range(3)])

    return log.do(lambda opened: count(Reader(opened)))


def check_contents(log: LogOnDisk) -> None:
    counts = Counter(log.payloads("out", 3))
    assert [payload for payload, count in counts.items() if count > 1] == []
    assert sorted(map(int, counts)) == list(range(RECORDS))
    assert log.problems("out", 3) == []


def test_a_stream_whose_driver_is_killed_again_and_again_copies_every_record_once(
    log: LogOnDisk, tmp_path: Path
) -> None:
    chance = random.Random(7)
    checkpoint = str(tmp_path / "checkpoint")
    for _ in range(KILLS):
        before = arrived(log)
        with driver(log, _COPY, checkpoint, "300") as process:
            while arrived(log) == before:
                check_runs(log, process)
                time.sleep(0.1)
            time.sleep(chance.uniform(0, 2))
            assert process.poll() is None, "there must be more records than a run copies before it is killed"
        log.collect()  # what the killed run has left behind must not be missed
    assert 0 < arrived(log) < RECORDS
    with driver(log, _COPY, checkpoint, str(RECORDS)) as process:
        finish(log, process)
    check_contents(log)


def test_a_write_whose_executor_is_killed_recovers_and_writes_every_record_once(log: LogOnDisk, tmp_path: Path) -> None:
    with driver(log, _SLOW_WRITE, str(tmp_path)) as process:
        while len(list(tmp_path.glob("started-*"))) < 2:
            check_runs(log, process)
            time.sleep(0.05)
        executors = executors_of(process)
        assert len(executors) == 2
        executors[0].kill()
        executors[0].wait(60)
        (tmp_path / "go").touch()
        finish(log, process)
    check_contents(log)
