"""Redis that syncs before it answers (`appendfsync always`): a stream for each partition, an XADD for each record.

Redis is taken from PATH, else from Debian's packages, which are unpacked without being installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.load import Exchange
from bench.peers.peer import Peer
from devtools.servers.downloads import debian_programs, library_environment
from devtools.servers.listening import free_ports, listening_server

_PACKAGES = ("redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblzf1")
"""The server, and the libraries that a small system lacks."""


@contextmanager
def redis(directory: Path, cache: Path, value: bytes) -> Iterator[Peer]:
    program, environment = _program(cache)
    (port,) = free_ports(1)
    options = {"port": port, "bind": "127.0.0.1", "dir": directory, "save": "", "daemonize": "no"}
    durable = {"appendonly": "yes", "appendfsync": "always", "auto-aof-rewrite-percentage": 0}
    command = [program, *(str(part) for name, each in {**options, **durable}.items() for part in (f"--{name}", each))]
    with listening_server(command, port, directory, environment) as address:
        yield Peer("Redis", address, partial(_append, value))


def _append(value: bytes, partition: int, records: int) -> Exchange:
    command = _encode(b"XADD", b"bench-%d" % partition, b"*", b"v", value)
    return Exchange(command * records, take_replies, records)


def _encode(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def take_replies(buffer: bytearray) -> int:
    """Remove complete replies, the ids of new records, and return how many there were."""
    count = position = 0
    while (end := buffer.find(b"\r\n", position)) >= 0:
        if buffer[position : position + 1] != b"$":
            raise RuntimeError(f"Redis answered {bytes(buffer[position:end])!r}")
        end += 2 + int(buffer[position + 1 : end]) + 2
        if end > len(buffer):
            break
        position, count = end, count + 1
    del buffer[:position]
    return count


def _program(cache: Path) -> tuple[str, dict[str, str]]:
    found = shutil.which("redis-server")
    if found is not None:
        return found, dict(os.environ)
    unpacked = debian_programs(cache, "redis", _PACKAGES)
    return str(unpacked / "usr/bin/redis-server"), library_environment(unpacked)
