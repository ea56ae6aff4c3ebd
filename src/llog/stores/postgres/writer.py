"""Writes to a PostgreSQL metadata store: group commit, and the session's heartbeat.

All calls that arrive while a request is under way share the next request and its one commit.
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
from llog.stores.meta import version_mismatch
from llog.stores.postgres.connections import FAILURES, OPERATION_SECONDS, Connection, Identity, Server, is_answer
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
"""The time that a call must have left for its request to begin: the outcome of a request that is cut off is unknown."""
CLOSE_SECONDS: Final = 5.0
NOTICE_BYTES_MAX: Final = 7000
"""The size of one notification. PostgreSQL's limit is 8000 bytes with the revision."""
NOTICES_MAX: Final = 16
"""Notifications of one request. If the names of its keys need more, every watch is woken."""

_NO_VERSION: Final = -3
"""An expected version that no key has."""
_VERSION_MAX: Final = (1 << 63) - 1
_REPEATABLE: Final = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
_REPEATS_MAX: Final = 3


class Operation(msgspec.Struct, frozen=True, gc=False):
    """One operation as the server's function takes it; `schema` has the kinds."""

    kind: int
    key: bytes = b""
    value: bytes = b""
    expected: int = ANY_VERSION


def put_operation(key: str, value: bytes, expected: int | None, *, ephemeral: bool = False) -> Operation:
    return Operation(PUT_EPHEMERAL if ephemeral else PUT, key.encode(), value, _to_server_version(expected))


def delete_operation(key: str, expected: int | None) -> Operation:
    return Operation(DELETE, key.encode(), b"", _to_server_version(expected))


def delete_range_operation(start: str, end: str) -> Operation:
    return Operation(DELETE_RANGE, start.encode(), end.encode())


def decode_result(operation: Operation, result: int) -> int | VersionMismatch:
    """Return the new version, 1 or 0 if a delete found the key or not, or the mismatch that the server reports."""
    if result >= 0:
        return result
    return version_mismatch(operation.key.decode(), operation.expected, -2 - result)


def _to_server_version(version: int | None) -> int:
    if version is None:
        return ANY_VERSION
    return _NO_VERSION if version < -1 else min(version, _VERSION_MAX)


class _Job(NamedTuple):
    """One call, and the future of its answer."""

    operations: Sequence[Operation]
    size: int
    deadline: float
    future: asyncio.Future[tuple[list[int], Identity]]


