"""A watcher between a process and its child, so that the child ends when the process does, however that ends.

Run as a script: `leash.py GRACE_S COMMAND…`. The watcher leads a process group of its own, runs the command in it and
reads its standard input, a pipe whose other end the starter holds; the kernel closes that end when the starter dies.
Then the command gets a SIGTERM, and its whole group a SIGKILL if it has not ended within the grace. The watcher itself
ends with the command only: it ignores SIGTERM, which a service manager may send to all processes, and passes SIGINT
on. Files that the starter passed are the command's alone. (PR_SET_PDEATHSIG
is tied to the starting thread rather than to the process, and reaches no grandchildren.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def watch(grace_s: float, command: Sequence[str]) -> int:
    """Run the command; return its exit code, or 128 + n if signal n ended it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: child.send_signal(signal.SIGINT))

    def end_with_the_starter() -> None:
        while os.read(0, 1):
            pass
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_the_starter, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(watch(float(sys.argv[1]), sys.argv[2:]))
