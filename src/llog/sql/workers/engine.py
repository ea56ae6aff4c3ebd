"""DuckDB in a worker, as the rest of the process has it: cursors that run SQL and give Arrow tables.

What DuckDB raises there is raised here. When the worker dies, or is killed since a call does not end otherwise, that
call and all others fail with `EngineEnded`.
"""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, Final

import duckdb
import pyarrow as pa

from llog.errors import ResultTooLarge
from llog.sql.workers import framing, jobs
from llog.sql.workers.duckdb_server import Close, DuckDBOptions, Failed, Interrupt, Request, Rows, TooLarge
from llog.sql.workers.process import Process

Params = Sequence[Any] | Mapping[str, Any] | None

LANES: Final = 18
"""Calls at a time: at least as many as there are threads for statements, and one to close with."""


class EngineEnded(duckdb.Error):  # type: ignore[misc]
    """The worker has ended, and all that it had in memory is gone. `killed`: by us, since a statement did not end
    otherwise.
    """

    def __init__(self, killed: bool) -> None:
        super().__init__("the process that runs DuckDB has ended")
        self.killed = killed


class Engine:
    """Any thread may call. It ends when it is closed, or retired and none of its cursors is open."""

    def __init__(self, options: DuckDBOptions) -> None:
        self.options = options
        self._process = Process(options, LANES)
        self._mutex = threading.Lock()
        self._sending = threading.Lock()
        self._idle: list[socket.socket] = list(self._process.lanes)
        self._lanes = threading.BoundedSemaphore(LANES)
        self._numbers = count()
        self._open = 0
        self._retired = False
        self._killed = False

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    def cursor(self) -> EngineCursor:
        with self._mutex:
            self._open += 1
            return EngineCursor(self, next(self._numbers))

    def retire(self) -> None:
        """No other cursors are made."""
        with self._mutex:
            self._retired = True
            last = not self._open
        if last:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._let_go()

    def kill(self) -> None:
        self._killed = True
        self._process.kill()

    def closed(self, cursor: int) -> None:
        self.tell(Close(cursor))
        with self._mutex:
            self._open -= 1
            last = self._retired and not self._open
        if last:
            self.close()

    def tell(self, what: Interrupt | Close) -> None:
        with self._sending, suppress(OSError):  # it has ended
            framing.send(self._process.control, what)

    def ask(self, request: Request, tables: Mapping[str, pa.Table], call: jobs.Call, ending: bool) -> pa.Table:
        try:
            asked = pickle.dumps(request, 5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RuntimeError(f"a parameter that no process but this one can have: {error}") from None
        buffers = [framing.table_out(table) for table in tables.values()]
        with self._lanes, jobs.waiting(call, ending=ending), self._use_lane() as lane:
            framing.send_pickled(lane, asked, *buffers)
            answer, given = framing.receive(lane)
            found: list[pa.Table] = []
            while isinstance(answer, Rows):
                found += map(framing.table_in, given)
                if answer.last:
                    break
                answer, given = framing.receive(lane)
        if isinstance(answer, Failed):
            raise _error(answer)
        if isinstance(answer, TooLarge):
            raise ResultTooLarge(
                f"the statement gives more than {self.options.max_rows} rows or {self.options.max_bytes} bytes: "
                "add LIMIT, or ask for less at a time"
            )
        return found[0] if len(found) == 1 else pa.concat_tables(found) if found else pa.table({})

    @contextmanager
    def _use_lane(self) -> Iterator[socket.socket]:
        with self._mutex:
            lane = self._idle.pop()
        try:
            yield lane
        except (OSError, EOFError):
            self._process.kill()
            raise EngineEnded(self._killed) from None
        except BaseException:  # the answer is still to come, and nobody will read it
            self.kill()
            raise
        finally:
            with self._mutex:
                self._idle.append(lane)
            self._let_go()

    def _let_go(self) -> None:
        """Of the sockets, once nobody uses them."""
        with self._mutex, self._sending:
            if len(self._idle) == LANES and self._process.has_ended:
                self._process.close()


class EngineCursor:
    """For one thread at a time; only `interrupt` may come from another."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._number = number
        self._asked = 0
        self._closed = False

    def run(
        self,
        sql: str,
        params: Params = None,
        tables: Mapping[str, pa.Table] | None = None,
        *,
        limited: bool = True,
    ) -> pa.Table:
        """The rows that the statement gives; `ResultTooLarge` if they are `limited` and too many. `tables` are known to
        no other.
        """
        return self._ask(sql, params, tables or {}, limited=limited)

    def do(self, sql: str, params: Params = None, tables: Mapping[str, pa.Table] | None = None) -> None:
        """As `run`, for a statement that gives no rows."""
        self._ask(sql, params, tables or {}, gives_rows=False)

    @contextmanager
    def registered(self, tables: Mapping[str, pa.Table]) -> Iterator[None]:
        """Tables that all statements of the block know: they are sent once."""
        if not tables:
            yield
            return
        self._ask("", None, tables, gives_rows=False, keeps=True)
        try:
            yield
        finally:
            with suppress(EngineEnded):
                self._ask("", None, {}, ending=True, gives_rows=False, forgets=tuple(tables))

    def end(self, sql: str) -> None:
        """COMMIT, ROLLBACK and the like, also of a job that was stopped."""
        self._ask(sql, None, {}, ending=True, gives_rows=False)

    def interrupt(self) -> None:
        """The statement that runs, if any, fails soon."""
        self._engine.tell(Interrupt(self._number, self._asked))

    def kill(self) -> None:
        self._engine.kill()

    def close(self) -> None:
        """Idempotent. Rolls back what is open."""
        if not self._closed:
            self._closed = True
            self._engine.closed(self._number)

    def _ask(
        self, sql: str, params: Params, tables: Mapping[str, pa.Table], *, ending: bool = False, **how: Any
    ) -> pa.Table:
        self._asked += 1
        request = Request(self._number, self._asked, sql, params, tuple(tables), **how)
        return self._engine.ask(request, tables, self, ending)


def _error(failed: Failed) -> Exception:
    kind: Any = getattr(duckdb, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, duckdb.Error):
        return kind(failed.text)  # type: ignore[no-any-return]
    return RuntimeError(f"{failed.kind}: {failed.text}")
