"""The topology of `deploy/` as plain processes: `python -m devtools.topology`, or `./quick_run.sh`, until Ctrl-C.

PostgreSQL, an S3 server, brokers, a compactor and Prometheus, which finds them through files (`file_sd`), all on free
ports of the loopback interface and with their data in one directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from devtools.servers.downloads import UnobtainableError
from devtools.servers.listening import free_ports, listening_server
from devtools.servers.postgres import postgres_server
from devtools.servers.prometheus import prometheus_program
from devtools.servers.weed import ServerError, weed_server

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
BUCKET = "llog"
SCRAPE_INTERVAL_S = 5
_READY_S = 120
_LLOG = (sys.executable, "-m", "llog.cli.main")

Metadata = Literal["postgres", "sqlite"]


class Topology(NamedTuple):
    """The addresses of what runs. Prometheus is None where it cannot be had, for the reason beside it."""

    brokers: list[str]
    kafka: list[str]
    """Where Kafka clients reach the brokers."""
    compactor: str
    s3: str
    prometheus: str | None
    missing: str = ""


@contextmanager
def topology(
    directory: Path,
    *,
    brokers: int = 3,
    metadata: Metadata = "postgres",
    scrape_interval_s: int = SCRAPE_INTERVAL_S,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Topology]:
    """Run everything with its data below `directory`, and yield the addresses once all of it answers.

    Raises `ServerError` if a server cannot be started. `settings` are further LLOG_… of brokers and compactor.
    """
    with ExitStack() as stack:
        s3 = stack.enter_context(weed_server(_make(directory / "s3")))
        s3.create_bucket(BUCKET)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LLOG_")},
            "LLOG_BLOBS": f"s3://{BUCKET}/log",
            "LLOG_S3_ENDPOINT_URL": s3.endpoint,
            "LLOG_S3_REGION_NAME": s3.region,
            "LLOG_S3_ACCESS_KEY_ID": s3.access_key,
            "LLOG_S3_SECRET_ACCESS_KEY": s3.secret_key,
            "LLOG_LOG_FORMAT": "json",
        }
        if metadata == "postgres":
            environment |= stack.enter_context(postgres_server()).environment()
        else:
            environment["LLOG_META"] = f"sqlite://{directory}/meta.sqlite"
        environment |= settings or {}
        kafka_ports = free_ports(brokers)
        addresses = [
            stack.enter_context(
                _service(directory, "serve", f"broker-{number}", environment | {"LLOG_KAFKA_PORT": str(port)})
            )
            for number, port in enumerate(kafka_ports, 1)
        ]
        compactor = stack.enter_context(_service(directory, "compactor", "compactor", environment))
        found = Topology(addresses, [f"127.0.0.1:{port}" for port in kafka_ports], compactor, s3.endpoint, None)
        try:
            program = prometheus_program("prometheus")
        except UnobtainableError as error:
            yield found._replace(missing=str(error))
            return
        config = write_prometheus_config(_make(directory / "prometheus"), found, scrape_interval_s)
        yield found._replace(prometheus=stack.enter_context(_prometheus(program, config)))


def write_prometheus_config(directory: Path, found: Topology, scrape_interval_s: int) -> Path:
    """Write Prometheus' files of `deploy/` with these targets instead of those of the compose file."""
    text = (DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8")
    config = directory / "prometheus.yml"
    config.write_text(text.replace("interval: 15s", f"interval: {scrape_interval_s}s"), encoding="utf-8")
    shutil.copy(DEPLOY / "prometheus/rules.yml", directory)
    targets = [
        {"targets": [address.removeprefix("http://") for address in group], "labels": {"service": service}}
        for service, group in (("broker", found.brokers), ("compactor", [found.compactor]))
    ]
    (_make(directory / "targets") / "processes.json").write_text(json.dumps(targets, indent=2), encoding="utf-8")
    return config


@contextmanager
def _service(root: Path, command: str, name: str, environment: Mapping[str, str]) -> Iterator[str]:
    (port,) = free_ports(1)
    directory = root / name
    own = {**environment, "LLOG_CLIENT_IDENTIFIER": name, "LLOG_DATA_DIR": str(directory)}
    with listening_server([*_LLOG, command, "--port", str(port)], port, _make(directory), own) as (host, _):
        address = f"http://{host}:{port}"
        _wait_until_ready(f"{address}/ready", directory)
        yield address


@contextmanager
def _prometheus(program: str, config: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    directory = config.parent
    command = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with listening_server(command, port, directory) as (host, _):
        _wait_until_ready(f"http://{host}:{port}/-/ready", directory)
        yield f"http://{host}:{port}"


def _wait_until_ready(url: str, directory: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=10).close()
            return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > deadline:
                log = (directory / "server.log").read_text(errors="replace")[-1000:]
                raise ServerError(f"{url} did not become ready ({error}): {log}") from error
        time.sleep(0.1)


def _make(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="quick_run.sh", description="Run the topology of deploy/ until Ctrl-C.")
    parser.add_argument("--brokers", type=int, default=3, help="how many brokers to run (default: 3)")
    parser.add_argument(
        "--metadata", choices=get_args(Metadata), default="postgres", help="the metadata store (default: postgres)"
    )
    parser.add_argument("--directory", type=Path, help="where to keep the data (default: a temporary directory)")
    options = parser.parse_args(arguments)
    if options.brokers < 1:
        parser.error(f"--brokers is {options.brokers}: run at least one")
    with ExitStack() as stack:
        directory = options.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llog-quick-run-")))
        print(f"starting; data and logs are in {directory}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        try:
            running = topology(directory.absolute(), brokers=options.brokers, metadata=options.metadata)
            print(_description(stack.enter_context(running)), flush=True)
            signal.pause()
        except ServerError as error:
            print(f"quick_run: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopping", flush=True)
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _description(found: Topology) -> str:
    prometheus = found.prometheus or f"not running: {found.missing}"
    return "\n".join(
        [
            *(f"  broker      {address}" for address in found.brokers),
            f"  Kafka       bootstrap.servers={','.join(found.kafka)}",
            f"  compactor   {found.compactor}",
            f"  S3          {found.s3}",
            f"  Prometheus  {prometheus}",
            f"  dashboard   import {DEPLOY / 'grafana/dashboards/llog.json'} into a Grafana with that Prometheus",
            "end it with Ctrl-C",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
