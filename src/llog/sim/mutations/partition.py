"""Ways to break the engine `object`: its writer, compactor, collector, repair and sink."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import copy
from typing import Final

import msgspec

from llog.batch.shared import Body
from llog.engines.object import blob_reads, collector, pending, sink, writer
from llog.engines.object.append import Append
from llog.engines.object.clocks import Window
from llog.engines.object.compaction import job as compaction
from llog.engines.object.compaction import plan as compaction_plan
from llog.engines.object.compaction.job import Job
from llog.engines.object.compaction.plan import Breadcrumb, Plan
from llog.engines.object.gaps import Gaps
from llog.engines.object.repair import index as repair
from llog.engines.object.repair.candidates import Candidate, fills
from llog.errors import LlogError, VersionMismatch
from llog.log.engine import AppendResult
from llog.log.inline import is_inline
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Compaction, CompactionCursor, Control, IndexEntry, Manifest, Pending, decode, encode
from llog.sim.mutations.patch import Change, Mutation, Patch
from llog.sim.plan import overtaken_compactors, overtaken_merges, slow_commits, slow_sinks, snapshots
from llog.stores.blobs import Buffer
from llog.stores.meta import MetaEntry, Put, scan


def skip_the_index_entry_of_the_append_before(patch: Patch) -> None:
    patch.setattr(writer, "pending_puts", lambda keys, pending: [])


def put_the_index_entry_unconditionally(patch: Patch) -> None:
    shipped = pending.pending_puts

    def unconditional(keys: PartitionKeys, newest: Pending | None) -> list[Put]:
        return [msgspec.structs.replace(put, expected=None) for put in shipped(keys, newest)]

    patch.setattr(writer, "pending_puts", unconditional)
    patch.setattr(compaction_plan, "pending_puts", unconditional)


def delete_the_lower_keys_before_the_compacted_one_is_there(patch: Patch) -> None:
    shipped = compaction._publish

    async def delete_first(log: Log, keys: PartitionKeys, breadcrumb: Breadcrumb) -> bool:
        await log.meta.delete_range(
            keys.entry(breadcrumb.record.start_offset), keys.entry(breadcrumb.record.end_offset)
        )
        return await shipped(log, keys, breadcrumb)

    patch.setattr(compaction, "_publish", delete_first)


def advance_the_cursor_first(patch: Patch) -> None:
    shipped = compaction._publish

    async def cursor_first(log: Log, keys: PartitionKeys, breadcrumb: Breadcrumb) -> bool:
        found = await log.meta.get(keys.cursor)
        if (
            found is not None
            and decode(CompactionCursor, found.value, found.key).offset <= breadcrumb.record.end_offset
        ):
            moved = encode(CompactionCursor(breadcrumb.record.end_offset + 1))
            await log.meta.put(keys.cursor, moved, expected=found.version)
        return await shipped(log, keys, breadcrumb)

    patch.setattr(compaction, "_publish", cursor_first)


def publish_the_compacted_entry_unconditionally(patch: Patch) -> None:
    async def publish(log: Log, keys: PartitionKeys, breadcrumb: Breadcrumb) -> bool:
        assert breadcrumb.record.entry is not None
        await log.meta.put(keys.entry(breadcrumb.record.end_offset), encode(breadcrumb.record.entry))
        return True

    patch.setattr(compaction, "_publish", publish)


def begin_a_compaction_without_looking_again_at_the_cursor(patch: Patch) -> None:
    shipped = compaction.is_still_next

    def is_still_next(run: Compaction, cursor: int, highest: MetaEntry | None) -> bool:
        return shipped(run, run.start_offset, highest)

    patch.setattr(compaction, "is_still_next", is_still_next)


def merge_without_reading_the_run_again(patch: Patch) -> None:
    shipped = compaction._begin_merge

    async def begin_merge(log: Log, plan: Plan, breadcrumb: Breadcrumb, *, resumed: bool) -> Job | None:
        if resumed:
            return await shipped(log, plan, breadcrumb, resumed=resumed)
        return Job(plan, breadcrumb, -1, has_blob=False)

    patch.setattr(compaction, "_begin_merge", begin_merge)


def collect_without_raising_the_floors(patch: Patch) -> None:
    async def raise_nothing(log: Log, enumerated: Sequence[PartitionKeys], run: Window) -> int:
        return run.far_ms

    patch.setattr(collector, "raise_floors", raise_nothing)


def ignore_in_the_mark(kind: str) -> Change:
    """The collector's mark without one of the places that name blobs."""

    async def references(log: Log, enumerated: Sequence[PartitionKeys], gaps: Gaps | None = None) -> AsyncIterator[str]:
        for keys in enumerated:
            found = await log.meta.get(keys.control)
            if found is not None and kind != "pending":
                newest = decode(Control, found.value, found.key).pending
                for entry in newest.entries if newest else ():
                    if not is_inline(entry.data_uri):
                        yield log.blob_name(entry.data_uri)
            found = await log.meta.get(keys.compaction)
            if found is not None and kind != "breadcrumb":
                yield decode(Compaction, found.value, found.key).blob
            async for found in scan(log.meta, keys.index):
                data_uri = decode(IndexEntry, found.value, found.key).data_uri
                if not is_inline(data_uri):
                    yield log.blob_name(data_uri)

    def mutation(patch: Patch) -> None:
        patch.setattr(collector, "references", references)

    mutation.__name__ = f"ignore_{kind}_in_the_mark"
    return mutation


