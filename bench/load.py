"""Load on a server from this process: connections that repeat a request, one at a time each, over plain sockets.

One loop over epoll serves all connections, so that the client takes little of the machine and every server, llog or a
peer, has the same client.
"""

from __future__ import annotations

import select
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from bench.stores_bare import Pace

Address = tuple[str, int]
RECEIVE_BYTES = 1 << 20
STALL_S = 60


class Exchange(NamedTuple):
    """A request that a connection repeats, and how its answers are recognised."""

    request: bytes
    take: Callable[[bytearray], int]
    """Removes the complete answers from the bytes that have arrived, and returns how many there were. Raises
    `RuntimeError` if one of them is a refusal.
    """
    answers: int = 1
    """To one request: a pipelined one has several."""
    hello: bytes = b""
    """Sent once, before the first request."""


def connect(address: Address) -> socket.socket:
    connection = socket.create_connection(address, timeout=STALL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def run_load(address: Address, exchanges: Sequence[Exchange], seconds: float) -> Pace:
    """Run one connection for each exchange for `seconds`, and measure complete requests."""
    with ExitStack() as stack:
        poll = stack.enter_context(select.epoll())
        connections = {}
        for exchange in exchanges:
            connection = stack.enter_context(connect(address))
            connection.sendall(exchange.hello)
            connections[connection.fileno()] = _Repeater(connection, exchange)
            poll.register(connection, select.EPOLLIN)
        began = time.perf_counter()
        end = began + seconds
        for repeater in connections.values():
            repeater.send()
        latencies: list[float] = []
        waiting = len(connections)
        while waiting:
            ready = poll.poll(STALL_S)
            if not ready:
                raise RuntimeError(f"the server at {address[0]}:{address[1]} has not answered for {STALL_S} s")
            for number, _ in ready:
                latency = connections[number].receive()
                if latency is None:
                    continue
                latencies.append(latency * 1000)
                if time.perf_counter() < end:
                    connections[number].send()
                else:
                    waiting -= 1
        return Pace(len(latencies) / (time.perf_counter() - began), latencies)


class _Repeater:
    """One connection with its exchange."""

    def __init__(self, connection: socket.socket, exchange: Exchange) -> None:
        self._connection = connection
        self._exchange = exchange
        self._buffer = bytearray()
        self._awaited = 0
        self._sent_at = 0.0

    def send(self) -> None:
        """Send the request, in blocking mode: no server here waits for one client before it reads another's bytes."""
        self._awaited = self._exchange.answers
        self._sent_at = time.perf_counter()
        self._connection.sendall(self._exchange.request)

    def receive(self) -> float | None:
        """Take what has arrived, and return the seconds that the request took once its last answer is complete."""
        received = self._connection.recv(RECEIVE_BYTES)
        if not received:
            raise RuntimeError("the server closed a connection")
        self._buffer += received
        taken = self._exchange.take(self._buffer)
        if not taken or not self._awaited:
            return None
        self._awaited -= taken
        return None if self._awaited else time.perf_counter() - self._sent_at


def p50_ms(pace: Pace) -> float:
    return statistics.median(pace.latencies_ms)
