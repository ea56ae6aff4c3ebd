"""The client of a DuckDB that runs in a worker: cursors that run SQL and return Arrow tables.

DuckDB's exceptions are raised here as they are in the worker. When the worker dies, or is killed because a call does
not end otherwise, that call and all others fail with `DuckDBEnded`.
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
from llog.sql.workers.duckdb_server import Close, DuckDBOptions, Failure, Interrupt, Request, Rows, TooLarge
from llog.sql.workers.process import WorkerProcess

Params = Sequence[Any] | Mapping[str, Any] | None

LANES: Final = 18
"""Concurrent calls: one for each thread that runs statements, and one to close with."""


class DuckDBEnded(duckdb.Error):  # type: ignore[misc]
    """The worker has ended, and its memory is lost. `was_killed` if this process killed it to end a statement."""

    def __init__(self, was_killed: bool) -> None:
        super().__init__("the process that runs DuckDB has ended")
        self.was_killed = was_killed


class DuckDBClient:
    """One worker with a DuckDB, which ends on `close`, or after `retire` with its last cursor. Any thread may call."""

    def __init__(self, options: DuckDBOptions) -> None:
        self.options = options
        self._process = WorkerProcess(options, LANES)
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

    def cursor(self) -> DuckDBCursor:
        with self._mutex:
            self._open += 1
            return DuckDBCursor(self, next(self._numbers))

    def retire(self) -> None:
        """Close the client as soon as its last cursor is closed. No other cursor may be opened."""
        with self._mutex:
            self._retired = True
            is_unused = not self._open
        if is_unused:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._close_unused_sockets()

    def kill(self) -> None:
        """Kill the worker, to end a statement that does not end otherwise."""
        self._killed = True
        self._process.kill()

    def close_cursor(self, cursor: int) -> None:
        self.notify(Close(cursor))
        with self._mutex:
            self._open -= 1
            is_unused = self._retired and not self._open
        if is_unused:
            self.close()

    def notify(self, message: Interrupt | Close) -> None:
        """Send a message that has no answer."""
        with self._sending, suppress(OSError):  # the worker has ended
            framing.send(self._process.control, message)

    def request_rows(
        self, request: Request, tables: Mapping[str, pa.Table], call: jobs.Call, must_finish: bool
    ) -> pa.Table:
        """Send a request with tables, and return the rows of its answers."""
        try:
            encoded = pickle.dumps(request, 5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RuntimeError(f"a parameter cannot be sent to another process: {error}") from None
        buffers = [framing.encode_table(table) for table in tables.values()]
        with self._lanes, jobs.waiting_for(call, must_finish=must_finish), self._use_lane() as lane:
            framing.send_pickled(lane, encoded, *buffers)
            answer, parts = framing.receive(lane)
            tables_received: list[pa.Table] = []
            while isinstance(answer, Rows):
                tables_received += map(framing.decode_table, parts)
                if answer.is_last:
                    break
                answer, parts = framing.receive(lane)
        if isinstance(answer, Failure):
            raise _duckdb_error(answer)
        if isinstance(answer, TooLarge):
            raise ResultTooLarge(
                f"the statement returns more than {self.options.max_rows} rows or {self.options.max_bytes} bytes: "
                "add LIMIT, or ask for less at a time"
            )
        if not tables_received:
            return pa.table({})
        return tables_received[0] if len(tables_received) == 1 else pa.concat_tables(tables_received)

    @contextmanager
    def _use_lane(self) -> Iterator[socket.socket]:
        with self._mutex:
            lane = self._idle.pop()
        try:
            yield lane
        except (OSError, EOFError):
            self._process.kill()
            raise DuckDBEnded(self._killed) from None
        except BaseException:  # nobody will read the answer that is still to come
            self.kill()
            raise
        finally:
            with self._mutex:
                self._idle.append(lane)
            self._close_unused_sockets()

    def _close_unused_sockets(self) -> None:
        """Close the sockets of a worker that has ended, once no thread uses them."""
        with self._mutex, self._sending:
            if len(self._idle) == LANES and self._process.has_ended:
                self._process.close()


class DuckDBCursor:
    """One thread at a time may use a cursor; only `interrupt` and `kill` may come from another."""

    def __init__(self, client: DuckDBClient, number: int) -> None:
        self._client = client
        self._number = number
        self._requests = 0
        self._closed = False

    def run(
        self,
        sql: str,
        params: Params = None,
        tables: Mapping[str, pa.Table] | None = None,
        *,
        is_limited: bool = True,
    ) -> pa.Table:
        """Return the statement's rows. Only this statement sees `tables`.

        Raises `ResultTooLarge` if the result `is_limited` and larger than the options allow.
        """
        return self._request(sql, params, tables or {}, is_limited=is_limited)

    def do(self, sql: str, params: Params = None, tables: Mapping[str, pa.Table] | None = None) -> None:
        """Run a statement, and return no rows."""
        self._request(sql, params, tables or {}, returns_rows=False)

    @contextmanager
    def register(self, tables: Mapping[str, pa.Table]) -> Iterator[None]:
        """Register tables that every statement of the block sees; they are sent once."""
        if not tables:
            yield
            return
        self._request("", None, tables, returns_rows=False, keep_tables=True)
        try:
            yield
        finally:
            with suppress(DuckDBEnded):
                self._request("", None, {}, must_finish=True, returns_rows=False, drop_tables=tuple(tables))

    def end(self, sql: str) -> None:
        """Run COMMIT, ROLLBACK or the like, even in a job that was stopped."""
        self._request(sql, None, {}, must_finish=True, returns_rows=False)

    def interrupt(self) -> None:
        """Make the running statement, if there is one, fail soon."""
        self._client.notify(Interrupt(self._number, self._requests))

    def kill(self) -> None:
        self._client.kill()

    def close(self) -> None:
        """Roll back an open transaction and close the cursor. Idempotent."""
        if not self._closed:
            self._closed = True
            self._client.close_cursor(self._number)

    def _request(
        self, sql: str, params: Params, tables: Mapping[str, pa.Table], *, must_finish: bool = False, **options: Any
    ) -> pa.Table:
        self._requests += 1
        request = Request(self._number, self._requests, sql, params, tuple(tables), **options)
        return self._client.request_rows(request, tables, self, must_finish)


def _duckdb_error(failure: Failure) -> Exception:
    kind: Any = getattr(duckdb, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, duckdb.Error):
        return kind(failure.text)  # type: ignore[no-any-return]
    return RuntimeError(f"{failure.kind}: {failure.text}")
