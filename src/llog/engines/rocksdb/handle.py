"""The RocksDB of an open log: opened at its first use, which makes this process the owner until the log is closed."""

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
from llog.log.owners import ROCKSDB_LABEL, ROCKSDB_OWNERSHIP, Owners
from llog.log.producers import Producer
from llog.model import TopicPartition
from llog.runtime import Runtime

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import RocksStore

_GROUP_BYTES: Final = 64 << 20
"""About how many bytes of queued appends go into one write."""


class _QueuedAppend(NamedTuple):
    directory: str
    tp: TopicPartition
    columns: Columns
    producer: Producer | None
    answer: asyncio.Future[StagedAppend | LlogError]


class RocksHandle:
    """Shares one RocksDB among all users of the tables and `rocksdb` topics of one `Log`."""

    def __init__(self, directory: Path, runtime: Runtime, owners: Owners | None = None) -> None:
        self._directory = directory
        self._runtime = runtime
        self._owners = owners
        self._ownership_mutex = asyncio.Lock()
        self._open_mutex = threading.Lock()
        self._logs: RocksLogs | None = None
        self._closed = False
        self._queue: list[_QueuedAppend] = []
        self._committer: asyncio.Task[None] | None = None

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def logs_if_open(self) -> RocksLogs | None:
        """The logs in the RocksDB, or None; never opens it."""
        return self._logs

    def logs(self) -> RocksLogs:
        """Return the logs, after `open` has returned. Blocks. Raises `LogOwned` if another process has the RocksDB, and
        `MissingExtra` if the package is not installed.
        """
        logs = self._logs
        if logs is not None:
            return logs
        with self._open_mutex:
            if self._closed:
                raise StoreUnavailable("this log is closed: open another one")
            if self._logs is None:
                self._logs = RocksLogs(self._open_store(), self._runtime)
            return self._logs

    async def open(self) -> RocksLogs:
        """Open the RocksDB if needed, and return its logs. Opening goes on even if the caller is cancelled: the next
        caller gets the result, or the log closes it.

        Raises `LogOwned` if another process has the RocksDB, and `OwnerUnavailable` if its owner is not running.
        """
        logs = self._logs
        return await asyncio.shield(asyncio.ensure_future(self._open())) if logs is None else logs

    async def check(self) -> None:
        """Raise `StoreUnavailable` if the RocksDB exists, open or not, and cannot be written."""
        await asyncio.to_thread(self._check)

    async def append(
        self, directory: str, tp: TopicPartition, columns: Columns, producer: Producer | None
    ) -> StagedAppend:
        """Append durably, in the order of the calls. Concurrent appends share one write and one sync."""
        answer: asyncio.Future[StagedAppend | LlogError] = asyncio.get_running_loop().create_future()
        self._queue.append(_QueuedAppend(directory, tp, columns, producer, answer))
        if self._committer is None:
            self._committer = asyncio.create_task(self._commit_all())
        found = await answer
        if isinstance(found, LlogError):
            raise found
        return found

    async def close(self) -> None:
        """Finish the queued appends, then close the RocksDB. Idempotent."""
        self._closed = True
        while self._committer is not None:
            await asyncio.wait([self._committer])
        await asyncio.to_thread(self._close)

    async def _open(self) -> RocksLogs:
        async with self._ownership_mutex:
            if self._logs is not None or self._owners is None:
                return await asyncio.to_thread(self.logs)
            import llog.engines.rocksdb.store  # noqa: F401  # raises, before ownership is taken, without RocksDB

            await self._owners.settle(ROCKSDB_OWNERSHIP, ROCKSDB_LABEL, self._directory, "LLOG_ROCKSDB_DIR")
            try:
                logs = await asyncio.to_thread(self.logs)
            except BaseException:
                await self._owners.release(ROCKSDB_OWNERSHIP)
                raise
            await self._owners.publish(ROCKSDB_OWNERSHIP)
            return logs

    def _check(self) -> None:
        if self._logs is not None:
            self._logs.store.check()
        elif self._directory.is_dir():
            check_writable(self._directory)

    def _close(self) -> None:
        with self._open_mutex:
            logs, self._logs = self._logs, None
            if logs is not None:
                logs.close()
                logs.store.close()

    def _open_store(self) -> RocksStore:
        from llog.engines.rocksdb.store import RocksStore

        try:
            address = None if self._owners is None else self._owners.local_address
            return RocksStore.open(self._directory, address=address)
        except LogOwned as error:
            error.args = (
                f"{error}. If it is a broker, use HTTP (POST /produce, /consume, /sql), "
                "llog.connect('http://host:port'), or --url where a command has it: reads must go through it, too",
            )
            raise

    async def _commit_all(self) -> None:
        try:
            while self._queue:
                group = self._take_group()
                try:
                    answers = await asyncio.to_thread(self._commit_group, group)
                except Exception as error:
                    for each in group:
                        if not each.answer.done():
                            each.answer.set_exception(error)
                    continue
                for each, answer in zip(group, answers, strict=True):
                    if not each.answer.done():
                        each.answer.set_result(answer)
        finally:
            self._committer = None

    def _take_group(self) -> list[_QueuedAppend]:
        size = number = 0
        for each in self._queue:
            if number and size >= _GROUP_BYTES:
                break
            number, size = number + 1, size + byte_size(each.columns)
        group, self._queue = self._queue[:number], self._queue[number:]
        return group

    def _commit_group(self, group: Sequence[_QueuedAppend]) -> list[StagedAppend | LlogError]:
        """Write these appends together. One that is refused does not stop the others; if the write fails, all fail."""
        logs = self.logs()
        cells = [_record_cells(each.columns) for each in group]
        answers: list[StagedAppend | LlogError] = []
        with logs.stage() as staged:
            for each, (values, keys, headers, timestamps) in zip(group, cells, strict=True):
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


class _RecordCells(NamedTuple):
    values: Cells
    keys: Cells | None
    headers: Cells | None
    timestamps: Times | None


def _record_cells(columns: Columns) -> _RecordCells:
    values, keys, timestamps, headers, _ = columns
    if columns.count > FEW:
        return _RecordCells(values, keys, headers, timestamps)
    return _RecordCells(
        values.to_pylist(),
        None if keys is None else keys.to_pylist(),
        None if headers is None else [each or b"" for each in headers.to_pylist()],
        None if timestamps is None else timestamps.to_pylist(),
    )
