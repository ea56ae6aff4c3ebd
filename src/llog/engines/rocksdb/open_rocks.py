"""The RocksDB that one opened log holds: opened at its first use, which makes this process its owner, until the log is
closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from llog.base.durable import check_writable
from llog.batch.columns import FEW, Columns, byte_size
from llog.engines.rocksdb.envelope import Cells, Times
from llog.engines.rocksdb.logs import RocksLogs, StagedAppend
from llog.errors import LlogError, LogOwned, StoreUnavailable
from llog.log.owners import ROCKSDB, ROCKSDB_NAMED, Owners
from llog.log.producers import Producer
from llog.model import TopicPartition
from llog.runtime import Runtime

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import RocksStore

_TOGETHER_BYTES: Final = 64 << 20
"""About as much of the appends that wait goes into one write."""


class _Waiting(NamedTuple):
    directory: str
    tp: TopicPartition
    columns: Columns
    producer: Producer | None
    answer: asyncio.Future[StagedAppend | LlogError]


class OpenRocks:
    """All that use tables and topics of engine `rocksdb` through one `Log` share this."""

    def __init__(self, directory: Path, runtime: Runtime, owners: Owners | None = None) -> None:
        self._directory = directory
        self._runtime = runtime
        self._owners = owners
        self._claiming = asyncio.Lock()
        self._opening = threading.Lock()
        self._logs: RocksLogs | None = None
        self._closed = False
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def known(self) -> RocksLogs | None:
        """If it is open."""
        return self._logs

    def logs(self) -> RocksLogs:
        """Once `opened` has returned. Blocking. `LogOwned` if another process has it, `MissingExtra` if RocksDB is not
        installed.
        """
        logs = self._logs
        if logs is not None:
            return logs
        with self._opening:
            if self._closed:
                raise StoreUnavailable("this log is closed: open another one")
            if self._logs is None:
                self._logs = RocksLogs(self._opened_store(), self._runtime)
            return self._logs

    async def opened(self) -> RocksLogs:
        """An opening goes on though its caller is cancelled: it is the next caller's, or is closed with the log.

        `LogOwned` if another process has it, `OwnerUnavailable` if the one that has it does not run.
        """
        logs = self._logs
        return await asyncio.shield(asyncio.ensure_future(self._open())) if logs is None else logs

    async def check(self) -> None:
        """`StoreUnavailable` if it is there, open or not, and would take no changes."""
        await asyncio.to_thread(self._check)

    async def append(
        self, directory: str, tp: TopicPartition, columns: Columns, producer: Producer | None
    ) -> StagedAppend:
        """Durable when it returns. Appends that come together share one write and one sync; their order is that of the
        calls.
        """
        answer: asyncio.Future[StagedAppend | LlogError] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(directory, tp, columns, producer, answer))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        found = await answer
        if isinstance(found, LlogError):
            raise found
        return found

    async def close(self) -> None:
        """Idempotent. Appends that were begun are finished."""
        self._closed = True
        while self._writing is not None:
            await asyncio.wait([self._writing])
        await asyncio.to_thread(self._close)

    async def _open(self) -> RocksLogs:
        async with self._claiming:
            if self._logs is not None or self._owners is None:
                return await asyncio.to_thread(self.logs)
            import llog.engines.rocksdb.store  # noqa: F401  # without RocksDB, nothing is claimed

            await self._owners.settle(ROCKSDB, ROCKSDB_NAMED, self._directory, "LLOG_ROCKSDB_DIR")
            try:
                logs = await asyncio.to_thread(self.logs)
            except BaseException:
                await self._owners.release(ROCKSDB)
                raise
            await self._owners.publish(ROCKSDB)
            return logs

    def _check(self) -> None:
        if self._logs is not None:
            self._logs.store.check()
        elif self._directory.is_dir():
            check_writable(self._directory)

    def _close(self) -> None:
        with self._opening:
            logs, self._logs = self._logs, None
            if logs is not None:
                logs.close()
                logs.store.close()

    def _opened_store(self) -> RocksStore:
        from llog.engines.rocksdb.store import RocksStore

        try:
            return RocksStore.open(self._directory, address=None if self._owners is None else self._owners.address)
        except LogOwned as error:
            error.args = (
                f"{error}. If it is a broker, use HTTP (POST /produce, /consume, /sql), "
                "llog.connect('http://host:port'), or "
                "--url where a command has it: what it owns is read through it, too",
            )
            raise

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                together = self._next()
                try:
                    answers = await asyncio.to_thread(self._write, together)
                except Exception as error:
                    for each in together:
                        if not each.answer.done():
                            each.answer.set_exception(error)
                    continue
                for each, answer in zip(together, answers, strict=True):
                    if not each.answer.done():
                        each.answer.set_result(answer)
        finally:
            self._writing = None

    def _next(self) -> list[_Waiting]:
        size = number = 0
        for each in self._waiting:
            if number and size >= _TOGETHER_BYTES:
                break
            number, size = number + 1, size + byte_size(each.columns)
        together, self._waiting = self._waiting[:number], self._waiting[number:]
        return together

    def _write(self, together: Sequence[_Waiting]) -> list[StagedAppend | LlogError]:
        """One that fails does not keep the others; if the write fails, all do."""
        logs = self.logs()
        prepared = [_prepared(each.columns) for each in together]
        answers: list[StagedAppend | LlogError] = []
        with logs.staged() as staged:
            for each, (values, keys, headers, timestamps) in zip(together, prepared, strict=True):
                try:
                    answer: StagedAppend | LlogError = staged.append(
                        each.directory,
                        each.tp.partition,
                        values,
                        keys=keys,
                        headers=headers,
                        timestamps=timestamps,
                        now_ms=self._runtime.now_ms(),
                        producer=each.producer,
                        what=str(each.tp),
                    )
                except LlogError as error:
                    answer = error
                answers.append(answer)
            if len(staged.changes):
                staged.commit()
        return answers


class _Prepared(NamedTuple):
    values: Cells
    keys: Cells | None
    headers: Cells | None
    timestamps: Times | None


def _prepared(columns: Columns) -> _Prepared:
    values, keys, timestamps, headers, _ = columns
    if columns.count > FEW:
        return _Prepared(values, keys, headers, timestamps)
    return _Prepared(
        values.to_pylist(),
        None if keys is None else keys.to_pylist(),
        None if headers is None else [each or b"" for each in headers.to_pylist()],
        None if timestamps is None else timestamps.to_pylist(),
    )
