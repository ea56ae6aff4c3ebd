"""One broker process: a socket, uvicorn on it, and an end that loses nothing that was accepted."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from ipaddress import ip_address
from typing import Final, cast

from llog.config import Settings
from llog.errors import ConfigurationError, MissingExtra
from llog.log.log import Log
from llog.log.opening import opened_log

try:
    import uvicorn
    import uvloop

    from llog.broker.app import Broker
    from llog.broker.http.connections import Connection, Limits, allowed_files
except ImportError as error:
    if (error.name or "").partition(".")[0] == "llog":
        raise  # a part of this package: nothing that could be installed
    raise MissingExtra(f'the broker needs {error.name}: pip install "leaderless-log[broker]"') from error

GRACE_S: Final = 30
"""How long requests may take to finish once the broker was told to stop."""
_KEEP_ALIVE_S: Final = 75
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

Beside = Callable[[Log], Awaitable[None]]


def run(settings: Settings, *, ready: Callable[[str], None], beside: Sequence[Beside] = ()) -> None:
    """Serves until SIGINT or SIGTERM, then finishes what was begun. `ready` gets the broker's address once it answers.

    `beside` runs on the same loop as long as the broker does, and is cancelled before the log is closed. Should one
    fail, the broker stops, too, and its error is raised.
    """
    with (
        closing(listening(settings.broker_bind_host, settings.broker_port)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(settings, listener, ready, beside))


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; a `ConfigurationError` that says what to change if it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} of {host} is taken: end what listens there, or choose another with --port or "
                "LLOG_BROKER_PORT"
            ) from error
        raise ConfigurationError(
            f"cannot listen on {host}, port {port} ({error.strerror}): check LLOG_BROKER_BIND_HOST and LLOG_BROKER_PORT"
        ) from error


def advertised(settings: Settings, listener: socket.socket) -> str | None:
    """Where other brokers reach this one; None if it listens on every address of the machine, and nothing says which of
    them to use.
    """
    if settings.broker_advertised_address is not None:
        return settings.broker_advertised_address.rstrip("/")
    return None if ip_address(listener.getsockname()[0]).is_unspecified else _address(listener)


def is_open_to_others(host: str) -> bool:
    """Whether other machines can reach what listens there."""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


class Server(uvicorn.Server):
    """uvicorn with bounds for connections, and without its signal handlers, which raise the signal again after a clean
    end.
    """

    def __init__(self, broker: Broker, settings: Settings, files_max: int, ready: Callable[[], None]) -> None:
        limits = Limits(settings, broker.metrics, files_max)
        config = uvicorn.Config(
            broker.app(),
            http=cast(type[asyncio.Protocol], partial(Connection, limits)),
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


async def _serve(
    settings: Settings, listener: socket.socket, ready: Callable[[str], None], beside: Sequence[Beside]
) -> None:
    async with opened_log(
        settings, is_broker=True, address=advertised(settings, listener), reads_only=settings.role == "read"
    ) as log:
        broker = Broker(log, settings)
        await broker.start()
        server = Server(broker, settings, allowed_files(), lambda: ready(_address(listener)))

        def stop() -> None:
            server.force_exit = server.should_exit  # told twice, it does not wait for anybody's connection
            server.should_exit = True
            broker.stopping.set()

        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.add_signal_handler(each, stop)
        tasks = [asyncio.ensure_future(_beside(each, log, stop)) for each in beside]
        try:
            await server.serve([listener])
        finally:
            await broker.close()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for each in _SIGNALS:
                loop.remove_signal_handler(each)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end


async def _beside(run: Beside, log: Log, stop: Callable[[], None]) -> None:
    try:
        await run(log)
    except Exception:
        stop()
        raise


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
