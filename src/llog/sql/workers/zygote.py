"""The process that workers are forked from: it has their libraries loaded, and no threads, so that a worker is there in
milliseconds.

Run as a module, with the number of a socket. Each message on it is one byte with the sockets of a new worker: the first
is its leash, which nothing is sent over. When the other end of the leash is closed, by will or because the starter has
died, the worker gets a SIGKILL.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from importlib.abc import MetaPathFinder
from typing import Final, NoReturn

SOCKETS_MAX: Final = 64
_PARSERS: Final = ("llog.sql.tables.plans", "llog.sql.parser", "sqlglot.dialects.duckdb")
"""Loaded last one first, while there is nothing else to do: DuckDB does not need them."""


class _WithoutPandas(MetaPathFinder):
    """Arrow would load it if it is there, which takes seconds. A worker may, if it is given a value of it."""

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(fullname)


def main(descriptor: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: it is for the starter to decide
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
                _end(leashes.pop(leash))
                leash.close()
        if starter in ready:
            message, descriptors, _, _ = socket.recv_fds(starter, 1, SOCKETS_MAX)
            if not message:
                for worker_pid in leashes.values():
                    _end(worker_pid)
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
    """None if there can be no other process: who asked finds the sockets closed."""
    try:
        return os.fork()
    except OSError as error:
        print(f"llog: no process for SQL: {error}", file=sys.stderr)
        return None


def _end(pid: int) -> None:
    """Nobody else waits for it, so the id is still its own."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
