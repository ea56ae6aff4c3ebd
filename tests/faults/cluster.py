"""Brokers and upkeep as processes of their own on shared stores: they can be killed, paused, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from devtools.servers.leash import leashed, signal_command
from devtools.servers.weed import S3Server
from llog.config import Settings
from llog.config.loading import load_settings

LIMIT_S = 300
"""Nothing here takes nearly as long, unless it hangs."""
SESSION_MS = 2000
GRACE_MS = 1500
BATCH_DELAY_MS = 20
"""Much shorter than by default: more appends meet each fault."""
_ROOT = Path(__file__).parents[2]
_LLOG = (sys.executable, "-m", "llog.cli.main")


async def until(condition: Callable[[], bool], what: str) -> None:
    """Return once the condition holds; fail with `what` if it never does."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{LIMIT_S} s have passed without this: {what}") from None


class Server(Protocol):
    """The process of a store's server, which keeps its data and its address."""

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Metadata(NamedTuple):
    """A metadata server on this machine, and the settings of who uses it."""

    server: Server
    environment: Mapping[str, str]
    port: int

    def through(self, port: int) -> dict[str, str]:
        """The settings of who uses it through a proxy."""
        address = self.environment["LLOG_META"].replace(f":{self.port}", f":{port}")
        return {**self.environment, "LLOG_META": address}


class Process:
    """One program, which may have several lives. It cannot outlive the tests."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._directory = directory / name
        self._directory.mkdir()
        self._life = 0
        self._running = ExitStack()
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        """What it has printed in this life."""
        return self._output_file.read_text(errors="replace")

    @property
    def all_output(self) -> str:
        lives = (self._directory / f"{life}.log" for life in range(1, self._life + 1))
        return "".join(path.read_text(errors="replace") for path in lives)

    @property
    def _output_file(self) -> Path:
        return self._directory / f"{self._life}.log"

    @property
    def has_ended(self) -> bool:
        return self._watcher is None or self._watcher.poll() is not None

    def start(self) -> None:
        assert self.has_ended, f"{self.name} runs already"
        self._life += 1
        self._watcher = self._running.enter_context(
            leashed(self._command, log=self._output_file, cwd=_ROOT, env=self._environment)
        )

    async def come_up(self) -> None:
        """Start it, and return when it is at work, which it says."""
        self.start()
        await until(lambda: self.has_ended or bool(self.output), f"{self.name} says something")

    def kill(self) -> None:
        """End it with SIGKILL, also while it is paused. Idempotent."""
        self._running.close()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._watcher is not None
        signal_command(self._watcher.pid, number)


class Broker(Process):
    """`llog serve`; started again until it listens, as a supervisor would do while a store is down."""

    def __init__(self, name: str, environment: Mapping[str, str], directory: Path) -> None:
        super().__init__(name, [*_LLOG, "serve", "--port", "0"], environment, directory)
        self.address: str | None = None
        """None while nobody listens, as far as is known."""

    def kill(self) -> None:
        self.address = None
        super().kill()

    async def come_up(self) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while self.address is None:
                    if self.has_ended:
                        self.start()
                    await asyncio.sleep(0.05)
                    self.address = self._listening()
        except TimeoutError:
            raise AssertionError(f"{self.name} does not come up:\n{self.output}") from None

    def _listening(self) -> str | None:
        told = [line for line in self.output.splitlines(keepends=True) if "listening on" in line]
        return told[0].split()[-1] if told and told[0].endswith("\n") else None


class Upkeep(Process):
    """A compactor or a collector, which ends only when it is killed, or by a bug."""

    def __init__(self, name: str, kind: str, environment: Mapping[str, str], directory: Path) -> None:
        super().__init__(name, [sys.executable, "-m", "tests.faults.upkeep", kind], environment, directory)
        self.kind = kind

    @property
    def done(self) -> int:
        """Entries compacted, or blobs deleted, in all its lives."""
        lines = (line.split() for line in self.all_output.splitlines())
        return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] == "done")


def many_machines(metadata: Metadata, s3: S3Server) -> dict[str, str]:
    """Return the settings of processes on machines of their own, with a new bucket."""
    bucket = f"cluster-{uuid.uuid4().hex}"
    s3.create_bucket(bucket)
    return {
        **metadata.environment,
        "LLOG_BLOBS": f"s3://{bucket}/log",
        "LLOG_S3_ENDPOINT_URL": s3.endpoint,
        "LLOG_S3_REGION_NAME": s3.region,
        "LLOG_S3_ACCESS_KEY_ID": s3.access_key,
        "LLOG_S3_SECRET_ACCESS_KEY": s3.secret_key,
    }


def one_machine(directory: Path) -> dict[str, str]:
    """Return the settings of processes that share SQLite, local files and the tail."""
    return {"LLOG_DATA_DIR": str(directory / "data"), "LLOG_TAIL_CACHE_DIR": str(directory / "tail")}


class Cluster:
    """Where the log is, its brokers, two compactors and a collector."""

    def __init__(self, stores: Mapping[str, str], directory: Path) -> None:
        self._directory = directory
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LLOG_")},
            **stores,
            "LLOG_KAFKA_PORT": "0",
            "LLOG_SESSION_TIMEOUT_MS": f"{SESSION_MS}ms",
            "LLOG_COLLECT_GRACE_MS": f"{GRACE_MS}ms",
            "LLOG_BATCH_MAX_DELAY_MS": f"{BATCH_DELAY_MS}ms",
        }
        self.brokers: list[Broker] = []
        self.upkeep: list[Upkeep] = []

    @property
    def settings(self) -> Settings:
        """Of a program that is none of the brokers."""
        return load_settings(environment=self._own("tests"))

    def add_broker(self, **environment: str) -> Broker:
        name = f"broker-{len(self.brokers) + 1}"
        broker = Broker(name, {**self._own(name), **environment}, self._directory)
        self.brokers.append(broker)
        return broker

    def add_upkeep(self, kind: str, **environment: str) -> Upkeep:
        name = f"{kind}-{len(self.upkeep) + 1}"
        process = Upkeep(name, kind, {**self._own(name), **environment}, self._directory)
        self.upkeep.append(process)
        return process

    @property
    def processes(self) -> list[Process]:
        return [*self.brokers, *self.upkeep]

    async def __aenter__(self) -> Cluster:
        try:
            await asyncio.gather(*(process.come_up() for process in self.processes))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()

    def has_kept_up(self) -> bool:
        """Whether each kind of upkeep has done something; raise if one of the processes met a bug."""
        for process in self.processes:
            for bug in ("Traceback", "never retrieved"):
                assert bug not in process.all_output, f"{process.name}:\n{process.all_output[:5000]}"
        for process in self.upkeep:
            assert not process.has_ended, f"{process.name} ended by itself:\n{process.output[-3000:]}"
        busy = {process.kind for process in self.upkeep if process.done}
        return busy == {process.kind for process in self.upkeep}

    async def llog(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of a command."""
        process = await asyncio.create_subprocess_exec(
            *_LLOG, *arguments, env=self._own("tests"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def check(self, history: Path) -> None:
        """Nothing is damaged, and the history is one that a log which keeps its promises can have."""
        for command in (["verify"], ["check-history", str(history)]):
            code, output = await self.llog(*command)
            assert code == 0, f"{' '.join(command)}: exit code {code}\n{output}"

    def _own(self, name: str) -> dict[str, str]:
        """Return the settings of one process, with its own machine's files unless all are on one machine."""
        return {"LLOG_DATA_DIR": str(self._directory / f"{name}-data"), **self.environment}