def ignore_sink_manifests_in_the_mark(patch: Patch) -> None:
    async def none(log: Log) -> AsyncIterator[str]:
        nothing: tuple[str, ...] = ()
        for name in nothing:
            yield name

    patch.setattr(collector, "sink_references", none)


def ignore_gaps(patch: Patch) -> None:
    """The collector deletes what could fill a gap in the index."""
    patch.setattr(collector, "strike_off_kept", lambda names, gaps: None)


def repair_with_the_first_that_fits(patch: Patch) -> None:
    """A gap that several candidates fit is filled with one of them."""

    def first(
        start: int, end: int, candidates: Sequence[Candidate], accept: Callable[[Sequence[Candidate]], bool]
    ) -> list[list[Candidate]] | None:
        ways = fills(start, end, candidates, accept)
        return ways[:1] if ways else ways

    patch.setattr(repair, "fills", first)


def ignore_pins(patch: Patch) -> None:
    async def none(log: Log, now_ms: int) -> list[object]:
        return []

    patch.setattr(collector, "alive_pins", none)


def append_without_looking_for_a_repeated_one(patch: Patch) -> None:
    patch.setattr(writer, "find_repeated", lambda *_: None)


def forget_what_this_writer_appended(patch: Patch) -> None:
    patch.setattr(writer, "find_appended", lambda *_: None)


def answer_before_the_commit(patch: Patch) -> None:
    shipped = writer.Writer._commit

    async def answered(self: writer.Writer, appends: Sequence[Append]) -> None:
        early = [append for append in appends if not append.is_numbered]
        copies = [copy(append) for append in early]
        for append in early:
            append.control = append.lane.last
            _, appended = self._advance(append)
            append.outcome = writer._result(append.lane, appended)
        commit = asyncio.ensure_future(shipped(self, copies))
        commit.add_done_callback(lambda done: done.exception())
        await shipped(self, [append for append in appends if append.is_numbered])

    patch.setattr(writer.Writer, "_commit", answered)


def acknowledge_a_lost_commit_because_a_neighbour_won(patch: Patch) -> None:
    shipped = writer.Writer._settle

    def settle(self: writer.Writer, tried: Sequence[Append], results: Sequence[int | VersionMismatch]) -> None:
        won = [result for result in results if not isinstance(result, VersionMismatch)]
        shipped(self, tried, [won[0] if won and isinstance(each, VersionMismatch) else each for each in results])

    patch.setattr(writer.Writer, "_settle", settle)


