"""SQL: `POST /sql`, `POST /sql/insert` and `POST /sql/names`. The statements of a request run in a session of its own.

The database is opened at the start if tables exist, else by the first request: a broker without SQL opens no RocksDB.
Statements end when their time is over, when the client goes, and when the broker stops, after a moment to finish. A
transaction that a request leaves open is rolled back, and the request is answered with an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import pyarrow as pa
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from llog.base.units import format_duration_ms
from llog.broker.http.answer_shapes import NamesAnswer, SqlAnswer
from llog.broker.http.answers import json_answer
from llog.broker.http.arrow import MEDIA_TYPE, decode_stream
from llog.broker.http.bodies import Bodies
from llog.broker.http.disconnects import until_gone
from llog.broker.http.operations import Operation
from llog.broker.http.requests import JSON, content_type, decode_body, decode_query, is_from_page
from llog.broker.http.routing import Route
from llog.config import Settings
from llog.engines.rocksdb.engine import rocksdb_of
from llog.engines.rocksdb.topics import require_rocks
from llog.errors import (
    InvalidArgument,
    LogOwned,
    MissingExtra,
    OutcomeUnknown,
    OwnerUnavailable,
    ResultTooLarge,
    StatementTimeout,
    StoreUnavailable,
    WrongRole,
)
from llog.log.log import Log
from llog.log.owners import ROCKSDB_OWNERSHIP
from llog.sql.json_values import json_rows, type_name
from llog.sql.opening import open_database
from llog.sql.result import Result
from llog.sql.wire import ALL_RESULTS, params_in, stream_of

if TYPE_CHECKING:
    from llog.sql.database import Database
    from llog.sql.session import DatabaseSession

T = TypeVar("T")

logger: Final = logging.getLogger("llog.sql")

_TEXT: Final = ("application/sql", "text/plain")
_STOP_GRACE_S: Final = 1.0
_RETRY_S: Final = 2.0
_SMALL_BYTES: Final = 64 << 10
"""Answers and parameters up to this size are converted on the event loop: a thread costs more."""
_ROW_BYTES: Final = 256
"""Bytes that a row of parameters counts for."""


class SqlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`params` are the values of the statements' parameters, `rows` those of many runs of one statement, as in
    `llog.sql.wire`.
    """

    sql: str
    params: list[Any] | dict[str, Any] = []
    rows: list[list[Any]] | None = None
    member: Annotated[str, Meta(max_length=200)] | None = None


class InsertQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    table: str


_EXECUTE: Final = Operation(
    "SQL",
    "Run SQL statements",
    {JSON: SqlRequest, **dict.fromkeys(_TEXT, str)},
    answers={JSON: SqlAnswer, MEDIA_TYPE: None},
)
_INSERT: Final = Operation(
    "SQL",
    "Insert the rows of an Arrow stream",
    {MEDIA_TYPE: None},
    InsertQuery,
    answers={JSON: SqlAnswer, MEDIA_TYPE: None},
)
_NAMES: Final = Operation("SQL", "List the names that statements may use", answers={JSON: NamesAnswer})


