"""Faults in an order that a seed decides, under load; what happens is printed, and pytest shows it when a test
fails.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from llog.log.catalog import Catalog
from llog.log.opening import opened_log
from tests.faults.cluster import SESSION_MS, Cluster, Process, Server
from tests.faults.load import PARTITIONS, TOPIC, Load, Progress

SEED = int(os.environ.get("LLOG_FAULTS_SEED", "16"))

Fault = Callable[[], Awaitable[None]]


@asynccontextmanager
async def suffering(cluster: Cluster, directory: Path) -> AsyncIterator[Chaos]:
    """The cluster with a topic and load on it; in the end all must be as it was told, and whole."""
    async with opened_log(cluster.settings) as log:
        await Catalog(log).create(TOPIC, PARTITIONS)
    history = directory / "history.jsonl"
    async with cluster, Load(cluster.settings, cluster.brokers, SEED, history) as load:
        try:
            yield Chaos(cluster, load)
            await load.until(cluster.has_kept_up, "all upkeep has done something")
            await load.finish()
            await cluster.check(history)
        except BaseException:
            for process in cluster.processes:
                print(f"{process.name} said in its last life:\n{process.output[-2000:]}")
            raise
        finally:
            print(f"{load.progress.acknowledged} records, {dict(load.progress.failures)}")


class Working(Protocol):
    """Load that goes on through the faults."""

    @property
    def progress(self) -> Progress: ...

    async def more(self, count: int) -> None: ...


class Chaos:
    """Faults of a cluster, and when they come."""

    def __init__(self, cluster: Cluster, load: Working, seed: int = SEED) -> None:
        self._cluster = cluster
        self._load = load
        self._rng = random.Random(seed)
        self._began = time.monotonic()
        self.say(f"seed {seed} (LLOG_FAULTS_SEED)")

    async def run(self, faults: Sequence[Fault]) -> None:
        """All of them, each a while after the one before, as more records are acknowledged; then the log must go on."""
        for fault in self._rng.sample(faults, len(faults)):
            await self.more()
            await fault()
        await self._load.more(200)

    async def more(self) -> None:
        """Return when some more records are acknowledged."""
        await self._load.more(self._rng.randint(20, 100))

    def kill(self, process: Process) -> Fault:
        """End it with SIGKILL; the log goes on while it is down, and it comes up again."""

        async def strike() -> None:
            self.say(f"kill {process.name}")
            process.kill()
            await self.more()
            await process.come_up()

        return strike

    def pause(self, process: Process) -> Fault:
        """Stop it in whatever it does for longer than its session and its claims last; the log goes on, and it wakes
        up.
        """

        async def strike() -> None:
            self.say(f"pause {process.name}")
            process.pause()
            await asyncio.sleep(2 * SESSION_MS / 1000)
            await self.more()
            self.say(f"resume {process.name}")
            process.resume()

        return strike

    def kill_server(self, name: str, server: Server, down_s: float = 0.0) -> Fault:
        """End it with SIGKILL, and a broker that has to wait for it; start it again after `down_s`."""

        async def strike() -> None:
            broker = self._rng.choice(self._cluster.brokers)
            self.say(f"kill {name} and {broker.name}")
            await asyncio.to_thread(server.kill)
            broker.kill()
            coming = asyncio.create_task(broker.come_up())
            await asyncio.sleep(down_s)
            await asyncio.to_thread(server.start)
            self.say(f"start {name}")
            await coming

        return strike

    def pause_server(self, name: str, server: Server, paused_s: float) -> Fault:
        async def strike() -> None:
            self.say(f"pause {name}")
            await asyncio.to_thread(server.pause)
            await asyncio.sleep(paused_s)
            await asyncio.to_thread(server.resume)
            self.say(f"resume {name}")

        return strike

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s, {self._load.progress.acknowledged} records: {what}")
