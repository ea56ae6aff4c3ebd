"""The append path: one blob put per call, or none if it is small, then one metadata request for all of its partitions.

1. Know the control records, from the last append or by one read of the unknown ones, so that the blob's stamp is
   between the collector's floors and ceilings.
2. Put the shared blob. A call of small groups, whose partitions admit it, puts none: its batches are inline, in the
   control records and then in the index entries (`log/inline.py`).
3. Send one `put_many` that holds for each partition, in this order, the index entries and the producers' states of the
   append that `pending` names, and a CAS on the control record that advances the next offset and names this append as
   pending. The CAS is the partition's commit point.
4. Read, judge and retry the partitions that lost their CAS together; all partitions if the answer was lost.

Groups of one call with producers of records share an append of their partition, as its parts (`append_parts.py`). The
states of these producers (`producer_states.py`) must be exact for the control record that the CAS replaces. If a
judgement leaves a part out, the others are packed and put again without it.

Partitions commit independently: none is acknowledged or refused because of another. Calls may overlap: their blobs
upload at the same time, and their commits to one partition keep the order of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from llog.batch.columns import stamp
from llog.batch.shared import Body, body_parts, encode_body, pack
from llog.engines.checks import checked_columns
from llog.engines.object.append import Append
from llog.engines.object.append_parts import AppendParts, Judgement, Part, join_groups
from llog.engines.object.clocks import clamp_to_ceiling, stamp_within
from llog.engines.object.commit_order import CommitOrder, CommitTurn, end_turns, wait_for_turn
from llog.engines.object.lanes import Lane, Lanes
from llog.engines.object.pending import pending_puts
from llog.engines.object.producer_states import ProducerStates
from llog.engines.object.retention import retain, trim
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
from llog.log.engine import AppendGroup, AppendResult, RetentionResult, WriterOptions
from llog.log.inline import batch_bytes_max, to_inline
from llog.log.keys import WAL
from llog.log.log import NEWEST_FORMAT, Log, raise_format
from llog.log.producers import Producer, RememberedAppend, find_appended, find_repeated, remember
from llog.log.record_producers import ProducerName, RecordProducer
from llog.log.records import Control, Kind, LogState, Pending, encode, entry_of
from llog.model import TopicPartition
from llog.runtime import uuid7
from llog.stores.meta import Put, Reads, check_size

COMMIT_BYTES_MAX: Final = 64 << 20
"""The most bytes of values in one `put_many`; further partitions commit with the next one."""


class UploadedGroup(NamedTuple):
    """Bodies in existing blobs, to be appended to one partition in this order, as one append."""

    tp: TopicPartition
    sources: Sequence[tuple[str, Body]]
    """Each body with its blob."""
    producer: Producer


class Writer:
    """Appends to any partition of a log. Any number of writers, in any processes, may append to the same ones."""

    def __init__(self, log: Log, options: WriterOptions | None = None) -> None:
        self._log = log
        self._options = options or WriterOptions()
        self._name = uuid7(log.runtime.now_ms(), log.runtime.random())
        self._lanes = Lanes(log)
        self._states = ProducerStates(log, self._lanes)
        self._commit_order = CommitOrder()
        self._sequence = 0
        self._has_newest_format = False
        self.attempts = 0
        """The number of CAS attempts so far, for measuring contention."""

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]:
        """Append the groups and return one result or error for each, in order: partitions commit independently.

        Raises only if nothing at all was appended (an invalid argument, or the blob could not be put).
        """
        columns = checked_columns(groups, self._options.append_bytes_max)
        joined = join_groups(groups, columns) if any(map(_is_numbered, groups)) else None
        if joined is None:
            tps = [TopicPartition(group.topic, group.partition) for group in groups]
        else:
            tps = [parts.tp for parts in joined]
        # Before the first await: calls that have yet to learn their lanes must not overtake each other.
        turns = self._commit_order.take_turns(tps)
        try:
            lanes = await self._lanes.find(tps)
            if joined is None:
                appends = [
                    Append(lane, turn, self._next_sequence(), _producer_of_appends(group), records)
                    for lane, turn, group, records in zip(lanes, turns, groups, columns, strict=True)
                    if isinstance(lane, Lane)
                ]
            else:
                appends = [
                    Append(lane, turn, self._next_sequence(), parts.producer, None, parts)
                    for lane, turn, parts in zip(lanes, turns, joined, strict=True)
                    if isinstance(lane, Lane)
                ]
            if not appends:
                raise next(lane for lane in lanes if isinstance(lane, LlogError))
            if joined is not None:
                await self._require_newest_format()
                await self._drop_repeated(appends)
            now = await self._lanes.present_ms({append.lane: None for append in appends})
            packed = [append for append in appends if append.outcome is None]
            if packed and await self._may_be_inline(packed):
                self._pack_inline(packed, now)
            elif packed:
                await self._upload(packed, now)
            outcomes = await self._commit_in_order(lanes, turns, appends)
            return outcomes if joined is None else _in_order_of_groups(joined, outcomes)
        finally:
            end_turns(turns)

    async def append_uploaded(self, uploads: Sequence[UploadedGroup]) -> list[AppendResult | LlogError]:
        """Append uploaded groups and return one result or error for each, as `append` does.

        The caller keeps the blobs from the collector.
        """
        tps = [upload.tp for upload in uploads]
        turns = self._commit_order.take_turns(tps)
        try:
            lanes = [*map(_check_topic, await self._lanes.find(tps), uploads)]
            appends = []
            for lane, turn, upload in zip(lanes, turns, uploads, strict=True):
                if isinstance(lane, Lane):
                    appends.append(Append(lane, turn, self._next_sequence(), upload.producer, None))
                    appends[-1].sources = upload.sources
            return await self._commit_in_order(lanes, turns, appends)
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
        # One sequence for all lanes: a lane that is forgotten and created again must not repeat a number that the
        # partition remembers.
        self._sequence += 1
        return self._sequence

    async def _may_be_inline(self, appends: Sequence[Append]) -> bool:
        """Return whether these appends need no blob, as far as their partitions are known; mark those that only their
        partitions refuse.
        """
        limits = self._options.inline
        if not limits.group_bytes_max:
            return False
        sizes = [batch_bytes_max(append.records) for append in appends]
        if not limits.fit(sizes):
            return False
        for append, size in zip(appends, sizes, strict=True):
            append.is_refused_inline = not limits.admit(append.lane.last, size)
        if any(append.is_refused_inline for append in appends):
            return False
        try:
            await self._require_newest_format()
        except LlogError:
            return False  # A blob can be read by every version.
        return True

    async def _require_newest_format(self) -> None:
        """Keep processes from the log that do not know inline appends, or would drop the states of producers."""
        if not self._has_newest_format:
            await raise_format(self._log, NEWEST_FORMAT)
            self._has_newest_format = True

    def _pack_inline(self, appends: Sequence[Append], now_ms: int) -> None:
        """Make the batches of these appends, which the control records will carry."""
        for append in appends:
            lane = append.lane
            records = stamp(append.records, now_ms)
            parts, body = encode_body(lane.tp, lane.keys.directory, records, self._options.codec)
            append.inline_uri = to_inline(b"".join(parts))
            append.sources = ((append.inline_uri, body),)
            if self._options.on_commit is not None:
                append.batch = parts

    async def _upload(self, appends: Sequence[Append], now_ms: int) -> None:
        """Put one shared blob of all these appends, stamped within their known bounds as far as one stamp can be."""
        controls = [append.lane.last for append in appends]
        blob = WAL + uuid7(stamp_within(now_ms, *controls), self._log.runtime.random())
        parts, bodies = pack(
            ((append.lane.tp, append.lane.keys.directory, stamp(append.records, now_ms)) for append in appends),
            writer=self._name,
            created_at_ms=now_ms,
            codec=self._options.codec,
            next_offsets=[control.next_offset for control in controls],
        )
        await self._log.blobs.put(blob, parts)
        if self._options.counts is not None:
            self._options.counts.blob_bytes.observe(sum(memoryview(part).nbytes for part in parts))
        for append, control, body in zip(appends, controls, bodies, strict=True):
            append.sources = ((blob, body),)
            append.inline_uri = ""
            append.clock_repairs = control.clock_repairs
        if self._options.on_commit is not None:
            for append, batch in zip(appends, body_parts(parts, bodies), strict=True):
                append.batch = batch

    async def _commit_in_order(
        self, lanes: Sequence[Lane | LlogError], turns: Sequence[CommitTurn], appends: Sequence[Append]
    ) -> list[AppendResult | LlogError]:
        """Commit the appends, and return the results and the errors of missing lanes in the order of the call."""
        end_turns(turn for lane, turn in zip(lanes, turns, strict=True) if isinstance(lane, LlogError))
        await self._commit(appends)
        final_outcome = iter(appends)
        return [lane if isinstance(lane, LlogError) else next(final_outcome).final_outcome for lane in lanes]

    async def _commit(self, appends: Sequence[Append]) -> None:
        """Settle all appends: first those that may commit at once, then those that lost their CAS or wait for their
        turn.
        """
        end_turns(append.turn for append in appends if append.outcome is not None)
        left = [append for append in appends if append.outcome is None]
        while left:
            ready = [append for append in left if append.turn.has_come]
            known = [append for append in ready if append.lane.known is not None and self._knows_states(append)]
            if known:
                await self._attempt(known)
            elif ready:
                await self._look(ready)
            else:
                await wait_for_turn(append.turn for append in left)
            end_turns(append.turn for append in left if append.outcome is not None)
            left = [append for append in left if append.outcome is None]

    async def _look(self, appends: Sequence[Append]) -> None:
        """Read the control records of these appends, after a pause if other writers won their CAS."""
        attempts = max(append.attempts for append in appends)
        if attempts:
            ceiling_ms = min(self._options.retry_delay_ms_max, 2 ** min(attempts, 12))
            await self._log.runtime.sleep(self._log.runtime.random().uniform(0, ceiling_ms) / 1000)
        try:
            reads = await self._log.meta.begin_reads()
        except LlogError as error:
            self._fail(appends, error)
            return
        numbered = {append.lane: append.parts.producers_left() for append in appends if append.parts is not None}
        numbered = {lane: producers for lane, producers in numbered.items() if producers}
        for lane in numbered:
            lane.known = None
        errors = await self._lanes.learn([append.lane for append in appends if append.lane not in numbered])
        errors |= await self._states.learn(numbered)
        for append in appends:
            append.look, append.is_fresh = reads, True
            if append.lane.tp in errors:
                self._fail([append], errors[append.lane.tp])

    async def _attempt(self, appends: Sequence[Append]) -> None:
        """Judge these appends by the known control records, and try one CAS for each that may proceed, in one request.

        Leaves unsettled the appends that lost their CAS or may have, that only an old control record refuses, and that
        did not fit into the request.
        """
        going: list[Append] = []
        refused: list[tuple[Append, Reads, Part | None, LlogError]] = []
        for append in appends:
            assert append.lane.known is not None
            append.control, append.version = append.lane.known
            verdict = self._verdict(append, append.control)
            if verdict is None and append.is_numbered:
                unfit = self._judge_parts(append)
                if unfit is None:
                    append.lane.known = None
                    continue
                refused += [(append, append.look, part, error) for part, error in unfit if append.look is not None]
                if unfit or append.outcome is not None:
                    continue
            if verdict is None:
                append.since = append.since or append.control.next_offset
                going.append(append)
                continue
            if isinstance(verdict, LlogError):
                append.lane.known = None
                if append.look is not None:
                    refused.append((append, append.look, None, verdict))
                continue
            append.outcome = verdict
        await self._refuse(refused)
        # Appends that may commit now do; those that need another blob, or their first, wait for the next round.
        limits = self._options.inline
        going = [append for append in going if append.may_commit(limits)] or await self._upload_again(going)
        puts: list[Put] = []
        tried: list[Append] = []
        places: list[int] = []
        size = 0
        for append in going:
            append.changed, append.appended = self._advance(append)
            entries = pending_puts(append.lane.keys, append.control.pending)
            commit = Put(append.lane.keys.control, encode(append.changed), append.version)
            size += len(commit.value)
            for entry in entries:
                size += len(entry.value)
            if size > COMMIT_BYTES_MAX and tried:
                break
            try:
                check_size(commit.key, commit.value)
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

    async def _refuse(self, refused: Sequence[tuple[Append, Reads, Part | None, LlogError]]) -> None:
        """Refuse these appends, or one part of each, unless the read of their control records was stale."""
        for look in {look: None for _, look, _, _ in refused}:
            together = list({append: None for append, own, _, _ in refused if own is look})
            try:
                await look.confirm()
            except LlogError as error:
                self._fail(together, error)
        for append, _, part, verdict in refused:
            if part is None or append.outcome is not None:
                append.outcome = append.outcome or verdict
            else:
                append.refuse(part, verdict)

    async def _drop_repeated(self, appends: Sequence[Append]) -> None:
        """Settle the parts that the partitions remember, and pack the others for the first upload.

        What a partition remembers was appended, even if an old state shows it. Everything else is judged at the commit.
        """
        numbered = [append for append in appends if append.is_numbered]
        await self._learn_states([append for append in numbered if not self._knows_states(append)])
        # The topic may have been deleted since this writer last read: only a read answers a repetition.
        await self._learn_states([append for append in numbered if self._has_old_repetition(append)])
        for append in appends:
            assert append.parts is not None
            packed = append.parts.left
            if append.is_numbered and self._knows_states(append) and append.lane.last.log_state is not LogState.DELETED:
                judgement = self._judge(append)
                if append.is_fresh or not judgement.repeated:
                    append.settle_repeated(judgement)
                    packed = judgement.may_be_next()
            if append.outcome is None:
                append.columns = append.parts.pack(packed)

    async def _learn_states(self, appends: Sequence[Append]) -> None:
        """Read the control records and the states that these appends need. Errors are left to the commit."""
        wanted: dict[Lane, list[ProducerName]] = {}
        for append in appends:
            assert append.parts is not None
            wanted.setdefault(append.lane, []).extend(append.parts.producers_left())
        errors = await self._states.learn(wanted)
        for append in appends:
            append.is_fresh = append.lane.tp not in errors

    def _judge(self, append: Append) -> Judgement:
        """Judge the parts by the known states, which the append then has."""
        assert append.parts is not None
        states = self._states.find(append.lane, append.parts.producers_left())
        assert states is not None
        append.states = states
        return append.parts.judge(states)

    def _has_old_repetition(self, append: Append) -> bool:
        return not append.is_fresh and self._knows_states(append) and bool(self._judge(append).repeated)

    def _knows_states(self, append: Append) -> bool:
        if append.parts is None or not append.is_numbered:
            return True
        return self._states.find(append.lane, append.parts.producers_left()) is not None

    def _judge_parts(self, append: Append) -> list[tuple[Part, LlogError]] | None:
        """Settle the repeated parts, choose those of the batch, and return those that are to be refused; None if the
        control record has to be read before.
        """
        assert append.parts is not None
        judgement = self._judge(append)
        if (judgement.refused and append.look is None) or (judgement.repeated and not append.is_fresh):
            return None
        append.settle_repeated(judgement)
        if not judgement.refused and append.outcome is None and append.parts.packed != judgement.accepted:
            append.attempted = {**append.attempted, append.sequence: append.parts.packed}
            append.sequence = self._next_sequence()
            append.columns, append.sources = append.parts.pack(judgement.accepted), ()
        return judgement.refused

    def _settle(self, tried: Sequence[Append], results: Sequence[int | VersionMismatch]) -> None:
        """Acknowledge each append that won its own CAS."""
        for append, result in zip(tried, results, strict=True):
            if isinstance(result, VersionMismatch):
                self._lose(append)
            else:
                append.lane.know(append.changed, result)
                self._keep_states(append, result)
                append.succeed(_result(append.lane, append.appended))
                self._count(append)
                if self._options.on_commit is not None and append.batch:
                    keys = append.lane.keys
                    self._options.on_commit(keys.directory, keys.partition, append.appended.start_offset, append.batch)

    def _count(self, append: Append) -> None:
        counts = self._options.counts
        if counts is not None:
            counts.inline += bool(append.inline_uri)
            counts.inline_bytes += append.inline_bytes
            counts.blob += not append.inline_uri
            counts.full += append.is_refused_inline

    def _keep_states(self, append: Append, version: int) -> None:
        """Keep the states after a commit, if they are still those of the lane's known control record."""
        pending, known = append.changed.pending, append.lane.known
        if append.states and pending is not None and known is not None and known[1] == version:
            self._states.keep(append.lane, {**append.states, **{each.name: each.state for each in pending.producers}})

    def _lose(self, append: Append, error: OutcomeUnknown | None = None) -> None:
        append.lane.known = None
        append.look = None
        append.attempts += 1
        if append.attempts < self._options.attempts_max:
            return
        if append.is_doubtful:
            append.outcome = error or OutcomeUnknown(
                f"the append to {append.lane.tp} may have happened: {append.attempts} attempts did not show its outcome"
            )
        else:
            append.outcome = Contention(
                f"{append.lane.tp}: {self._options.attempts_max} attempts to append lost their race; try again"
            )

    def _fail(self, appends: Sequence[Append], error: LlogError) -> None:
        """Apply a failed request to its appends: each did not happen, or has to be looked up."""
        for append in appends:
            if isinstance(error, OutcomeUnknown):
                append.is_doubtful = True
                self._lose(append, error)
                continue
            append.lane.known = None
            append.outcome = error
            if append.is_doubtful and isinstance(error, StoreUnavailable):
                append.outcome = OutcomeUnknown(f"the append to {append.lane.tp} may have happened: {error}")

    def _verdict(self, append: Append, control: Control) -> AppendResult | LlogError | None:
        """Return the outcome of this append according to the control record; None if it may proceed."""
        lane, producer = append.lane, append.producer
        mine = self._find_mine(append, control)
        if mine is not None:
            return mine
        if append.is_doubtful and self._name not in control.writers and control.writers_evicted_through >= append.since:
            return OutcomeUnknown(
                f"the append to {lane.tp} may have happened: the partition no longer remembers this writer"
            )
        repeated = None
        if producer is not None:
            try:
                repeated = find_repeated(
                    control.producers, control.evicted_through, control.next_offset, producer, str(lane.tp)
                )
            except LlogError as error:
                if control.log_state is not LogState.DELETED:
                    return error
                # The producer may mean the topic that was created again under the name.
        if repeated is not None:
            return _result(lane, repeated, repeated=True)
        if append.is_numbered and control.log_state is LogState.FENCED and append.is_fresh:
            append.settle_repeated(self._judge(append))
            if append.outcome is not None:
                return append.outcome
        if control.log_state is LogState.FENCED:
            return PartitionFenced(f"partition {lane.tp} is fenced: it accepts no appends until `llog topics unfence`")
        if control.log_state is LogState.DELETED:
            self._lanes.forget(lane)
            return PartitionNotInitialized(f"partition {lane.tp} was deleted")
        return None

    def _find_mine(self, append: Append, control: Control) -> AppendResult | None:
        """Return the result of an attempt of this append that the partition remembers; None if parts of the append are
        left to be judged after it.
        """
        if not append.is_numbered:
            mine = find_appended(control.writers, self._name, append.sequence)
            return None if mine is None else _result(append.lane, mine)
        for sequence, packed in ((append.sequence, None), *append.attempted.items()):
            mine = find_appended(control.writers, self._name, sequence)
            if mine is not None:
                append.succeed(_result(append.lane, mine), packed)
                if isinstance(append.outcome, AppendResult):
                    return append.outcome
        return None

    async def _upload_again(self, appends: Sequence[Append]) -> list[Append]:
        """Put records under new names whose blobs a collector may have decided to delete, or which their partitions no
        longer admit inline, in one blob for each stamp.

        Returns the appends that may proceed.
        """
        now = self._log.runtime.now_ms()
        limits = self._options.inline
        by_stamp: dict[int, list[Append]] = {}
        done: list[Append] = []
        for append in appends:
            if append.inline_uri and limits.admit(append.control, batch_bytes_max(append.records)):
                # Judging has left parts of it out, and the others are still inline.
                self._pack_inline([append], clamp_to_ceiling(now, append.control))
                done.append(append)
                continue
            append.is_refused_inline |= bool(append.inline_uri)
            by_stamp.setdefault(stamp_within(now, append.control), []).append(append)
        for together in by_stamp.values():
            try:
                await self._upload(together, min(clamp_to_ceiling(now, append.control) for append in together))
                done += together
            except LlogError as error:
                self._fail(together, error)
        return done

    def _advance(self, append: Append) -> tuple[Control, RememberedAppend]:
        """Return the control record after this append, and the append as the record remembers it."""
        control, now_ms = append.control, self._log.runtime.now_ms()
        start, end = control.next_offset, control.next_offset - 1
        entries, max_append, max_timestamp = [], control.max_append_ms, control.max_timestamp_ms
        inline_total = control.inline_total + append.inline_bytes
        for blob, body in append.sources:
            end += body.msg_count
            max_append = max(max_append, body.append_ms)
            max_timestamp = max(max_timestamp, body.timestamp_max)
            entries.append(
                entry_of(
                    body,
                    append.inline_uri or self._log.data_uri(blob),
                    Kind.WAL,
                    max_append_ms=max_append,
                    max_timestamp_ms=max_timestamp,
                    inline_total=inline_total,
                )
            )
        appended = RememberedAppend(append.sequence, start, end)
        writers, writers_evicted = remember(
            control.writers, control.writers_evicted_through, self._name, appended, now_ms
        )
        producers, evicted = control.producers, control.evicted_through
        if append.producer is not None:
            named = RememberedAppend(append.producer.sequence, start, end)
            producers, evicted = remember(producers, evicted, append.producer.id, named, now_ms)
        stored = append.parts.stored_producers(append.states, start, max_append) if append.parts else ()
        changed = msgspec.structs.replace(
            control,
            next_offset=end + 1,
            pending=Pending(start_offset=start, entries=tuple(entries), producers=stored),
            max_append_ms=max_append,
            max_timestamp_ms=max_timestamp,
            producers=producers,
            evicted_through=evicted,
            writers=writers,
            writers_evicted_through=writers_evicted,
            inline_total=inline_total,
            inline_full=append.is_refused_inline or (control.inline_full and not append.inline_uri),
        )
        return changed, appended


