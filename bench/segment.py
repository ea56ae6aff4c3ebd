"""The disk engine beside the bare disk: appends against `writev`, reads against `pread`, lookups, size of indexes.

Baseline and log take turns, so that a disk whose speed changes favours neither; figures are medians.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from awscrt.checksums import crc32c

from bench.report import Report, rate
from llog.batch.columns import Columns, stamp
from llog.engines.disk.format.files import INDEX, LOG, TIMEINDEX, file_name, write_at
from llog.engines.disk.format.frames import Body, frame_parts, make_body
from llog.engines.disk.format.index import IndexRule, Maxima
from llog.engines.disk.format.segment import Segment
from llog.engines.disk.format.tail import boot, open_tail, pack_tail, write_tail
from llog.engines.disk.log.log import Fsync, SegmentLog, SegmentOptions, encode_body
from llog.engines.disk.log.reader import SegmentReader
from llog.log.engine import Bounds

RECORDS = 1000
RECORD_BYTES = 100
NOW_MS = time.time_ns() // 1_000_000
MIB = 1 << 20


def records(count: int = RECORDS) -> Columns:
    data = os.urandom(count * RECORD_BYTES)
    offsets = np.arange(0, len(data) + 1, RECORD_BYTES, dtype=np.int32)
    values = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)], 0)
    return Columns(values, None, None, None, ())


def seconds_of(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Turns(NamedTuple):
    """The median seconds of works that took turns, and the medians of their ratios to the first within a round."""

    seconds: list[float]
    ratios: list[float]


def in_turns(rounds: int, *works: Callable[[], float]) -> Turns:
    """Run the works one after the other in every round; the first round is a warm-up."""
    found = [[work() for work in works] for _ in range(rounds + 1)][1:]
    seconds = [statistics.median(times) for times in zip(*found, strict=True)]
    ratios = [statistics.median(times[0] / times[number] for times in found) for number in range(len(works))]
    return Turns(seconds, ratios)


def bare(path: Path, batches: int, data: bytes, *, sync: bool) -> float:
    """Return the seconds of plain writes of the same bytes, in a directory of their own."""
    path.mkdir()
    descriptor = os.open(path / "bare", os.O_WRONLY | os.O_CREAT)

    def work() -> None:
        for _ in range(batches):
            os.writev(descriptor, [data])
            if sync:
                os.fdatasync(descriptor)

    seconds = seconds_of(work)
    os.close(descriptor)
    return seconds


def ours(path: Path, batches: int, body: Callable[[], Body], fsync: Fsync) -> float:
    log = SegmentLog.open(path, SegmentOptions(fsync=fsync))

    def work() -> None:
        for _ in range(batches):
            log.append_encoded([body()])

    seconds = seconds_of(work)
    log._writer.active.close()  # without the sync of a close, which would keep the disk busy during the next turn
    os.close(log._writer._tail)
    os.close(log._writer._lock)
    return seconds


def appends(directory: Path, report: Report, rounds: int, batches: int) -> None:
    columns = records()
    body = encode_body(stamp(columns, NOW_MS))
    data = b"".join(frame_parts(body, 1, NOW_MS, NOW_MS))
    size = len(data) * batches
    path = directory / "log"

    def remove_after(seconds: float) -> float:
        shutil.rmtree(path)
        return seconds

    (base, plain, encoded), ratios = in_turns(
        rounds,
        lambda: remove_after(bare(path, batches, data, sync=False)),
        lambda: remove_after(ours(path, batches, lambda: body, Fsync.OS)),
        lambda: remove_after(ours(path, batches, lambda: encode_body(stamp(columns, NOW_MS)), Fsync.OS)),
    )
    report.ratio("append, encoded before, no sync", rate(size, plain), f"writev {rate(size, base)}", ratios[1], 0.5)
    report.ratio("append with encoding, no sync", rate(size, encoded), f"writev {rate(size, base)}", ratios[2], 0.15)
    report.note("records/s of it", f"{batches * RECORDS / plain:,.0f} and {batches * RECORDS / encoded:,.0f}")


def synced_appends(directory: Path, report: Report, rounds: int, batches: int, count: int) -> None:
    """Measure appends with syncs.

    The time of a sync depends mostly on its place on the disk and on recent deletions. So there are more turns, each in
    a new directory, and nothing is deleted between them.
    """
    rounds, batches = rounds * 4, max(batches // 5, 1)
    directories = (directory / str(number) for number in itertools.count())
    body = encode_body(stamp(records(count), NOW_MS))
    data = b"".join(frame_parts(body, 1, NOW_MS, NOW_MS))
    (base, ours_s), ratios = in_turns(
        rounds,
        lambda: bare(next(directories), batches, data, sync=True),
        lambda: ours(next(directories), batches, lambda: body, Fsync.ALWAYS),
    )
    against = f"writev + fdatasync {batches / base:,.0f}/s"
    report.ratio(f"append of {count}, a sync each", f"{batches / ours_s:,.0f}/s", against, ratios[1], 0.9)


def reads(directory: Path, report: Report, rounds: int, batches: int) -> None:
    path = directory / "log"
    log = SegmentLog.open(path, SegmentOptions(fsync=Fsync.OS))
    body = encode_body(stamp(records(), NOW_MS))
    for _ in range(batches):
        log.append_encoded([body])
    file = path / file_name(1, LOG)
    size = file.stat().st_size
    descriptor = os.open(file, os.O_RDONLY)
    reader = SegmentReader.open(path, log=log)

    def bare() -> None:
        for position in range(0, size, MIB):
            crc32c(os.pread(descriptor, MIB, position))

    def ours() -> None:
        offset = 1
        while found := reader.read_now(offset, 8 * MIB):
            offset = found[-1][0] + found[-1][1].count

    (base, ours_s), ratios = in_turns(rounds, lambda: seconds_of(bare), lambda: seconds_of(ours))
    report.ratio("sequential read, decoded", rate(size, ours_s), f"pread + checksum {rate(size, base)}", ratios[1], 0.5)
    report.note("records/s of it", f"{batches * RECORDS / ours_s:,.0f}")
    os.close(descriptor)
    log._writer.close()


def made_log(path: Path, size: int, frame_bytes: int) -> int:
    """Create a sparse log of about `size` bytes, with complete indexes but few frames, and return the next offset."""
    path.mkdir()
    body = make_body([bytes(frame_bytes)], records=RECORDS, append_ms=NOW_MS, timestamp_max=NOW_MS)
    length = sum(map(len, frame_parts(body, 1, NOW_MS, NOW_MS)))
    base, segment_bytes = 1, 1 << 30
    while size > 0:
        count = min(size, segment_bytes) // length
        rule = IndexRule(base, 4096, None)
        found = [rule.entries(n * length, base + n * RECORDS, Maxima(NOW_MS, NOW_MS)) for n in range(count)]
        (path / file_name(base, INDEX)).write_bytes(b"".join(entry for entry, _ in found))
        (path / file_name(base, TIMEINDEX)).write_bytes(b"".join(entry for _, entry in found))
        with open(path / file_name(base, LOG), "wb") as file:
            file.truncate(count * length)
        base += count * RECORDS
        size -= segment_bytes
    return base


def fill(path: Path, offsets: list[int], body: Body) -> None:
    """Write the frames that will be looked up."""
    bases = sorted(int(each.name[:20]) for each in path.glob("*.log"))
    length = sum(map(len, frame_parts(body, 1, NOW_MS, NOW_MS)))
    for offset in offsets:
        base = max(each for each in bases if each <= offset)
        number = (offset - base) // RECORDS
        descriptor = os.open(path / file_name(base, LOG), os.O_RDWR)
        for each in {0, number}:
            write_at(descriptor, frame_parts(body, base + each * RECORDS, NOW_MS, NOW_MS), each * length, length)
        os.close(descriptor)


def lookups(directory: Path, report: Report, rounds: int) -> None:
    """Measure lookups with frames of 5 KB: every frame has an index entry, so the index is as dense as possible."""
    source = random.Random(7)
    columns = records()
    small = columns._replace(values=pa.array([b"abcd"] * RECORDS, pa.binary()))
    body = encode_body(stamp(small, NOW_MS))
    readers, offsets = [], []
    for name, size in (("small", 100 * MIB), ("large", 10 << 30)):
        path = directory / name
        end = made_log(path, size, body.length)
        chosen = [source.randrange(1, end) for _ in range(300)]
        fill(path, chosen, body)
        tail = open_tail(path)
        write_tail(tail, pack_tail(Bounds(1, end), boot()))
        os.close(tail)
        readers.append(SegmentReader.open(path))
        offsets.append(chosen)

    def look_up(number: int) -> float:
        reader = readers[number]

        def work() -> None:
            for offset in offsets[number]:
                assert reader.read_now(offset, 1)[0][0] == offset

        return seconds_of(work)

    (small_s, _), ratios = in_turns(rounds, lambda: look_up(0), lambda: look_up(1))
    report.note("lookup in 100 MB", f"{small_s / 300 * 1e6:,.0f} us")
    report.limit("lookup in 10 GB / in 100 MB", 1 / ratios[1], 1.5, "times")
    for reader in readers:
        reader.close()


def memory(directory: Path, report: Report) -> None:
    """Measure the size of indexes with small frames, so that entries are as dense as possible."""
    path = directory / "log"
    log = SegmentLog.open(path, SegmentOptions(fsync=Fsync.OS))
    small = make_body([bytes(128)], records=1, append_ms=NOW_MS, timestamp_max=NOW_MS)
    for _ in range(100):
        log.append_encoded([small] * 1000)
    segment = Segment(path, 1)
    report.limit("indexes / log", segment.index_bytes() / segment.size() * 100, 0.3, "%")
    log._writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument(
        "--directory", type=Path, default=None, help="a directory on the disk to measure; default: temporary files"
    )
    arguments = parser.parse_args()
    report = Report(f"segment log, batches of {RECORDS} x {RECORD_BYTES} bytes")
    works: list[Callable[[Path], None]] = [
        lambda directory: appends(directory, report, arguments.rounds, arguments.batches),
        lambda directory: reads(directory, report, arguments.rounds, arguments.batches),
        lambda directory: lookups(directory, report, arguments.rounds),
        lambda directory: memory(directory, report),
        # Last, the larger one at the end: the disk is busy for a while when its files are deleted.
        lambda directory: synced_appends(directory, report, arguments.rounds, arguments.batches, RECORDS // 100),
        lambda directory: synced_appends(directory, report, arguments.rounds, arguments.batches, RECORDS),
    ]
    for work in works:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            work(Path(directory))
    report.print()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
