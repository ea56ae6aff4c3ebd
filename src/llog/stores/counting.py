"""Counts the calls of a store: how many, how long they took, what they moved, how many failed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from llog.errors import BlobExists, BlobNotFound, VersionMismatch

T = TypeVar("T")


class OperationCounts:
    """What was asked of a store: plain attributes, exported by whoever wants them."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def add(self, operation: str, size: int, seconds: float, *, failed: bool = False) -> None:
        self.count[operation] = self.count.get(operation, 0) + 1
        self.bytes[operation] = self.bytes.get(operation, 0) + size
        self.seconds[operation] = self.seconds.get(operation, 0.0) + seconds
        if failed:
            self.errors[operation] = self.errors.get(operation, 0) + 1


class Call:
    """One call under way; `size` is what it moved, told before it ends."""

    size = 0


@contextmanager
def counted(counts: OperationCounts, operation: str) -> Iterator[Call]:
    """Counts the call when it ends. That a blob or a version is not the one that was expected is an answer and no
    failure.
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
        counts.add(operation, call.size, time.perf_counter() - start, failed=failed)


async def counted_answer(
    counts: OperationCounts, operation: str, asking: Awaitable[T], size_of: Callable[[T], int]
) -> T:
    """As `counted`, for a call whose size its answer tells."""
    with counted(counts, operation) as call:
        answer = await asking
        call.size = size_of(answer)
        return answer
