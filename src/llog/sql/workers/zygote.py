"""The process that workers are forked from. It has loaded their libraries and has no threads, so a worker starts in
milliseconds.

It is run as a module, with the descriptor of a socket. Each message on that socket is one byte with the sockets of a
new worker. The first of them is the worker's leash: when its other end is closed or shut down, either deliberately or
because the starter has died, the worker gets a SIGKILL, and the zygote answers with the signal that ended the worker.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from typing import Final, NoReturn

SOCKETS_MAX: Final = 64
_PARSERS: Final = ("llog.sql.tables.plans", "llog.sql.parser", "sqlglot.dialects.duckdb")
"""Loaded from last to first while the zygote is idle: workers that run DuckDB do not need them."""


class _WithoutPandas(MetaPathFinder):
    """Keeps Arrow from importing pandas in the zygote, which takes seconds. Workers may import it for pandas values."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(fullname)


def main(descriptor: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what Ctrl-C means is for the starter to decide
    sys.meta_path.insert(0, _WithoutPandas)
    from llog.sql.workers import worker

    starter = socket.socket(fileno=descriptor)
    leashes: dict[socket.socket, int] = {}
    parsers = list(_PARSERS)
    while True:
        ready, _, _ = select.select([starter, *leashes], [], [], 0 if parsers else None)
        if not ready:
            importlib.import_module(parsers.pop())
            gc.freeze()
        for leash in ready:
            if leash in leashes:
                _end_worker(leashes.pop(leash), leash)
        if starter in ready:
            message, descriptors, _, _ = socket.recv_fds(starter, 1, SOCKETS_MAX)
            if not message:
                for leash, worker_pid in leashes.items():
                    _end_worker(worker_pid, leash)
                os._exit(0)
            sockets = [socket.socket(fileno=each) for each in descriptors]
            pid = _fork()
            if pid == 0:
                for each in (starter, *leashes, sockets[0]):
                    each.close()
                sys.meta_path.remove(_WithoutPandas)
                worker.serve(sockets[1], sockets[2:])
            if pid is not None:
                leashes[sockets[0]] = pid
            for each in sockets if pid is None else sockets[1:]:
                each.close()


def _fork() -> int | None:
    """Fork, or return None if the system refuses another process; the caller's peer then finds its sockets closed."""
    try:
        return os.fork()
    except OSError as error:
        print(f"llog: cannot start a process for SQL: {error}", file=sys.stderr)
        return None


def _end_worker(pid: int, leash: socket.socket) -> None:
    """Kill a worker, unless it has ended, and send the signal that ended it, or 0.

    Only the zygote waits for its workers, so the id cannot belong to another process yet.
    """
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):  # the starter has closed its end
        leash.send(bytes([os.WTERMSIG(status)]))
    leash.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
