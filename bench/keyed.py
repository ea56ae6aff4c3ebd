"""Keyed logs: durable appends, scans, counts, a million keys, a thousand segments, and the filter on keys."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.report import Report
from llog.keyed import Config, KeyedLog, KeyedLogReader, StorageConfig, TimeRange, fast_bytes
from llog.keyed.encoding import entry_prefix, sequence_suffix
from llog.keyed.model import StorageConfig as Storage
from llog.keyed.slate import locate, new_batch, open_database
from llog.runtime import SystemRuntime

VALUE = 100
KEYS_PER_BATCH = 100
RECORDS_PER_KEY = 100
BATCH = KEYS_PER_BATCH * RECORDS_PER_KEY
IN_FLIGHT = 4
MB = 1 << 20

Figures = dict[str, float]


class Clock(SystemRuntime):
    """A clock that is set by hand, so that a thousand hours take no time."""

    ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms


def values(count: int) -> list[bytes]:
    content = os.urandom(count * VALUE)
    return [content[start : start + VALUE] for start in range(0, len(content), VALUE)]


def interleaved_records() -> list[tuple[bytes, bytes]]:
    """Return 100 records for each of 100 keys, in turns."""
    keys = [b"key-%08d" % number for number in range(KEYS_PER_BATCH)] * RECORDS_PER_KEY
    return list(zip(keys, values(BATCH), strict=True))


async def seconds_of(operation: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await operation
    return time.perf_counter() - start


async def append_pipelined(log: KeyedLog, batches: Sequence[Any], in_flight: int = IN_FLIGHT) -> None:
    """Append durably, with several appends in flight at a time."""
    pending: set[asyncio.Future[int]] = set()
    for records in batches:
        if len(pending) >= in_flight:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        pending.add(asyncio.ensure_future(log.append(records)))
    await asyncio.gather(*pending)


async def appends(directory: Path) -> Figures:
    records = interleaved_records()
    columns = {"key": [key for key, _ in records], "value": [value for _, value in records]}
    table = pa.table({name: pa.array(column, pa.binary()) for name, column in columns.items()})
    rounds = 60
    async with await KeyedLog.open(f"file://{directory}/appends") as log:
        await append_pipelined(log, [records] * 5)
        rates: Figures = {}
        for name, given, in_flight in (
            ("pairs", records, IN_FLIGHT),
            ("arrow", table, IN_FLIGHT),
            ("alone", records, 1),
        ):
            rates[name] = rounds * BATCH / await seconds_of(append_pipelined(log, [given] * rounds, in_flight))
        return rates


async def stock(directory: Path) -> Figures:
    """Measure the same records, one entry each, through the unmodified SlateDB binding."""
    fast_bytes._installed = False
    database = await open_database(locate(f"file://{directory}/stock", None), Storage())
    records = interleaved_records()

    async def write(base: int) -> None:
        batch = new_batch()
        for number, (key, value) in enumerate(records, base):
            batch.put(entry_prefix(0, key) + sequence_suffix(number), value)
        await database.await_durable(await database.write(batch))

    rounds = 3
    await write(0)
    seconds = sum([await seconds_of(write(round_ * BATCH)) for round_ in range(1, rounds + 1)])
    await database.close()
    return {"rate": rounds * BATCH / seconds}


async def scans(directory: Path) -> Figures:
    """Measure scans and counts of one key with 10^6 records in runs of 100."""
    total, run = 1_000_000, 100
    async with await KeyedLog.open(f"file://{directory}/scans") as log:
        few = [(b"hot", value) for value in values(run)]
        for _ in range(total // run):
            await log.append(few, await_durable=False)
        await log.flush()
        await log.settle()

        async def scan() -> None:
            count = 0
            async for batch in log.scan_batches(b"hot"):
                count += batch.num_rows
            assert count == total

        async def iterate() -> None:
            count = 0
            async for _ in log.scan(b"hot", range(100_000)):
                count += 1
            assert count == 100_000

        figures = {"batches": total / min([await seconds_of(scan()) for _ in range(5)])}
        figures["entries"] = 100_000 / min([await seconds_of(iterate()) for _ in range(3)])

        async def counting(length: int, start: int) -> float:
            """Both ends in the middle of runs."""
            began = time.perf_counter()
            assert await log.count(b"hot", range(start, start + length)) == length
            return time.perf_counter() - began

        # In turns, so that a machine that is busy now and then is unfair to neither.
        pairs = [(await counting(1000, start), await counting(total - 500, start)) for start in range(37, 437, 4)]
        few_s, many_s = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        figures |= {"count_few": few_s, "count_many": many_s}
        scanned = sum([batch.num_rows async for batch in log.scan_batches(b"hot", range(123_456, 654_321))])
        assert scanned == await log.count(b"hot", range(123_456, 654_321))
        errors = []
        for start in range(1, 500_000, 9973):
            near = await log.count(b"hot", range(start, start + 300_050), approximate=True)
            errors.append(abs(near - 300_050))
        return figures | {"approximate_error": max(errors), "run": run}


async def many_keys(directory: Path, keys: int, records: int) -> Figures:
    """Batches of 1,000 records for 1,000 different keys of `keys`, and one key that is looked for among them.

    The same amount goes into a log of few keys and into one of many, so that both have tables to build and to compact.
    """
    size, steady = 1000, 200
    (value,) = values(1)
    async with await KeyedLog.open(f"file://{directory}/keys-{keys}") as log:

        def batch(number: int) -> list[tuple[bytes, bytes]]:
            first = number * size
            return [(b"key-%09d" % (index * 7919 % keys), value) for index in range(first, first + size)]

        async def fill(batches: range) -> float:
            seconds = 0.0
            for start in range(batches.start, batches.stop, 50):
                some = [batch(number) for number in range(start, min(start + 50, batches.stop))]
                seconds += await seconds_of(append_pipelined(log, some))
            return len(batches) * size / seconds

        first = await fill(range(records // size))
        again = await fill(range(steady))
        probe = b"key-%09d" % (keys // 2)
        for _ in range(20):
            await log.append([(probe, value)] * 100)
        await log.settle()

        async def scan() -> None:
            assert sum([found.num_rows async for found in log.scan_batches(probe)]) >= 2000

        scan_s = statistics.median([await seconds_of(scan()) for _ in range(50)])
        listed = sum([len(page) async for page in log.keys_batches()])
        assert listed == keys
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB
    return {"first": first, "again": again, "scan_ms": scan_s * 1000, "memory": peak}


async def segments(directory: Path) -> Figures:
    """Measure a scan of the last hour of one key, in a thousand segments of an hour each."""
    clock = Clock()
    storage = StorageConfig(flush_interval=timedelta(milliseconds=1))
    async with await KeyedLog.open(f"file://{directory}/hours", Config(storage=storage), runtime=clock) as log:
        records = [(b"key-%03d" % number, value) for number, value in enumerate(values(100))]
        for _ in range(1000):
            await log.append(records, await_durable=False)
            clock.ms += 3_600_000
            await log.seal_segment()
        await log.append(records)
        await log.settle()
        last_hour = TimeRange(clock.ms - 3_599_999)

        async def scan(wanted: TimeRange | None) -> float:
            before = log.segments_read
            found = [entry async for entry in log.scan(b"key-050", time_range=wanted)]
            assert len(found) == (1 if wanted else 1001)
            return log.segments_read - before

        figures = {"read": await scan(last_hour), "read_all": await scan(None)}
        figures["ms"] = statistics.median([await seconds_of(scan(last_hour)) for _ in range(20)]) * 1000
        figures["ms_all"] = await seconds_of(scan(None)) * 1000
        return figures


async def key_filter(directory: Path) -> Figures:
    """Measure the read of a key that is in one of forty tables, with nothing cached."""
    figures: Figures = {}
    for name, wanted in (("with", True), ("without", False)):
        url = f"file://{directory}/filter-{name}"
        config = Config(storage=StorageConfig(key_filter=wanted))
        async with await KeyedLog.open(url, config) as log:
            for round_ in range(40):
                await log.append(
                    [(b"key-%d-%03d" % (number % 10, round_), value) for number, value in enumerate(values(1000))]
                )
                if round_ == 20:
                    await log.append([(b"key-5-sparse", b"found")])
                await log.settle()
        async with await KeyedLogReader.open(url, config) as reader:
            before = reader.metrics()
            assert [entry.value async for entry in reader.scan(b"key-5-sparse")] == [b"found"]
            grown = {metric: value - before.get(metric, 0) for metric, value in reader.metrics().items()}
        figures[f"{name}_blocks"] = sum(
            value for metric, value in grown.items() if "db_cache.access_count" in metric and "data_block" in metric
        )
        figures[f"{name}_index"] = sum(
            value for metric, value in grown.items() if "db_cache.access_count" in metric and "kind=index" in metric
        )
    return figures


def measure(part: Callable[..., Coroutine[Any, Any, Figures]], *arguments: object) -> Figures:
    """Run a part in a process of its own, so that it does not inherit memory, threads or converters."""
    print(f"   {part.__name__} {' '.join(map(str, arguments[1:]))}", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run, part, *arguments).result()


def _run(part: Callable[..., Coroutine[Any, Any, Figures]], *arguments: object) -> Figures:
    return asyncio.run(part(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=None, help="a directory on the disk to measure; default: temporary files"
    )
    parser.add_argument("--keys", type=int, default=1_000_000, help="of the larger of the two logs with many keys")
    options = parser.parse_args()
    report = Report("keyed logs")
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        rates, plain = measure(appends, directory), measure(stock, directory)
        each = f"{KEYS_PER_BATCH} keys × {RECORDS_PER_KEY} records of {VALUE} B"
        report.ratio(f"durable appends, {each}", f"{rates['pairs']:,.0f}/s", "300,000/s", rates["pairs"] / 300_000, 1)
        against = f"stock binding, {plain['rate']:,.0f}/s"
        report.ratio("  the same", f"{rates['pairs']:,.0f}/s", against, rates["pairs"] / plain["rate"], 10)
        report.note("  from Arrow; one append at a time", f"{rates['arrow']:,.0f}/s; {rates['alone']:,.0f}/s")

        found = measure(scans, directory)
        report.ratio(
            "scan of a key, runs of 100", f"{found['batches']:,.0f}/s", "1,500,000/s", found["batches"] / 1.5e6, 1
        )
        report.note("  as objects", f"{found['entries']:,.0f}/s")
        times = found["count_many"] / found["count_few"]
        report.note(
            "count over 10^3 and 10^6 records", f"{found['count_few'] * 1e3:.2f} and {found['count_many'] * 1e3:.2f} ms"
        )
        report.limit("  times as long", times, 3, "×")
        report.limit("approximate count, largest error", found["approximate_error"], 2 * found["run"], "records")

        few = measure(many_keys, directory, 1000, options.keys)
        many = measure(many_keys, directory, options.keys, options.keys)
        label = f"{options.keys:,} keys"
        report.ratio(
            f"appends, {label}",
            f"{many['again']:,.0f}/s",
            f"10^3 keys, {few['again']:,.0f}/s",
            many["again"] / few["again"],
            0.5,
        )
        report.compare(
            "  while all keys are new",
            f"{many['first']:,.0f}/s",
            f"{few['first']:,.0f}/s",
            many["first"] / few["first"],
        )
        report.ratio(
            f"scan of one of {label}",
            f"{many['scan_ms']:.2f} ms",
            f"10^3 keys, {few['scan_ms']:.2f} ms",
            few["scan_ms"] / many["scan_ms"],
            0.1,
        )
        report.limit(f"memory with {label}", many["memory"], 1536, "MiB")

        hours = measure(segments, directory)
        report.limit("last hour of a key, 1,001 segments: read", hours["read"], 2, "segments")
        report.compare(
            "  time",
            f"{hours['ms']:.1f} ms",
            f"{hours['read_all']:.0f} segments, {hours['ms_all']:.0f} ms",
            hours["ms_all"] / hours["ms"],
        )

        sparse = measure(key_filter, directory)
        for what, title in (("blocks", "data blocks"), ("index", "table indexes")):
            with_, without = sparse[f"with_{what}"], sparse[f"without_{what}"]
            label = f"sparse key in 40 tables: {title} read"
            report.ratio(label, f"{with_:.0f}", f"no filter, {without:.0f}", without / with_, 5)
    report.print()
    sys.exit(1 if report.missed else 0)


if __name__ == "__main__":
    main()
