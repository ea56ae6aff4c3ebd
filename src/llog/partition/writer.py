"""The append path: one blob put per call, then one metadata round trip per partition.

1. The control record is known, from the last append or by a read, so that the blob's stamp is between the collector's floor and ceiling.
2. The shared blob is put.
3. Per partition, in one ordered `put_many`: the index entries of the append that `pending` names, then a CAS on the control record
   that advances the counter and names this append as pending. The CAS is the commit point, and is answered at once.

Calls may overlap: their blobs upload at a time, and their commits to one partition keep the order of the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from llog.batch.columns import Columns, byte_size, columns_of, stamped
from llog.batch.format import Codec
from llog.batch.shared import Body, pack
from llog.errors import (
    Contention,
    InvalidArgument,
    LlogError,
    OutcomeUnknown,
    PartitionFenced,
    PartitionNotInitialized,
    RecordTooLarge,
    StoreUnavailable,
    VersionMismatch,
)
from llog.model import FIRST_OFFSET, TopicPartition
from llog.partition.catalog import Catalog
from llog.partition.clocks import AHEAD_MS, bounded_ms, is_near_ceiling, may_commit, present_ms, raised, stamp_within
from llog.partition.keys import WAL, PartitionKeys
from llog.partition.log import Log
from llog.partition.records import Control, Kind, LogState, Pending, decode, encode, entry_of
from llog.partition.retention import retain, trim
from llog.ports import AppendResult, Group, RetentionResult
from llog.producers import Appended, Producer, check_producer, find_appended, find_repeated, remembered
from llog.runtime import uuid7
from llog.stores.meta import ABSENT, Put

_RAISES_MAX: Final = 5
"""Attempts to raise a ceiling: after them, blobs are stamped no higher than it is."""


class WriterOptions(msgspec.Struct, frozen=True, kw_only=True):
    codec: Codec = Codec.NONE
    append_bytes_max: int = 256 << 20
    attempts_max: int = 200
    retry_delay_ms_max: int = 200


class Writer:
    """Appends to any partition of a log. Any number of writers, in any processes, may append to the same ones."""

    def __init__(self, log: Log, options: WriterOptions | None = None) -> None:
        self._log = log
        self._options = options or WriterOptions()
        self._catalog = Catalog(log)
        self._name = uuid7(log.runtime.now_ms(), log.runtime.random())
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._last_turns: dict[TopicPartition, asyncio.Future[None]] = {}
        self._sequence = 0
        self.attempts = 0
        """CAS attempts so far, for measuring contention."""

    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]:
        """One result or error per group, in their order: partitions commit independently.

        Raises only if nothing at all was appended (a bad argument, or the blob could not be put).
        """
        columns = checked(groups, self._options.append_bytes_max)
        tps = [TopicPartition(group.topic, group.partition) for group in groups]
        # Before anything is awaited: calls that have yet to learn their lane must not overtake each other on the way.
        turns = [_Turn(self._last_turns, tp) for tp in tps]
        try:
            lanes = await asyncio.gather(*(self._lane(tp) for tp in tps))
            sources = await self._upload(lanes, columns)
            return await asyncio.gather(
                *(
                    self._settled(lane, turn, source, group.producer)
                    for lane, turn, source, group in zip(lanes, turns, sources, groups, strict=True)
                )
            )
        finally:
            for turn in turns:
                turn.end()

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        return await trim(self._log, tp, before_offset)

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        now_ms = self._log.runtime.now_ms()
        return await retain(self._log, tp, retention_ms=retention_ms, retention_bytes=retention_bytes, now_ms=now_ms)

    async def append_uploaded(
        self, tp: TopicPartition, uploads: Sequence[tuple[str, Body]], producer: Producer
    ) -> AppendResult:
        """Appends what is in blobs already, in this order, as one append. The caller keeps the blobs from being collected."""
        turn = _Turn(self._last_turns, tp)
        try:
            lane = await self._lane(tp)
            if isinstance(lane, LlogError):
                raise lane
            if any(body.directory != lane.keys.directory for _, body in uploads):
                raise PartitionNotInitialized(
                    f"partition {tp} was deleted with its topic, which was created again since"
                )
            await turn.come()
            return await self._commit(lane, [_Source(blob, body, None) for blob, body in uploads], producer)
        finally:
            turn.end()

    async def _lane(self, tp: TopicPartition) -> _Lane | LlogError:
        """The lane of a partition, its control record known; or why there is none."""
        try:
            lane = self._lanes.get(tp)
            if lane is None:
                lane = self._lanes.setdefault(tp, _Lane(tp, await self._catalog.partition(tp)))
            if lane.known is None:
                await self._learn(lane)
        except LlogError as error:
            return error
        return lane

    async def _learn(self, lane: _Lane) -> tuple[Control, int]:
        found = await self._log.meta.get(lane.keys.control)
        if found is None:
            self._lanes.pop(lane.tp, None)
            raise PartitionNotInitialized(f"partition {lane.tp} has no control record")
        lane.know(decode(Control, found.value, found.key), found.version)
        assert lane.known is not None
        return lane.known

    async def _upload(self, lanes: Sequence[_Lane | LlogError], columns: Sequence[Columns]) -> list[_Source]:
        """Puts one shared blob of all groups that have a lane; sources are returned for all, in order."""
        now = await self._present_ms([lane for lane in lanes if isinstance(lane, _Lane)])
        lasts = [lane.last if isinstance(lane, _Lane) else None for lane in lanes]
        stamp = stamp_within(now, *(control for control in lasts if control is not None))
        blob = WAL + uuid7(stamp, self._log.runtime.random())
        packed, next_offsets = [], []
        for lane, part in zip(lanes, columns, strict=True):
            if isinstance(lane, _Lane):
                packed.append((lane.tp, lane.keys.directory, stamped(part, now)))
                next_offsets.append(lane.known[0].sequence_counter if lane.known else FIRST_OFFSET)
        if not packed:
            raise next(lane for lane in lanes if isinstance(lane, LlogError))
        codec = self._options.codec
        parts, bodies = pack(packed, writer=self._name, created_at_ms=now, codec=codec, next_offsets=next_offsets)
        await self._log.blobs.put(blob, parts)
        remaining = iter(bodies)
        return [
            _Source(blob, bodies[0] if last is None else next(remaining), part, last.clock_repairs if last else 0)
            for last, part in zip(lasts, columns, strict=True)
        ]

    async def _present_ms(self, lanes: Sequence[_Lane]) -> int:
        """The present, by a clock that is not far ahead. Ceilings that it comes near to are raised, before anything is stamped."""
        now = self._log.runtime.now_ms()
        if not any(is_near_ceiling(lane.last, now) for lane in lanes):
            return now
        now = await present_ms(self._log)
        for lane in lanes:
            await self._raise_ceiling(lane, now)
        return now

    async def _raise_ceiling(self, lane: _Lane, now_ms: int) -> None:
        for _ in range(_RAISES_MAX):
            try:
                control, version = lane.known or await self._learn(lane)
                if not is_near_ceiling(control, now_ms):
                    return
                changed = raised(control, control.blob_floor_ms, now_ms + AHEAD_MS)
                lane.know(changed, await self._log.meta.put(lane.keys.control, encode(changed), expected=version))
            except (VersionMismatch, OutcomeUnknown):
                lane.known = None
            except PartitionNotInitialized:
                return  # which the commit will say

    async def _settled(
        self, lane: _Lane | LlogError, turn: _Turn, source: _Source, producer: Producer | None
    ) -> AppendResult | LlogError:
        if isinstance(lane, LlogError):
            return lane
        try:
            await turn.come()
            return await self._commit(lane, [source], producer)
        except LlogError as error:
            return error
        finally:
            turn.end()

    async def _commit(self, lane: _Lane, sources: list[_Source], producer: Producer | None) -> AppendResult:
        # One sequence for all lanes: a lane that is given up and made again must not repeat one that the partition remembers.
        self._sequence += 1
        lane.sequence = self._sequence
        doubtful = False  # whether an earlier attempt of this commit may have happened
        since = lane.known[0].sequence_counter if lane.known else 1
        for attempt in range(self._options.attempts_max):
            if attempt:
                await self._back_off(attempt)
            try:
                control, version, verdict = await self._judged(lane, producer, since if doubtful else None)
                if verdict is None:
                    sources = [await self._within_bounds(lane, control, source) for source in sources]
                    changed, appended = self._advanced(lane, control, sources, producer)
                    self.attempts += 1
                    results = await self._log.meta.put_many(
                        [*index_puts(lane.keys, control.pending), Put(lane.keys.control, encode(changed), version)]
                    )
            except OutcomeUnknown:
                lane.known = None
                doubtful = True
                if attempt + 1 == self._options.attempts_max:
                    raise
                continue
            except StoreUnavailable as error:
                lane.known = None
                if doubtful:
                    raise OutcomeUnknown(f"the append to {lane.tp} may have happened: {error}") from error
                raise
            if isinstance(verdict, LlogError):
                raise verdict
            if verdict is not None:
                return verdict
            outcome = results[-1]
            if not isinstance(outcome, VersionMismatch):
                lane.know(changed, outcome)
                return _result(lane, appended)
            lane.known = None
        if doubtful:
            raise OutcomeUnknown(
                f"the append to {lane.tp} may have happened: its control record is too contended to tell"
            )
        raise Contention(f"{lane.tp}: {self._options.attempts_max} attempts to append lost their race; try again")

    async def _judged(
        self, lane: _Lane, producer: Producer | None, doubtful_since: int | None
    ) -> tuple[Control, int, AppendResult | LlogError | None]:
        """The control record, its version, and what it says about this append: None, go on.

        A refusal may be due to what this writer knew being old, so it is only given after a look at what is there now.
        """
        if lane.known is not None:
            verdict = self._verdict(lane, lane.known[0], producer, doubtful_since)
            if not isinstance(verdict, LlogError):
                return *lane.known, verdict
        control, version = await self._learn(lane)
        verdict = self._verdict(lane, control, producer, doubtful_since)
        if isinstance(verdict, LlogError):
            lane.known = None
        return control, version, verdict

    def _verdict(
        self, lane: _Lane, control: Control, producer: Producer | None, doubtful_since: int | None
    ) -> AppendResult | LlogError | None:
        mine = find_appended(control.writers, self._name, lane.sequence)
        if mine is not None:
            return _result(lane, mine)
        forgotten = self._name not in control.writers
        if forgotten and doubtful_since is not None and control.writers_evicted_through >= doubtful_since:
            return OutcomeUnknown(f"whether the append to {lane.tp} happened cannot be told any more")
        try:
            repeated = None
            if producer is not None:
                repeated = find_repeated(
                    control.producers, control.evicted_through, control.sequence_counter, producer, str(lane.tp)
                )
        except LlogError as error:
            if control.log_state is not LogState.DELETED:  # else the producer may mean the topic that has the name now
                return error
        if repeated is not None:
            return _result(lane, repeated, repeated=True)
        if control.log_state is LogState.FENCED:
            return PartitionFenced(f"partition {lane.tp} is fenced: it accepts no appends until it is unfenced")
        if control.log_state is LogState.DELETED:
            self._lanes.pop(lane.tp, None)  # the topic may be created again, under other keys
            return PartitionNotInitialized(f"partition {lane.tp} was deleted")
        return None

    async def _within_bounds(self, lane: _Lane, control: Control, source: _Source) -> _Source:
        """The source itself, or a copy of it under another name if a collector may already have decided about its blob."""
        if source.columns is None or may_commit(control, source.blob, source.clock_repairs):
            return source
        now = bounded_ms(self._log.runtime.now_ms(), control)
        blob = WAL + uuid7(stamp_within(now, control), self._log.runtime.random())
        again = stamped(source.columns, now)
        parts, bodies = pack(
            [(lane.tp, lane.keys.directory, again)],
            writer=self._name,
            created_at_ms=now,
            codec=self._options.codec,
            next_offsets=[control.sequence_counter],
        )
        await self._log.blobs.put(blob, parts)
        return _Source(blob, bodies[0], source.columns, control.clock_repairs)

    def _advanced(
        self, lane: _Lane, control: Control, sources: Sequence[_Source], producer: Producer | None
    ) -> tuple[Control, Appended]:
        """The control record after this append."""
        entries, max_append, max_timestamp = [], control.max_append_ms, control.max_timestamp_ms
        for source in sources:
            body = source.body
            max_append = max(max_append, body.append_ms)
            max_timestamp = max(max_timestamp, body.timestamp_max)
            entries.append(
                entry_of(
                    body,
                    self._log.data_uri(source.blob),
                    Kind.WAL,
                    max_append_ms=max_append,
                    max_timestamp_ms=max_timestamp,
                )
            )
        pending = Pending(start_offset=control.sequence_counter, entries=tuple(entries))
        now = self._log.runtime.now_ms()
        appended = Appended(lane.sequence, pending.start_offset, pending.end_offset)
        writers, writers_evicted = remembered(
            control.writers, control.writers_evicted_through, self._name, appended, now
        )
        producers, evicted = control.producers, control.evicted_through
        if producer is not None:
            named = Appended(producer.sequence, pending.start_offset, pending.end_offset)
            producers, evicted = remembered(producers, evicted, producer.id, named, now)
        changed = msgspec.structs.replace(
            control,
            sequence_counter=pending.end_offset + 1,
            pending=pending,
            max_append_ms=max_append,
            max_timestamp_ms=max_timestamp,
            producers=producers,
            evicted_through=evicted,
            writers=writers,
            writers_evicted_through=writers_evicted,
        )
        return changed, appended

    async def _back_off(self, attempt: int) -> None:
        ceiling_ms = min(self._options.retry_delay_ms_max, 2 ** min(attempt, 12))
        await self._log.runtime.sleep(self._log.runtime.random().uniform(0, ceiling_ms) / 1000)


class _Source(NamedTuple):
    """One body to append: where it lies, and the records to put again if it may no longer lie there."""

    blob: str
    body: Body
    columns: Columns | None
    clock_repairs: int = 0
    """Of the partition, as far as the writer knew when it chose the blob's name."""