def _is_numbered(group: AppendGroup) -> bool:
    return isinstance(group.producer, RecordProducer)


def _producer_of_appends(group: AppendGroup) -> Producer | None:
    return group.producer if isinstance(group.producer, Producer) else None


def _in_order_of_groups(
    joined: Sequence[AppendParts], outcomes: Sequence[AppendResult | LlogError]
) -> list[AppendResult | LlogError]:
    """Return the outcome of each group, in the order of the call."""
    found: dict[int, AppendResult | LlogError] = {}
    for parts, outcome in zip(joined, outcomes, strict=True):
        found |= zip((part.number for part in parts.all), parts.outcomes(outcome), strict=True)
    return [found[number] for number in range(len(found))]


def _check_topic(lane: Lane | LlogError, upload: UploadedGroup) -> Lane | LlogError:
    """Return the lane, or an error if the records were uploaded for an earlier incarnation of the topic."""
    if isinstance(lane, LlogError) or all(body.directory == lane.keys.directory for _, body in upload.sources):
        return lane
    return PartitionNotInitialized(f"partition {lane.tp} was deleted with its topic, which was created again since")


def _result(lane: Lane, appended: RememberedAppend, *, repeated: bool = False) -> AppendResult:
    return AppendResult(
        topic=lane.tp.topic,
        partition=lane.tp.partition,
        start_offset=appended.start_offset,
        end_offset=appended.end_offset,
        repeated=repeated,
    )
