"""A group's messages of one partition: claimed, read, and what is not handed out given back, buried or done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from llog.engines.port import Bounds, LogReader
from llog.errors import Contention, LlogError, OutcomeUnknown, StoreUnavailable
from llog.groups.assignment import Membership
from llog.groups.claims import held_up_until
from llog.groups.dead_letters import DeadLetters
from llog.groups.groups import Groups
from llog.groups.messages import MessageReader
from llog.groups.offsets import resolved
from llog.groups.records import Claim, GroupMode
from llog.groups.requests import ConsumeCall, Start
from llog.groups.waits import Watch
from llog.log.records import Topic
from llog.model import TopicPartition

_BURIED_AT_A_TIME: Final = 1_000


class Unsettled(Exception):
    """A claim may be left of which nobody was told: an ACK of its member would take it for delivered."""

    def __init__(self, error: LlogError) -> None:
        super().__init__(str(error))
        self.error = error


class Delivery(NamedTuple):
    tables: list[pa.Table]
    rows: int
    size: int


class Delivering:
    def __init__(self, reader: LogReader, groups: Groups, messages: MessageReader, dead_letters: DeadLetters) -> None:
        self._reader = reader
        self._groups = groups
        self._messages = messages
        self._dead_letters = dead_letters

    async def claim(
        self,
        call: ConsumeCall,
        topic: Topic,
        tp: TopicPartition,
        limit: int,
        bounds: Bounds,
        membership: Membership | None,
    ) -> tuple[Claim, ...]:
        """`Unsettled` if it failed, and may have been recorded all the same."""
        assert call.group is not None
        claims = None
        for _ in range(2):
            try:
                claims = await self._groups.claim(
                    call.group,
                    tp,
                    call.member,
                    limit=limit,
                    visibility_ms=call.visibility_ms,
                    membership=membership,
                    bounds=bounds,
                    topic=topic,
                )
            except (StoreUnavailable, OutcomeUnknown, Contention) as error:
                raise Unsettled(error) from error
            if claims is not None:
                break
            await self._begin(call, topic, tp)
        return claims or ()

    async def _begin(self, call: ConsumeCall, topic: Topic, tp: TopicPartition) -> None:
        """Stores the group's first position in every partition, so that nothing is passed over from now on.

        Partition 0 comes last: a group that has a position there has begun, and a partition that it has none in was
        added later.
        """
        assert call.group is not None
        start = call.start or Start("earliest")
        first = TopicPartition(call.topic, 0)
        if tp != first and await self._groups.record(call.group, first, topic=topic) is not None:
            start = Start("earliest")
        positions = await resolved(self._reader, call.topic, start, range(topic.partitions))
        for partition, offset in sorted(positions.items(), reverse=True):
            place = TopicPartition(call.topic, partition)
            await self._groups.begin(call.group, place, offset, mode=GroupMode(call.mode), topic=topic)

    async def deliver(
        self,
        call: ConsumeCall,
        topic: Topic,
        tp: TopicPartition,
        claims: Sequence[Claim],
        bounds: Bounds,
        size: int,
        *,
        whole: bool,
    ) -> Delivery:
        """What these claims hold. What does not fit, and what fails, is given back; what is not there any more is done.

        `Unsettled` if it failed, and could not be given back.
        """
        assert call.group is not None
        tables: list[pa.Table] = []
        gone: list[tuple[int, int]] = []
        back: list[tuple[int, int]] = []
        rows, left = 0, size
        try:
            reads = await self._groups.log.meta.begin_reads()
            for claim in claims:
                if call.max_attempts is not None and claim.attempt > call.max_attempts:
                    await self._bury(call, topic, tp, claim, bounds)
                    continue
                read = await self._messages.read(
                    topic,
                    tp,
                    claim.start,
                    claim.end,
                    low=bounds.log_start_offset,
                    rows=claim.count,
                    size=left,
                    whole=whole and not tables,
                )
                last = claim.start - 1 if read.last is None else read.last
                if last + 1 < read.next_offset:
                    gone.append((last + 1, read.next_offset - 1))
                if read.next_offset <= claim.end:
                    back.append((read.next_offset, claim.end))
                tables += read.tables(claim.attempt)
                rows, left = rows + read.rows, left - read.size
            if gone:
                await reads.confirm()  # in an old state, what was claimed may not be there yet
                await self._groups.settle(call.group, tp, call.member, gone, topic=topic)
            if back:
                await self._groups.give_back(call.group, tp, call.member, back, topic=topic)
        except LlogError as error:
            if not await self.give_back(call, topic, tp, claims):
                raise Unsettled(error) from error
            raise
        except BaseException:
            await self.give_back(call, topic, tp, claims)
            raise
        return Delivery(tables, rows, size - left)

    async def give_back(self, call: ConsumeCall, topic: Topic, tp: TopicPartition, claims: Sequence[Claim]) -> bool:
        """Whether it could be done; if not, they expire."""
        assert call.group is not None
        every = [(claim.start, claim.end) for claim in claims]
        try:
            await self._groups.give_back(call.group, tp, call.member, every, topic=topic)
        except LlogError:
            return False
        return True

    async def _bury(self, call: ConsumeCall, topic: Topic, tp: TopicPartition, claim: Claim, bounds: Bounds) -> None:
        """Makes dead letters of a claim that was delivered often enough, piece by piece."""
        assert call.group is not None
        offset = claim.start
        while offset <= claim.end:
            reads = await self._groups.log.meta.begin_reads()
            read = await self._messages.read(
                topic,
                tp,
                offset,
                claim.end,
                low=bounds.log_start_offset,
                rows=_BURIED_AT_A_TIME,
                size=call.max_bytes,
                whole=True,
            )
            await reads.confirm()
            await self._dead_letters.send(
                read.batches, topic=topic, to=call.dead_letter, group=call.group, attempts=claim.attempt - 1
            )
            done = [(offset, read.next_offset - 1)]
            await self._groups.settle(call.group, tp, call.member, done, topic=topic)
            offset = read.next_offset

    async def watch(self, call: ConsumeCall, topic: Topic, tp: TopicPartition, bounds: Bounds) -> Watch:
        """What would give the group something here: a new record, the end of somebody's claim, or of what holds up all
        others.
        """
        assert call.group is not None
        record = await self._groups.record(call.group, tp, topic=topic)
        if record is None:
            return Watch(tp, bounds.next_offset)
        held_up_ms = held_up_until(record.claims, self._groups.log.runtime.now_ms())
        if call.mode == "assigned" and held_up_ms is not None:
            return Watch(None, 0, held_up_ms)
        return Watch(tp, record.offset, min((claim.deadline_ms for claim in record.claims), default=None))
