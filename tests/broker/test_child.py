"""A child beside a broker, which is started again when it dies, and never outlives the broker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llog.broker.child import ChildOptions, supervise
from llog.errors import ChildFailed

LIMIT_S = 60


def _unexpected(report: str) -> None:
    raise AssertionError(report)


async def test_a_child_that_dies_is_started_again_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    script = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a'), flush=True); time.sleep(600)"
    reports: list[str] = []
    options = ChildOptions(restart_s=0.01, restart_s_max=0.02)
    command = [sys.executable, "-c", script, str(starts)]
    running = asyncio.ensure_future(supervise("the child", command, dict(os.environ), reports.append, options))
    pids: list[int] = []
    async with asyncio.timeout(LIMIT_S):
        for times in (1, 2, 3):
            while len(pids := _pids(starts)) < times:
                await asyncio.sleep(0.01)
            if times < 3:
                os.kill(pids[-1], signal.SIGKILL)
    running.cancel()
    await asyncio.wait([running])
    assert all(_gone(pid) for pid in pids)
    assert len(reports) == 2
    assert "ended with code 137" in reports[0]


async def test_a_child_that_says_it_cannot_run_is_not_started_again() -> None:
    command = [sys.executable, "-c", "raise SystemExit(2)"]
    await asyncio.wait_for(supervise("the child", command, dict(os.environ), _unexpected), LIMIT_S)


async def test_a_child_that_ends_at_once_again_and_again_is_given_up() -> None:
    reports: list[str] = []
    options = ChildOptions(restart_s=0.01, restart_s_max=0.02, attempts_max=3)
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    with pytest.raises(ChildFailed, match=r"the child ended 3 times in a row .* the last time with code 7"):
        await asyncio.wait_for(supervise("the child", command, dict(os.environ), reports.append, options), LIMIT_S)
    assert len(reports) == 2


async def test_a_child_has_the_files_that_it_was_given_for_itself(tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = "import os, sys; os.write(int(sys.argv[1]), b'here'); open(sys.argv[2], 'w'); sys.exit(2)"
    reader, writer = os.pipe()
    command = [sys.executable, "-c", script, str(writer), str(told)]
    options = ChildOptions(files=(writer,))
    supervised = supervise("the child", command, dict(os.environ), _unexpected, options)
    await asyncio.wait_for(supervised, LIMIT_S)
    os.close(writer)
    assert told.exists()
    assert os.read(reader, 100) == b"here"
    assert os.read(reader, 100) == b"", "nobody else has the pipe open"
    os.close(reader)


async def test_a_child_that_is_ending_gets_a_sigint_in_a_hurry(tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = (
        "import pathlib, signal, sys, time\n"
        "told = pathlib.Path(sys.argv[1])\n"
        "times = 0\n"
        "def end(*_):\n"
        "    global times\n"
        "    times += 1\n"
        "    told.write_text(str(times))\n"
        "    if times == 2: sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "signal.signal(signal.SIGINT, end)\n"
        "told.write_text('0')\n"
        "while True: time.sleep(0.1)\n"
    )
    hurry = asyncio.Event()
    command = [sys.executable, "-c", script, str(told)]
    options = ChildOptions(grace_s=LIMIT_S)
    running = asyncio.ensure_future(
        supervise("the child", command, dict(os.environ), _unexpected, options, hurry=hurry)
    )
    async with asyncio.timeout(LIMIT_S):
        for times in ("0", "1", "2"):
            while not told.exists() or told.read_text() != times:
                await asyncio.sleep(0.01)
            if times == "0":
                running.cancel()
            elif times == "1":
                hurry.set()
        await asyncio.wait([running])


async def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), child.pid, sep='\\n', file=open(sys.argv[1], 'w'), flush=True)\n"
        "time.sleep(600)\n"
    )
    options = ChildOptions(grace_s=0.2)
    command = [sys.executable, "-c", script, str(pids)]
    running = asyncio.ensure_future(supervise("the child", command, dict(os.environ), _unexpected, options))
    async with asyncio.timeout(LIMIT_S):
        while len(_pids(pids)) < 2:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert all(_gone(pid) for pid in _pids(pids))


def test_a_child_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
    starter = (
        "import asyncio, os, sys\n"
        "from llog.broker.child import supervise\n"
        "command = [sys.executable, '-c', sys.argv[1], sys.argv[2]]\n"
        "asyncio.run(supervise('the child', command, dict(os.environ), print))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter, child, str(pids)])
    deadline = time.monotonic() + LIMIT_S
    while not _pids(pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert _gone(_pids(pids)[0])


def _pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # ended, and not yet looked at by whoever is its parent now
            return True
        time.sleep(0.02)
    return False
