"""What every engine can do: the two ports that join engines and surfaces, and the data that passes through them.

An engine stores the records of topics: `object/` is leaderless; `disk/` and `rocksdb/` have one owner process each. The
catalog names the engine of every topic, and `routing.py` finds it, so that every interface works on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from llog.batch.columns import Columns
from llog.batch.format import Codec
from llog.errors import LlogError
from llog.log.producers import Producer
from llog.log.records import Topic
from llog.model import Record, TimestampType, TopicPartition


class Bounds(NamedTuple):
    """Readable are the offsets in [log_start_offset, next_offset)."""

    log_start_offset: int
    next_offset: int


class Look(NamedTuple):
    """The directory of the partition's topic, which is another one once the topic was created again, and the bounds
    there.
    """

    directory: str
    bounds: Bounds


class Batch(NamedTuple):
    """Consecutive records of one partition, as Arrow columns."""

    tp: TopicPartition
    start_offset: int
    columns: Columns

    @property
    def end_offset(self) -> int:
        return self.start_offset + self.columns.count - 1


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Records for one partition: appended together, or not at all."""

    topic: str
    partition: int
    records: Sequence[Record] | Columns
    producer: Producer | None = None


class AppendResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    topic: str
    partition: int
    start_offset: int
    end_offset: int
    repeated: bool = False
    """The producer had appended this before; these are the offsets it got then."""


class RetentionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What this call trimmed. `bytes` counts the pieces that are now wholly below the log start."""

    old_start: int
    new_start: int
    records: int
    bytes: int


class CleanResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one key compaction did. Offsets below `through` are compacted; bytes are those of the rewritten segments."""

    through: int = 0
    passes: int = 0
    removed: int = 0
    segments: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


class LogReader(Protocol):
    """Reads, from any process, while others write."""

    async def bounds(self, tp: TopicPartition) -> Bounds: ...

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = ..., *, stop: int | None = None
    ) -> list[Batch]:
        """Batches from `offset` on, at least one if there is one, up to about `max_bytes`; none at the next offset.

        No batch begins at `stop` or above it; the last one may reach beyond. Where records were removed by key
        compaction, the first batch begins above `offset`. Timestamps are of the topic's kind. `OffsetOutOfRange`
        outside the bounds.
        """
        ...

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        """Whether the partition has a record at `past_offset` within `timeout` seconds."""
        ...

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        """The first offset whose time, as a running maximum, is at or after this; the next offset if there is none."""
        ...


class TopicReader(LogReader, Protocol):
    """As an engine has it."""

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """The bounds of all partitions, in their order, in few round trips."""
        ...

    async def look(self, tp: TopicPartition) -> Look:
        """The bounds, and whose they are: for those who keep what they read."""
        ...


class LogAppender(Protocol):
    """Appends. What is acknowledged is durable, unless the engine was told otherwise."""

    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]:
        """One result or error per group, in their order: partitions commit independently."""
        ...

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        """Removes every record below `before_offset`: `bounds()` says so at once, even where bytes go later."""
        ...

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        """Removes what is older or more than this, in whole pieces; None is no limit."""
        ...


class WriterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How appends are made. Retries and the codec are those of the object engine."""

    codec: Codec = Codec.NONE
    append_bytes_max: int = 256 << 20
    attempts_max: int = 200
    retry_delay_ms_max: int = 200
