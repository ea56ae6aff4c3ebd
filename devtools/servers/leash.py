"""Child processes that cannot outlive the process that started them, not even when it is killed.

A small watcher leads a process group of its own, runs the command in it and holds the read end of a pipe. The
starter holds the write end; the kernel closes it however the starter ends, and the watcher then kills the group.
(PR_SET_PDEATHSIG is tied to the starting thread rather than to the process, and would kill too early.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def leashed(
    command: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command`, with its output appended to `log`, and kill it and all its children on leaving.

    The yielded process is the watcher, which ends with the command and with its exit code.
    """
    with log.open("ab") as output:
        watcher = subprocess.Popen(
            [sys.executable, "-S", str(Path(__file__).resolve()), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    try:
        yield watcher
    finally:
        # Until the watcher is waited for, its id cannot belong to another process, even if it has ended.
        if watcher.returncode is None:
            os.killpg(watcher.pid, signal.SIGKILL)
            watcher.wait()
        if watcher.stdin is not None:
            watcher.stdin.close()


def signal_command(watcher: int, number: signal.Signals) -> None:
    """Send a signal to the command of the watcher with this id. `ProcessLookupError` if the command has ended.

    The watcher itself must not be stopped: it ends the command when the starter is gone.
    """
    children = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
    if len(children) != 1:
        raise ProcessLookupError("the command has ended")
    os.kill(int(children[0]), number)


def _watch(command: Sequence[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def kill_when_the_starter_is_gone() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=kill_when_the_starter_is_gone, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_watch(sys.argv[1:]))
