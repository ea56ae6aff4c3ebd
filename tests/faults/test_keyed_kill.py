"""Processes that write to a keyed log and are killed, or take it from each other: nothing acknowledged is lost, nothing
is there twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from llog.keyed import Config, KeyedLog, KeyedLogReader, SegmentConfig
from llog.keyed.writer import BLOCK_SEQUENCES

_APPENDS = 100_000

# Appends the same value to two keys and to one of its own, several appends in flight; tells what was acknowledged.
_WRITER = """
import asyncio, os, sys
from llog.errors import WriterFenced
from llog.keyed import Config, KeyedLog, SegmentConfig
async def main():
    name = sys.argv[2].encode()
    log = await KeyedLog.open(sys.argv[1], Config(segmentation=SegmentConfig(seal_records=200)), take_over=True)
    numbers = iter(range(int(sys.argv[3])))
    async def append():
        for number in numbers:
            value = b"%s-%d" % (name, number)
            first = await log.append([(b"a", value), (b"b", value), (b"own " + name, value)])
            os.write(1, b"%d %s\\n" % (first, value))
    try:
        await asyncio.gather(*(append() for _ in range(8)))
    except WriterFenced:
        os.write(1, b"fenced\\n")
        os._exit(3)
asyncio.run(main())
"""


class Found(NamedTuple):
    sequence: int
    value: bytes


@contextmanager
def writing(url: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", _WRITER, url, name, str(_APPENDS)], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def acknowledged(lines: list[bytes]) -> list[Found]:
    parts = [line.split() for line in lines if line.endswith(b"\n") and line != b"fenced\n"]
    return [Found(int(sequence), value) for sequence, value in parts]


async def check(log: KeyedLogReader, told: list[Found], names: list[str]) -> list[int]:
    """Every acknowledged append is there whole, once, under its sequences; the sequences of key `a`."""
    stored = {key: [Found(e.sequence, e.value) async for e in log.scan(key)] for key in (b"a", b"b")}
    assert {found.value for found in told} <= {found.value for found in stored[b"a"]}
    assert set(told) <= set(stored[b"a"])
    assert [Found(f.sequence + 1, f.value) for f in stored[b"a"]] == stored[b"b"]
    own = [Found(e.sequence - 2, e.value) for name in names async for e in log.scan(b"own " + name.encode())]
    assert sorted(own) == stored[b"a"]
    values = [found.value for found in stored[b"a"]]
    assert len(set(values)) == len(values)
    sequences = [found.sequence for found in stored[b"a"]]
    assert sequences == sorted(set(sequences))
    for key in (b"a", b"b"):
        assert await log.count(key) == len(sequences)
    return sequences


@pytest.mark.parametrize("told_before_kill", [1, 60, 400])
async def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path, told_before_kill: int) -> None:
    url = f"file://{tmp_path}/log"
    told: list[Found] = []
    names = ["first", "second"]
    for name in names:
        with writing(url, name) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(told_before_kill)]
            os.kill(process.pid, signal.SIGKILL)
            lines += process.stdout.readlines()
            assert process.wait() == -signal.SIGKILL
        assert told_before_kill <= len(lines) < _APPENDS
        told += acknowledged(lines)
    async with await KeyedLog.open(url) as log:
        sequences = await check(log, told, names)
        highest = max(sequences) + 2
        first = await log.append([(b"a", b"last")])
        assert highest < first <= highest + 1 + BLOCK_SEQUENCES
        segments = await log.segments()
        assert [each.end_seq for each in segments[:-1]] == [each.start_seq for each in segments[1:]]
        assert sum(each.records for each in segments) == len(sequences) * 3 + 1


async def test_of_two_processes_that_race_one_survives_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/log"
    with writing(url, "first") as first:
        assert first.stdout is not None
        told = acknowledged([first.stdout.readline() for _ in range(50)])
        with writing(url, "second") as second:
            assert second.stdout is not None
            told += acknowledged([second.stdout.readline() for _ in range(50)])
            lines = first.stdout.readlines()  # until it has ended
            assert lines[-1] == b"fenced\n"
            assert first.wait() == 3
            told += acknowledged(lines)
            told += acknowledged([second.stdout.readline() for _ in range(50)])
            assert second.poll() is None
            async with await KeyedLog.open(url) as third:
                lines = second.stdout.readlines()
                assert lines[-1] == b"fenced\n"
                told += acknowledged(lines)
                sequences = await check(third, told, ["first", "second"])
                assert await third.append([(b"a", b"third")]) > max(sequences) + 2


async def test_a_reader_in_another_process_than_the_writer_follows_it(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/log"
    with writing(url, "first") as process:
        assert process.stdout is not None
        told = acknowledged([process.stdout.readline() for _ in range(20)])
        async with await KeyedLogReader.open(url) as reader:
            tail = reader.tail(b"a", after=-1)
            seen = [Found((entry := await anext(tail)).sequence, entry.value) for _ in range(20)]
            told += acknowledged([process.stdout.readline() for _ in range(200)])
            latest = max(found.sequence for found in told)
            while seen[-1].sequence < latest:
                entry = await anext(tail)
                seen.append(Found(entry.sequence, entry.value))
            assert {found for found in told if found.sequence <= latest} <= set(seen)
            assert [found.sequence for found in seen] == sorted({found.sequence for found in seen})


async def test_a_writer_that_stands_still_while_another_takes_over_acknowledges_nothing_after(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/log"
    with writing(url, "first") as process:
        assert process.stdout is not None
        told = acknowledged([process.stdout.readline() for _ in range(50)])
        os.kill(process.pid, signal.SIGSTOP)
        config = Config(segmentation=SegmentConfig(seal_records=200))
        async with await KeyedLog.open(url, config, take_over=True) as log:
            mine = await log.append([(b"a", b"mine"), (b"b", b"mine"), (b"own mine", b"mine")])
            os.kill(process.pid, signal.SIGCONT)
            lines = process.stdout.readlines()
            assert lines[-1] == b"fenced\n"
            told += acknowledged(lines)
            assert max(found.sequence for found in told) < mine
            await check(log, told, ["first", "mine"])


_LEAVER = """
import sys
from llog.keyed import Config, StorageConfig, SyncKeyedLog
log = SyncKeyedLog.open(sys.argv[1], Config(storage=StorageConfig(table_bytes=1 << 20)))
for number in range(6):
    log.append([(b"%d-%d" % (number, place), b"x" * 200) for place in range(3000)])
log.append([(b"last", b"not awaited")], await_durable=False)
"""


async def test_a_program_that_ends_without_closing_its_log_ends_well_and_keeps_everything(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/log"
    # Tables are still being built when it ends, by threads that call Python.
    done = subprocess.run([sys.executable, "-c", _LEAVER, url], check=False, timeout=120)  # noqa: ASYNC221
    assert done.returncode == 0
    async with await KeyedLog.open(url) as log:
        assert sum([len(page) async for page in log.keys_batches()]) == 18_001
        assert await log.count(b"last") == 1
