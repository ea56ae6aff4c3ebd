"""The simulation finds what it is there for: each way to break the protocol is caught within a few seeds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec
import pytest

from llog.batch.shared import Body
from llog.partition import collector, compaction, compaction_plan, sink, writer
from llog.partition.compaction_plan import Crumb
from llog.partition.gaps import Gaps
from llog.partition.keys import PartitionKeys
from llog.partition.log import Log
from llog.partition.records import Compaction, Control, Cursor, IndexEntry, Manifest, Pending, decode, encode
from llog.ports import AppendResult
from llog.producers import Producer
from llog.sim.plan import SimPlan
from llog.sim.stores import Faults
from llog.sim.world import run_seed
from llog.stores.meta import Put, scan

Mutation = Callable[[pytest.MonkeyPatch], None]
SEEDS_MAX = 400


def skip_the_index_entry_of_the_append_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "index_puts", lambda keys, pending: [])


def put_the_index_entry_unconditionally(patch: pytest.MonkeyPatch) -> None:
    shipped = writer.index_puts

    def unconditional(keys: PartitionKeys, pending: Pending | None) -> list[Put]:
        return [put._replace(expected=None) for put in shipped(keys, pending)]

    patch.setattr(writer, "index_puts", unconditional)
    patch.setattr(compaction_plan, "index_puts", unconditional)


def delete_the_lower_keys_before_the_compacted_one_is_there(patch: pytest.MonkeyPatch) -> None:
    shipped = compaction._publish

    async def delete_first(log: Log, keys: PartitionKeys, crumb: Crumb) -> bool:
        await log.meta.delete_range(keys.entry(crumb.record.start_offset), keys.entry(crumb.record.end_offset))
        return await shipped(log, keys, crumb)

    patch.setattr(compaction, "_publish", delete_first)


def advance_the_cursor_first(patch: pytest.MonkeyPatch) -> None:
    shipped = compaction._publish

    async def cursor_first(log: Log, keys: PartitionKeys, crumb: Crumb) -> bool:
        found = await log.meta.get(keys.cursor)
        if found is not None and decode(Cursor, found.value, found.key).offset <= crumb.record.end_offset:
            moved = encode(Cursor(crumb.record.end_offset + 1))
            await log.meta.put(keys.cursor, moved, expected=found.version)
        return await shipped(log, keys, crumb)

    patch.setattr(compaction, "_publish", cursor_first)


def collect_without_raising_the_floors(patch: pytest.MonkeyPatch) -> None:
    async def raise_nothing(log: Log, enumerated: Sequence[PartitionKeys], limit: int) -> None:
        pass

    patch.setattr(collector, "raise_floors", raise_nothing)


def ignore_in_the_mark(kind: str) -> Mutation:
    """The collector's mark without one of the places that name blobs."""

    async def references(log: Log, enumerated: Sequence[PartitionKeys], gaps: Gaps | None = None) -> AsyncIterator[str]:
        for keys in enumerated:
            found = await log.meta.get(keys.control)
            if found is not None and kind != "pending":
                pending = decode(Control, found.value, found.key).pending
                for entry in pending.entries if pending else ():
                    yield log.blob_name(entry.data_uri)
            found = await log.meta.get(keys.compaction)
            if found is not None and kind != "breadcrumb":
                yield decode(Compaction, found.value, found.key).blob
            async for found in scan(log.meta, keys.index):
                yield log.blob_name(decode(IndexEntry, found.value, found.key).data_uri)

    def mutation(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(collector, "references", references)

    mutation.__name__ = f"ignore_{kind}_in_the_mark"
    return mutation


def ignore_sink_manifests_in_the_mark(patch: pytest.MonkeyPatch) -> None:
    async def none(log: Log) -> AsyncIterator[str]:
        nothing: tuple[str, ...] = ()
        for name in nothing:
            yield name

    patch.setattr(collector, "sink_references", none)


def ignore_gaps(patch: pytest.MonkeyPatch) -> None:
    """The collector deletes what could fill a gap in the index."""
    patch.setattr(Gaps, "keeps", lambda self, blob: False)


def ignore_pins(patch: pytest.MonkeyPatch) -> None:
    async def none(log: Log) -> list[object]:
        return []

    patch.setattr(collector, "alive_pins", none)


def append_without_looking_for_a_repeated_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "find_repeated", lambda *_: None)


def forget_what_this_writer_appended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "find_appended", lambda *_: None)


def answer_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    shipped = writer.Writer._commit

    async def answered(
        self: writer.Writer, lane: writer._Lane, sources: list[writer._Source], producer: Producer | None
    ) -> AppendResult:
        control, _ = lane.known or await self._learn(lane)
        _, appended = self._advanced(lane, control, sources, producer)
        commit = asyncio.ensure_future(shipped(self, lane, sources, producer))
        commit.add_done_callback(lambda done: done.exception())
        return writer._result(lane, appended)

    patch.setattr(writer.Writer, "_commit", answered)


def publish_ones_own_attempt_although_the_record_names_another(patch: pytest.MonkeyPatch) -> None:
    shipped = sink._apply

    async def own(log: Log, name: str, batch: int, manifest: Manifest, known: Mapping[str, tuple[Body, ...]]) -> None:
        since = {f"stable/{partition}": manifest.since.get(f"stable/{partition}", 1) for partition in range(2)}
        mine = msgspec.structs.replace(manifest, blobs=tuple(known) or manifest.blobs, since=since)
        await shipped(log, name, batch, mine, known)

    patch.setattr(sink, "_apply", own)


def eager_collectors(plan: SimPlan) -> SimPlan:
    """Slow messages between two drivers and a collector that waits for nothing: what it must not take, it nearly does."""
    faults = Faults(throttled=0.2, throttle_delay=10.0, delay=0.05)
    roles = {"writer": 1, "compactor": 2, "collector": 2, "driver": 2}
    return msgspec.structs.replace(
        plan,
        roles=dict.fromkeys(plan.roles, 0) | roles,
        faults=faults,
        skew_ms_max=0,
        crash_every=20.0,
        stall_every=5.0,
        grace_ms=0,
        sink_open_ms=0,
        batches=50,
        max_offsets=12,
    )


@pytest.mark.parametrize(
    ("mutation", "caught_as"),
    [
        (skip_the_index_entry_of_the_append_before, "I1"),
        (put_the_index_entry_unconditionally, "I1|I5|I6"),
        (delete_the_lower_keys_before_the_compacted_one_is_there, "I1"),
        (advance_the_cursor_first, "I5"),
        (collect_without_raising_the_floors, "I6"),
        (ignore_in_the_mark("pending"), "I6"),
        (ignore_in_the_mark("breadcrumb"), "I6"),
        (ignore_sink_manifests_in_the_mark, "I6|BlobNotFound"),
        (ignore_pins, "I6"),
        (ignore_gaps, "I6"),
        (append_without_looking_for_a_repeated_one, "I8|S1"),
        (forget_what_this_writer_appended, "I8"),
        (answer_before_the_commit, "I3"),
        (publish_ones_own_attempt_although_the_record_names_another, "S1|I6"),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else None,
)
def test_a_broken_protocol_is_caught(mutation: Mutation, caught_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    adjust = eager_collectors if mutation is ignore_sink_manifests_in_the_mark else None
    for seed in range(SEEDS_MAX):
        violation = run_seed(seed, adjust=adjust).violation
        if violation is not None:
            assert re.match(caught_as, violation), violation
            return
    pytest.fail(f"not caught within {SEEDS_MAX} seeds")
