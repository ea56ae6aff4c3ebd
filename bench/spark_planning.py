"""Planning a read over a million index entries: seconds and memory of the process that does it."""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from bench.logs import BenchLog
from bench.report import Report
from llog.log.catalog import Catalog
from llog.log.keys import WAL, PartitionKeys
from llog.log.log import Log
from llog.log.records import Control, IndexEntry, Kind, decode, encode
from llog.runtime import uuid7
from llog.stores.meta import Put

ENTRIES = 1_000_000
PARTITIONS = 100
RECORDS_PER_ENTRY = 100
SLICE_BYTES = 100_000
_PUTS = 20_000


def measure(report: Report, directory: Path, scale: float) -> None:
    directory.mkdir()
    log = BenchLog(directory)
    entries = int(ENTRIES * scale)
    log.do(lambda opened: _fill_index(opened, entries // PARTITIONS))
    answer = subprocess.run(
        [sys.executable, "-m", "bench.spark_planning", str(directory)], check=True, capture_output=True
    )
    found = json.loads(answer.stdout)
    report.limit(f"planning {entries:,} index entries ({found['tasks']:,} tasks)", found["seconds"], 10, "s")
    report.note("CPU time of planning", f"{found['cpu_seconds']:,.1f} s")
    report.limit("memory of the planning process", found["mb"], 500, "MB")
    report.note("of which before it planned", f"{found['mb_before']:,.1f} MB")


async def _fill_index(log: Log, entries: int) -> None:
    """Put index entries as writers do, for blobs that do not exist and are never read."""
    topic = await Catalog(log).create("planned", PARTITIONS)
    now = log.runtime.now_ms()
    uris = [log.data_uri(WAL + uuid7(now + number, log.runtime.random())) for number in range(entries)]
    puts: list[Put] = []
    for partition in range(PARTITIONS):
        keys = PartitionKeys(topic.directory, partition)
        for number, uri in enumerate(uris):
            entry = IndexEntry(
                kind=Kind.WAL,
                data_uri=uri,
                byte_offset=partition * SLICE_BYTES,
                byte_length=SLICE_BYTES,
                msg_count=RECORDS_PER_ENTRY,
                encoding="bytes-batch-v1",
                append_ms=now,
                timestamp_min=now,
                timestamp_max=now,
                max_append_ms=now,
                max_timestamp_ms=now,
            )
            puts.append(Put(keys.entry((number + 1) * RECORDS_PER_ENTRY), encode(entry)))
        found = await log.meta.get(keys.control)
        assert found is not None
        control = decode(Control, found.value, found.key)
        grown = msgspec.structs.replace(control, next_offset=entries * RECORDS_PER_ENTRY + 1)
        puts.append(Put(keys.control, encode(grown), found.version))
        while len(puts) >= _PUTS or (puts and partition == PARTITIONS - 1):
            await log.meta.put_many(puts[:_PUTS])
            del puts[:_PUTS]


def _plan(directory: Path) -> dict[str, float]:
    """Plan a read as Spark does, including pickling."""
    from llog.spark.options import read_options
    from llog.spark.schema import source_schema
    from llog.spark.source import LlogReader

    options = read_options({**BenchLog(directory).options, "subscribe": "planned"}, streaming=False)
    reader = LlogReader(options, source_schema(include_headers=False))
    mb_before = _peak_mb()
    started, cpu_started = time.perf_counter(), time.process_time()
    tasks = [pickle.dumps(task) for task in reader.partitions()]
    return {
        "tasks": len(tasks),
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "mb": _peak_mb(),
        "mb_before": mb_before,
    }


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(_plan(Path(sys.argv[1]))))
