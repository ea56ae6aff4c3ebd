"""What an engine does for the catalog, for surfaces and for upkeep; `Log.engines` has one of each name.

`llog.engines` implements it: `object` is leaderless; `disk` and `rocksdb` have one owner process each. Nobody else asks
for the name of an engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from llog.errors import WrongEngine
from llog.log.findings import VerifyReport
from llog.log.records import Topic
from llog.model import TopicPartition

if TYPE_CHECKING:
    from llog.engines.port import CleanResult, LogAppender, TopicReader, WriterOptions
    from llog.log.log import Log

T = TypeVar("T")

Check = Callable[[], Awaitable[None]]
"""Raises `StoreUnavailable` if the store would take no records."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """How a partition is stored, for people: each engine adds what it has."""

    topic: str
    partition: int


class Verifier(Protocol):
    """Verifies partitions of one engine, one after the other."""

    async def __call__(self, tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Reads every record below the present next offset; `progress` gets the records read so far.

        Damage is reported, not raised.
        """
        ...


class Engine(Protocol):
    """Keeps the records of topics. Methods get the log of their caller, which may differ in its stores from others."""

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
        """Whether the records of consumer groups lie with those of the topic instead of in the metadata store."""
        ...

    # Topics, for the catalog

    async def create(self, log: Log, topic: Topic) -> Topic:
        """Makes all partitions of a new topic, and returns the topic with its home, if it has one.

        `WrongStore` if records of another topic are in its place.
        """
        ...

    async def add_partitions(self, log: Log, topic: Topic, partitions: range) -> None:
        """Makes these partitions of a topic. Idempotent."""
        ...

    async def check_removable(self, log: Log, topic: Topic) -> None:
        """Raises, `LogOwned` for one, if the topic cannot be removed by this process."""
        ...

    async def remove(self, log: Log, topic: Topic) -> None:
        """Removes the topic's records for good. Idempotent."""
        ...

    async def is_here(self) -> bool:
        """Whether topics of this engine can be on this machine."""
        ...

    # Records

    def reader(self, log: Log) -> TopicReader: ...

    def appender(self, log: Log, options: WriterOptions) -> LogAppender: ...

    async def describe(self, log: Log, tp: TopicPartition, max_pieces: int, *, from_offset: int = 0) -> Description:
        """How the partition is stored, with up to `max_pieces` of its pieces from the one at `from_offset` on."""
        ...

    def verifier(self, log: Log) -> Verifier: ...

    # Upkeep

    @property
    def is_taken_up(self) -> bool:
        """Whether upkeep does not make this process the owner of anything that it does not own yet."""
        ...

    async def clean(self, log: Log, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        """Key compaction: of each key, the newest record stays. `InvalidArgument` if the topic keeps all records.

        What is not worth it yet is left alone, unless with `force`.
        """
        ...

    async def release_deleted(self) -> None:
        """Closes the files of topics that were deleted, by whatever process."""
        ...

    # The process

    async def take_up(self) -> None:
        """Makes this broker the owner of the topics that are on this machine, if there are any. `LogOwned` if another
        process is.
        """
        ...

    def owner_key(self, topic: Topic) -> str | None:
        """Under which name `Log.owners` has the owner of this topic; None if it has none."""
        ...

    def checks(self) -> Mapping[str, Check]:
        """How the stores that the engine has on this machine are checked, by what they are called."""
        ...

    async def close(self) -> None:
        """Releases all that is open. Idempotent."""
        ...


def engine_of(log: Log, topic: Topic) -> Engine:
    """The engine that keeps the topic; `WrongEngine` if this version of llog does not have it."""
    return pick_engine(log.engines, topic.engine, topic.name)


def pick_engine(engines: Mapping[str, T], engine: str, topic: str) -> T:
    """As `engine_of`, from what the caller has for each engine."""
    found = engines.get(engine)
    if found is None:
        raise WrongEngine(f"topic {topic!r} is of engine {engine!r}, which this version of llog does not have")
    return found