class SqlRoutes:
    def __init__(self, log: Log, settings: Settings, stopping: asyncio.Event, bodies: Bodies) -> None:
        self._log = log
        self._settings = settings
        self._stopping = stopping
        self._bodies = bodies
        self._opening = asyncio.Lock()
        self._database: Database | None = None
        self._retrying: asyncio.Future[None] | None = None

    def routes(self) -> list[Route]:
        """Every broker has these routes, whatever its role: the handlers' refusal says which role answers."""
        wait_ms = self._settings.sql_timeout_ms
        find_owner = self.find_tables_owner if self._settings.role == "both" else None
        return [
            Route("all", "POST", "/sql", self._execute, wait_ms=wait_ms, find_owner=find_owner, operation=_EXECUTE),
            Route(
                "all", "POST", "/sql/insert", self._insert, wait_ms=wait_ms, find_owner=find_owner, operation=_INSERT
            ),
            Route("all", "POST", "/sql/names", self._names, wait_ms=wait_ms, find_owner=find_owner, operation=_NAMES),
        ]

    async def find_tables_owner(self) -> str | None:
        """Return the address of the broker that owns the tables; None if this one does, or no broker does yet."""
        owners, rocksdb = self._log.owners, rocksdb_of(self._log)
        if owners is None or rocksdb.is_open:
            return None
        if await owners.home(ROCKSDB_OWNERSHIP) is None:
            return None
        try:
            await (await require_rocks(self._log, rocksdb.rocks, "SQL")).open()
        except LogOwned as error:
            return error.address
        except (OwnerUnavailable, StoreUnavailable, MissingExtra):
            pass  # statements without tables work, and those with tables raise it again
        return None

    async def start(self) -> None:
        """Open the tables if they exist: events in their outbox must not wait for a request."""
        rocks = rocksdb_of(self._log).rocks
        if self._settings.role == "both" and rocks is not None and rocks.directory.is_dir():
            try:
                await self._open()
            except (MissingExtra, OwnerUnavailable) as error:
                logger.warning("the tables in %s are left alone: %s", rocks.directory, error)
            except StoreUnavailable as error:  # all else can be served
                logger.warning("the tables in %s cannot be opened yet: %s", rocks.directory, error)
                self._retrying = asyncio.ensure_future(self._open_later(rocks.directory))

    async def take_up(self) -> None:
        """Take up the tables that another process of this machine has left."""
        if self._database is not None and self._settings.role == "both":
            await self._database.start()

    async def close(self) -> None:
        """After this, the log may be closed."""
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.gather(self._retrying, return_exceptions=True)
        async with self._opening:
            if self._database is not None:
                await self._database.close()
                self._database = None

    async def _execute(self, request: Request) -> Response:
        self._check_role()
        command = await self._read_request(request)
        params = params_in(command.params)

        async def run(session: DatabaseSession) -> list[Result]:
            if command.rows is not None:
                given = command.rows
                rows = await _run_off_loop(len(given) * _ROW_BYTES, lambda: [list(params_in(row)) for row in given])
                return [await session.execute_many(command.sql, rows)]
            return await session.execute(command.sql, params)

        return await self._answer_results(request, command.member, run)

    async def _insert(self, request: Request) -> Response:
        self._check_role()
        table = decode_query(InsertQuery, request.query_params).table
        async with self._bodies.read(request, MEDIA_TYPE) as body:
            data = decode_stream(body, lambda schema: schema, lambda rows, _: rows)

            async def run(session: DatabaseSession) -> list[Result]:
                return [await session.insert(table, data)]

            return await self._answer_results(request, None, run)

    async def _names(self, request: Request) -> Response:
        self._check_role()
        names = await self._run(request, None, lambda session: session.names())
        return json_answer(names._asdict())

    def _check_role(self) -> None:
        if self._settings.role != "both":
            raise WrongRole(
                f"this broker has the role {self._settings.role!r}, and SQL both reads and writes, in the one "
                "process that owns the tables: ask a broker with the role 'both' (--role, LLOG_ROLE)"
            )

    async def _read_request(self, request: Request) -> SqlRequest:
        """Return the request in a body of JSON, or of SQL alone."""
        kind = content_type(request)
        if kind == "text/plain" and is_from_page(request):
            raise InvalidArgument(  # a page may send it anywhere, without its visitor knowing
                "content-type is text/plain, which is not taken from a web page: send application/sql or "
                "application/json"
            )
        if kind not in (JSON, *_TEXT):
            raise InvalidArgument(
                f"content-type is {kind[:80]!r}: it must be {JSON}, or {' or '.join(_TEXT)} for SQL alone"
            )
        async with self._bodies.read(request, kind) as body:
            if kind == JSON:
                command = decode_body(SqlRequest, body)
                if command.rows is not None and command.params:
                    raise InvalidArgument("the body has params and rows: rows are the parameters, one run for each")
                return command
            try:
                return SqlRequest(sql=body.decode())
            except UnicodeDecodeError as error:
                raise InvalidArgument(f"the body is no UTF-8: {error}") from None

    async def _answer_results(
        self, request: Request, member: str | None, run: Callable[[DatabaseSession], Awaitable[list[Result]]]
    ) -> Response:
        start = time.perf_counter()
        results = await self._run(request, member, run)
        size = sum(result.table.nbytes for result in results if result.table is not None)
        if size > self._settings.sql_answer_max_bytes:
            raise ResultTooLarge(
                f"the rows have {size} bytes, and at most {self._settings.sql_answer_max_bytes} are answered "
                "(LLOG_SQL_ANSWER_MAX_BYTES): ask for fewer with LIMIT. The statements were run, and what they "
                "changed stays changed"
            )
        accepted = request.headers.get("accept", "")
        ms = round((time.perf_counter() - start) * 1000, 3)
        if MEDIA_TYPE in accepted:
            chosen = results if ALL_RESULTS in accepted.replace(" ", "") else [_main_result(results)]
            body = memoryview(await _run_off_loop(size, lambda: stream_of(chosen)))
            return Response(body, headers={"llog-ms": str(ms)}, media_type=MEDIA_TYPE)
        return Response(await _run_off_loop(size, lambda: _encode_json(results, ms)), media_type=JSON)

    async def _run(self, request: Request, member: str | None, run: Callable[[DatabaseSession], Awaitable[T]]) -> T:
        """Return the result of `run` in a session of its own, which is closed whatever happens."""
        session = (await self._open()).session(member=member or "")  # an ACK without a name is for all of them
        task = asyncio.ensure_future(run(session))
        try:
            await self._wait_for_end(request, task)
            result = task.result()
            if session.in_transaction:
                raise InvalidArgument(
                    "the statements end in an open transaction, which was rolled back: a transaction is one "
                    "request, from BEGIN to COMMIT"
                )
            return result
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await session.close()

    async def _wait_for_end(self, request: Request, task: asyncio.Future[Any]) -> None:
        """Return when the task is done; raise if it is cut short by its time, its client or the end of the broker."""
        gone, stopping = asyncio.ensure_future(until_gone(request)), asyncio.ensure_future(self._stopping.wait())
        try:
            timeout_ms = self._settings.sql_timeout_ms
            await asyncio.wait((task, gone, stopping), timeout=timeout_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await asyncio.wait((task, gone), timeout=_STOP_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return
            if gone.done():
                raise ClientDisconnect
            if stopping.done():
                raise OutcomeUnknown(
                    "the broker stops, and the statements had not ended: they may have been run in part"
                )
            raise StatementTimeout(
                f"the statements ran for {format_duration_ms(timeout_ms)} and were cancelled "
                "(LLOG_SQL_TIMEOUT_MS); those before the last one may have been run"
            )
        finally:
            gone.cancel()
            stopping.cancel()

    async def _open_later(self, directory: Path) -> None:
        while self._database is None:
            await asyncio.sleep(_RETRY_S)
            with suppress(StoreUnavailable):
                await self._open()
        logger.warning("the tables in %s are open now", directory)

    async def _open(self) -> Database:
        """Return the database, which the first call opens."""
        async with self._opening:
            if self._database is None:
                self._database = await open_database(self._log, self._settings, stopping=self._stopping)
            return self._database


def _main_result(results: list[Result]) -> Result:
    """Return the result to answer where there is room for one: the last with rows, else the last."""
    with_rows = [result for result in results if result.table is not None]
    return (with_rows or results or [Result("", None, 0)])[-1]


async def _run_off_loop(size: int, convert: Callable[[], T]) -> T:
    """Return the result of `convert`, which runs in a thread unless it has little to do."""
    return convert() if size <= _SMALL_BYTES else await asyncio.to_thread(convert)


def _encode_json(results: list[Result], ms: float) -> bytes:
    return msgspec.json.encode({"results": [_result_fields(result) for result in results], "ms": ms})


def _result_fields(result: Result) -> dict[str, Any]:
    table = pa.table({}) if result.table is None else result.table
    fields = {
        "kind": result.kind,
        "columns": [{"name": field.name, "type": type_name(field.type)} for field in table.schema],
        "rows": list(json_rows(table)),
        "changed": result.changed,
    }
    if result.warnings:
        fields["warnings"] = result.warnings
    if result.member is not None:
        fields["member"] = result.member
    return fields
