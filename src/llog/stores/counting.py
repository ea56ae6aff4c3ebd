"""Counts of a store's operations: how many there were, their time, their bytes and their failures."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from llog.base.histogram import Histogram
from llog.errors import BlobExists, BlobNotFound, VersionMismatch

T = TypeVar("T")


class OperationCounts:
    """Totals by the name of the operation. The broker's metrics export them."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.latency: dict[str, Histogram] = {}
        self.on_operation: Callable[[str, int, float, int], None] | None = None
        """Called after each operation with its name, bytes, seconds and failures, for traces."""

    def add(self, operation: str, size: int, seconds: float, *, calls: int = 1, failures: int = 0) -> None:
        """Add `calls`, of which `failures` failed; all together they moved `size` bytes and took `seconds`."""
        self.count[operation] = self.count.get(operation, 0) + calls
        self.bytes[operation] = self.bytes.get(operation, 0) + size
        latency = self.latency.get(operation)
        if latency is None:
            latency = self.latency[operation] = Histogram()
        latency.observe_mean(seconds, calls)
        if self.on_operation is not None:
            self.on_operation(operation, size, seconds, failures)
        if failures:
            self.errors[operation] = self.errors.get(operation, 0) + failures


class Call:
    """An operation under way. Set `size` to the bytes that it moved before it ends."""

    size = 0


@contextmanager
def measure(counts: OperationCounts, operation: str) -> Iterator[Call]:
    """Add the operation to the counts when it ends.

    `BlobExists`, `BlobNotFound` and `VersionMismatch` are answers of the store and do not count as failures.
    """
    call = Call()
    start = time.perf_counter()
    failed = True
    try:
        yield call
        failed = False
    except (BlobExists, BlobNotFound, VersionMismatch):
        failed = False
        raise
    finally:
        counts.add(operation, call.size, time.perf_counter() - start, failures=failed)


async def measure_answer(
    counts: OperationCounts, operation: str, request: Awaitable[T], size_of: Callable[[T], int]
) -> T:
    """Return the answer of the request, and measure the operation, whose size follows from the answer."""
    with measure(counts, operation) as call:
        answer = await request
        call.size = size_of(answer)
        return answer
