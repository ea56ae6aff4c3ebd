"""Connections and long polls: what each costs while nothing happens, and how fast one append wakes them."""

from __future__ import annotations

import select
import statistics
import time
from collections.abc import Sequence

from bench.broker.process import Client, consume, produce, produce_many
from bench.broker.subject import PARTITIONS, VALUE, Subject
from bench.load import STALL_S

WAIT_MS = 60_000
IDLE_S = 5.0
IDLE_CPU_MAX_PERCENT = 2.0
WOKEN_PARTITION = 2
ALONE_PARTITION = 3
FIRST_OTHER_PARTITION = 4


def measure_connections(subject: Subject, count: int) -> None:
    before = subject.process.memory_bytes()
    clients: list[Client] = []
    began = time.perf_counter()
    for _ in range(count):
        clients.append(Client(subject.process))
        clients[-1].ask(consume(PARTITIONS - 1, 1))  # of the tail, whose cost does not depend on what came before
    seconds = time.perf_counter() - began
    subject.report.note(f"{count:,} connections, one request each", f"{count / seconds:,.0f}/s")
    each = (subject.process.memory_bytes() - before) / count
    subject.report.limit("memory of an idle connection", each / 1024, 64, "KiB")
    _close(clients)


def measure_idle_polls(subject: Subject, count: int) -> None:
    """Measure the memory of long polls on one partition, and the CPU time of a broker in which nothing else happens."""
    other = Client(subject.process)
    base_percent = _cpu_percent(subject)
    before = subject.process.memory_bytes()
    clients = [Client(subject.process) for _ in range(count)]
    _wait_all(clients, other, [consume(WOKEN_PARTITION, other.next_offset(WOKEN_PARTITION), WAIT_MS)] * count)
    each = (subject.process.memory_bytes() - before) / count
    percent = _cpu_percent(subject)
    subject.report.limit(f"memory of one of {count:,} idle long polls", each / 1024, 16, "KiB")
    measure = f"CPU of {count:,} idle long polls, beside {base_percent:.1f} % without them"
    subject.report.limit(measure, max(0.0, percent - base_percent), IDLE_CPU_MAX_PERCENT, "%")
    _close([*clients, other])


def _cpu_percent(subject: Subject) -> float:
    """Return the part of one core that the broker uses while it has nothing to do."""
    before = subject.process.cpu_s()
    time.sleep(IDLE_S)
    return (subject.process.cpu_s() - before) / IDLE_S * 100


def measure_wakes(subject: Subject, count: int) -> None:
    """Measure long polls that all wait on one partition; then one on a partition of its own, beside the rest on others.

    The baseline of a wake is the same number of consumes that find their record at once: the difference is the price of
    having waited.
    """
    clients, other = [Client(subject.process) for _ in range(count)], Client(subject.process)
    at_once: list[float] = []
    woken: list[float] = []
    for _ in range(subject.rounds):
        offset = other.next_offset(WOKEN_PARTITION)
        _wait_all(clients, other, [consume(WOKEN_PARTITION, offset, WAIT_MS)] * count)
        woken.append(_wake_s(other, produce(WOKEN_PARTITION, [VALUE]), clients))
        began = time.perf_counter()
        for client in clients:
            client.socket.sendall(consume(WOKEN_PARTITION, offset))
        _receive_all(clients)
        at_once.append(time.perf_counter() - began)
    wake_s, base_s = statistics.median(woken), statistics.median(at_once)
    ratio = statistics.median(base / wake for base, wake in zip(at_once, woken, strict=True))
    measure = f"{count:,} long polls on one partition, from the append to the last wake"
    subject.report.limit(measure, wake_s * 1000, 500, "ms")
    value, against = f"{wake_s * 1000:,.0f} ms", f"{count:,} consumes {base_s * 1000:,.0f} ms"
    subject.report.ratio(f"one append wakes {count:,} long polls", value, against, ratio, 0.7)
    _measure_wake_beside_others(subject, clients, other)
    _close([*clients, other])


def _measure_wake_beside_others(subject: Subject, clients: Sequence[Client], other: Client) -> None:
    waiter, *others = clients
    turns = 10 * subject.rounds
    alone = [_one_wake_s(waiter, other) for _ in range(turns)]
    ends = {partition: other.next_offset(partition) for partition in range(FIRST_OTHER_PARTITION, PARTITIONS)}
    partitions = [FIRST_OTHER_PARTITION + number % len(ends) for number in range(len(others))]
    _wait_all(others, other, [consume(partition, ends[partition], WAIT_MS) for partition in partitions])
    beside = [_one_wake_s(waiter, other) for _ in range(turns)]
    base_s, wake_s = statistics.median(alone), statistics.median(beside)
    measure = f"one of them wakes, beside {len(others):,} on other partitions"
    value, against = f"{wake_s * 1000:,.1f} ms", f"alone {base_s * 1000:,.1f} ms"
    subject.report.ratio(measure, value, against, base_s / wake_s, 0.5)
    _wake_s(other, produce_many({partition: ["end"] for partition in ends}), others)


def _one_wake_s(waiter: Client, other: Client) -> float:
    _wait_all([waiter], other, [consume(ALONE_PARTITION, other.next_offset(ALONE_PARTITION), WAIT_MS)])
    return _wake_s(other, produce(ALONE_PARTITION, [VALUE]), [waiter])


def _wake_s(producer: Client, request: bytes, waiters: Sequence[Client]) -> float:
    """Append, and return the seconds until the last of the waiters has its answer."""
    began = time.perf_counter()
    producer.socket.sendall(request)
    _receive_all(waiters)
    taken = time.perf_counter() - began
    producer.answer()
    return taken


def _receive_all(clients: Sequence[Client]) -> None:
    """Return once every client has received its answer."""
    by_number = {client.socket.fileno(): client for client in clients}
    with select.epoll() as poll:
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        while by_number:
            ready = poll.poll(STALL_S)
            if not ready:
                raise RuntimeError(f"{len(by_number):,} clients have not been answered for {STALL_S} s")
            for number, _ in ready:
                by_number.pop(number).answer()
                poll.unregister(number)


def _wait_all(clients: Sequence[Client], other: Client, requests: Sequence[bytes]) -> None:
    """Send these requests, and return once the broker reports that all of them wait."""
    wanted = other.waiting_requests() + len(clients)
    deadline = time.monotonic() + STALL_S
    for client, request in zip(clients, requests, strict=True):
        client.socket.sendall(request)
    while other.waiting_requests() < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the broker does not report {wanted:,} requests that wait")
        time.sleep(0.01)


def _close(clients: Sequence[Client]) -> None:
    for client in clients:
        client.close()
