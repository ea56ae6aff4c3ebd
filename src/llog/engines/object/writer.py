"""The append path: one blob put per call, then one metadata request for all of its partitions.

1. The control records are known, from the last append or by one read of those that are not, so that the blob's stamp is
   between the collector's floors and ceilings.
2. The shared blob is put.
3. One `put_many` has for each partition, in this order, the index entries of the append that `pending` names, and a CAS
   on the control record that advances the counter and names this append as pending. The CAS is the partition's commit
   point.
4. Partitions that lost their CAS are read, judged and tried again, together. So are all of them if the answer got lost.

Partitions commit independently: none is acknowledged or refused because of another. Calls may overlap: their blobs
upload at a time, and their commits to one partition keep the order of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from llog.batch.columns import Columns, stamped
from llog.batch.shared import Body, pack
from llog.engines.checks import checked_columns
from llog.engines.object.clocks import bounded_ms, may_commit, stamp_within
from llog.engines.object.commit_order import Turn, Turns, end_turns, next_turn
from llog.engines.object.lanes import Lane, Lanes
from llog.engines.object.retention import retain, trim
from llog.engines.port import AppendResult, Group, RetentionResult, WriterOptions
from llog.errors import (
    Contention,
    InvalidArgument,
    LlogError,
    OutcomeUnknown,
    PartitionFenced,
    PartitionNotInitialized,
    StoreUnavailable,
    VersionMismatch,
)
from llog.log.keys import WAL, PartitionKeys
from llog.log.log import Log
from llog.log.producers import Appended, Producer, find_appended, find_repeated, remembered
from llog.log.records import Control, Kind, LogState, Pending, encode, entry_of
from llog.model import TopicPartition
from llog.runtime import uuid7
from llog.stores.meta import ABSENT, Put, Reads, check

COMMIT_BYTES_MAX: Final = 64 << 20
"""Values in one `put_many`: partitions beyond that commit with the next one."""


class Uploaded(NamedTuple):
    """Bodies in blobs that are there already, to be appended to one partition in this order, as one append."""

    tp: TopicPartition
    sources: Sequence[tuple[str, Body]]
    """Each body with the blob that it is in."""
    producer: Producer


class Writer:
    """Appends to any partition of a log. Any number of writers, in any processes, may append to the same ones."""

    def __init__(self, log: Log, options: WriterOptions | None = None) -> None:
        self._log = log
        self._options = options or WriterOptions()
        self._name = uuid7(log.runtime.now_ms(), log.runtime.random())
        self._lanes = Lanes(log)
        self._turns = Turns()
        self._sequence = 0
        self.attempts = 0
        """CAS attempts so far, for measuring contention."""

    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]:
        """One result or error per group, in their order: partitions commit independently.

        Raises only if nothing at all was appended (a bad argument, or the blob could not be put).
        """
        columns = checked_columns(groups, self._options.append_bytes_max)
        tps = [TopicPartition(group.topic, group.partition) for group in groups]
        # Before anything is awaited: calls that have yet to learn their lanes must not overtake each other on the way.
        turns = self._turns.take(tps)
        try:
            lanes = await self._lanes.find(tps)
            appends = [
                _Append(lane, turn, self._next_sequence(), group.producer, part)
                for lane, turn, group, part in zip(lanes, turns, groups, columns, strict=True)
                if isinstance(lane, Lane)
            ]
            if not appends:
                raise next(lane for lane in lanes if isinstance(lane, LlogError))
            now = await self._lanes.present_ms({append.lane: None for append in appends})
            await self._upload(appends, now)
            return await self._committed(lanes, turns, appends)
        finally:
            end_turns(turns)

    async def append_uploaded(self, uploads: Sequence[Uploaded]) -> list[AppendResult | LlogError]:
        """One result or error per partition, as of `append`. The caller keeps the blobs from being collected."""
        tps = [upload.tp for upload in uploads]
        turns = self._turns.take(tps)
        try:
            lanes = [*map(_same_topic, await self._lanes.find(tps), uploads)]
            appends = []
            for lane, turn, upload in zip(lanes, turns, uploads, strict=True):
                if isinstance(lane, Lane):
                    appends.append(_Append(lane, turn, self._next_sequence(), upload.producer, None))
                    appends[-1].sources = upload.sources
            return await self._committed(lanes, turns, appends)
        finally:
            end_turns(turns)

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        return await trim(self._log, tp, before_offset)

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        now_ms = self._log.runtime.now_ms()
        return await retain(self._log, tp, retention_ms=retention_ms, retention_bytes=retention_bytes, now_ms=now_ms)

    def _next_sequence(self) -> int:
        # One sequence for all lanes: a lane that is given up and made again must not repeat one that the partition
        # remembers.
        self._sequence += 1
        return self._sequence

    async def _upload(self, appends: Sequence[_Append], now_ms: int) -> None:
        """Puts one shared blob of all these, stamped within the bounds that are known, as far as one stamp can be."""
        controls = [append.lane.last for append in appends]
        blob = WAL + uuid7(stamp_within(now_ms, *controls), self._log.runtime.random())
        parts, bodies = pack(
            ((append.lane.tp, append.lane.keys.directory, stamped(append.records, now_ms)) for append in appends),
            writer=self._name,
            created_at_ms=now_ms,
            codec=self._options.codec,
            next_offsets=[control.sequence_counter for control in controls],
        )
        await self._log.blobs.put(blob, parts)
        for append, control, body in zip(appends, controls, bodies, strict=True):
            append.sources = ((blob, body),)
            append.clock_repairs = control.clock_repairs

    async def _committed(
        self, lanes: Sequence[Lane | LlogError], turns: Sequence[Turn], appends: Sequence[_Append]
    ) -> list[AppendResult | LlogError]:
        """The outcomes of all, in order: of those that have a lane, once they are settled."""
        end_turns(turn for lane, turn in zip(lanes, turns, strict=True) if isinstance(lane, LlogError))
        await self._commit(appends)
        settled = iter(appends)
        return [lane if isinstance(lane, LlogError) else next(settled).settled for lane in lanes]

    async def _commit(self, appends: Sequence[_Append]) -> None:
        """Settles all of these: first those that may go at once, then those that lost, or have yet to wait for their
        turn.
        """
        left = list(appends)
        while left:
            ready = [append for append in left if append.turn.has_come]
            known = [append for append in ready if append.lane.known is not None]
            if known:
                await self._attempt(known)
            elif ready:
                await self._look(ready)
            else:
                await next_turn(append.turn for append in left)
            end_turns(append.turn for append in left if append.outcome is not None)
            left = [append for append in left if append.outcome is None]

    async def _look(self, appends: Sequence[_Append]) -> None:
        """Reads the control records of these, after a pause if others have won races for them."""
        attempts = max(append.attempts for append in appends)
        if attempts:
            ceiling_ms = min(self._options.retry_delay_ms_max, 2 ** min(attempts, 12))
            await self._log.runtime.sleep(self._log.runtime.random().uniform(0, ceiling_ms) / 1000)
        try:
            reads = await self._log.meta.begin_reads()
        except LlogError as error:
            self._fail(appends, error)
            return
        errors = await self._lanes.learn([append.lane for append in appends])
        for append in appends:
            append.look = reads
            if append.lane.tp in errors:
                self._fail([append], errors[append.lane.tp])

    async def _attempt(self, appends: Sequence[_Append]) -> None:
        """Judges these by what is known, and tries one CAS for each that may go on, in one request.

        Not settled is what lost its CAS or may have, what is refused by knowledge that may be old, and what did not
        fit.
        """
        going, refused = [], []
        for append in appends:
            assert append.lane.known is not None
            append.control, append.version = append.lane.known
            verdict = self._verdict(append, append.control)
            if verdict is None:
                append.since = append.since or append.control.sequence_counter
                going.append(append)
                continue
            if isinstance(verdict, LlogError):
                append.lane.known = None
                if append.look is not None:
                    refused.append((append, append.look, verdict))
                continue
            append.outcome = verdict
        await self._refuse(refused)
        # Those that may go at once do: what has to be put again first is left to the next round.
        going = [append for append in going if append.may_commit()] or await self._upload_again(going)
        puts: list[Put] = []
        tried: list[_Append] = []
        places: list[int] = []
        size = 0
        for append in going:
            append.changed, append.appended = self._advanced(append)
            entries = index_puts(append.lane.keys, append.control.pending)
            commit = Put(append.lane.keys.control, encode(append.changed), append.version)
            size += len(commit.value)
            for entry in entries:
                size += len(entry.value)
            if size > COMMIT_BYTES_MAX and tried:
                break
            try:
                check(commit.key, commit.value)
            except InvalidArgument as error:
                append.outcome = error
                continue
            puts += entries
            places.append(len(puts))
            puts.append(commit)
            tried.append(append)
        if not tried:
            return
        self.attempts += len(tried)
        try:
            results = await self._log.meta.put_many(puts)
        except LlogError as error:
            self._fail(tried, error)
        else:
            self._settle(tried, [results[place] for place in places])

    async def _refuse(self, refused: Sequence[tuple[_Append, Reads, LlogError]]) -> None:
        """Refuses these, unless the look at their control records was at an old state."""
        for look in {look: None for _, look, _ in refused}:
            same = [append for append, own, _ in refused if own is look]
            try:
                await look.confirm()
            except LlogError as error:
                self._fail(same, error)
        for append, _, verdict in refused:
            append.outcome = append.outcome or verdict

    def _settle(self, tried: Sequence[_Append], results: Sequence[int | VersionMismatch]) -> None:
        """Acknowledges each append whose own CAS was won."""
        for append, result in zip(tried, results, strict=True):
            if isinstance(result, VersionMismatch):
                self._lose(append)
            else:
                append.lane.know(append.changed, result)
                append.outcome = _result(append.lane, append.appended)

    def _lose(self, append: _Append, error: OutcomeUnknown | None = None) -> None:
        append.lane.known = None
        append.look = None
        append.attempts += 1
        if append.attempts < self._options.attempts_max:
            return
        if append.is_doubtful:
            append.outcome = error or OutcomeUnknown(
                f"the append to {append.lane.tp} may have happened: {append.attempts} attempts could not tell"
            )
        else:
            append.outcome = Contention(
                f"{append.lane.tp}: {self._options.attempts_max} attempts to append lost their race; try again"
            )

    def _fail(self, appends: Sequence[_Append], error: LlogError) -> None:
        """What an error of a request means for each of these: it did not happen, or has to be looked for."""
        for append in appends:
            if isinstance(error, OutcomeUnknown):
                append.is_doubtful = True
                self._lose(append, error)
                continue
            append.lane.known = None
            append.outcome = error
            if append.is_doubtful and isinstance(error, StoreUnavailable):
                append.outcome = OutcomeUnknown(f"the append to {append.lane.tp} may have happened: {error}")

    def _verdict(self, append: _Append, control: Control) -> AppendResult | LlogError | None:
        """What the control record says about this append: None, go on."""
        lane, producer = append.lane, append.producer
        mine = find_appended(control.writers, self._name, append.sequence)
        if mine is not None:
            return _result(lane, mine)
        if append.is_doubtful and self._name not in control.writers and control.writers_evicted_through >= append.since:
            return OutcomeUnknown(f"whether the append to {lane.tp} happened cannot be told any more")
        repeated = None
        if producer is not None:
            try:
                repeated = find_repeated(
                    control.producers, control.evicted_through, control.sequence_counter, producer, str(lane.tp)
                )
            except LlogError as error:
                if control.log_state is not LogState.DELETED:
                    return error
                # The producer may mean the topic that has the name now.
        if repeated is not None:
            return _result(lane, repeated, repeated=True)
        if control.log_state is LogState.FENCED:
            return PartitionFenced(f"partition {lane.tp} is fenced: it accepts no appends until it is unfenced")
        if control.log_state is LogState.DELETED:
            self._lanes.forget(lane)
            return PartitionNotInitialized(f"partition {lane.tp} was deleted")
        return None

    async def _upload_again(self, appends: Sequence[_Append]) -> list[_Append]:
        """Puts copies, under new names, of what collectors may already have decided about: one blob for all that the
        same stamp suits.

        Returns those that may go on.
        """
        now = self._log.runtime.now_ms()
        by_stamp: dict[int, list[_Append]] = {}
        for append in appends:
            by_stamp.setdefault(stamp_within(now, append.control), []).append(append)
        done: list[_Append] = []
        for same in by_stamp.values():
            try:
                await self._upload(same, min(bounded_ms(now, append.control) for append in same))
                done += same
            except LlogError as error:
                self._fail(same, error)
        return done

    def _advanced(self, append: _Append) -> tuple[Control, Appended]:
        """The control record after this append."""
        control, now_ms = append.control, self._log.runtime.now_ms()
        start, end = control.sequence_counter, control.sequence_counter - 1
        entries, max_append, max_timestamp = [], control.max_append_ms, control.max_timestamp_ms
        for blob, body in append.sources:
            end += body.msg_count
            max_append = max(max_append, body.append_ms)
            max_timestamp = max(max_timestamp, body.timestamp_max)
            entries.append(
                entry_of(
                    body,
                    self._log.data_uri(blob),
                    Kind.WAL,
                    max_append_ms=max_append,
                    max_timestamp_ms=max_timestamp,
                )
            )
        appended = Appended(append.sequence, start, end)
        writers, writers_evicted = remembered(
            control.writers, control.writers_evicted_through, self._name, appended, now_ms
        )
        producers, evicted = control.producers, control.evicted_through
        if append.producer is not None:
            named = Appended(append.producer.sequence, start, end)
            producers, evicted = remembered(producers, evicted, append.producer.id, named, now_ms)
        changed = msgspec.structs.replace(
            control,
            sequence_counter=end + 1,
            pending=Pending(start_offset=start, entries=tuple(entries)),
            max_append_ms=max_append,
            max_timestamp_ms=max_timestamp,
            producers=producers,
            evicted_through=evicted,
            writers=writers,
            writers_evicted_through=writers_evicted,
        )
        return changed, appended


_NOTHING_KNOWN: Final = Control()
_NOTHING_APPENDED: Final = Appended(0, 0, 0)


class _Append:
    """One group of records on its way into its partition."""

    __slots__ = (
        "appended",
        "attempts",
        "changed",
        "clock_repairs",
        "columns",
        "control",
        "is_doubtful",
        "lane",
        "look",
        "outcome",
        "producer",
        "sequence",
        "since",
        "sources",
        "turn",
        "version",
    )

    def __init__(
        self, lane: Lane, turn: Turn, sequence: int, producer: Producer | None, columns: Columns | None
    ) -> None:
        self.lane = lane
        self.turn = turn
        self.sequence = sequence
        self.producer = producer
        self.columns = columns
        """The records, to be put again if their blob may be gone; None if somebody else keeps their blobs."""
        self.sources: Sequence[tuple[str, Body]] = ()
        """Where the records are: each body with its blob."""
        self.clock_repairs = 0
        """Of the partition, as far as the writer knew when it chose the blob's name."""
        self.control, self.version = _NOTHING_KNOWN, ABSENT
        """What the append was judged by last."""
        self.changed, self.appended = _NOTHING_KNOWN, _NOTHING_APPENDED
        """What the last attempt was to put in its place, and the offsets that the append has if it did."""
        self.since = 0
        """The partition's next offset before the first attempt: what is remembered below it cannot be this append."""
        self.attempts = 0
        self.look: Reads | None = None
        """The look at the control record after the last attempt, if there was one: only by that may the append be
        refused.
        """
        self.is_doubtful = False
        """Whether an earlier attempt may have happened."""
        self.outcome: AppendResult | LlogError | None = None

    @property
    def records(self) -> Columns:
        assert self.columns is not None
        return self.columns

    @property
    def settled(self) -> AppendResult | LlogError:
        assert self.outcome is not None
        return self.outcome

    def may_commit(self) -> bool:
        """Whether no collector can have decided about its blob."""
        return self.columns is None or may_commit(self.control, self.sources[0][0], self.clock_repairs)


def index_puts(keys: PartitionKeys, pending: Pending | None) -> list[Put]:
    """The index entries of a pending append. ABSENT: whoever put them before has put the same, or compacted them
    since.
    """
    if pending is None:
        return []
    puts, end = [], pending.start_offset - 1
    for entry in pending.entries:
        end += entry.msg_count
        puts.append(Put(keys.entry(end), encode(entry), ABSENT))
    return puts


def _same_topic(lane: Lane | LlogError, upload: Uploaded) -> Lane | LlogError:
    """The lane, or the error of records that were uploaded for another topic than the one that has the name now."""
    if isinstance(lane, LlogError) or all(body.directory == lane.keys.directory for _, body in upload.sources):
        return lane
    return PartitionNotInitialized(f"partition {lane.tp} was deleted with its topic, which was created again since")


def _result(lane: Lane, appended: Appended, *, repeated: bool = False) -> AppendResult:
    return AppendResult(
        topic=lane.tp.topic,
        partition=lane.tp.partition,
        start_offset=appended.start_offset,
        end_offset=appended.end_offset,
        repeated=repeated,
    )
