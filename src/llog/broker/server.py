"""One process that serves HTTP, a broker above all: a socket, uvicorn on it, and a shutdown that loses no accepted
request.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Final, Protocol, cast

from llog.broker.listeners import advertised_address, listen, listening_address
from llog.broker.workers.plan import WorkerPlan
from llog.config import Settings
from llog.errors import MissingExtra
from llog.log.opening import opened_log

try:
    import uvicorn
    import uvloop

    from llog.broker.app import Broker
    from llog.broker.http.connections import Connection, Limits, allowed_files
    from llog.broker.http.routing import App
    from llog.broker.metrics import Metrics
except ImportError as error:
    if (error.name or "").partition(".")[0] == "llog":
        raise  # a module of this package: no installation would help
    raise MissingExtra(f'the broker needs {error.name}: pip install "leaderless-log[broker]"') from error

GRACE_S: Final = 30
"""How long requests, and what runs beside them, may take to finish once the process stops."""
_KEEP_ALIVE_S: Final = 75
_GC_THRESHOLD: Final = 10_000
"""Objects that are made between two collections of garbage, where Python's default is 700: fewer than a flush makes."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""How long the busy event loop may keep the interpreter from the threads of the stores. Python's default, 5 ms, is many
times what a commit takes.
"""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

Companion = Callable[[Broker], Awaitable[None]]
"""What runs beside the broker on its event loop, such as maintenance. It ends soon after `broker.stopping` is set."""


class Service(Protocol):
    """What a process serves over HTTP."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the process begins to stop."""
        ...

    def app(self) -> App: ...

    async def close(self) -> None:
        """Finish what was accepted."""


def run(settings: Settings, *, ready: Callable[[str], None], beside: Sequence[Companion] = ()) -> None:
    """Serve until SIGINT or SIGTERM, then finish what was begun. `ready` gets the broker's address once it answers.

    The companions run `beside` the broker on the same event loop, and end before the log is closed. If one fails, the
    broker stops as well, and the error is raised.
    """
    with closing(listen(settings.broker_bind_host, settings.broker_port)) as listener:
        run_loop(serve_broker(settings, [listener], ready, beside))


def run_loop(main: Coroutine[None, None, None]) -> None:
    """Run the main coroutine of a process on an event loop of its own."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


class Server(uvicorn.Server):
    """uvicorn with bounds for connections, and without its signal handlers, which raise the signal again after a clean
    shutdown.
    """

    def __init__(self, service: Service, settings: Settings, files_max: int, ready: Callable[[], None]) -> None:
        limits = Limits(settings, service.metrics, files_max)
        app = service.app()
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(Connection, limits, app.shortcuts)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=limits.backlog,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


async def serve_broker(
    settings: Settings,
    listeners: Sequence[socket.socket],
    ready: Callable[[str], None],
    beside: Sequence[Companion],
    plan: WorkerPlan | None = None,
) -> None:
    """Serve a broker at these sockets, the first of which is the one that clients know. A worker has a `plan`."""
    async with opened_log(
        settings,
        is_broker=True,
        address=advertised_address(settings, listeners[0]),
        worker=None if plan is None else plan.own_address,
        reads_only=settings.role == "read",
    ) as log:
        broker = Broker(log, settings, plan)
        await broker.start()
        companions = [each(broker) for each in beside]
        await serve(broker, settings, listeners, ready, companions, is_worker=plan is not None)


async def serve(
    service: Service,
    settings: Settings,
    listeners: Sequence[socket.socket],
    ready: Callable[[str], None],
    beside: Sequence[Awaitable[None]] = (),
    *,
    is_worker: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM. Then close the service, and wait until what runs `beside` it has ended; what takes
    longer than the grace, or gets a second signal, is cancelled. `ready` gets the address of the first listener.

    If one of `beside` fails, the service stops as well, and the error is raised. A worker takes a second SIGTERM for
    the first one: it may get one from its supervisor and one from a service manager, which signals every process.
    """
    server = Server(service, settings, allowed_files(), lambda: ready(listening_address(listeners[0])))

    def stop(number: int | None = None) -> None:
        if server.should_exit and not (is_worker and number == signal.SIGTERM):  # a second signal waits for nothing
            server.force_exit = True
            for task in tasks:
                task.cancel()
        server.should_exit = True
        service.stopping.set()

    async def run_beside(work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:
            stop()
            raise

    # Modules and the service itself live as long as the process: the collector of garbage need not look at them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    tasks = [asyncio.ensure_future(run_beside(each)) for each in beside]
    loop = asyncio.get_running_loop()
    for each in _SIGNALS:
        loop.add_signal_handler(each, stop, each)
    try:
        await server.serve([*listeners])
    finally:
        service.stopping.set()
        await service.close()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end
