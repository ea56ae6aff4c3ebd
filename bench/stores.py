"""Metadata stores beside a bare client of the same server: conditional puts, commits, produces, a large flush.

`python -m bench.stores [--stores memory,sqlite,postgres,oxia] [--seconds S] [--rounds N]`. A store that is not
available is left out, with the reason. The store and the bare client take turns, on the event loop of the broker, and
figures are medians of the rounds: only the ratios carry over to another machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.blobs import bare as bare_blob
from bench.broker.process import Client, Process, produce
from bench.logs import records
from bench.report import Report
from bench.stores_bare import VALUE, Bare, BareOxia, BarePostgres, BareSqlite, Pace, measure_pace
from devtools.servers.oxia import oxia_server
from devtools.servers.postgres import postgres_server
from devtools.servers.weed import ServerError
from llog.config.loading import load_settings
from llog.engines.object.writer import Writer
from llog.errors import LlogError
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.stores.memory.blobs import MemoryBlobStore
from llog.stores.meta import ABSENT, MetaStore, Put, scan
from llog.stores.sqlite.store import SqliteMetaStore

CALLERS = (1, 64)
RATIO_MIN = 0.5
PARTITIONS = 10_000
FLUSH_CPU_MS = 500
SHARDS = 4
LOOKUPS = 5_000
RECORD = b"x" * 100


class Candidate(NamedTuple):
    """A metadata store that is available."""

    environment: Mapping[str, str]
    """The settings that name the store."""
    bare: Bare | None


@contextmanager
def memory(directory: Path) -> Iterator[Candidate]:
    yield Candidate({"LLOG_META": "memory://bench", "LLOG_BLOBS": "memory://bench"}, None)


@contextmanager
def sqlite(directory: Path) -> Iterator[Candidate]:
    yield Candidate({"LLOG_META": f"sqlite://{directory / 'meta.sqlite'}"}, BareSqlite(directory / "bare.sqlite"))


@contextmanager
def postgres(directory: Path) -> Iterator[Candidate]:
    with postgres_server() as server:
        yield Candidate(server.environment(), BarePostgres(server))


@contextmanager
def oxia(directory: Path) -> Iterator[Candidate]:
    with oxia_server(directory, shards=SHARDS) as server:
        yield Candidate({"LLOG_META": server.url}, BareOxia(server))


STORES = {"memory": memory, "sqlite": sqlite, "postgres": postgres, "oxia": oxia}


class Rounds:
    """The paces of one kind of work, round by round."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._latencies: list[float] = []

    def add(self, pace: Pace) -> None:
        self._rates.append(pace.per_second)
        self._latencies += pace.latencies_ms

    @property
    def rate(self) -> float:
        return statistics.median(self._rates)

    def percentile_ms(self, percent: int) -> float:
        latencies = sorted(self._latencies)
        return latencies[len(latencies) * percent // 100]

    def __str__(self) -> str:
        return f"{self.rate:,.0f}/s, p50 {self.percentile_ms(50):.1f} ms, p99 {self.percentile_ms(99):.1f} ms"


class Ours:
    """The store's own pace. Keys are those of partitions, so that a store of shards spreads them."""

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self._made = 0

    async def pace(self, callers: int, seconds: float, *, commits: bool) -> Pace:
        self._made += 1
        prefixes = [f"llog/bench-{self._made}/partitions/{caller:010}/" for caller in range(callers)]
        versions = [await self._store.put(prefix + "meta/control", VALUE) for prefix in prefixes]
        done = [0] * callers

        async def put(caller: int) -> None:
            key = prefixes[caller] + "meta/control"
            versions[caller] = await self._store.put(key, VALUE, expected=versions[caller])

        async def commit(caller: int) -> None:
            done[caller] += 1
            entry = Put(f"{prefixes[caller]}index/{done[caller]:020}", VALUE, ABSENT)
            swap = Put(prefixes[caller] + "meta/control", VALUE, versions[caller])
            _, result = await self._store.put_many([entry, swap])
            if isinstance(result, LlogError):
                raise result
            versions[caller] = result

        return await measure_pace(commit if commits else put, callers, seconds)


async def measure_paces(report: Report, name: str, store: MetaStore, bare: Bare | None, options: Options) -> None:
    ours = Ours(store)
    for work, commits in (("CAS", False), ("commit", True)):
        for callers in CALLERS:
            mine, theirs = Rounds(), Rounds()
            for _ in range(options.rounds):
                if bare is not None:
                    theirs.add(await bare.pace(callers, options.seconds, commits=commits))
                mine.add(await ours.pace(callers, options.seconds, commits=commits))
            measure = f"{name}: {work}, {callers} caller{'s' * (callers > 1)}"
            if bare is None:
                report.note(measure, str(mine))
            elif callers > 1:
                report.ratio(measure, str(mine), str(theirs), mine.rate / theirs.rate, RATIO_MIN)
            else:
                report.compare(measure, str(mine), str(theirs), mine.rate / theirs.rate)


async def measure_flush(report: Report, name: str, opened: Log, options: Options) -> None:
    """Measure one append to all partitions of a topic, with its blob in memory: the rest is llog and the store.

    The CPU time of llog does not include the thread in which SQLite works.
    """
    clock = time.thread_time if name == "sqlite" else time.process_time
    topic = f"flush-{options.partitions}"
    log = opened._replace(blobs=MemoryBlobStore())
    await Catalog(log).create(topic, options.partitions)
    writer, columns = Writer(log), records(1, len(RECORD))
    groups = [AppendGroup(topic=topic, partition=number, records=columns) for number in range(options.partitions)]
    await writer.append(groups)  # afterwards the writer knows the control records, as in a running broker
    cpu, wall, most = [], [], 0
    for _ in range(options.rounds):
        with counted_requests(name, log.meta) as requests:
            cpu_began, began = clock(), time.perf_counter()
            results = await writer.append(groups)
            cpu.append((clock() - cpu_began) * 1000)
            wall.append(time.perf_counter() - began)
        for result in results:
            if isinstance(result, LlogError):
                raise result
        most = max(most, *requests.values())
    measure = f"{name}: a flush of {options.partitions:,} partitions"
    report.limit(f"{measure}, requests to a shard", most, 1, "")
    report.limit(f"{measure}, our CPU", statistics.median(cpu), FLUSH_CPU_MS, "ms")
    report.note(f"{measure}, wall", f"{statistics.median(wall):.2f} s")


@contextmanager
def counted_requests(name: str, store: Any) -> Iterator[Counter[int]]:
    """Count the requests of a write to each shard's server; without a server, its calls or transactions."""
    requests: Counter[int] = Counter()
    if name == "oxia":
        from llog.stores.oxia.writes import Request

        with call_before(Request, "answer", lambda request, *_: requests.update([request.message.shard])):
            yield requests
    elif name == "postgres":
        from llog.stores.postgres.writer import Writer as PostgresWriter

        with call_before(PostgresWriter, "_request", lambda *_: requests.update([0])):
            yield requests
    elif name == "sqlite":
        before = store.commits
        yield requests
        requests[0] = store.commits - before
    else:
        before = store.counts.count["put_many"]
        yield requests
        requests[0] = store.counts.count["put_many"] - before


@contextmanager
def call_before(target: type, name: str, seen: Callable[..., object]) -> Iterator[None]:
    """Call `seen` with the arguments of every call of this method, before the method itself."""
    shipped = getattr(target, name)

    def watched(*arguments: Any) -> Any:
        seen(*arguments)
        return shipped(*arguments)

    setattr(target, name, watched)
    try:
        yield
    finally:
        setattr(target, name, shipped)


async def measure_produce(
    report: Report, name: str, process: Process, bare: Bare, directory: Path, options: Options
) -> None:
    """Measure one client of one broker, beside the least work of a produce: a synced file and a bare commit."""
    try:
        client = Client(process)
        request = produce(0, [RECORD.decode()])
        client.ask(request)
        mine, theirs = Rounds(), []
        for turn in range(options.rounds):
            puts = [bare_blob(directory / f"put-{turn}-{number}", RECORD) * 1000 for number in range(50)]
            swaps = await bare.pace(1, options.seconds, commits=True)
            theirs.append(statistics.median(puts) + statistics.median(swaps.latencies_ms))

            async def ask(_: int) -> None:
                client.ask(request)

            mine.add(await measure_pace(ask, 1, options.seconds))
        client.close()
    finally:
        process.end()
    bare_ms, mine_ms = statistics.median(theirs), mine.percentile_ms(50)
    report.compare(
        f"{name}: produce through a broker, p50",
        f"{mine_ms:.1f} ms",
        f"{bare_ms:.1f} ms put + commit",
        bare_ms / mine_ms,
    )


async def measure_lookups(report: Report, directory: Path, sizes: Sequence[int]) -> None:
    """Measure SQLite's lookups in a small and a large index, which should take the same time."""
    ceilings: list[float] = []
    for keys in sizes:
        store = SqliteMetaStore.open(directory / f"index-{keys}.sqlite")
        for first in range(0, keys, 20_000):
            await store.put_many([Put(f"i/{key:020}", VALUE) for key in range(first, min(keys, first + 20_000))])
        for lookup in (store.ceiling, store.get):
            began = time.perf_counter()
            for number in range(LOOKUPS):
                await lookup(f"i/{number * 7919 % keys:020}")
            ceilings.append((time.perf_counter() - began) / LOOKUPS * 1e6)
            report.compare(
                f"sqlite: {lookup.__name__}, {keys:,} keys",
                f"{ceilings[-1]:.1f} µs",
                f"{ceilings[0]:.1f} µs, ceiling of {sizes[0]:,}",
                ceilings[-1] / ceilings[0],
            )
        began = time.perf_counter()
        count = sum([1 async for _ in scan(store, "i/")])
        report.note(f"sqlite: scan, {count:,} keys", f"{time.perf_counter() - began:.3f} s")
        await store.close()


class Options(NamedTuple):
    seconds: float
    rounds: int
    partitions: int


async def measure(report: Report, name: str, candidate: Candidate, directory: Path, options: Options) -> None:
    environment = {"LLOG_BLOBS": f"file://{directory / 'blobs'}", **candidate.environment}
    async with opened_log(load_settings({}, environment=environment)) as log:
        await measure_paces(report, name, log.meta, candidate.bare, options)
        await measure_flush(report, name, log, options)
    if candidate.bare is not None:
        await measure_produce(report, name, Process(directory, environment), candidate.bare, directory, options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", default=",".join(STORES), help=f"which of {', '.join(STORES)}; default: all")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each figure and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--partitions", type=int, default=PARTITIONS, help="of one flush")
    parser.add_argument("--index-keys", type=int, default=1_000_000, help="of SQLite's lookups; 0 leaves them out")
    parser.add_argument(
        "--directory", default=None, help="a directory on the disk to measure; default: temporary files"
    )
    arguments = parser.parse_args()
    names = arguments.stores.split(",")
    unknown = [name for name in names if name not in STORES]
    if unknown:
        parser.error(f"there is no store {unknown[0]!r}: there are {', '.join(STORES)}")
    options = Options(arguments.seconds, arguments.rounds, arguments.partitions)
    report = Report("metadata stores")
    for name in names:
        with (
            tempfile.TemporaryDirectory(prefix="llog-bench-", dir=arguments.directory) as temporary,
            ExitStack() as stack,
        ):
            directory = Path(temporary)
            try:
                candidate = stack.enter_context(STORES[name](directory))
            except (ServerError, ImportError) as error:
                report.note(name, f"left out: {error}")
                continue
            uvloop.run(measure(report, name, candidate, directory, options))
            if name == "sqlite" and arguments.index_keys:
                uvloop.run(measure_lookups(report, directory, (1_000, arguments.index_keys)))
    report.print()
    return 1 if report.missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
