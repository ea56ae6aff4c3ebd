"""Reads of the tail: its throughput as Arrow, and the time from an append to a consumer that waits for it."""

from __future__ import annotations

import socket
import statistics
import sys
import time
from pathlib import Path

import uvloop

from bench.blobs import bare as write_synced
from bench.broker.appends import ARROW_REQUEST_BYTES, append_arrow
from bench.broker.process import TOPIC, Client, consume, empty_exchange, encode_request, produce
from bench.broker.subject import PARTITIONS, VALUE, Subject
from bench.load import STALL_S, connect, p50_ms, run_load
from bench.report import rate
from bench.turns import in_turns
from devtools.servers.listening import free_ports, listening_server
from llog.broker.http.arrow import MEDIA_TYPE

TAIL_PARTITION = 5
TAIL_BYTES = 128 << 20
ANSWER_BYTES_MAX = 16 << 20
HEAD_BYTES_MAX = 4096
RELAY_PARTITION = PARTITIONS - 2
"""No other measurement appends to it: a partition that others have filled with inline records takes a blob for each
append, and the figure would depend on what was measured before.
"""
RELAYS = 200
SETTLE_S = 0.003
"""Between two appends, for the broker to receive the next long poll."""
_SENDER = """\
import socket, sys
content = bytes(1 << 20)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    while True:
        connection, _ = listener.accept()
        with connection:
            for _ in range(int.from_bytes(connection.recv(8), "big") >> 20):
                connection.sendall(content)
"""


def measure_tail(subject: Subject) -> None:
    """Measure one consumer that reads what was just appended, beside the same bytes over a bare loopback socket."""
    client = Client(subject.process)
    first = client.next_offset(TAIL_PARTITION)
    request = append_arrow(TAIL_PARTITION, ARROW_REQUEST_BYTES)
    for _ in range(TAIL_BYTES // ARROW_REQUEST_BYTES):
        client.ask(request)
    stop = client.next_offset(TAIL_PARTITION)
    client.close()
    (port,) = free_ports(1)
    directory = subject.directory / "sender"
    directory.mkdir()
    with listening_server([sys.executable, "-c", _SENDER, str(port)], port, directory) as address:

        def receive_bare() -> float:
            buffer = bytearray(ANSWER_BYTES_MAX)
            with connect(address) as connection:
                began = time.perf_counter()
                connection.sendall(TAIL_BYTES.to_bytes(8, "big"))
                for _ in range(TAIL_BYTES // ANSWER_BYTES_MAX):
                    _receive_into(connection, memoryview(buffer))
                return TAIL_BYTES / (time.perf_counter() - began)

        turns = in_turns({"llog": lambda: _read_tail(subject, first, stop), "bare": receive_bare}, subject.rounds)
    subject.report.reach(
        "hot tail, Arrow, one consumer",
        turns.median("llog") / 1e6,
        600,
        "MB/s",
        f"bare loopback {rate(turns.median('bare'), 1)}",
        turns.ratio("llog", "bare"),
    )


def _read_tail(subject: Subject, first: int, stop: int) -> float:
    """Return the bytes per second at which one consumer reads these records."""
    buffer = memoryview(bytearray(2 * ANSWER_BYTES_MAX))
    offset, size = first, 0
    with connect(subject.process.address) as connection:
        began = time.perf_counter()
        while offset < stop:
            path = f"/topics/{TOPIC}/partitions/{TAIL_PARTITION}/records?offset={offset}&max_bytes={ANSWER_BYTES_MAX}"
            connection.sendall(encode_request("GET", path, kind=MEDIA_TYPE))
            head, received = b"", 0
            while b"\r\n\r\n" not in head:
                arrived = connection.recv_into(buffer[received:])
                if not arrived:
                    raise RuntimeError("the broker closed the connection")
                received += arrived
                head = bytes(buffer[: min(received, HEAD_BYTES_MAX)])
            head = head.partition(b"\r\n\r\n")[0].lower()
            if not head.startswith(b"http/1.1 200"):
                raise RuntimeError(head.decode())
            length = int(_field(head, b"content-length"))
            _receive_into(connection, buffer[received : len(head) + 4 + length])
            offset, size = int(_field(head, b"llog-next-fetch-offset")), size + length
        return size / (time.perf_counter() - began)


def _field(head: bytes, name: bytes) -> bytes:
    return head.partition(b"\r\n" + name + b":")[2].partition(b"\r\n")[0]


def _receive_into(connection: socket.socket, wanted: memoryview) -> None:
    while wanted:
        received = connection.recv_into(wanted)
        if not received:
            raise RuntimeError("the server closed the connection")
        wanted = wanted[received:]


def measure_relay(subject: Subject) -> None:
    """Measure the time from an append to the consumer that waits for it, beside the least that it can take."""
    parts: dict[str, list[float]] = {"write": [], "swap": [], "round trip": []}

    def least() -> float:
        turn = len(parts["write"])
        files = [subject.directory / f"relay-{turn}-{number}" for number in range(50)]
        parts["write"].append(statistics.median(map(_write_value, files)))
        swaps = uvloop.run(subject.bare.pace(1, subject.seconds / 2, commits=False))
        parts["swap"].append(p50_ms(swaps))
        trips = run_load(subject.process.address, [empty_exchange()], subject.seconds / 2)
        parts["round trip"].append(p50_ms(trips))
        return parts["write"][-1] + parts["swap"][-1] + 2 * parts["round trip"][-1]

    turns = in_turns({"llog": lambda: _relay_ms(subject), "bare": least}, subject.rounds)
    write, swap, trip = (statistics.median(each[-subject.rounds :]) for each in parts.values())
    subject.report.ratio_at_most(
        "append to consume through one broker, p50",
        f"{turns.median('llog'):.2f} ms",
        f"{write:.2f} durable write + {swap:.2f} CAS + 2 × {trip:.2f} empty round trip",
        turns.ratio("llog", "bare"),
        1.5,
    )


def _write_value(path: Path) -> float:
    return write_synced(path, VALUE.encode()) * 1000


def _relay_ms(subject: Subject) -> float:
    producer, consumer = Client(subject.process), Client(subject.process)
    consumer.socket.settimeout(STALL_S)
    request, offset = produce(RELAY_PARTITION, [VALUE]), producer.next_offset(RELAY_PARTITION)
    taken = []
    for number in range(RELAYS):
        consumer.socket.sendall(consume(RELAY_PARTITION, offset + number, 30_000))
        time.sleep(SETTLE_S)
        began = time.perf_counter()
        producer.socket.sendall(request)
        consumer.answer()
        taken.append((time.perf_counter() - began) * 1000)
        producer.answer()
    producer.close()
    consumer.close()
    return statistics.median(taken)