class _Lane:
    """What a writer knows of one partition."""

    def __init__(self, tp: TopicPartition, keys: PartitionKeys) -> None:
        self.tp = tp
        self.keys = keys
        self.known: tuple[Control, int] | None = None
        self.last: Control | None = None
        """What was known last, which may be old."""
        self.sequence = 0

    def know(self, control: Control, version: int) -> None:
        self.known, self.last = (control, version), control


class _Turn:
    """A place in the order of a partition's commits, taken when the call is made."""

    def __init__(self, last: dict[TopicPartition, asyncio.Future[None]], tp: TopicPartition) -> None:
        self._before = last.get(tp)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        last[tp] = self._done

    async def come(self) -> None:
        if self._before is not None:
            await asyncio.shield(self._before)
            self._before = None

    def end(self) -> None:
        """Lets the next one go. Cancelled before it came, it still waits for those before it."""
        if self._done.done():
            return
        if self._before is None or self._before.done():
            self._done.set_result(None)
        else:
            self._before.add_done_callback(lambda _: self.end())


def checked(groups: Sequence[Group], append_bytes_max: int) -> list[Columns]:
    """The groups' records as columns, before anything is done with them: none may be empty, and all together not too large."""
    if not groups:
        raise InvalidArgument("an append needs at least one group of records")
    columns = []
    for group in groups:
        part = group.records if isinstance(group.records, Columns) else columns_of(group.records)
        if part.count == 0:
            raise InvalidArgument(f"the group for {group.topic}/{group.partition} has no records")
        if group.producer is not None:
            check_producer(group.producer)
        columns.append(part)
    size = sum(byte_size(part) for part in columns)
    if size > append_bytes_max:
        raise RecordTooLarge(f"an append of {size} bytes is over the limit of {append_bytes_max} bytes")
    return columns


def index_puts(keys: PartitionKeys, pending: Pending | None) -> list[Put]:
    """The index entries of a pending append. ABSENT: whoever put them before has put the same, or compacted them since."""
    if pending is None:
        return []
    puts, end = [], pending.start_offset - 1
    for entry in pending.entries:
        end += entry.msg_count
        puts.append(Put(keys.entry(end), encode(entry), ABSENT))
    return puts


def _result(lane: _Lane, appended: Appended, *, repeated: bool = False) -> AppendResult:
    return AppendResult(
        topic=lane.tp.topic,
        partition=lane.tp.partition,
        start_offset=appended.start_offset,
        end_offset=appended.end_offset,
        repeated=repeated,
    )
