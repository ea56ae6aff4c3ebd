"""`llog` as a process: pipes that break, interrupts, and several of them at one log."""

from __future__ import annotations

import signal
import subprocess
import sys
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
