"""Servers that are up when they accept connections, on free ports of the loopback interface."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from devtools.servers.downloads import UnobtainableError
from devtools.servers.leash import leashed

START_S = 60


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@contextmanager
def listening_server(
    command: Sequence[str], port: int, directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """Run a server in `directory` and yield its address once the server accepts connections."""
    log = directory / "server.log"
    with leashed(command, log=log, cwd=directory, env=environment) as watcher:
        deadline = time.monotonic() + START_S
        while not _is_listening(port):
            if watcher.poll() is not None or time.monotonic() > deadline:
                raise UnobtainableError(f"{command[0]} did not start: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.05)
        yield ("127.0.0.1", port)


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
