"""One small record per append, inline and through a blob, on each pair of stores: latency, and bytes of metadata.

`python -m bench.inline [--stores sqlite,postgres,oxia] [--appends N] [--bytes N]`. SQLite has its blobs in files,
PostgreSQL and Oxia in S3. Both ways take turns, append by append, so that the load of the machine falls on both: only
the ratios carry over to another machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import uvloop

from bench.report import Report
from devtools.servers.oxia import oxia_server
from devtools.servers.postgres import postgres_server
from devtools.servers.weed import S3Server, ServerError, weed_server
from llog.config.loading import load_settings
from llog.engines.object.reader import Reader
from llog.engines.object.writer import Writer
from llog.errors import LlogError
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, WriterOptions
from llog.log.inline import InlineLimits
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.log.records import encode
from llog.model import Record, TopicPartition
from llog.stores.meta import scan

BUCKET = "bench"
TPS = {"inline": TopicPartition("inline", 0), "blob": TopicPartition("blob", 0)}
LIMITS = {
    "inline": InlineLimits(group_bytes_max=256 << 10, partition_bytes_max=1 << 30),
    "blob": InlineLimits(group_bytes_max=0),
}


def _s3(server: S3Server) -> dict[str, str]:
    server.create_bucket(BUCKET)
    return {
        "LLOG_BLOBS": f"s3://{BUCKET}/log",
        "LLOG_S3_ENDPOINT_URL": server.endpoint,
        "LLOG_S3_REGION_NAME": server.region,
        "LLOG_S3_ACCESS_KEY_ID": server.access_key,
        "LLOG_S3_SECRET_ACCESS_KEY": server.secret_key,
    }


@contextmanager
def sqlite(directory: Path) -> Iterator[dict[str, str]]:
    yield {"LLOG_DATA_DIR": str(directory)}


@contextmanager
def postgres(directory: Path) -> Iterator[dict[str, str]]:
    with postgres_server() as server, weed_server(directory) as weed:
        yield {**server.environment(), **_s3(weed)}


@contextmanager
def oxia(directory: Path) -> Iterator[dict[str, str]]:
    with oxia_server(directory / "oxia") as server, weed_server(directory / "weed") as weed:
        yield {"LLOG_META": server.url, **_s3(weed)}


STORES = {"sqlite": sqlite, "postgres": postgres, "oxia": oxia}


async def measure(log: Log, report: Report, name: str, appends: int, size: int) -> None:
    writers = {way: Writer(log, WriterOptions(inline=limits)) for way, limits in LIMITS.items()}
    for tp in TPS.values():
        await Catalog(log).create(tp.topic)
    latencies: dict[str, list[float]] = {way: [] for way in TPS}
    for number in range(appends + 10):
        for way, tp in TPS.items():
            group = AppendGroup(topic=tp.topic, partition=0, records=[Record(payload=b"x" * size)])
            began = time.perf_counter()
            [result] = await writers[way].append([group])
            if isinstance(result, LlogError):
                raise result
            if number >= 10:
                latencies[way].append((time.perf_counter() - began) * 1000)
    inline, blob = (statistics.median(latencies[way]) for way in ("inline", "blob"))
    report.compare(f"{name}: p50 of {size} bytes", f"{inline:.2f} ms", f"{blob:.2f} ms", inline / blob)
    controls, entries = {}, {}
    for way, tp in TPS.items():
        keys, control = await Reader(log).control(tp)
        controls[way] = len(encode(control))
        found = [len(each.value) async for each in scan(log.meta, keys.index)]
        entries[way] = sum(found) / len(found)
    for what, bytes_ in (("control record", controls), ("index entry", entries)):
        ratio = bytes_["inline"] / bytes_["blob"]
        report.compare(f"{name}: bytes of the {what}", f"{bytes_['inline']:.0f}", f"{bytes_['blob']:.0f}", ratio)


Stores = Callable[[Path], AbstractContextManager[Mapping[str, str]]]


def run(stores: Stores, name: str, report: Report, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory, stores(Path(directory)) as environment:

        async def work() -> None:
            async with opened_log(load_settings(environment=environment)) as log:
                await measure(log, report, name, options.appends, options.bytes)

        uvloop.run(work())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.inline", description=__doc__)
    parser.add_argument("--stores", default=",".join(STORES))
    parser.add_argument("--appends", type=int, default=300)
    parser.add_argument("--bytes", type=int, default=100)
    options = parser.parse_args()
    report = Report("inline appends (value) beside appends through a blob (baseline)")
    for name in options.stores.split(","):
        try:
            run(STORES[name], name, report, options)
        except ServerError as error:
            report.note(name, f"left out: {error}")
    report.print()
    return int(bool(report.missed))


if __name__ == "__main__":
    raise SystemExit(main())
