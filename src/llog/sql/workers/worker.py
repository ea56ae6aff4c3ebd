"""What a worker process runs: a DuckDB server, or one call of a function."""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from llog.errors import LlogError
from llog.sql.workers import framing
from llog.sql.workers.duckdb_server import DuckDBOptions, DuckDBServer

_SLACK_BYTES: Final = 64 << 20
"""Beside what the limit is for: requests and answers on their way."""
_HAS: Final = re.compile(r"^VmData:\s+(\d+) kB$", re.MULTILINE)


class CallOnce(msgspec.Struct, frozen=True):
    function: Callable[..., Any]
    """A function of a module: pickle sends its name."""
    args: tuple[Any, ...]
    memory_max_bytes: int


def serve(control: socket.socket, lanes: Sequence[socket.socket]) -> NoReturn:
    """Receives a task and runs it. Ends the process, at the latest when the other end of `control` is closed."""
    try:
        task, _ = framing.receive(control)
        if isinstance(task, DuckDBOptions):
            server = DuckDBServer(task, lanes)
            _limit_memory(task.memory_max_bytes)
            server.serve(control)
        else:
            before = _limit_memory(task.memory_max_bytes)
            try:
                framing.send(control, _call(task))
            except MemoryError:
                # What the function used up may still be held, and to say so takes memory, too.
                resource.setrlimit(resource.RLIMIT_DATA, before)
                framing.send(control, (True, MemoryError()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the starter has gone
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    os._exit(0)


def _call(task: CallOnce) -> tuple[bool, Any]:
    """Returns whether the function failed, and what it returned or raised."""
    try:
        return False, task.function(*task.args)
    except LlogError as error:
        return True, error


def _limit_memory(more: int) -> tuple[int, int]:
    """Lets this process have `more` bytes beside what it has now, and returns the limits from before.

    Only Linux can, and counts what can be written, not what is mapped.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        found = _HAS.search(Path("/proc/self/status").read_text())
    except OSError:
        return before
    if found is not None:
        limit = (int(found[1]) << 10) + more + _SLACK_BYTES
        _, hard = before
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return before
