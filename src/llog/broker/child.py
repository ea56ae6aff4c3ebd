"""A child process that is started again when it dies, and never outlives its starter."""

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
from llog.errors import EXIT_BAD_INPUT


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    grace_s: float = 15.0
    """From SIGTERM to SIGKILL."""
    restart_s: float = 1.0
    restart_s_max: float = 60.0
    steady_s: float = 60.0
    """Having run so long, it is started again as quickly as the first time."""


async def supervise(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    report: Callable[[str], None],
    options: ChildOptions | None = None,
) -> None:
    """Runs the command until this is cancelled, which ends it; returns only if it exits with 2: it cannot run as things
    are.
    """
    options = options or ChildOptions()
    loop = asyncio.get_running_loop()
    delay = options.restart_s
    while True:
        began = loop.time()
        code = await _run(command, environment, options)
        if code == EXIT_BAD_INPUT:
            return
        if loop.time() - began >= options.steady_s:
            delay = options.restart_s
        report(f"{name} ended with code {code}; it is started again in {delay:g} s")
        await asyncio.sleep(delay)
        delay = min(2 * delay, options.restart_s_max)


async def _run(command: Sequence[str], environment: Mapping[str, str], options: ChildOptions) -> int:
    watcher = subprocess.Popen(  # noqa: ASYNC220  # a fork and no wait
        [sys.executable, "-S", str(Path(leash.__file__).resolve()), str(options.grace_s), *command],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),
        env=dict(environment),
        start_new_session=True,
    )
    # Looked at and not reaped: as long as it is not, nobody else can get its id, and its group can be killed by it.
    ended = asyncio.ensure_future(asyncio.to_thread(os.waitid, os.P_PID, watcher.pid, os.WEXITED | os.WNOWAIT))
    try:
        await asyncio.shield(ended)
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        await asyncio.wait([ended], timeout=options.grace_s + 5)
        os.killpg(watcher.pid, signal.SIGKILL)
        await ended
        watcher.wait()
    return watcher.returncode
