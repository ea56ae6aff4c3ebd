"""A broker process: connections, small and large requests, long polls that one append wakes, and memory.

The broker is a process of its own, on a log in local files, and this process is all of its clients. The baseline of a
wake is the same number of consumes that find their record at once: the difference is the price of having waited.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from bench.report import Report, rate
from llog.broker.http.connections import allowed_files

WAIT_MS = 60_000
PAYLOAD = "x" * 100
PARTITIONS = 64
START_S = 60


class Process:
    """`llog serve` on a log in `directory`, unless `environment` names other stores."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        errors = directory / "stderr"
        command = [sys.executable, "-m", "llog.cli.main", "--data-dir", str(directory / "log"), "serve", "--port", "0"]
        with errors.open("wb") as file:
            self._process = subprocess.Popen(command, stderr=file, env={**os.environ, **(environment or {})})
        deadline = time.monotonic() + START_S
        while "listening on" not in (line := errors.read_text()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the broker did not start: {line}")
            time.sleep(0.02)
        address = urlsplit(line.split()[-1])
        self.address = str(address.hostname), int(address.port or 0)

    def memory_bytes(self, field: str = "VmRSS") -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextmanager
def serving(directory: str | None) -> Iterator[Process]:
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        process = Process(Path(temporary))
        try:
            yield process
        finally:
            process.end()


class Client:
    """One connection with one request at a time: a minimal client, so that the bench measures the broker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, process: Process) -> Client:
        return cls(*await asyncio.open_connection(*process.address))

    async def send(self, method: str, path: str, body: bytes = b"") -> None:
        kind = "content-type: application/json\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{kind}content-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        await self._writer.drain()

    async def answer(self) -> bytes:
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await self._reader.readexactly(size)
        if not head.startswith(b"http/1.1 200") or b'"error"' in body:
            raise RuntimeError(f"{head.decode()}{body.decode()}")
        return body

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        await self.send(method, path, body)
        return await self.answer()

    def close(self) -> None:
        self._writer.close()


def produce(partition: int, payload: str = PAYLOAD) -> bytes:
    item = {"topic": "bench", "partition": partition, "records": [payload]}
    return json.dumps({"topic_partitions": [item]}).encode()


def consume(partition: int, offset: int, wait_ms: int = 0) -> bytes:
    item = {"topic": "bench", "partition": partition, "fetch_offset": offset, "partition_max_bytes": 16 << 20}
    return json.dumps({"topic_partitions": [item], "max_wait_ms": wait_ms}).encode()


async def connect_clients(process: Process, count: int) -> list[Client]:
    return [await Client.connect(process) for _ in range(count)]


async def next_offset(client: Client, partition: int) -> int:
    found: Any = json.loads(await client.ask("GET", "/topics/bench"))
    return int(found["bounds"][partition]["next_offset"])


async def seconds_of(work: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def _time_all(requests: Sequence[Coroutine[Any, Any, bytes]]) -> float:
    return await seconds_of(lambda: asyncio.gather(*requests))


async def connections(process: Process, report: Report, count: int) -> None:
    before = process.memory_bytes()
    clients: list[Client] = []

    async def open_all() -> None:
        for _ in range(count):
            clients.append(await Client.connect(process))
            await clients[-1].ask("GET", "/metrics")

    seconds = await seconds_of(open_all)
    report.note(f"{count:,} connections, one request each", f"{count / seconds:,.0f}/s")
    each = (process.memory_bytes() - before) / count
    report.limit("memory of an idle connection", each / 1024, 64, "KiB")
    for client in clients:
        client.close()


async def small_requests(process: Process, report: Report, count: int, at_a_time: int = 64) -> None:
    clients = await connect_clients(process, at_a_time)

    async def all_of(method: str, path: str, body: bytes) -> float:
        async def some(client: Client) -> None:
            for _ in range(count // at_a_time):
                await client.ask(method, path, body)

        return count / await seconds_of(lambda: asyncio.gather(*map(some, clients)))

    requests = {
        "GET /metrics": ("GET", "/metrics", b""),
        "consume of one record": ("POST", "/consume", consume(0, 1)),
        "produce of one record, durable": ("POST", "/produce", produce(0)),
    }
    rates = {name: await all_of(*request) for name, request in requests.items()}
    base = rates.pop("GET /metrics")
    for name, found in rates.items():
        measure = f"{name}, {at_a_time} at a time"
        report.compare(measure, f"{found:,.0f}/s", f"GET /metrics {base:,.0f}/s", found / base)
    for client in clients:
        client.close()


async def large_requests(process: Process, report: Report, rounds: int, size: int = 8 << 20) -> None:
    client = await Client.connect(process)
    body = produce(1, "x" * size)
    written, read, files = [], [], []
    first = await next_offset(client, 1)
    for number in range(rounds):
        files.append(_write_synced(body))
        written.append(await seconds_of(lambda: client.ask("POST", "/produce", body)))
        read.append(await seconds_of(partial(client.ask, "POST", "/consume", consume(1, first + number))))
    produced, file = statistics.median(written), statistics.median(files)
    against = f"write and fsync {rate(size, file)}"
    report.compare(f"produce of {size >> 20} MiB, durable", rate(size, produced), against, file / produced)
    report.note(f"consume of {size >> 20} MiB", rate(size, statistics.median(read)))
    client.close()


def _write_synced(data: bytes) -> float:
    with tempfile.TemporaryFile() as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - start


async def long_polls(process: Process, report: Report, count: int, rounds: int) -> None:
    """Measure polls that all wait on one partition; then one on a partition of its own, beside the rest on others."""
    before = process.memory_bytes()
    clients, other = await connect_clients(process, count), await Client.connect(process)
    at_once: list[float] = []
    woken: list[float] = []
    for _ in range(rounds):
        offset = await next_offset(other, 2)
        await _wait_all(clients, other, [consume(2, offset, WAIT_MS)] * count)
        if not woken:
            each = (process.memory_bytes() - before) / count
            report.limit("memory of a waiting request", each / 1024, 128, "KiB")

        woken.append(
            await _time_all([other.ask("POST", "/produce", produce(2)), *(client.answer() for client in clients)])
        )
        at_once.append(await _time_all([client.ask("POST", "/consume", consume(2, offset)) for client in clients]))
    wake_s, base_s = statistics.median(woken), statistics.median(at_once)
    measure = f"one append wakes {count:,} long polls"
    report.ratio(
        measure, f"{wake_s * 1000:,.0f} ms", f"{count:,} consumes {base_s * 1000:,.0f} ms", base_s / wake_s, 0.7
    )
    await _measure_wake_beside_others(clients, other, report, rounds)
    for client in (*clients, other):
        client.close()


async def _measure_wake_beside_others(clients: Sequence[Client], other: Client, report: Report, rounds: int) -> None:
    waiter = clients[0]
    alone = [await _one_wake(waiter, other) for _ in range(10 * rounds)]
    ends = {partition: await next_offset(other, partition) for partition in range(4, PARTITIONS)}
    partitions = [4 + number % (PARTITIONS - 4) for number in range(1, len(clients))]
    await _wait_all(clients[1:], other, [consume(partition, ends[partition], WAIT_MS) for partition in partitions])
    beside = [await _one_wake(waiter, other) for _ in range(10 * rounds)]
    base_s, wake_s = statistics.median(alone), statistics.median(beside)
    measure = f"one of them wakes, beside {len(clients) - 1:,} on other partitions"
    report.ratio(measure, f"{wake_s * 1000:,.1f} ms", f"alone {base_s * 1000:,.1f} ms", base_s / wake_s, 0.5)
    items = [{"topic": "bench", "partition": partition, "records": ["end"]} for partition in ends]
    await other.ask("POST", "/produce", json.dumps({"topic_partitions": items}).encode())
    await asyncio.gather(*(each.answer() for each in clients[1:]))


async def _one_wake(waiter: Client, other: Client) -> float:
    await _wait_all([waiter], other, [consume(3, await next_offset(other, 3), WAIT_MS)])
    return await _time_all([other.ask("POST", "/produce", produce(3)), waiter.answer()])


async def _wait_all(clients: Sequence[Client], other: Client, bodies: Sequence[bytes]) -> None:
    """Send these requests, and return once the broker reports that all of them wait."""
    wanted = await _waiting_requests(other) + len(clients)
    for client, body in zip(clients, bodies, strict=True):
        await client.send("POST", "/consume", body)
    while await _waiting_requests(other) < wanted:
        await asyncio.sleep(0.01)


async def _waiting_requests(client: Client) -> int:
    return int(json.loads(await client.ask("GET", "/metrics"))["llog_waiting_requests"])


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=2000, help="that are open, and that wait, at a time")
    parser.add_argument("--requests", type=int, default=10_000, help="small ones of each kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory", default=None, help="a directory on the disk to measure; default: temporary files"
    )
    arguments = parser.parse_args()
    count = min(arguments.connections, allowed_files() // 2 - 100)
    report = Report(f"a broker, {os.cpu_count()} cores shared with its clients")
    with serving(arguments.directory) as process:
        client = await Client.connect(process)
        items = [{"topic": "bench", "partition": number, "records": ["first"]} for number in range(PARTITIONS)]
        await client.ask("POST", "/produce", json.dumps({"topic_partitions": items}).encode())
        client.close()
        await connections(process, report, count)
        await small_requests(process, report, arguments.requests)
        await large_requests(process, report, arguments.rounds)
        await long_polls(process, report, count, arguments.rounds)
        report.note("memory of the broker, at most", f"{process.memory_bytes('VmHWM') / 1e6:,.0f} MB")
    report.print()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
