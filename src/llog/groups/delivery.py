"""One partition's share of a consume call for a group: its messages are claimed and read, and every record of a claim
that is not delivered is given back, sent to the dead letters or settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from llog.errors import Contention, LlogError, OutcomeUnknown, StoreUnavailable
from llog.groups.assignment import Membership
from llog.groups.claims import held_up_until
from llog.groups.dead_letters import DeadLetters
from llog.groups.group_partition import GroupPartition
from llog.groups.groups import Groups
from llog.groups.messages import MessageReader
from llog.groups.options import ConsumeOptions, Start
from llog.groups.records import Claim, GroupMode
from llog.groups.waits import Wakeup
from llog.log.engine import Bounds

_DEAD_LETTERS_AT_A_TIME: Final = 1_000


class UndeliveredClaims(Exception):
    """Claims may be recorded whose messages were never delivered: an ACK of their member would acknowledge them."""

    def __init__(self, error: LlogError) -> None:
        super().__init__(str(error))
        self.error = error


class Delivery(NamedTuple):
    tables: list[pa.Table]
    rows: int
    size: int


class PartitionDelivery:
    """Delivers messages of one partition to the member of a group that made the call."""

    def __init__(
        self,
        groups: Groups,
        messages: MessageReader,
        dead_letters: DeadLetters,
        options: ConsumeOptions,
        partition: GroupPartition,
        bounds: Bounds,
        membership: Membership | None,
    ) -> None:
        self._groups = groups
        self._messages = messages
        self._dead_letters = dead_letters
        self._options = options
        self._partition = partition
        self._bounds = bounds
        self._membership = membership

    async def claim(self, limit: int) -> tuple[Claim, ...]:
        """Claim up to `limit` records, after giving a new group its first positions.

        Raises `UndeliveredClaims` if the claim failed and may have been recorded all the same.
        """
        claims = await self._claim(limit)
        if claims is None:
            assert self._options.group is not None
            start = self._options.start or Start("earliest")
            await self._groups.begin(self._options.group, self._partition.topic, start, GroupMode(self._options.mode))
            claims = await self._claim(limit)
        return claims or ()

    async def _claim(self, limit: int) -> tuple[Claim, ...] | None:
        try:
            return await self._partition.claim(
                self._options.member,
                limit=limit,
                visibility_ms=self._options.visibility_ms,
                membership=self._membership,
                bounds=self._bounds,
            )
        except (StoreUnavailable, OutcomeUnknown, Contention) as error:
            raise UndeliveredClaims(error) from error

    async def deliver(self, claims: Sequence[Claim], max_bytes: int, *, at_least_one: bool) -> Delivery:
        """Read the messages of these claims, up to `max_bytes`; `at_least_one` message however large it is.

        Messages that do not fit are given back, and so are all if the read fails; records that no longer exist are
        settled. Raises `UndeliveredClaims` if the read failed and the claims could not be given back.
        """
        tables: list[pa.Table] = []
        gone: list[tuple[int, int]] = []
        back: list[tuple[int, int]] = []
        rows, bytes_left = 0, max_bytes
        try:
            reads = await self._groups.log.meta.begin_reads()
            for claim in claims:
                if self._options.max_attempts is not None and claim.attempt > self._options.max_attempts:
                    await self._send_to_dead_letters(claim)
                    continue
                read = await self._messages.read(
                    self._partition.topic,
                    self._partition.tp,
                    claim.start,
                    claim.end,
                    log_start=self._bounds.log_start_offset,
                    max_rows=claim.count,
                    max_bytes=bytes_left,
                    at_least_one=at_least_one and not tables,
                )
                last = claim.start - 1 if read.last is None else read.last
                if last + 1 < read.next_offset:
                    gone.append((last + 1, read.next_offset - 1))
                if read.next_offset <= claim.end:
                    back.append((read.next_offset, claim.end))
                tables += read.tables(claim.attempt)
                rows, bytes_left = rows + read.rows, bytes_left - read.size
            if gone:
                await reads.confirm()  # in a stale state, records that were claimed may not exist yet
                await self._partition.settle(self._options.member, gone)
            if back:
                await self._partition.give_back(self._options.member, back)
        except LlogError as error:
            if not await self.give_back(claims):
                raise UndeliveredClaims(error) from error
            raise
        except BaseException:
            await self.give_back(claims)
            raise
        return Delivery(tables, rows, max_bytes - bytes_left)

    async def give_back(self, claims: Sequence[Claim]) -> bool:
        """Give the claims back; return whether that succeeded. If it did not, they expire."""
        try:
            await self._partition.give_back(self._options.member, [(claim.start, claim.end) for claim in claims])
        except LlogError:
            return False
        return True

    async def wakeup(self) -> Wakeup:
        """Return what would give the group something here: a new record, the end of a claim, or the end of the delay
        that holds up an assigned group.
        """
        record = await self._partition.record()
        if record is None:
            return Wakeup(self._partition.tp, self._bounds.next_offset)
        held_up_ms = held_up_until(record.claims, self._groups.log.runtime.now_ms())
        if self._options.mode == "assigned" and held_up_ms is not None:
            return Wakeup(None, 0, held_up_ms)
        deadline_ms = min((claim.deadline_ms for claim in record.claims), default=None)
        return Wakeup(self._partition.tp, record.offset, deadline_ms)

    async def _send_to_dead_letters(self, claim: Claim) -> None:
        """Append the records of a claim that was delivered often enough to the dead-letter topic, in parts, and settle
        each part.
        """
        assert self._options.group is not None
        offset = claim.start
        while offset <= claim.end:
            reads = await self._groups.log.meta.begin_reads()
            read = await self._messages.read(
                self._partition.topic,
                self._partition.tp,
                offset,
                claim.end,
                log_start=self._bounds.log_start_offset,
                max_rows=_DEAD_LETTERS_AT_A_TIME,
                max_bytes=self._options.max_bytes,
                at_least_one=True,
            )
            await reads.confirm()
            await self._dead_letters.send(
                read.batches,
                topic=self._partition.topic,
                to=self._options.dead_letter,
                group=self._options.group,
                attempts=claim.attempt - 1,
            )
            await self._partition.settle(self._options.member, [(offset, read.next_offset - 1)])
            offset = read.next_offset
