"""CONSUME and ACK on topics of any engine: messages for a consumer group, or for a reader without one.

Delivery is at least once. A group's messages are claimed before they are handed out and are its member's until they are
acknowledged or the visibility time is over; what was claimed and then not handed out is given back at once. Only `ack`
and `reset` move a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
from msgspec.structs import replace

from llog.engines.port import LogAppender, LogReader
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import InvalidArgument, LlogError, OffsetOutOfRange, StaleMember
from llog.groups.acks import Acked
from llog.groups.dead_letters import DeadLetters
from llog.groups.delivery import Delivering, Unsettled
from llog.groups.groups import Groups
from llog.groups.messages import CONSUMED, MessageReader
from llog.groups.offsets import bounds_of, resolved
from llog.groups.records import UNNAMED, VISIBILITY_MS_MAX, Claim
from llog.groups.requests import ConsumeCall as ConsumeCall
from llog.groups.requests import Start as Start
from llog.groups.requests import check_call, check_range, check_start
from llog.groups.waits import Waits, Watch, any_of
from llog.log.catalog import Catalog, check_partition
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.runtime import uuid7

LOOK_AGAIN_S: Final = 5.0
"""A wait looks again after so long, for what nothing wakes it for: a reset, a message given back elsewhere, a topic
created again.
"""
_TURNS_MAX: Final = 10_000
_STALE_MAX: Final = 10
"""A member whose partitions change under it this often in one call is told so."""


class _Turn(NamedTuple):
    """One look at all partitions."""

    found: list[pa.Table]
    has_progress: bool
    """Whether it is worth another look at once."""
    watches: list[Watch]
    """Where there was nothing, and what would change that."""


class Consuming:
    """Shared by all who consume in a process. `waits` sees records arrive, unless the reader does; `stopping` ends
    every wait.
    """

    def __init__(
        self,
        log: Log,
        reader: LogReader | None = None,
        appender: LogAppender | None = None,
        *,
        waits: Waits | None = None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        self._reader = reader or EngineReader(log)
        self._waits = waits or self._reader
        self._runtime = log.runtime
        self._catalog = Catalog(log)
        self._groups = Groups(log, self._reader)
        self._messages = MessageReader(self._reader)
        dead_letters = DeadLetters(self._catalog, appender or EngineAppender(log))
        self._delivering = Delivering(self._reader, self._groups, self._messages, dead_letters)
        self._stopping = stopping or asyncio.Event()
        self._turns: dict[tuple[str, str], int] = {}
        """By topic's directory and group: the partition that comes first next time."""

    async def consume(self, call: ConsumeCall) -> pa.Table:
        """Messages in the order of their partition's offsets, with `attempt`; zero rows if nothing came within
        `wait_ms`.

        After an error, its member may hold what it was never given, and an ACK would pass over it: go on under another
        name.
        """
        check_call(call)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + call.wait_ms / 1000
        positions: dict[int, int] | None = None
        while True:
            # After a wait, it may be another one of that name, or have more partitions.
            topic = await self._catalog.get(call.topic)
            partitions = range(topic.partitions) if call.partition is None else (call.partition,)
            check_partition(topic, partitions[0])
            if call.group is not None and (call.start is None or call.start.kind in ("latest", "earliest")):
                turn = await self._grouped(call, topic, partitions)
            else:
                start = call.start or Start("earliest")
                positions = positions or await resolved(self._reader, call.topic, start, partitions)
                turn = await self._plain(call, topic, positions)
            left = deadline - loop.time()
            if turn.found or (not turn.has_progress and (left <= 0 or self._stopping.is_set())):
                return _joined(turn.found)
            if not turn.has_progress:
                await any_of(self._waits, self._runtime, turn.watches, min(left, LOOK_AGAIN_S), self._stopping)

    def named(self, call: ConsumeCall) -> ConsumeCall:
        """Gives a call that claims for a member without a name one that nobody else has: an ACK under it passes over
        nothing of others.
        """
        if call.group is None or call.member or call.mode == "assigned":
            return call
        return replace(call, member=UNNAMED + uuid7(self._runtime.now_ms(), self._runtime.random()))

    async def ack(self, topic: str, group: str, upto: Mapping[int | None, int], member: str = "") -> dict[int, Acked]:
        """Acknowledges what `member` holds up to and with these offsets; returns what became of it, by partition.

        The empty name speaks for all who consumed without one.
        No partition (None) may be named only if there is one; `OffsetOutOfRange` beyond the partition's end.
        """
        found = await self._catalog.get(topic)
        if None in upto and (found.partitions > 1 or len(upto) > 1):
            raise InvalidArgument(
                f"topic {topic!r} has {found.partitions} partitions: an ACK must name one for each offset "
                "(PARTITION p UPTO OFFSET n)"
            )
        named = {partition or 0: offset for partition, offset in upto.items()}
        for partition, offset in named.items():
            check_partition(found, partition)
            if offset < 0:
                raise InvalidArgument(f"an ACK is up to an offset, not {offset}")
        if len(named) > 1:  # one that is refused must not leave the others done
            for partition, (low, end) in (await bounds_of(self._reader, topic, list(named))).items():
                if named[partition] >= end:
                    raise OffsetOutOfRange(str(TopicPartition(topic, partition)), named[partition], low, end)
        return {
            partition: await self._groups.ack(group, TopicPartition(topic, partition), member, offset, topic=found)
            for partition, offset in named.items()
        }

    async def release(
        self, topic: str, group: str, partition: int, offset: int, *, member: str = "", delay_ms: int = 0
    ) -> bool:
        """Gives one message back, to be delivered again after `delay_ms`; whether `member` still held it. Its delivery
        counts.
        """
        check_range("delay_ms", delay_ms, 0, VISIBILITY_MS_MAX)
        found = await self._catalog.get(topic)
        check_partition(found, partition)
        tp = TopicPartition(topic, partition)
        return await self._groups.release(group, tp, member, offset, delay_ms=delay_ms, topic=found)

    async def heartbeat(self, topic: str, group: str, member: str, *, visibility_ms: int = 60_000) -> tuple[int, ...]:
        """Keeps a member of an assigned group alive for so long while it does not consume; the partitions it has.

        `StaleMember` if it was silent for too long: what it holds is delivered to others.
        """
        check_range("visibility_ms", visibility_ms, 1, VISIBILITY_MS_MAX)
        return (await self._groups.heartbeat(group, topic, member, session_ms=visibility_ms)).partitions

    async def leave(self, topic: str, group: str, member: str) -> None:
        """Gives the partitions that a member of an assigned group has to the others, at once."""
        await self._groups.leave(group, topic, member)

    async def reset(self, group: str, topic: str, start: Start, partition: int | None = None) -> dict[int, int]:
        """Moves the group there, back as well, in one partition or all; claims are dropped. The new positions, by
        partition.
        """
        found = await self._catalog.get(topic)
        partitions = range(found.partitions) if partition is None else (partition,)
        check_partition(found, partitions[0])
        check_start(start)
        positions = await resolved(self._reader, topic, start, partitions)
        for each, offset in positions.items():
            await self._groups.reset(group, TopicPartition(topic, each), offset, topic=found)
        return positions

    # --- without a claim

    async def _plain(self, call: ConsumeCall, topic: Topic, positions: Mapping[int, int]) -> _Turn:
        bounds = await bounds_of(self._reader, call.topic, list(positions))
        found: list[pa.Table] = []
        watches = []
        rows, size = call.limit, call.max_bytes
        for partition, offset in positions.items():
            if rows <= 0 or size <= 0:
                break
            tp, low, end = TopicPartition(call.topic, partition), bounds[partition][0], bounds[partition][1] - 1
            if offset > end:
                watches.append(Watch(tp, offset))
                continue
            # More offsets than rows are asked for: some may have been removed.
            read = await self._messages.read(topic, tp, offset, end, low=low, rows=rows, size=size, whole=not found)
            found += read.tables(attempt=0)
            rows, size = rows - read.rows, size - read.size
            if read.rows == 0:
                watches.append(Watch(tp, end + 1))
        return _Turn(found, False, watches)

    # --- with claims

    async def _grouped(self, call: ConsumeCall, topic: Topic, partitions: Sequence[int]) -> _Turn:
        for _ in range(_STALE_MAX - 1):
            try:
                return await self._turn(call, topic, partitions)
            except StaleMember:
                pass  # others came or went just now
        return await self._turn(call, topic, partitions)

    async def _turn(self, call: ConsumeCall, topic: Topic, partitions: Sequence[int]) -> _Turn:
        assert call.group is not None
        membership = None
        if call.mode == "assigned":
            membership = await self._groups.join(call.group, call.topic, call.member, session_ms=call.visibility_ms)
            partitions = [each for each in membership.partitions if each in partitions]
        bounds = await bounds_of(self._reader, call.topic, partitions)
        found: list[pa.Table] = []
        watches: list[Watch] = []
        given: list[tuple[TopicPartition, Sequence[Claim]]] = []
        has_progress = False
        rows, size = call.limit, call.max_bytes
        for partition in self._rotated(topic, call.group, partitions):
            if rows <= 0 or size <= 0:
                break
            tp = TopicPartition(call.topic, partition)
            try:
                claims = await self._delivering.claim(call, topic, tp, rows, bounds[partition], membership)
                if not claims:
                    watches.append(await self._delivering.watch(call, topic, tp, bounds[partition]))
                    continue
                delivery = await self._delivering.deliver(
                    call, topic, tp, claims, bounds[partition], size, whole=not found
                )
            except Unsettled as unsettled:
                # Whoever is told of an error takes another name; so nothing must be delivered under this one.
                for place, others in given:
                    await self._delivering.give_back(call, topic, place, others)
                raise unsettled.error from unsettled
            except LlogError:
                if not found:
                    raise
                break  # what was claimed elsewhere is delivered first: the next call meets the error again
            has_progress = True
            given.append((tp, claims))
            found += delivery.tables
            rows, size = rows - delivery.rows, size - delivery.size
            self._turns[topic.directory, call.group] = partition + 1
        if membership is not None:
            # A member that waits says so in time, and learns of those who came and went.
            renew_ms = self._runtime.now_ms() + max(call.visibility_ms // 3, 1)
            watches.append(Watch(None, 0, renew_ms))
        return _Turn(found, has_progress, watches)

    def _rotated(self, topic: Topic, group: str, partitions: Sequence[int]) -> list[int]:
        """Beginning after the partition that gave something last time."""
        if len(self._turns) > _TURNS_MAX:
            self._turns.clear()
        first = self._turns.get((topic.directory, group), 0)
        return sorted(partitions, key=lambda partition: (partition < first, partition))


def _joined(tables: list[pa.Table]) -> pa.Table:
    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables(tables) if tables else CONSUMED.empty_table()
