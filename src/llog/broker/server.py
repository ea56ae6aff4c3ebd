"""One broker process: a socket, uvicorn on it, and a shutdown that loses no accepted request."""

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
        raise  # a module of this package: no installation would help
    raise MissingExtra(f'the broker needs {error.name}: pip install "leaderless-log[broker]"') from error

GRACE_S: Final = 30
"""How long requests may take to finish once the broker stops."""
_KEEP_ALIVE_S: Final = 75
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

Companion = Callable[[Log], Awaitable[None]]
"""What runs beside the broker on its event loop, such as maintenance."""


def run(settings: Settings, *, ready: Callable[[str], None], beside: Sequence[Companion] = ()) -> None:
    """Serve until SIGINT or SIGTERM, then finish what was begun. `ready` gets the broker's address once it answers.

    The companions run `beside` the broker on the same event loop, and are cancelled before the log is closed. If one
    fails, the broker stops as well, and the error is raised.
    """
    with (
        closing(listen(settings.broker_bind_host, settings.broker_port)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(settings, listener, ready, beside))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. A `ConfigurationError` says what to change if there can be none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} of {host} is in use: end the process that listens there, or choose another port with "
                "--port or LLOG_BROKER_PORT"
            ) from error
        raise ConfigurationError(
            f"cannot listen on {host}, port {port} ({error.strerror}): check LLOG_BROKER_BIND_HOST and LLOG_BROKER_PORT"
        ) from error


def advertised_address(settings: Settings, listener: socket.socket) -> str | None:
    """Return the address at which other brokers reach this one.

    None if it listens on every address of the machine and LLOG_BROKER_ADVERTISED_ADDRESS names none of them.
    """
    if settings.broker_advertised_address is not None:
        return settings.broker_advertised_address.rstrip("/")
    return None if ip_address(listener.getsockname()[0]).is_unspecified else _address(listener)


def is_open_to_others(host: str) -> bool:
    """Return whether other machines can reach a server that listens on this host."""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


class Server(uvicorn.Server):
    """uvicorn with bounds for connections, and without its signal handlers, which raise the signal again after a clean
    shutdown.
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
    settings: Settings, listener: socket.socket, ready: Callable[[str], None], beside: Sequence[Companion]
) -> None:
    async with opened_log(
        settings, is_broker=True, address=advertised_address(settings, listener), reads_only=settings.role == "read"
    ) as log:
        broker = Broker(log, settings)
        await broker.start()
        server = Server(broker, settings, allowed_files(), lambda: ready(_address(listener)))

        def stop() -> None:
            server.force_exit = server.should_exit  # a second signal does not wait for connections
            server.should_exit = True
            broker.stopping.set()

        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.add_signal_handler(each, stop)
        tasks = [asyncio.ensure_future(_run_companion(each, log, stop)) for each in beside]
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


async def _run_companion(run: Companion, log: Log, stop: Callable[[], None]) -> None:
    try:
        await run(log)
    except Exception:
        stop()
        raise


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