class Writer:
    """The writes of one event loop."""

    def __init__(self, server: Server, session_timeout_ms: int) -> None:
        self._server = server
        self._connection = Connection(server)
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
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._is_replicated = True
        """False once the server warned that it answers a commit that its standbys do not have."""

    async def write(self, operations: Sequence[Operation], size: int = 0) -> list[int]:
        """Return a result for each operation, in their order, once they are durable."""
        results, _ = await self._submit(operations, size)
        return results

    async def confirm(self) -> Identity:
        """Return the identity of the server in charge, which a commit proves."""
        _, identity = await self._submit([Operation(CONFIRM)], 0)
        return identity

    async def end_sessions(self) -> None:
        """Delete the keys of sessions that were not renewed. If this fails, the next write does it."""
        with suppress(LlogError):
            await self._submit((), 0)

    async def close(self) -> None:
        """Finish the calls that were made before, and end the session. Gives up on a server that does not answer."""
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()
        with suppress(TimeoutError, LlogError):
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._session is not None:
                    await self.write([Operation(END_SESSION)])
                elif self._task is not None:
                    await asyncio.wait([self._task])
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail(
            list(self._queue),
            StoreUnavailable(f"{self._server.name} was closed before the write began: open another store"),
        )
        self._queue.clear()
        await self._connection.close()

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
                opened = await self._connection.open(self._queue[0].deadline - REQUEST_SECONDS_MIN)
                if self._statement is None or self._statement[0] is not opened.client:
                    await self._prepare(opened.client, self._queue[0].deadline - REQUEST_SECONDS_MIN)
            except Exception as error:
                # Mostly `StoreUnavailable`; and a defect of llog must reach a caller, not end the task.
                late = loop.time() + REQUEST_SECONDS_MIN
                self._fail([self._queue.popleft()], error)
                while self._queue and self._queue[0].deadline <= late:
                    self._fail([self._queue.popleft()], error)
                continue
            group = self._take_group(loop.time() + REQUEST_SECONDS_MIN)
            if group:
                await self._transact(group, opened.identity)

    async def _prepare(self, connection: Any, deadline: float) -> None:
        """Have the server parse the statement before it is used: a later failure may come after the write happened."""
        try:
            async with asyncio.timeout_at(deadline):
                self._statement = (connection, await connection.prepare(self._apply))
        except FAILURES as error:
            self._connection.drop()
            raise self._server.unavailable(error) from error
        connection.add_log_listener(self._note_warning)

    def _take_group(self, late: float) -> list[_Job]:
        """Remove the calls of one request from the queue.

        Cancelled calls are left out, and calls that have too little time left fail.
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
            results = await self._request_with_retries(operations, group[0].deadline)
        except asyncio.CancelledError:
            self._connection.drop()
            self._fail(group, self._unknown("the store was closed"))
            raise
        except Exception as error:  # a defect of llog must reach the callers, too, and not end the task
            if not isinstance(error, LlogError):
                self._connection.drop()
            self._fail(group, error)
            return
        at = 0
        for job in group:
            if not job.future.done():
                job.future.set_result((results[at : at + len(job.operations)], identity))
            at += len(job.operations)

    async def _request_with_retries(self, operations: list[Operation], deadline: float) -> list[int]:
        """Make the request, and repeat it after a deadlock or serialization failure with other clients."""
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
            self._beat_at = loop.time() + self._beat_seconds / 4  # if the request fails
        kinds = [each.kind for each in operations]
        keys = [each.key for each in operations]
        values = [each.value for each in operations]
        expected = [each.expected for each in operations]
        try:
            async with asyncio.timeout_at(deadline):
                session, results = await statement.fetchrow(
                    *(self._session, self._timeout_ms, renew, kinds, keys, values, expected, _notices(operations))
                )
        except _REPEATABLE:
            raise
        except FAILURES as error:
            self._connection.drop()
            raise self._server.unavailable(error) if is_answer(error) else self._unknown(error) from error
        if not self._is_replicated:
            raise self._unknown("its standbys may not have it")
        if renew:
            self._beat_at = loop.time() + self._beat_seconds
        self._session = session
        if session is not None and (self._heartbeat_task is None or self._heartbeat_task.done()):
            self._heartbeat_task = loop.create_task(self._keep_alive())
        return list(results)

    async def _keep_alive(self) -> None:
        """Keep the session alive while there is one.

        A session that has ended stays ended: other processes may have seen that its keys are gone.
        """
        loop = asyncio.get_running_loop()
        while self._session is not None:
            await asyncio.sleep(max(self._beat_at - loop.time(), self._beat_seconds / 8))
            if self._session is not None and loop.time() >= self._beat_at:
                with suppress(LlogError):
                    await self._submit((), 0)

    def _note_warning(self, _: Any, message: Any) -> None:
        # An operator has cancelled the wait for a synchronous standby: the server answers a commit that only it has.
        if getattr(message, "server_source_function", None) == "SyncRepWaitForLSN":
            self._is_replicated = False

    def _unknown(self, reason: object) -> OutcomeUnknown:
        text = " ".join(str(reason).split())[:200] or type(reason).__name__
        return OutcomeUnknown(f"{self._server.name}: the write may have happened ({text}): read to find out")

    def _fail(self, jobs: list[_Job], error: Exception) -> None:
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)


def _notices(operations: list[Operation]) -> list[str] | None:
    """Return the texts to notify, which name the keys that may change; None if they would be too long or too many."""
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
