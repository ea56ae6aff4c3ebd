"""Writes to a PostgreSQL metadata store: group commit, and the session's heartbeat.

Whatever was asked for while a request was under way shares the next one, and its one commit.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec

from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable, VersionMismatch
from llog.stores.meta import mismatch
from llog.stores.postgres.connections import FAILURES, OPERATION_SECONDS, Identity, Line, Server, is_answer
from llog.stores.postgres.schema import (
    ANY_VERSION,
    CONFIRM,
    DELETE,
    DELETE_RANGE,
    END_SESSION,
    PUT,
    PUT_EPHEMERAL,
)

GROUP_OPERATIONS_MAX: Final = 4096
GROUP_BYTES_MAX: Final = 16 << 20
REQUEST_SECONDS_MIN: Final = 1.0
"""What must be left of a call's time for a request to begin: one that is cut off leaves its outcome unknown."""
CLOSE_SECONDS: Final = 5.0
NOTICE_BYTES_MAX: Final = 7000
"""Of one notification; PostgreSQL's limit is 8000 with the revision."""
NOTICES_MAX: Final = 16
"""Of one request. If the names of its keys need more, every watch is woken."""

_NEVER: Final = -3
_VERSION_MAX: Final = (1 << 63) - 1
_REPEATABLE: Final = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
_REPEATS_MAX: Final = 3


class Operation(msgspec.Struct, frozen=True, gc=False):
    kind: int
    key: bytes = b""
    value: bytes = b""
    expected: int = ANY_VERSION


def put(key: str, value: bytes, expected: int | None, *, ephemeral: bool = False) -> Operation:
    return Operation(PUT_EPHEMERAL if ephemeral else PUT, key.encode(), value, _expected(expected))


def delete(key: str, expected: int | None) -> Operation:
    return Operation(DELETE, key.encode(), b"", _expected(expected))


def delete_range(start: str, end: str) -> Operation:
    return Operation(DELETE_RANGE, start.encode(), end.encode())


def outcome(operation: Operation, result: int) -> int | VersionMismatch:
    """Return what the server's result means: a version, or 1 or 0 for a key that a delete found or not."""
    if result >= 0:
        return result
    return mismatch(operation.key.decode(), operation.expected, -2 - result)


def _expected(version: int | None) -> int:
    if version is None:
        return ANY_VERSION
    return _NEVER if version < -1 else min(version, _VERSION_MAX)


class _Job(NamedTuple):
    """One call, and where its answer goes."""

    operations: Sequence[Operation]
    size: int
    deadline: float
    future: asyncio.Future[tuple[list[int], Identity]]


