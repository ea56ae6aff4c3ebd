"""DuckDB in a worker: cursors that statements are run on, each lane one at a time.

The database can reach neither files nor the network, and no SQL changes its settings.
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

# `sql()`, which DuckDB would have us call instead, is slower for small statements, and its errors do not say where.
warnings.filterwarnings("ignore", message="Arrow output on a DB-API result", category=UserWarning)


class DuckDBOptions(msgspec.Struct, frozen=True, kw_only=True):
    memory_max_bytes: int = 1 << 30
    threads: int = 1
    """More than one slows small statements down."""
    max_rows: int = 1_000_000
    """Of one result, and of the changes of one transaction."""
    max_bytes: int = 256 << 20
    """Of one result."""


class Request(NamedTuple):
    cursor: int
    number: int
    """Counts the requests of this cursor."""
    sql: str
    """May be empty."""
    params: Any = None
    names: tuple[str, ...] = ()
    """Of the Arrow tables that come beside it, which only this cursor knows."""
    keeps: bool = False
    """They stay when the statement has run."""
    forgets: tuple[str, ...] = ()
    """Those that stayed, and shall no longer."""
    gives_rows: bool = True
    limited: bool = True
    """Whether the options say how many rows it may give."""


class Rows(NamedTuple):
    """A table beside it, if rows were asked for; another answer follows unless it is the `last`."""

    last: bool


class Failed(NamedTuple):
    kind: str
    """The exception's class."""
    text: str


class TooLarge(NamedTuple):
    """More rows, or bytes, than the options allow."""


class Interrupt(NamedTuple):
    """Of this request, not of the next one on the same cursor."""

    cursor: int
    number: int


class Close(NamedTuple):
    cursor: int


class DuckDBServer:
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
        for lane in lanes:  # all at once: at the limit, no thread can be started
            threading.Thread(target=self._serve_lane, args=[lane], daemon=True).start()

    def serve(self, control: socket.socket) -> NoReturn:
        """Until `EOFError`."""
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
        """The last answer to a request is sent when its cursor is free again."""
        try:
            while True:
                last: tuple[Any, ...]
                try:
                    request, buffers = framing.receive(lane)
                    with self._request_cursor(request) as cursor:
                        last = self._answer(lane, cursor, request, buffers)
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    return  # the starter has gone
                except MemoryError as error:  # Arrow's, too
                    last = (Failed("OutOfMemoryException", str(error)),)
                except Exception as error:
                    last = (Failed(type(error).__name__, str(error)),)
                framing.send(lane, *last)
        except OSError:
            return

    @contextmanager
    def _request_cursor(self, request: Request) -> Iterator[Any]:
        """The cursor of the request, which can be interrupted meanwhile."""
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
        """All answers but the last have been sent."""
        for name, buffer in zip(request.names, buffers, strict=True):
            cursor.register(name, framing.table_in(buffer))
        try:
            if request.sql:
                result = cursor.execute(request.sql, request.params) if request.params else cursor.execute(request.sql)
            if not request.gives_rows:
                return (Rows(last=True),)
            return self._rows(lane, result.to_arrow_reader(_BATCH_ROWS), request.limited)
        finally:
            for name in (*request.forgets, *(() if request.keeps else request.names)):
                with suppress(duckdb.Error):  # the transaction has failed: it takes the name with it
                    cursor.unregister(name)

    def _rows(self, lane: socket.socket, reader: pa.RecordBatchReader, limited: bool) -> tuple[Any, ...]:
        """Each batch is sent as it comes, when it is known that another one follows."""
        rows = size = 0
        held: list[pa.RecordBatch] = []
        for batch in reader:
            rows += batch.num_rows
            size += batch.nbytes
            if limited and (rows > self._options.max_rows or size > self._options.max_bytes):
                return (TooLarge(),)
            if held:
                framing.send(lane, Rows(last=False), framing.table_out(pa.Table.from_batches(held)))
            held = [batch]
        return Rows(last=True), framing.table_out(pa.Table.from_batches(held, reader.schema))
