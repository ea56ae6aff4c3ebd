"""A broker that is measured: a process of its own, its memory and its CPU time, and a connection to it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.load import RECEIVE_BYTES, Address, Exchange, connect
from devtools.servers.leash import leashed

TOPIC = "bench"
START_S = 60
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Process:
    """`llog serve` on a log in `directory`, unless `environment` names other stores."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        log = directory / "broker.log"
        log.unlink(missing_ok=True)  # of an earlier broker, with another port
        command = [sys.executable, "-m", "llog.cli.main", "--data-dir", str(directory / "log"), "serve", "--port", "0"]
        self._running = ExitStack()
        watcher = self._running.enter_context(
            leashed(command, log=log, cwd=directory, env={**os.environ, **(environment or {})})
        )
        deadline = time.monotonic() + START_S
        while "listening on" not in (text := log.read_text()):
            if watcher.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(f"the broker did not start: {text}")
            time.sleep(0.02)
        address = urlsplit(text.partition("listening on")[2].split()[0])
        self.address: Address = (str(address.hostname), int(address.port or 0))
        self._pid = int(Path(f"/proc/{watcher.pid}/task/{watcher.pid}/children").read_text())

    def memory_bytes(self, field: str = "VmRSS") -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))

    def cpu_s(self) -> float:
        """Return the CPU time that the broker's threads have used so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def end(self) -> None:
        """Kill the broker. Idempotent."""
        self._running.close()


class Client:
    """One connection with one request at a time: a minimal client, so that the bench measures the broker."""

    def __init__(self, process: Process) -> None:
        self.socket: socket.socket = connect(process.address)
        self._buffer = bytearray()

    def ask(self, request: bytes) -> bytes:
        self.socket.sendall(request)
        return self.answer()

    def answer(self) -> bytes:
        """Return the body of the next answer."""
        while (found := find_answer(self._buffer)) is None:
            received = self.socket.recv(RECEIVE_BYTES)
            if not received:
                raise RuntimeError("the broker closed the connection")
            self._buffer += received
        body, end = found
        del self._buffer[:end]
        return body

    def next_offset(self, partition: int) -> int:
        found: Any = json.loads(self.ask(encode_request("GET", f"/topics/{TOPIC}")))
        return int(found["bounds"][partition]["next_offset"])

    def waiting_requests(self) -> int:
        return int(json.loads(self.ask(encode_request("GET", "/metrics")))["llog_waiting_requests"])

    def close(self) -> None:
        self.socket.close()


def find_answer(buffer: bytearray, status: bytes = b"200") -> tuple[bytes, int] | None:
    """Return the body of the first answer in the buffer and where the answer ends; None if it is not complete.

    An answer with another status, or with an error in one of its items, is a `RuntimeError`.
    """
    begin = buffer.find(b"\r\n\r\n") + 4
    if begin < 4:
        return None
    head = bytes(buffer[:begin]).lower()
    end = begin + int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    if len(buffer) < end:
        return None
    body = bytes(buffer[begin:end])
    if not head.startswith(b"http/1.1 " + status) or b'"error"' in body[:1000]:
        raise RuntimeError(f"{head.decode()}{body[:1000].decode(errors='replace')}")
    return body, end


def take_answers(buffer: bytearray, status: bytes = b"200") -> int:
    """Remove complete answers, and return how many there were."""
    count = 0
    while (found := find_answer(buffer, status)) is not None:
        del buffer[: found[1]]
        count += 1
    return count


def encode_request(method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
    fields = f"accept: {kind}\r\n" + (f"content-type: {kind}\r\n" if body else "")
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{fields}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def produce(partition: int, values: Sequence[str]) -> bytes:
    """Encode a request that appends these records."""
    return produce_many({partition: values})


def produce_many(values: Mapping[int, Sequence[str]]) -> bytes:
    """Encode one request that appends records to several partitions."""
    items = [{"topic": TOPIC, "partition": number, "records": list(each)} for number, each in values.items()]
    return encode_request("POST", "/produce", json.dumps({"topic_partitions": items}).encode())


def consume(partition: int, offset: int, wait_ms: int = 0) -> bytes:
    item = {"topic": TOPIC, "partition": partition, "fetch_offset": offset, "partition_max_bytes": 16 << 20}
    return encode_request("POST", "/consume", json.dumps({"topic_partitions": [item], "max_wait_ms": wait_ms}).encode())


def exchange(request: bytes) -> Exchange:
    return Exchange(request, take_answers)


def empty_exchange() -> Exchange:
    """Return a round trip that asks for nothing: the broker decodes a produce without items and refuses it."""
    return Exchange(produce_many({}), partial(take_answers, status=b"400"))
