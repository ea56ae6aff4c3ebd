"""Ways to break inline appends."""

from __future__ import annotations

from typing import Final

import msgspec

from llog.engines.object import pending, writer
from llog.engines.object.append import Append
from llog.engines.object.compaction import job as compaction
from llog.engines.object.compaction import plan as compaction_plan
from llog.engines.object.compaction.plan import Breadcrumb
from llog.log.cas import update
from llog.log.inline import InlineLimits, is_inline, to_inline
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Control, IndexEntry, Pending, decode, encode
from llog.sim.mutations.patch import Mutation, Patch
from llog.sim.plan import inline_appends, resumed_inline_compactions
from llog.stores.meta import Put


def count_an_inline_total_twice(patch: Patch) -> None:
    """A compaction adds what it has compacted, and does so again when its run is resumed or an answer was lost."""

    async def add(log: Log, keys: PartitionKeys, entry: IndexEntry) -> None:
        run = entry.inline_total - (await _control(log, keys)).inline_compacted

        def counted(control: Control) -> Control:
            return msgspec.structs.replace(control, inline_compacted=control.inline_compacted + run)

        await update(log, keys.control, Control, counted)

    patch.setattr(compaction, "count_inline", add)


def count_inline_bytes_before_they_are_replaced(patch: Patch) -> None:
    shipped = compaction._publish

    async def count_first(log: Log, keys: PartitionKeys, breadcrumb: Breadcrumb) -> bool:
        assert breadcrumb.record.entry is not None
        await compaction.count_inline(log, keys, breadcrumb.record.entry)
        return await shipped(log, keys, breadcrumb)

    patch.setattr(compaction, "_publish", count_first)


def put_an_index_entry_without_its_bytes(patch: Patch) -> None:
    shipped = pending.pending_puts

    def puts(keys: PartitionKeys, newest: Pending | None) -> list[Put]:
        return [msgspec.structs.replace(put, value=_without_bytes(put)) for put in shipped(keys, newest)]

    for module in (pending, writer, compaction_plan):
        patch.setattr(module, "pending_puts", puts)


def append_inline_to_a_full_partition(patch: Patch) -> None:
    patch.setattr(InlineLimits, "admit", lambda self, control, size: True)


def judge_inline_appends_only_once(patch: Patch) -> None:
    """An append that lost its CAS stays inline, however full the partition is by then."""
    shipped = Append.may_commit

    def may_commit(self: Append, limits: InlineLimits) -> bool:
        return bool(self.inline_uri) or shipped(self, limits)

    patch.setattr(Append, "may_commit", may_commit)


def _without_bytes(put: Put) -> bytes:
    if "/index/" not in put.key:
        return put.value
    entry = decode(IndexEntry, put.value, put.key)
    if not is_inline(entry.data_uri):
        return put.value
    return encode(msgspec.structs.replace(entry, data_uri=to_inline(b"")))


async def _control(log: Log, keys: PartitionKeys) -> Control:
    found = await log.meta.get(keys.control)
    assert found is not None
    return decode(Control, found.value, found.key)


INLINE_MUTATIONS: Final = (
    Mutation(count_an_inline_total_twice, "I10", resumed_inline_compactions),
    Mutation(count_inline_bytes_before_they_are_replaced, "I10", resumed_inline_compactions),
    Mutation(put_an_index_entry_without_its_bytes, "I1|I6|CorruptBatch", inline_appends),
    Mutation(append_inline_to_a_full_partition, "I10", inline_appends),
    Mutation(judge_inline_appends_only_once, "I10", inline_appends),
)
