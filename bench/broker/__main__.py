"""A broker process: appends beside Redis, NATS and Kafka, the tail, long polls that one append wakes, and memory.

The broker and each peer is a process of its own, and this process is all of their clients. The sides of a ratio take
turns on the same disk, and a ratio is the median of the turns' ratios: only ratios carry over to another machine. Every
peer syncs before it answers. A peer that cannot be had is left out, with the reason. The bounds are those of a broker
on SQLite and local files; on other stores the figures have none.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bench.broker.appends import COMPARISONS, measure_arrow, measure_comparison, measure_large, measure_small
from bench.broker.connections import measure_connections, measure_idle_polls, measure_wakes
from bench.broker.process import Client, Process, produce_many
from bench.broker.reads import measure_relay, measure_tail
from bench.broker.subject import PARTITIONS, VALUE, Subject
from bench.peers.kafka import kafka
from bench.peers.nats import nats
from bench.peers.peer import Peer
from bench.peers.redis import redis
from bench.report import Report
from bench.stores import STORES
from devtools.servers.downloads import UnobtainableError
from devtools.servers.weed import ServerError, weed_server
from llog.broker.http.connections import allowed_files

CONNECTIONS_MAX = max(comparison.connections for comparison in COMPARISONS)
"""Each of them appends to a partition of its own."""
PEERS: Mapping[str, Callable[[Path, Path, bytes], AbstractContextManager[Peer]]] = {
    "redis": redis,
    "nats": partial(nats, partitions=CONNECTIONS_MAX),
    "kafka": partial(kafka, partitions=CONNECTIONS_MAX),
}
PARTS = ("appends", "reads", "connections")
Measurement = Callable[[Subject], None]


def main() -> int:
    arguments = _parse_arguments()
    report = Report(
        f"a broker on {arguments.meta} and {arguments.blobs}, {os.cpu_count()} cores shared with its clients",
        has_bounds=(arguments.meta, arguments.blobs) == ("sqlite", "files"),
    )
    report.note("load when it began", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    # A run that is ended early deletes its files, too, and reports what it has measured.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _run(report, arguments)
    finally:
        report.note("load when it ended", f"{os.getloadavg()[0]:.1f}")
        report.print()
    return 1 if report.missed else 0


def _run(report: Report, arguments: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="llog-bench-", dir=arguments.directory) as temporary,
        ExitStack() as stack,
    ):
        directory = Path(temporary)
        names = arguments.peers if "appends" in arguments.only else []
        peers = list(_start_peers(stack, report, names, directory, arguments.downloads or directory / "downloads"))
        try:
            candidate = stack.enter_context(STORES[arguments.meta](directory))
            blobs = stack.enter_context(_blobs(arguments.blobs, directory))
        except (ServerError, ImportError) as error:
            raise SystemExit(f"the stores cannot be had: {error}") from error
        assert candidate.bare is not None
        memory_most = 0
        plan = partial(Subject, peers, candidate.bare, directory, report, arguments.rounds, arguments.seconds)
        for part in arguments.only:
            for measurements in _plan(part, arguments):
                with _broker(directory, {**blobs, **candidate.environment}) as process:
                    for measure in measurements:
                        measure(plan(process))
                    memory_most = max(memory_most, process.memory_bytes("VmHWM"))
    report.note("memory of a broker, at most", f"{memory_most / 1e6:,.0f} MB")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench broker", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each measurement, after one to warm up")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn of a load")
    parser.add_argument("--connections", type=int, default=2000, help="that are open, and that wait, at a time")
    parser.add_argument("--idle", type=int, default=10_000, help="long polls that wait while nothing happens")
    parser.add_argument("--only", type=_choices(PARTS), default=PARTS, help=f"which of {', '.join(PARTS)}")
    parser.add_argument(
        "--peers", type=_choices(PEERS), default=tuple(PEERS), help=f"which of {', '.join(PEERS)}; '' for none"
    )
    parser.add_argument("--meta", choices=[name for name in STORES if name != "memory"], default="sqlite")
    parser.add_argument("--blobs", choices=("files", "s3"), default="files")
    parser.add_argument("--directory", default=None, help="on the disk to measure; default: temporary files")
    parser.add_argument(
        "--downloads",
        type=Path,
        default=None,
        help="where downloaded peers are kept; default: with the temporary files",
    )
    return parser.parse_args()


def _choices(known: Sequence[str] | Mapping[str, object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {name!r}: there are {', '.join(known)}")
        return names

    return parse


def _start_peers(
    stack: ExitStack, report: Report, names: Sequence[str], directory: Path, downloads: Path
) -> Iterator[Peer]:
    for name in names:
        place = directory / name
        place.mkdir()
        try:
            yield stack.enter_context(PEERS[name](place, downloads, VALUE.encode()))
        except UnobtainableError as error:
            report.note(name, f"left out: {error}")


@contextmanager
def _blobs(kind: str, directory: Path) -> Iterator[dict[str, str]]:
    """Yield the settings that name the blob store."""
    if kind == "files":
        yield {"LLOG_BLOBS": f"file://{directory / 'blobs'}"}
        return
    with weed_server(directory / "s3") as server:
        server.create_bucket("bench")
        yield {
            "LLOG_BLOBS": "s3://bench/log",
            "LLOG_S3_ENDPOINT_URL": server.endpoint,
            "LLOG_S3_REGION_NAME": server.region,
            "LLOG_S3_ACCESS_KEY_ID": server.access_key,
            "LLOG_S3_SECRET_ACCESS_KEY": server.secret_key,
        }


@contextmanager
def _broker(directory: Path, environment: Mapping[str, str]) -> Iterator[Process]:
    """Run a broker whose topic has all partitions, with at least one record each."""
    process = Process(directory, environment)
    try:
        client = Client(process)
        client.ask(produce_many({number: ["first"] for number in range(PARTITIONS)}))
        client.close()
        yield process
    finally:
        process.end()


def _plan(part: str, arguments: argparse.Namespace) -> list[list[Measurement]]:
    """Return the measurements of a part. Those of an inner list share a broker.

    Memory is measured in a fresh one: another would fill what earlier requests have left free.
    """
    connections_max = allowed_files() // 2 - 100
    connections, idle = min(arguments.connections, connections_max), min(arguments.idle, connections_max)
    if part == "appends":
        comparisons = [partial(measure_comparison, comparison=comparison) for comparison in COMPARISONS]
        return [[*comparisons, measure_small, measure_arrow, measure_large]]
    if part == "reads":
        return [[measure_tail, measure_relay]]
    return [
        [partial(measure_idle_polls, count=idle)],
        [partial(measure_connections, count=connections), partial(measure_wakes, count=connections)],
    ]


if __name__ == "__main__":
    sys.exit(main())
