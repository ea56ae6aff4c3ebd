"""Keyed logs for programs without an event loop: the same calls, blocking, from any thread.

Open a log in the process that uses it, after any fork.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import pyarrow as pa

from llog.api.portal import run
from llog.config import Settings
from llog.errors import InvalidArgument
from llog.keyed.model import (
    Config,
    CountOptions,
    KeyRange,
    LogEntry,
    Ranges,
    Records,
    RetentionConfig,
    ScanOptions,
    Segment,
    TimeRange,
    WriteOptions,
)
from llog.keyed.reader import DEFAULT_SCAN, KeyedLogReader, scan_options
from llog.keyed.scanner import entries_of
from llog.keyed.writer import KeyedLog
from llog.runtime import Runtime

L = TypeVar("L", bound=KeyedLogReader, covariant=True)
T = TypeVar("T")


class SyncKeyedLogReader(Generic[L]):
    """`KeyedLogReader`, blocking. Iterators fetch records as they go; an unfinished one is closed with the log."""

    def __init__(self, opened: L) -> None:
        self._log = opened
        self._pid = os.getpid()

    @classmethod
    def open(
        cls,
        url: str,
        config: Config | None = None,
        *,
        settings: Settings | None = None,
        runtime: Runtime | None = None,
    ) -> SyncKeyedLogReader[KeyedLogReader]:
        return SyncKeyedLogReader(run(KeyedLogReader.open(url, config, settings=settings, runtime=runtime)))

    def close(self) -> None:
        self._run(self._log.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def metrics(self) -> dict[str, int]:
        return self._log.metrics()

    def scan(self, key: bytes, seq_range: Ranges = None, *, time_range: TimeRange | None = None) -> Iterator[LogEntry]:
        return self._entries(lambda: self._log.scan_batches(key, seq_range, scan_options(time_range)))

    def scan_with_options(self, key: bytes, seq_range: Ranges, options: ScanOptions) -> Iterator[LogEntry]:
        return self._entries(lambda: self._log.scan_batches(key, seq_range, options))

    def scan_batches(
        self, key: bytes, seq_range: Ranges = None, options: ScanOptions = DEFAULT_SCAN
    ) -> Iterator[pa.RecordBatch]:
        return self._iterate(lambda: self._log.scan_batches(key, seq_range, options))

    def scan_prefix(
        self, prefix: bytes, seq_range: Ranges = None, *, time_range: TimeRange | None = None
    ) -> Iterator[LogEntry]:
        return self._entries(lambda: self._log.scan_prefix_batches(prefix, seq_range, scan_options(time_range)))

    def scan_prefix_batches(
        self, prefix: bytes, seq_range: Ranges = None, options: ScanOptions = DEFAULT_SCAN
    ) -> Iterator[pa.RecordBatch]:
        return self._iterate(lambda: self._log.scan_prefix_batches(prefix, seq_range, options))

    def scan_keys(
        self, key_range: KeyRange, seq_range: Ranges = None, *, time_range: TimeRange | None = None
    ) -> Iterator[LogEntry]:
        return self._entries(lambda: self._log.scan_keys_batches(key_range, seq_range, scan_options(time_range)))

    def scan_keys_batches(
        self, key_range: KeyRange, seq_range: Ranges = None, options: ScanOptions = DEFAULT_SCAN
    ) -> Iterator[pa.RecordBatch]:
        return self._iterate(lambda: self._log.scan_keys_batches(key_range, seq_range, options))

    def keys(self, prefix: bytes = b"", segment_range: Ranges = None) -> Iterator[bytes]:
        for page in self.keys_batches(prefix, segment_range):
            yield from page.to_pylist()

    def keys_batches(self, prefix: bytes = b"", segment_range: Ranges = None) -> Iterator[pa.BinaryArray]:
        return self._iterate(lambda: self._log.keys_batches(prefix, segment_range))

    def count(self, key: bytes, seq_range: Ranges = None, approximate: bool = False) -> int:
        return self._run(self._log.count(key, seq_range, approximate))

    def count_with_options(self, key: bytes, seq_range: Ranges, options: CountOptions) -> int:
        return self._run(self._log.count_with_options(key, seq_range, options))

    def segments(self, seq_range: Ranges = None, time_range: TimeRange | None = None) -> list[Segment]:
        return self._run(self._log.segments(seq_range, time_range))

    def next_sequence(self) -> int:
        return self._run(self._log.next_sequence())

    def tail(
        self, key: bytes | None = None, *, prefix: bytes | None = None, after: int | None = None
    ) -> Iterator[LogEntry]:
        return self._entries(lambda: self._log.tail_batches(key, prefix=prefix, after=after))

    def tail_batches(
        self, key: bytes | None = None, *, prefix: bytes | None = None, after: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        return self._iterate(lambda: self._log.tail_batches(key, prefix=prefix, after=after))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._pid != os.getpid():
            coroutine.close()
            raise InvalidArgument("this keyed log was opened before a fork, in another process: open it in this one")
        return run(coroutine)

    def _entries(self, begin: Callable[[], AsyncIterator[pa.RecordBatch]]) -> Iterator[LogEntry]:
        for batch in self._iterate(begin):
            yield from entries_of(batch)

    def _iterate(self, begin: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        found = begin()
        while (item := self._run(_next(found))) is not None:
            yield item


class SyncKeyedLog(SyncKeyedLogReader[KeyedLog]):
    """`KeyedLog`, blocking."""

    @classmethod
    def open(
        cls,
        url: str,
        config: Config | None = None,
        *,
        settings: Settings | None = None,
        runtime: Runtime | None = None,
        take_over: bool = False,
    ) -> SyncKeyedLog:
        return cls(run(KeyedLog.open(url, config, settings=settings, runtime=runtime, take_over=take_over)))

    def append(self, records: Records, await_durable: bool = True) -> int:
        return self._run(self._log.append(records, await_durable))

    def append_with_options(self, records: Records, options: WriteOptions) -> int:
        return self._run(self._log.append_with_options(records, options))

    def flush(self) -> None:
        self._run(self._log.flush())

    def seal_segment(self, user_meta: bytes | None = None) -> int:
        return self._run(self._log.seal_segment(user_meta))

    def delete_segments(self, before: int) -> int:
        return self._run(self._log.delete_segments(before))

    def retain(self, retention: RetentionConfig | None = None) -> int:
        return self._run(self._log.retain(retention))


async def _next(found: AsyncIterator[T]) -> T | None:
    return await anext(found, None)
