"""`llog` as a process: pipes that break, interrupts, and several of them at one log."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

LLOG = [sys.executable, "-m", "llog.cli.main"]
LIMIT_S = 120


def _run(directory: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*LLOG, *arguments], cwd=directory, input=stdin, capture_output=True, timeout=LIMIT_S)


def _start(directory: Path, *arguments: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*LLOG, *arguments], cwd=directory, stdin=pipe, stdout=pipe, stderr=pipe)


def _end(process: subprocess.Popen[bytes]) -> bytes:
    """What it wrote to stderr; killed if it does not end by itself."""
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return errors


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def test_a_follower_prints_what_another_process_appends_and_ends_quietly_when_interrupted(tmp_path: Path) -> None:
    assert _run(tmp_path, "produce", "t", stdin=b"first\n").returncode == 0
    follower = _start(tmp_path, "consume", "t", "--follow")
    assert _pipe(follower.stdout).readline() == b"first\n"
    assert _run(tmp_path, "produce", "t", stdin=b"second\n").returncode == 0
    assert _pipe(follower.stdout).readline() == b"second\n"
    follower.send_signal(signal.SIGINT)
    assert _end(follower) == b""
    assert follower.returncode == 130


def test_a_follower_prints_everything_of_partitions_that_are_added_while_it_follows(tmp_path: Path) -> None:
    assert _run(tmp_path, "produce", "t", stdin=b"old\n").returncode == 0
    follower = _start(tmp_path, "consume", "t", "--follow", "--max", "3")
    assert _pipe(follower.stdout).readline() == b"old\n"
    assert _run(tmp_path, "topics", "add-partitions", "t", "2").returncode == 0
    assert _run(tmp_path, "produce", "t", "--partition", "1", stdin=b"on the new one\n").returncode == 0
    assert _run(tmp_path, "produce", "t", "--partition", "0", stdin=b"on the old one\n").returncode == 0
    try:
        output, _ = follower.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        follower.kill()
        raise
    assert sorted(output.splitlines()) == [b"on the new one", b"on the old one"]


def test_a_reader_that_has_enough_ends_consume_without_a_word(tmp_path: Path) -> None:
    lines = b"".join(b"%d %s\n" % (number, b"x" * 1000) for number in range(3000))
    assert _run(tmp_path, "produce", "t", stdin=lines).returncode == 0
    consumer = _start(tmp_path, "consume", "t")
    _pipe(consumer.stdout).read(10)
    _pipe(consumer.stdout).close()
    consumer.stdout = None
    assert _end(consumer) == b""
    assert consumer.returncode == 141


class _Lines:
    """What a process has printed so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.found: list[bytes] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for line in _pipe(self.process.stdout):
            self.found.append(line.rstrip())

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self._reading.join(LIMIT_S)
        assert self.process.wait(LIMIT_S) == 130


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_of_one_group_share_its_records(tmp_path: Path) -> None:
    assert _run(tmp_path, "produce", "t", stdin=b"0\n").returncode == 0
    members = [_Lines(_start(tmp_path, "consume", "t", "--group", "g", "--follow")) for _ in range(2)]
    for number in range(1, 6):
        assert _run(tmp_path, "produce", "t", stdin=b"%d\n" % number).returncode == 0
    _until(lambda: sum(len(each.found) for each in members) >= 6)
    for each in members:
        each.end()
    assert sorted(line for each in members for line in each.found) == [b"%d" % number for number in range(6)]
    assert _run(tmp_path, "consume", "t", "--group", "g").stdout == b""


def test_processes_of_an_assigned_group_have_different_partitions(tmp_path: Path) -> None:
    assert _run(tmp_path, "topics", "create", "t", "--partitions", "2").returncode == 0
    assigned = ("consume", "t", "--group", "g", "--mode", "assigned", "--follow")
    members = [_Lines(_start(tmp_path, *assigned)) for _ in range(2)]

    def holders() -> set[str]:
        shown = _run(tmp_path, "groups", "describe", "g", "--json")
        return {each["assigned_to"] for each in json.loads(shown.stdout)} if shown.returncode == 0 else set()

    _until(lambda: len(holders() - {None}) == 2)
    for partition in (b"0", b"1"):
        lines = b"".join(partition + b" %d\n" % number for number in range(3))
        assert _run(tmp_path, "produce", "t", "--partition", partition.decode(), stdin=lines).returncode == 0
    _until(lambda: sum(len(each.found) for each in members) >= 6)
    for each in members:
        each.end()
    expected = [[partition + b" %d" % number for number in range(3)] for partition in (b"0", b"1")]
    assert sorted(each.found for each in members) == expected


def test_what_a_member_could_not_print_goes_to_the_next_at_once(tmp_path: Path) -> None:
    lines = b"".join(b"%d %s\n" % (number, b"x" * 1000) for number in range(2000))
    assert _run(tmp_path, "produce", "t", stdin=lines).returncode == 0
    consumer = _start(tmp_path, "consume", "t", "--group", "g")
    _pipe(consumer.stdout).read(10)
    _pipe(consumer.stdout).close()
    consumer.stdout = None
    assert _end(consumer) == b""
    assert consumer.returncode == 141
    assert _run(tmp_path, "consume", "t", "--group", "g").stdout == lines


def test_produce_appends_what_has_waited_long_enough_and_keeps_it_when_interrupted(tmp_path: Path) -> None:
    assert _run(tmp_path, "topics", "create", "t").returncode == 0
    producer = _start(tmp_path, "produce", "t")
    _pipe(producer.stdin).write(b"while the pipe stays open\n")
    _pipe(producer.stdin).flush()
    follower = _run(tmp_path, "consume", "t", "--follow", "--max", "1")
    assert follower.stdout == b"while the pipe stays open\n"
    producer.send_signal(signal.SIGINT)
    producer.wait(LIMIT_S)
    assert b"Traceback" not in _end(producer)
    assert producer.returncode == 130


def test_a_failure_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    failed = _run(tmp_path, "consume", "nothing")
    assert failed.returncode == 2
    assert b": there is no log. " in failed.stderr
    assert failed.stderr.count(b"\n") == 1
