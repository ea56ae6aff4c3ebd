"""The parts of benches that a wrong figure could hide in: answers, turns, bounds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from bench.__main__ import BENCHES, summary
from bench.broker.process import exchange, take_answers
from bench.load import Exchange, run_load
from bench.peers import kafka, nats, redis
from bench.report import Report
from bench.turns import Turns, in_turns

HTTP_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
KAFKA_BODY = b"\0\0\0\1" + b"\0\0\0\1" + b"\0\5bench" + b"\0\0\0\1" + b"\0\0\0\7"
"""The correlation id, one topic, its name, one partition, its number; an error and an offset follow."""


def kafka_answer(error: int) -> bytes:
    body = KAFKA_BODY + error.to_bytes(2, "big") + bytes(8 + 8 + 8 + 4)
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("take", "answer"),
    [
        (take_answers, HTTP_ANSWER),
        (redis.take_replies, b"$3\r\n1-0\r\n"),
        (nats.take_messages, b'INFO {}\r\nPING\r\nMSG _INBOX.1 1 9\r\n{"seq":1}\r\n'),
        (kafka.take_answers, kafka_answer(0)),
    ],
)
def test_answers_are_counted_in_whatever_pieces_they_arrive(take: Callable[[bytearray], int], answer: bytes) -> None:
    buffer, counts = bytearray(), []
    for byte in answer * 3:
        buffer.append(byte)
        counts.append(take(buffer))
    assert sum(counts) == 3
    assert counts[len(answer) - 1] == 1
    assert take(bytearray(answer * 3)) == 3
    assert not buffer


@pytest.mark.parametrize(
    ("take", "refusal"),
    [
        (take_answers, b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}"),
        (take_answers, b'HTTP/1.1 200 OK\r\ncontent-length: 30\r\n\r\n{"topic_partitions":[{"error":1'),
        (redis.take_replies, b"-MISCONF errors writing to the AOF file\r\n"),
        (nats.take_messages, b'MSG _INBOX.1 1 11\r\n{"error":1}\r\n'),
        (nats.take_messages, b"-ERR 'Maximum Payload Violation'\r\n"),
        (kafka.take_answers, kafka_answer(6)),
    ],
)
def test_a_refused_append_ends_the_measurement(take: Callable[[bytearray], int], refusal: bytes) -> None:
    with pytest.raises(RuntimeError):
        take(bytearray(refusal))


def test_a_load_counts_complete_requests_and_ends() -> None:
    received: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(5) == b"hello"
            while request := connection.recv(2, socket.MSG_WAITALL):
                received.append(request)
                connection.sendall(b"$1\r\na\r\n$1\r")  # two replies, the second of them in two pieces
                connection.sendall(b"\na\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        pace = run_load(listener.getsockname(), [Exchange(b"ab", redis.take_replies, 2, b"hello")], 0.05)
        server.join()
    assert len(pace.latencies_ms) == len(received) > 0
    assert set(received) == {b"ab"}


def test_a_load_on_a_server_that_goes_away_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closing = threading.Thread(target=lambda: listener.accept()[0].close())
        closing.start()
        with pytest.raises((RuntimeError, OSError)):
            run_load(listener.getsockname(), [exchange(b"request")], 60)
        closing.join()


def test_a_ratio_is_the_median_of_the_ratios_of_turns() -> None:
    # The machine was four times slower in the second turn and three times faster in the third.
    turns = Turns({"ours": [10.0, 2.5, 30.0], "theirs": [20.0, 5.0, 60.0]})
    assert turns.ratio("ours", "theirs") == 0.5
    assert turns.median("ours") == 10.0


def test_the_first_turn_warms_up_and_does_not_count() -> None:
    figures = iter([99.0, 98.0, 1.0, 2.0, 3.0, 4.0])
    turns = in_turns({"a": lambda: next(figures), "b": lambda: next(figures)}, rounds=2)
    assert (turns.median("a"), turns.median("b")) == (2.0, 3.0)


def test_a_report_lists_the_bounds_that_were_missed() -> None:
    for report, missed in ((Report("r"), ["slow", "late", "low", "much"]), (Report("r", has_bounds=False), [])):
        report.ratio("slow", "", "", 0.4, at_least=0.5)
        report.ratio("fast", "", "", 0.5, at_least=0.5)
        report.ratio_at_most("late", "", "", 5.1, at_most=5)
        report.ratio_at_most("soon", "", "", 5.0, at_most=5)
        report.reach("low", 599, 600, "MB/s", "", 1.0)
        report.reach("high", 600, 600, "MB/s", "", 1.0)
        report.limit("much", 17, 16, "KiB")
        assert report.missed == missed


def test_every_bench_says_what_it_measures() -> None:
    assert all(summary(name) for name in BENCHES)
