"""The worker's end of DuckDB: runs statements on cursors, one at a time for each lane.

The database can reach neither files nor the network, and no SQL can change its settings.
"""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, NoReturn

import duckdb
import msgspec
import pyarrow as pa

from llog.sql.workers import framing

_BATCH_ROWS: Final = 8_192

# `sql()`, which the warning recommends, is slower for small statements, and its errors have no position.
warnings.filterwarnings("ignore", message="Arrow output on a DB-API result", category=UserWarning)


class DuckDBOptions(msgspec.Struct, frozen=True, kw_only=True):
    memory_max_bytes: int = 1 << 30
    threads: int = 1
    """More than one slows down small statements."""
    max_rows: int = 1_000_000
    """Rows of one result, and rows that one transaction changes."""
    max_bytes: int = 256 << 20
    """Bytes of one result."""


class Request(NamedTuple):
    cursor: int
    number: int
    """Counts the requests of this cursor."""
    sql: str
    """Empty if the request only registers or drops tables."""
    params: Any = None
    names: tuple[str, ...] = ()
    """Names of the Arrow tables that follow the request; only this cursor sees them."""
    keep_tables: bool = False
    """Whether those tables stay registered when the statement has run."""
    drop_tables: tuple[str, ...] = ()
    """Names of tables that stayed registered and shall be dropped."""
    returns_rows: bool = True
    is_limited: bool = True
    """Whether the options bound the size of the result."""


class Rows(NamedTuple):
    """Is followed by a table if the request returns rows, and by another answer unless `is_last`."""

    is_last: bool


class Failure(NamedTuple):
    kind: str
    """The name of the exception's class."""
    text: str


class TooLarge(NamedTuple):
    """More rows, or bytes, than the options allow."""


class Interrupt(NamedTuple):
    """Interrupts this request, but not the next one on the same cursor."""

    cursor: int
    number: int


class Close(NamedTuple):
    """Closes a cursor."""

    cursor: int


class DuckDBServer:
    """An in-memory DuckDB, and a thread for each lane."""

    def __init__(self, options: DuckDBOptions, lanes: Sequence[socket.socket]) -> None:
        self._options = options
        self._cursors: dict[int, Any] = {}
        self._running: dict[int, int] = {}
        """Cursor → number of its request."""
        self._mutex = threading.Lock()
        self._root = duckdb.connect(
            ":memory:",
            config={
                "allow_community_extensions": "false",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "enable_external_access": "false",
                "memory_limit": f"{options.memory_max_bytes}B",
                "python_enable_replacements": "false",
                "temp_directory": "",
                "threads": str(options.threads),
            },
        )
        self._root.execute("SET GLOBAL TimeZone = 'UTC'")
        self._root.execute("SET lock_configuration = true")
        for lane in lanes:  # start all threads now: none can be started at the memory limit
            threading.Thread(target=self._serve_lane, args=[lane], daemon=True).start()

    def serve(self, control: socket.socket) -> NoReturn:
        """Interrupt and close cursors as the client asks, until the client is gone (`EOFError`)."""
        while True:
            message, _ = framing.receive(control)
            if isinstance(message, Interrupt):
                with self._mutex:
                    if self._running.get(message.cursor) == message.number:
                        self._cursors[message.cursor].interrupt()
            elif message.cursor in self._cursors:
                with suppress(duckdb.Error):
                    self._cursors.pop(message.cursor).close()

    def _serve_lane(self, lane: socket.socket) -> None:
        """Answer requests one by one. The last answer to each is sent when its cursor is free again."""
        try:
            while True:
                last_answer: tuple[Any, ...]
                try:
                    request, buffers = framing.receive(lane)
                    with self._request_cursor(request) as cursor:
                        last_answer = self._answer(lane, cursor, request, buffers)
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    return  # the starter has gone
                except MemoryError as error:  # Arrow raises it, too
                    last_answer = (Failure("OutOfMemoryException", str(error)),)
                except Exception as error:
                    last_answer = (Failure(type(error).__name__, str(error)),)
                framing.send(lane, *last_answer)
        except OSError:
            return

    @contextmanager
    def _request_cursor(self, request: Request) -> Iterator[Any]:
        """Yield the request's cursor, which can be interrupted meanwhile."""
        with self._mutex:
            if request.cursor not in self._cursors:
                self._cursors[request.cursor] = self._root.cursor()
            self._running[request.cursor] = request.number
        try:
            yield self._cursors[request.cursor]
        finally:
            with self._mutex:
                del self._running[request.cursor]

    def _answer(self, lane: socket.socket, cursor: Any, request: Request, buffers: list[bytearray]) -> tuple[Any, ...]:
        """Run the request, send all answers but the last, and return the last."""
        for name, buffer in zip(request.names, buffers, strict=True):
            cursor.register(name, framing.decode_table(buffer))
        try:
            if request.sql:
                result = cursor.execute(request.sql, request.params) if request.params else cursor.execute(request.sql)
            if not request.returns_rows:
                return (Rows(is_last=True),)
            return self._send_rows(lane, result.to_arrow_reader(_BATCH_ROWS), request.is_limited)
        finally:
            for name in (*request.drop_tables, *(() if request.keep_tables else request.names)):
                with suppress(duckdb.Error):  # the transaction has failed, and has dropped the name
                    cursor.unregister(name)

    def _send_rows(self, lane: socket.socket, reader: pa.RecordBatchReader, is_limited: bool) -> tuple[Any, ...]:
        """Send each batch once another one follows, and return the last."""
        rows = size = 0
        unsent: list[pa.RecordBatch] = []
        for batch in reader:
            rows += batch.num_rows
            size += batch.nbytes
            if is_limited and (rows > self._options.max_rows or size > self._options.max_bytes):
                return (TooLarge(),)
            if unsent:
                framing.send(lane, Rows(is_last=False), framing.encode_table(pa.Table.from_batches(unsent)))
            unsent = [batch]
        return Rows(is_last=True), framing.encode_table(pa.Table.from_batches(unsent, reader.schema))
