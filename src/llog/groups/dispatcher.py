"""The dispatcher delivers messages of any engine's topics to consumer groups and plain readers, and takes their ACKs.

Delivery is at least once. A group's messages are claimed before they are delivered and belong to the member until they
are acknowledged or the visibility time is over; what was claimed and not delivered is given back at once. A position
moves only by `ack` and `reset`, and past records that no longer exist or became dead letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
from msgspec.structs import replace

from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import InvalidArgument, LlogError, OffsetOutOfRange, StaleMember
from llog.groups.acks import AckResult
from llog.groups.dead_letters import DeadLetters
from llog.groups.delivery import PartitionDelivery, UndeliveredClaims
from llog.groups.group_partition import GroupPartition
from llog.groups.groups import Groups
from llog.groups.messages import CONSUMED_SCHEMA, MessageReader
from llog.groups.offsets import read_bounds, resolve_start
from llog.groups.options import ConsumeOptions, Start, check_options, check_range, check_start
from llog.groups.records import UNNAMED, VISIBILITY_MS_MAX, Claim
from llog.groups.waits import Waiter, Wakeup, wait_for_any
from llog.log.catalog import Catalog, check_partition
from llog.log.engine import LogAppender, LogReader
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.runtime import uuid7

LOOK_AGAIN_S: Final = 5.0
"""How long a wait lasts before it looks again for what wakes no waiter: a reset, a message that another process gave
back, a topic that was created again.
"""
_FIRST_PARTITIONS_MAX: Final = 10_000
_STALE_MAX: Final = 10
"""How often a member's partitions may change during one call before the call fails."""


class _Round(NamedTuple):
    """One look at all partitions."""

    tables: list[pa.Table]
    has_progress: bool
    """Whether another round at once may find more."""
    wakeups: list[Wakeup]
    """For each partition that had nothing, what would change that."""


