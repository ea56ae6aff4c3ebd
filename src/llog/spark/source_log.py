"""The port of a read: a log as Spark's driver sees it, from its stores (`stored_log.py`) or a broker (`broker_log.py`).

Each implementation plans tasks of its own kind, which carry everything that executors need to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from llog.log.engine import Bounds
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.spark.options import ReadOptions


class Range(NamedTuple):
    """Offsets [start, stop) of one partition."""

    tp: TopicPartition
    start: int
    stop: int


class SourceTask(Protocol):
    """The records that one Spark task reads. It is picklable, and an `InputPartition`."""

    def read(self, options: ReadOptions, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        """Yield the task's records as Arrow batches, on an executor."""
        ...


class SourceLog(Protocol):
    async def topic(self, name: str) -> Topic:
        """Return a topic; raise `TopicNotFound` if it does not exist."""
        ...

    async def topics(self) -> list[Topic]: ...

    def check_readable(self, topic: Topic) -> None:
        """Raise `WrongEngine` if tasks cannot read the topic's records."""
        ...

    async def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """Return the bounds of these partitions; raise if one of them does not exist."""
        ...

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int) -> int:
        """Return the first offset whose record has this timestamp or a later one; the next offset if none has."""
        ...

    def now_ms(self) -> int: ...

    async def pin(self, owner: str) -> str | None:
        """Keep everything that is readable now until the pin is released or expires; None if nothing needs a pin."""
        ...

    async def release(self, pin: str | None) -> None: ...

    async def plan(
        self, ranges: Sequence[Range], topics: Mapping[str, Topic], options: ReadOptions, *, pin: str | None
    ) -> Sequence[SourceTask]:
        """Return the tasks that read these ranges, one without records if there are none to read.

        Raise `DataLoss` if one of the topics was deleted.
        """
        ...

    async def cut_by_bytes(
        self,
        starts: Mapping[TopicPartition, int],
        ends: dict[TopicPartition, int],
        bytes_max: int,
        *,
        fail_on_data_loss: bool,
    ) -> dict[TopicPartition, int]:
        """Return ends that are no later, with about `bytes_max` stored bytes between the starts and them."""
        ...

    async def commit(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Publish these offsets as the positions of a consumer group; skip partitions that were deleted."""
        ...
