"""The supervisor of a broker's workers: it binds the port, starts the workers, restarts those that die, and ends them.

The supervisor serves nothing itself. It binds one socket for each worker to the port, among which the kernel spreads
connections: of 64 connections that came at once to one socket that three workers accepted from, one worker got 47 and
another 8. The supervisor keeps the sockets open, so that connections that wait when a worker dies are accepted after
its restart. Each worker also has a socket of its own on the loopback interface, by which the others reach it: to send
requests on to it, and to ask for its metrics.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec

from llog.broker.child import ChildOptions, supervise
from llog.broker.listeners import listen, listen_together, listening_address
from llog.broker.workers.directory import SETTINGS_FILE, TAIL, private_directory
from llog.broker.workers.plan import WorkerPlan
from llog.config import Settings
from llog.config.loading import CONFIG_VARIABLE
from llog.errors import ConfigurationError

GRACE_S: Final = 75.0
"""How long a worker may take to end: longer than its own two graces, for requests and for what runs beside them."""
STEADY_S: Final = 30.0
ATTEMPTS_MAX: Final = 5
_LOOPBACK: Final = "127.0.0.1"
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def run(
    settings: Settings, command: Sequence[str], *, ready: Callable[[str], None], report: Callable[[str], None]
) -> None:
    """Serve with LLOG_WORKERS processes until SIGINT or SIGTERM, then let all of them finish what they have begun.

    `command`, followed by the path of a plan, runs a worker. `ready` gets the broker's address once all workers answer.
    Raises `ChildFailed` if a worker ends again and again soon after its start.
    """
    _check(settings)
    with ExitStack() as stack:
        listeners = listen_together(settings.broker_bind_host, settings.broker_port, settings.workers)
        own_listeners = [listen(_LOOPBACK, 0) for _ in listeners]
        for each in (*listeners, *own_listeners):
            stack.enter_context(closing(each))
        directory = stack.enter_context(private_directory(settings.tail_cache_max_bytes))
        supervisor = _Supervisor(settings, command, directory, listeners, own_listeners, ready, report)
        asyncio.run(supervisor.run())


def _check(settings: Settings) -> None:
    """Raise `ConfigurationError` for settings with which several processes cannot be one broker."""
    for name, url in (("LLOG_META", settings.meta), ("LLOG_BLOBS", settings.blobs), ("LLOG_KEYED", settings.keyed)):
        if url is not None and url.startswith("memory:"):
            raise ConfigurationError(
                f"LLOG_WORKERS is {settings.workers} and {name} is memory://, which every process has for itself: use "
                "one worker, or a store that processes share"
            )
    if settings.broker_forward_timeout_ms == 0:
        raise ConfigurationError(
            f"LLOG_WORKERS is {settings.workers} and LLOG_BROKER_FORWARD_TIMEOUT_MS is 0: a worker sends requests for "
            "tables, keyed logs, and topics of engines with an owner on to the worker that owns them. Use one worker, "
            "or set a timeout"
        )


class _Supervisor:
    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        directory: Path,
        listeners: Sequence[socket.socket],
        own_listeners: Sequence[socket.socket],
        ready: Callable[[str], None],
        report: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._command = command
        self._directory = directory
        self._listeners = listeners
        self._own_listeners = own_listeners
        self._ready = ready
        self._report = report
        self._group = uuid4().hex
        self._started_s = time.time()
        self._is_ready = [asyncio.Event() for _ in self._own_listeners]
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ready_pipe: tuple[int, int] = os.pipe()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        # One thread waits for each worker to end.
        loop.set_default_executor(ThreadPoolExecutor(self._settings.workers + 2))
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop)
        reader, writer = self._ready_pipe
        loop.add_reader(reader, self._note_ready)
        workers: list[asyncio.Future[Any]] = []
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        try:
            # The first one alone: it creates a new log, and an error that all would meet is reported once.
            for numbers in ([0], range(1, self._settings.workers)):
                workers += [asyncio.ensure_future(self._keep(worker)) for worker in numbers]
                if not await self._are_ready([*workers, stopping]):
                    break
            else:
                self._ready(listening_address(self._listeners[0]))
            await asyncio.wait([*workers, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (*self._listeners, *self._own_listeners):
                each.close()  # new connections are refused, as soon as no worker accepts them
            stopping.cancel()
            for worker in workers:
                worker.cancel()
            ends = await asyncio.gather(*workers, return_exceptions=True)
            loop.remove_reader(reader)
            for descriptor in (reader, writer):
                os.close(descriptor)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end

    def _stop(self) -> None:
        (self._hurry if self._stopping.is_set() else self._stopping).set()

    def _note_ready(self) -> None:
        """Note which workers answer: each writes its number as a line, which a pipe never splits."""
        for line in os.read(self._ready_pipe[0], 1 << 16).splitlines():
            self._is_ready[int(line)].set()

    async def _are_ready(self, ends: Sequence[asyncio.Future[Any]]) -> bool:
        """Wait until the workers that were started answer; return False if one of `ends` comes first."""
        started = len(ends) - 1
        waiting = asyncio.gather(*(each.wait() for each in self._is_ready[:started]))
        await asyncio.wait([waiting, *ends], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return True
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return False

    async def _keep(self, number: int) -> None:
        """Keep one worker running until cancelled. Raises `ChildFailed` or `ConfigurationError` if it cannot run."""
        plan = WorkerPlan(
            number=number,
            group=self._group,
            addresses=[listening_address(each) for each in self._own_listeners],
            directory=str(self._directory),
            started_s=self._started_s,
            listener=self._listeners[number].fileno(),
            own_listener=self._own_listeners[number].fileno(),
            ready_pipe=self._ready_pipe[1],
        )
        path = self._directory / f"{number}.json"
        plan.write(path)
        options = ChildOptions(
            grace_s=GRACE_S,
            steady_s=STEADY_S,
            attempts_max=ATTEMPTS_MAX,
            files=(plan.listener, plan.own_listener, plan.ready_pipe),
        )
        await supervise(
            f"worker {number}", [*self._command, str(path)], self._environment(), self._report, options, self._hurry
        )
        raise ConfigurationError(f"worker {number} cannot run with these settings: its error is above")

    def _environment(self) -> dict[str, str]:
        """Return the environment of a worker: all settings, and nothing else that could change them."""
        settings = self._settings
        changes: dict[str, str] = {}
        if settings.tail_cache_dir is None and settings.tail_cache_max_bytes:
            changes["tail_cache_dir"] = str(self._directory / TAIL)
        if settings.client_identifier is None:
            changes["client_identifier"] = settings.client_name  # one name for all
        settings = msgspec.structs.replace(settings, **changes)
        others = {name: value for name, value in os.environ.items() if not name.startswith("LLOG_")}
        return others | settings.as_environment() | {CONFIG_VARIABLE: str(self._directory / SETTINGS_FILE)}