class Writer:
    """Belongs to one event loop."""

    def __init__(self, server: Server, session_timeout_ms: int) -> None:
        self._server = server
        self._line = Line(server)
        self._apply = (
            f"SELECT o_session, o_results FROM {server.address.schema}.llog_apply($1, $2, $3, $4, $5, $6, $7, $8)"
        )
        self._statement: Any = None
        self._timeout_ms = session_timeout_ms
        self._beat_seconds = session_timeout_ms / 3000
        self._beat_at = 0.0
        self._session: int | None = None
        self._queue: deque[_Job] = deque()
        self._task: asyncio.Task[None] | None = None
        self._heart: asyncio.Task[None] | None = None
        self._is_replicated = True
        """False once the server said that it answers a commit that its standbys do not have."""

    async def write(self, operations: Sequence[Operation], size: int = 0) -> list[int]:
        """Return a result for each operation, in their order, once they are durable."""
        results, _ = await self._submit(operations, size)
        return results

    async def confirm(self) -> Identity:
        """Return who is in charge, on the strength of a commit."""
        _, identity = await self._submit([Operation(CONFIRM)], 0)
        return identity

    async def end_sessions(self) -> None:
        """Have the keys of sessions deleted that were not renewed. A failure is left to the next one who writes."""
        with suppress(LlogError):
            await self._submit((), 0)

    async def close(self) -> None:
        """Finish what was asked for before, and end the session. Gives up on a server that does not answer."""
        if self._heart is not None:
            self._heart.cancel()
        with suppress(TimeoutError, LlogError):
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._session is not None:
                    await self.write([Operation(END_SESSION)])
                elif self._task is not None:
                    await asyncio.wait([self._task])
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail(list(self._queue), StoreUnavailable(f"{self._server.name} was closed before the write began"))
        self._queue.clear()
        await self._line.close()

    async def _submit(self, operations: Sequence[Operation], size: int) -> tuple[list[int], Identity]:
        loop = asyncio.get_running_loop()
        job = _Job(operations, size, loop.time() + OPERATION_SECONDS, loop.create_future())
        self._queue.append(job)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return await job.future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            try:
                link = await self._line.link(self._queue[0].deadline - REQUEST_SECONDS_MIN)
                if self._statement is None or self._statement[0] is not link.connection:
                    await self._prepare(link.connection, self._queue[0].deadline - REQUEST_SECONDS_MIN)
            except Exception as error:
                # Mostly `StoreUnavailable`; and a defect of ours must reach a caller, not end the task.
                late = loop.time() + REQUEST_SECONDS_MIN
                self._fail([self._queue.popleft()], error)
                while self._queue and self._queue[0].deadline <= late:
                    self._fail([self._queue.popleft()], error)
                continue
            group = self._take(loop.time() + REQUEST_SECONDS_MIN)
            if group:
                await self._transact(group, link.identity)

    async def _prepare(self, connection: Any, deadline: float) -> None:
        """Have the server parse the call beforehand: what fails later was sent, and may have happened."""
        try:
            async with asyncio.timeout_at(deadline):
                self._statement = (connection, await connection.prepare(self._apply))
        except FAILURES as error:
            self._line.drop()
            raise self._server.unavailable(error) from error
        connection.add_log_listener(self._note_warning)

    def _take(self, late: float) -> list[_Job]:
        """Remove from the queue what one request does: nobody's whose caller has gone, or who has too little time
        left.
        """
        group: list[_Job] = []
        count = size = 0
        while self._queue and count < GROUP_OPERATIONS_MAX and size < GROUP_BYTES_MAX:
            job = self._queue.popleft()
            if job.future.done():
                continue
            if job.deadline < late:
                self._fail([job], self._server.unavailable(TimeoutError()))
                continue
            group.append(job)
            count += len(job.operations)
            size += job.size
        return group

    async def _transact(self, group: list[_Job], identity: Identity) -> None:
        operations = [each for job in group for each in job.operations]
        try:
            results = await self._repeated(operations, group[0].deadline)
        except asyncio.CancelledError:
            self._line.drop()
            self._fail(group, self._unknown("the store was closed"))
            raise
        except Exception as error:  # a defect of ours must reach the callers, too, and not end the task
            if not isinstance(error, LlogError):
                self._line.drop()
            self._fail(group, error)
            return
        at = 0
        for job in group:
            if not job.future.done():
                job.future.set_result((results[at : at + len(job.operations)], identity))
            at += len(job.operations)

    async def _repeated(self, operations: list[Operation], deadline: float) -> list[int]:
        """Request until it does not meet what other clients of the server do to its locks."""
        for _ in range(_REPEATS_MAX):
            try:
                return await self._request(operations, deadline)
            except _REPEATABLE as raised:  # nothing happened
                error = raised
        raise self._server.unavailable(error) from error

    async def _request(self, operations: list[Operation], deadline: float) -> list[int]:
        loop = asyncio.get_running_loop()
        is_ephemeral = any(each.kind == PUT_EPHEMERAL for each in operations)
        renew = is_ephemeral or (self._session is not None and loop.time() >= self._beat_at)
        _, statement = self._statement
        self._is_replicated = True
        if renew:
            self._beat_at = loop.time() + self._beat_seconds / 4  # unless it goes well
        kinds = [each.kind for each in operations]
        keys = [each.key for each in operations]
        values = [each.value for each in operations]
        expected = [each.expected for each in operations]
        try:
            async with asyncio.timeout_at(deadline):
                session, results = await statement.fetchrow(
                    *(self._session, self._timeout_ms, renew, kinds, keys, values, expected, _touched(operations))
                )
        except _REPEATABLE:
            raise
        except FAILURES as error:
            self._line.drop()
            raise self._server.unavailable(error) if is_answer(error) else self._unknown(error) from error
        if not self._is_replicated:
            raise self._unknown("its standbys may not have it")
        if renew:
            self._beat_at = loop.time() + self._beat_seconds
        self._session = session
        if session is not None and (self._heart is None or self._heart.done()):
            self._heart = loop.create_task(self._beat())
        return list(results)

    async def _beat(self) -> None:
        """Keep the session alive for as long as there is one. One that has ended stays ended: others may have seen its
        keys gone.
        """
        loop = asyncio.get_running_loop()
        while self._session is not None:
            await asyncio.sleep(max(self._beat_at - loop.time(), self._beat_seconds / 8))
            if self._session is not None and loop.time() >= self._beat_at:
                with suppress(LlogError):
                    await self._submit((), 0)

    def _note_warning(self, _: Any, message: Any) -> None:
        # Somebody has cancelled the wait for a synchronous standby: the commit is answered though only this server has
        # it.
        if getattr(message, "server_source_function", None) == "SyncRepWaitForLSN":
            self._is_replicated = False

    def _unknown(self, reason: object) -> OutcomeUnknown:
        said = " ".join(str(reason).split())[:200] or type(reason).__name__
        return OutcomeUnknown(f"{self._server.name}: the write may have happened ({said}): read to find out")

    def _fail(self, jobs: list[_Job], error: Exception) -> None:
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)


def _touched(operations: list[Operation]) -> list[str] | None:
    """Return texts that name the keys which may change, short enough to be notified; None if they would be too long or
    too many.
    """
    if any(each.kind > DELETE for each in operations):
        return None
    notices: list[str] = []
    names: list[str] = []
    size = 0
    for key in {each.key: None for each in operations}:
        name = json.dumps(key.decode())
        if len(name) > NOTICE_BYTES_MAX or len(notices) == NOTICES_MAX:
            return None
        if size + len(name) > NOTICE_BYTES_MAX:
            notices.append(f"[{','.join(names)}]")
            names, size = [], 0
        names.append(name)
        size += len(name) + 1
    return [*notices, f"[{','.join(names)}]"]