class Dispatcher:
    """Serves every consumer of a process. `waiter` sees records arrive, unless the reader does; `stopping` ends every
    wait.
    """

    def __init__(
        self,
        log: Log,
        reader: LogReader | None = None,
        appender: LogAppender | None = None,
        *,
        waiter: Waiter | None = None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        self._reader = reader or EngineReader(log)
        self._waiter = waiter or self._reader
        self._runtime = log.runtime
        self._catalog = Catalog(log)
        self._groups = Groups(log, self._reader)
        self._messages = MessageReader(self._reader)
        self._dead_letters = DeadLetters(self._catalog, appender or EngineAppender(log))
        self._stopping = stopping or asyncio.Event()
        self._first_partitions: dict[tuple[str, str], int] = {}
        """By topic directory and group: the partition that the next round begins with."""

    async def consume(self, options: ConsumeOptions) -> pa.Table:
        """Return messages, with `attempt`, in the order of their offsets within each partition; no rows if none came
        within `wait_ms`.

        After an error, the member may hold messages that it was never given, and its next ACK would acknowledge them:
        continue under another member name.
        """
        check_options(options)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + options.wait_ms / 1000
        positions: dict[int, int] | None = None
        while True:
            # Read again after each wait: the topic may have been created again, or given more partitions.
            topic = await self._catalog.get(options.topic)
            partitions = range(topic.partitions) if options.partition is None else (options.partition,)
            check_partition(topic, partitions[0])
            if options.group is not None and (options.start is None or options.start.kind in ("latest", "earliest")):
                found = await self._claim_messages(options, topic, partitions)
            else:
                start = options.start or Start("earliest")
                positions = positions or await resolve_start(self._reader, options.topic, start, partitions)
                found = await self._read_messages(options, topic, positions)
            left_s = deadline - loop.time()
            if found.tables or (not found.has_progress and (left_s <= 0 or self._stopping.is_set())):
                return _concat(found.tables)
            if not found.has_progress:
                await wait_for_any(
                    self._waiter, self._runtime, found.wakeups, min(left_s, LOOK_AGAIN_S), self._stopping
                )

    def name_member(self, options: ConsumeOptions) -> ConsumeOptions:
        """Return the options; if they would claim for a member without a name, with a name that no other member has, so
        that its ACKs acknowledge nothing of others.
        """
        if options.group is None or options.member or options.mode == "assigned":
            return options
        return replace(options, member=UNNAMED + uuid7(self._runtime.now_ms(), self._runtime.random()))

    async def ack(
        self, topic: str, group: str, upto: Mapping[int | None, int], member: str = ""
    ) -> dict[int, AckResult]:
        """Acknowledge what `member` holds up to and including these offsets; return the outcome by partition.

        The empty name stands for all members that consumed without one. Only for a topic with one partition may the
        partition be None. Raises `OffsetOutOfRange` beyond a partition's end.
        """
        entry = await self._catalog.get(topic)
        if None in upto and (entry.partitions > 1 or len(upto) > 1):
            raise InvalidArgument(
                f"topic {topic!r} has {entry.partitions} partitions: an ACK must name one for each offset "
                "(PARTITION p UPTO OFFSET n)"
            )
        offsets = {partition or 0: offset for partition, offset in upto.items()}
        for partition, offset in offsets.items():
            check_partition(entry, partition)
            if offset < 0:
                raise InvalidArgument(f"an ACK is up to an offset, not {offset}")
        if len(offsets) > 1:  # check them all first: a refused offset must not leave the others acknowledged
            for partition, (low, end) in (await read_bounds(self._reader, topic, list(offsets))).items():
                if offsets[partition] >= end:
                    raise OffsetOutOfRange(str(TopicPartition(topic, partition)), offsets[partition], low, end)
        return {
            partition: await (await self._group_partition(group, entry, partition)).ack(member, offset)
            for partition, offset in offsets.items()
        }

    async def release(
        self, topic: str, group: str, partition: int, offset: int, *, member: str = "", delay_ms: int = 0
    ) -> bool:
        """Have one message delivered again after `delay_ms`; return whether `member` still held it. Its delivery
        counts as an attempt.
        """
        check_range("delay_ms", delay_ms, 0, VISIBILITY_MS_MAX)
        entry = await self._catalog.get(topic)
        check_partition(entry, partition)
        return await (await self._group_partition(group, entry, partition)).release(member, offset, delay_ms=delay_ms)

    async def heartbeat(self, topic: str, group: str, member: str, *, visibility_ms: int = 60_000) -> tuple[int, ...]:
        """Keep a member of an assigned group alive for `visibility_ms` while it does not consume; return its
        partitions.

        Raises `StaleMember` if the member was silent for too long: its claims are being delivered to others.
        """
        check_range("visibility_ms", visibility_ms, 1, VISIBILITY_MS_MAX)
        return (await self._groups.heartbeat(group, topic, member, session_ms=visibility_ms)).partitions

    async def leave(self, topic: str, group: str, member: str) -> None:
        """Give the partitions of a member of an assigned group to the other members at once."""
        await self._groups.leave(group, topic, member)

    async def reset(self, group: str, topic: str, start: Start, partition: int | None = None) -> dict[int, int]:
        """Move the group to `start`, forward or back, in one partition or all, and drop its claims; return the new
        position by partition.
        """
        entry = await self._catalog.get(topic)
        partitions = range(entry.partitions) if partition is None else (partition,)
        check_partition(entry, partitions[0])
        check_start(start)
        positions = await resolve_start(self._reader, topic, start, partitions)
        for number, offset in positions.items():
            await (await self._group_partition(group, entry, number)).reset(offset)
        return positions

    async def _read_messages(self, options: ConsumeOptions, topic: Topic, positions: Mapping[int, int]) -> _Round:
        """Read from these positions, without claims."""
        bounds = await read_bounds(self._reader, options.topic, list(positions))
        tables: list[pa.Table] = []
        wakeups = []
        rows_left, bytes_left = options.limit, options.max_bytes
        for partition, offset in positions.items():
            if rows_left <= 0 or bytes_left <= 0:
                break
            tp, end = TopicPartition(options.topic, partition), bounds[partition].next_offset - 1
            if offset > end:
                wakeups.append(Wakeup(tp, offset))
                continue
            # The range is not cut to `rows_left` offsets: some of its records may have been removed.
            read = await self._messages.read(
                topic,
                tp,
                offset,
                end,
                log_start=bounds[partition].log_start_offset,
                max_rows=rows_left,
                max_bytes=bytes_left,
                at_least_one=not tables,
            )
            tables += read.tables(attempt=0)
            rows_left, bytes_left = rows_left - read.rows, bytes_left - read.size
            if read.rows == 0:
                wakeups.append(Wakeup(tp, end + 1))
        return _Round(tables, False, wakeups)

    async def _claim_messages(self, options: ConsumeOptions, topic: Topic, partitions: Sequence[int]) -> _Round:
        """Claim and read in one round, which begins again while members of the group come and go."""
        for _ in range(_STALE_MAX - 1):
            try:
                return await self._claim_round(options, topic, partitions)
            except StaleMember:
                pass
        return await self._claim_round(options, topic, partitions)

    async def _claim_round(self, options: ConsumeOptions, topic: Topic, partitions: Sequence[int]) -> _Round:
        assert options.group is not None
        membership = None
        if options.mode == "assigned":
            membership = await self._groups.join(
                options.group, options.topic, options.member, session_ms=options.visibility_ms
            )
            partitions = [partition for partition in membership.partitions if partition in partitions]
        bounds = await read_bounds(self._reader, options.topic, partitions)
        tables: list[pa.Table] = []
        wakeups: list[Wakeup] = []
        delivered: list[tuple[PartitionDelivery, Sequence[Claim]]] = []
        rows_left, bytes_left = options.limit, options.max_bytes
        for partition in self._in_turn(topic, options.group, partitions):
            if rows_left <= 0 or bytes_left <= 0:
                break
            try:
                delivery = PartitionDelivery(
                    self._groups,
                    self._messages,
                    self._dead_letters,
                    options,
                    await self._group_partition(options.group, topic, partition),
                    bounds[partition],
                    membership,
                )
                claims = await delivery.claim(rows_left)
                if not claims:
                    wakeups.append(await delivery.wakeup())
                    continue
                messages = await delivery.deliver(claims, bytes_left, at_least_one=not tables)
            except UndeliveredClaims as undelivered:
                # The caller of a failed consume continues under another name, so nothing may stay claimed under this
                # one.
                for earlier, its_claims in delivered:
                    await earlier.give_back(its_claims)
                raise undelivered.error from undelivered
            except LlogError:
                if not tables:
                    raise
                break  # deliver what other partitions had: the next call meets the error again
            delivered.append((delivery, claims))
            tables += messages.tables
            rows_left, bytes_left = rows_left - messages.rows, bytes_left - messages.size
            self._first_partitions[topic.directory, options.group] = partition + 1
        if membership is not None:
            # A waiting member renews its session in time, and learns which members came and went.
            renew_ms = self._runtime.now_ms() + max(options.visibility_ms // 3, 1)
            wakeups.append(Wakeup(None, 0, renew_ms))
        return _Round(tables, bool(delivered), wakeups)

    async def _group_partition(self, group: str, topic: Topic, partition: int) -> GroupPartition:
        return await self._groups.partition(group, TopicPartition(topic.name, partition), topic=topic)

    def _in_turn(self, topic: Topic, group: str, partitions: Sequence[int]) -> list[int]:
        """Return the partitions in order, beginning after the one that delivered last."""
        if len(self._first_partitions) > _FIRST_PARTITIONS_MAX:
            self._first_partitions.clear()
        first = self._first_partitions.get((topic.directory, group), 0)
        return sorted(partitions, key=lambda partition: (partition < first, partition))


def _concat(tables: list[pa.Table]) -> pa.Table:
    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables(tables) if tables else CONSUMED_SCHEMA.empty_table()
