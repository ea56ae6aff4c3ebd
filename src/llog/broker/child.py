"""A child process that is restarted when it dies, and never outlives the process that started it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from llog.broker import leash
from llog.errors import EXIT_BAD_INPUT, ChildFailed


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    grace_s: float = 15.0
    """How long the child has between SIGTERM and SIGKILL."""
    restart_s: float = 1.0
    restart_s_max: float = 60.0
    steady_s: float = 60.0
    """A child that ran this long is restarted as quickly as the first time."""
    attempts_max: int | None = None
    """After so many ends in a row, none of which came after `steady_s`, the child is given up."""
    files: tuple[int, ...] = ()
    """Open file descriptors that the child gets, under the same numbers."""


async def supervise(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    report: Callable[[str], None],
    options: ChildOptions | None = None,
    hurry: asyncio.Event | None = None,
) -> None:
    """Run the command, and restart it when it ends, until cancelled, which ends it by SIGTERM. If that takes too long
    for the caller, `hurry` sends it a SIGINT.

    Returns only if the command exits with 2: with these settings it cannot run. Raises `ChildFailed` if it was given
    up.
    """
    options = options or ChildOptions()
    loop = asyncio.get_running_loop()
    hurry = hurry or asyncio.Event()
    delay, attempts = options.restart_s, 0
    while True:
        began = loop.time()
        code = await _run(command, environment, options, hurry)
        if code == EXIT_BAD_INPUT:
            return
        if loop.time() - began >= options.steady_s:
            delay, attempts = options.restart_s, 0
        attempts += 1
        if attempts == options.attempts_max:
            raise ChildFailed(
                f"{name} ended {attempts} times in a row within {options.steady_s:g} s of its start, the last time "
                f"with code {code}: what it logged before says why"
            )
        report(f"{name} ended with code {code}; it is restarted in {delay:g} s")
        await asyncio.sleep(delay)
        delay = min(2 * delay, options.restart_s_max)


async def _run(
    command: Sequence[str], environment: Mapping[str, str], options: ChildOptions, hurry: asyncio.Event
) -> int:
    watcher = subprocess.Popen(  # noqa: ASYNC220  # a fork and no wait
        [sys.executable, "-S", str(Path(leash.__file__).resolve()), str(options.grace_s), *command],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),
        env=dict(environment),
        start_new_session=True,
        pass_fds=options.files,
    )
    # Waits without reaping: until the watcher is reaped, no other process gets its id, which is that of the group.
    ended = asyncio.ensure_future(asyncio.to_thread(os.waitid, os.P_PID, watcher.pid, os.WEXITED | os.WNOWAIT))
    try:
        await asyncio.shield(ended)
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        hurried = asyncio.ensure_future(hurry.wait())
        limit_s = options.grace_s + 5
        await asyncio.wait([ended, hurried], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if hurried.done() and not ended.done():
            os.kill(watcher.pid, signal.SIGINT)
            await asyncio.wait([ended], timeout=limit_s)
        hurried.cancel()
        os.killpg(watcher.pid, signal.SIGKILL)
        await ended
        watcher.wait()
    return watcher.returncode