def take_a_request_for_done_because_one_of_its_commits_was(patch: Patch) -> None:
    """After a lost answer: what one partition shows is believed of all that were in the request."""
    shipped = writer.Writer._look

    async def look(self: writer.Writer, appends: Sequence[Append]) -> None:
        await shipped(self, appends)
        left = [append for append in appends if append.is_doubtful and append.outcome is None]
        if any(isinstance(self._verdict(append, append.lane.last), AppendResult) for append in left):
            for append in left:
                append.outcome = writer._result(append.lane, self._advance(append)[1])

    patch.setattr(writer.Writer, "_look", look)


def give_all_groups_of_a_call_one_sequence(patch: Patch) -> None:
    shipped = writer.Writer._commit

    async def commit(self: writer.Writer, appends: Sequence[Append]) -> None:
        for append in appends:
            append.sequence = appends[0].sequence
        await shipped(self, appends)

    patch.setattr(writer.Writer, "_commit", commit)


def publish_ones_own_attempt_although_the_record_names_another(patch: Patch) -> None:
    shipped = sink._apply

    async def own(log: Log, name: str, batch: int, manifest: Manifest, known: Mapping[str, tuple[Body, ...]]) -> None:
        since = {f"stable/{partition}": manifest.since.get(f"stable/{partition}", 1) for partition in range(2)}
        mine = msgspec.structs.replace(manifest, blobs=tuple(known) or manifest.blobs, since=since)
        await shipped(log, name, batch, mine, known)

    patch.setattr(sink, "_apply", own)


def hand_a_read_the_range_of_its_neighbour(patch: Patch) -> None:
    shipped = blob_reads._Range.part

    def part(wanted: blob_reads._Range, offset: int, length: int) -> Buffer | LlogError:
        neighbour = wanted.neighbours[0]
        return shipped(neighbour, neighbour.start, neighbour.end - neighbour.start)

    patch.setattr(blob_reads._Range, "part", part)


PARTITION_MUTATIONS: Final = (
    Mutation(skip_the_index_entry_of_the_append_before, "I1"),
    Mutation(put_the_index_entry_unconditionally, "I1|I5|I6"),
    Mutation(delete_the_lower_keys_before_the_compacted_one_is_there, "I1"),
    Mutation(advance_the_cursor_first, "I5"),
    Mutation(publish_the_compacted_entry_unconditionally, "I1|I5|I6"),
    Mutation(begin_a_compaction_without_looking_again_at_the_cursor, "I5", overtaken_compactors),
    Mutation(merge_without_reading_the_run_again, "I1|I5|InconsistentReadState", overtaken_merges),
    Mutation(collect_without_raising_the_floors, "I6", slow_commits),
    Mutation(ignore_in_the_mark("pending"), "I6"),
    Mutation(ignore_in_the_mark("breadcrumb"), "I6"),
    Mutation(ignore_sink_manifests_in_the_mark, "I6|BlobNotFound", slow_sinks),
    Mutation(ignore_pins, "I6", snapshots),
    Mutation(ignore_gaps, "I6"),
    Mutation(repair_with_the_first_that_fits, "I1"),
    Mutation(append_without_looking_for_a_repeated_one, "I8|S1"),
    Mutation(forget_what_this_writer_appended, "I8"),
    Mutation(answer_before_the_commit, "I3"),
    Mutation(acknowledge_a_lost_commit_because_a_neighbour_won, "I1|I3"),
    Mutation(take_a_request_for_done_because_one_of_its_commits_was, "I3"),
    Mutation(give_all_groups_of_a_call_one_sequence, "I3"),
    Mutation(hand_a_read_the_range_of_its_neighbour, "I1"),
    Mutation(publish_ones_own_attempt_although_the_record_names_another, "S1|I6"),
)
