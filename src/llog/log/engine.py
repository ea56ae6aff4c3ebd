"""The engine port: what an engine does for the catalog, the interfaces and upkeep, and the data that it exchanges.

`llog.engines` implements the port: `object` is leaderless; `disk` and `rocksdb` have one owner process each. The
catalog names every topic's engine, `Log.engines` holds the engines by name, and `llog.engines.routing` calls the right
one, so other code need not know an engine by its name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec

from llog.batch.columns import Buffer, Columns
from llog.batch.format import Codec
from llog.errors import LlogError, WrongEngine
from llog.log.findings import VerifyReport
from llog.log.inline import AppendCounts, InlineLimits
from llog.log.producers import Producer
from llog.log.record_producers import RecordProducer
from llog.log.records import Topic
from llog.model import Record, TimestampType, TopicPartition

if TYPE_CHECKING:
    from llog.log.log import Log

T = TypeVar("T")

Check = Callable[[], Awaitable[None]]
"""Raises `StoreUnavailable` if the store could not take records now."""


class Bounds(NamedTuple):
    """The readable offsets of a partition: those in [log_start_offset, next_offset)."""

    log_start_offset: int
    next_offset: int


class PartitionView(NamedTuple):
    """The bounds of a partition and the directory of its topic, which changes when the topic is created again."""

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


class AppendGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Records for one partition: appended together, or not at all."""

    topic: str
    partition: int
    records: Sequence[Record] | Columns
    producer: Producer | RecordProducer | None = None


class AppendResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    topic: str
    partition: int
    start_offset: int
    end_offset: int
    repeated: bool = False
    """Whether the producer had appended these records before; then these are the offsets of that append."""


class RetentionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a trim or retention removed. `bytes` counts only what now lies wholly below the log start."""

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
    """Reads partitions from any process, while others write."""

    async def bounds(self, tp: TopicPartition) -> Bounds: ...

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = ..., *, stop: int | None = None
    ) -> list[Batch]:
        """Return batches from `offset` on, at least one if any exists, up to about `max_bytes`; none at the next
        offset.

        No batch begins at `stop` or above; the last batch may reach beyond `stop`. Where key compaction removed
        records, the first batch begins above `offset`. Timestamps are of the topic's type. Raises `OffsetOutOfRange`
        outside the bounds.
        """
        ...

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return whether the partition has a record at `past_offset`."""
        ...

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        """Return the first offset whose time, as a running maximum, is at or after `timestamp_ms`; the next offset if
        none is.
        """
        ...


class TopicReader(LogReader, Protocol):
    """The reader of one engine, which also serves callers that cache what they read."""

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """Return the bounds of all partitions, in order, in few round trips."""
        ...

    async def view(self, tp: TopicPartition) -> PartitionView:
        """Return the bounds with the directory they belong to, for a caller that caches records."""
        ...


class LogAppender(Protocol):
    """Appends records. Acknowledged records are durable, unless the engine is configured otherwise."""

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]:
        """Append the groups and return one result or error for each, in order: partitions commit independently."""
        ...

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        """Remove every record below `before_offset`: `bounds()` shows it at once, even if the bytes go later."""
        ...

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        """Remove records that are older than `retention_ms` or exceed `retention_bytes`, in whole batches or segments;
        None is no limit.
        """
        ...


OnCommit = Callable[[str, int, int, Sequence[Buffer]], None]
"""Takes a topic's directory, a partition, the start offset of a batch that was just committed there, and the parts of
the batch as it is stored (`bytes-batch-v1`). It must neither raise nor block: appends wait for it.
"""


class WriterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How appends are made. Retries, the codec, inline appends and the callback are those of the object engine."""

    codec: Codec = Codec.NONE
    append_bytes_max: int = 256 << 20
    attempts_max: int = 200
    retry_delay_ms_max: int = 200
    on_commit: OnCommit | None = None
    """Called for each partition as soon as a writer has won the CAS that commits its batch. Not called for an append
    that was repeated, that another process uploaded, or whose answer from the metadata store was lost.
    """
    inline: InlineLimits = InlineLimits()
    counts: AppendCounts | None = None
    """Counts the appends by the way that they went."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """How a partition is stored, for people to read; each engine adds its own fields."""

    topic: str
    partition: int


class Verifier(Protocol):
    """Verifies partitions of one engine, one after the other."""

    async def __call__(self, tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read every record below the present next offset and report damage, which is never raised.

        `progress` is called with the number of records read so far.
        """
        ...


class Engine(Protocol):
    """Stores the records of topics. Methods take the log of their caller, whose store objects may be its own."""

    @property
    def has_owner(self) -> bool:
        """Whether each topic has one owner process, on whose machine its records lie."""
        ...

    @property
    def compacts_keys(self) -> bool:
        """Whether topics can keep only the newest record of each key."""
        ...

    @property
    def keeps_groups(self) -> bool:
        """Whether the engine stores the records of consumer groups with the topic instead of in the metadata store."""
        ...

    # Topics, for the catalog

    async def create(self, log: Log, topic: Topic) -> Topic:
        """Create all partitions of a new topic, and return the topic with its home, if it has one.

        Raises `WrongStore` if records of another topic lie in its place.
        """
        ...

    async def add_partitions(self, log: Log, topic: Topic, partitions: range) -> None:
        """Create these partitions of a topic. Idempotent."""
        ...

    async def check_removable(self, log: Log, topic: Topic) -> None:
        """Raise an error, such as `LogOwned`, if this process cannot remove the topic."""
        ...

    async def remove(self, log: Log, topic: Topic) -> None:
        """Remove the topic's records for good. Idempotent."""
        ...

    async def is_here(self) -> bool:
        """Whether topics of this engine can be on this machine."""
        ...

    # Records

    def reader(self, log: Log) -> TopicReader: ...

    def appender(self, log: Log, options: WriterOptions) -> LogAppender: ...

    async def describe(self, log: Log, tp: TopicPartition, max_pieces: int, *, from_offset: int = 0) -> Description:
        """Describe how the partition is stored, with up to `max_pieces` of its index entries, frames or records from
        `from_offset` on.
        """
        ...

    def verifier(self, log: Log) -> Verifier: ...

    # Upkeep

    @property
    def allows_background_upkeep(self) -> bool:
        """Whether upkeep can run without making this process the owner of anything new."""
        ...

    async def clean(self, log: Log, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        """Compact by key: keep only the newest record of each. Raises `InvalidArgument` if the topic keeps all records.

        Without `force`, leaves alone what is not yet worth compacting.
        """
        ...

    async def release_deleted(self) -> None:
        """Close the files of topics that any process has deleted."""
        ...

    # The process

    async def take_ownership(self) -> None:
        """Make this broker the owner of the topics on this machine, if there are any; raise `LogOwned` if another
        process owns them.
        """
        ...

    def ownership_name(self, topic: Topic) -> str | None:
        """Return the name under which `Log.owners` lists the owner of this topic; None if the topic has no owner."""
        ...

    def checks(self) -> Mapping[str, Check]:
        """Return the checks of the stores that the engine has on this machine, by the stores' names."""
        ...

    async def close(self) -> None:
        """Release all open files and connections. Idempotent."""
        ...


def engine_of(log: Log, topic: Topic) -> Engine:
    """Return the engine that stores the topic; raise `WrongEngine` if this version of llog does not have it."""
    return pick_engine(log.engines, topic.engine, topic.name)


def pick_engine(engines: Mapping[str, T], engine: str, topic: str) -> T:
    """Return the topic's item from a mapping by engine; raise `WrongEngine` as `engine_of` does."""
    found = engines.get(engine)
    if found is None:
        raise WrongEngine(f"topic {topic!r} is of engine {engine!r}, which this version of llog does not have")
    return found
