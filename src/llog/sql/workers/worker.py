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
"""Added to the limit, for requests and answers in transit."""
_DATA_SIZE: Final = re.compile(r"^VmData:\s+(\d+) kB$", re.MULTILINE)


class CallOnce(msgspec.Struct, frozen=True):
    """A task: one call of a function, whose outcome is sent back."""

    function: Callable[..., Any]
    """A function at the top level of a module, since pickle sends only its name."""
    args: tuple[Any, ...]
    memory_max_bytes: int


def serve(control: socket.socket, lanes: Sequence[socket.socket]) -> NoReturn:
    """Receive a task and run it, then end the process: at the latest when the other end of `control` is closed."""
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
                # The function's memory may still be in use, and the answer needs some, too.
                resource.setrlimit(resource.RLIMIT_DATA, before)
                framing.send(control, (True, MemoryError()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the starter has gone
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    os._exit(0)


def _call(task: CallOnce) -> tuple[bool, Any]:
    """Return whether the function failed, and what it returned or raised."""
    try:
        return False, task.function(*task.args)
    except LlogError as error:
        return True, error


def _limit_memory(more: int) -> tuple[int, int]:
    """Limit this process to `more` bytes beyond what it uses now, and return the previous limits.

    Only Linux enforces the limit; it counts writable memory, not mappings.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        found = _DATA_SIZE.search(Path("/proc/self/status").read_text())
    except OSError:
        return before
    if found is not None:
        limit = (int(found[1]) << 10) + more + _SLACK_BYTES
        _, hard = before
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return before
