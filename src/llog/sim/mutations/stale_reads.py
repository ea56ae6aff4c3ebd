"""Ways to delete on the strength of an old state, in which what is needed did not exist yet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final, TypeVar

from llog.engines.object import collection_tasks, collector
from llog.engines.object.clocks import Window
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.sim.mutations.patch import Mutation, Patch
from llog.sim.plan import old_collectors, old_executors
from llog.stores.meta import FreshReads, MetaStore, Reads

T = TypeVar("T")


def collect_without_confirming_the_reads(patch: Patch) -> None:
    shipped = collector.delete_unreferenced

    async def unconfirmed(
        log: Log, names: Collection[str], waiting: collector.Waiting, run: Window, reads: Reads
    ) -> list[str]:
        return await shipped(log, names, waiting, run, FreshReads(lambda: None))

    patch.setattr(collector, "delete_unreferenced", unconfirmed)


def executors_do_not_confirm_their_reads(patch: Patch) -> None:
    async def raise_floors_of(log: Log, share: Sequence[PartitionKeys], run: Window) -> int:
        return await collector.raise_floors(log, share, run)

    def unconfirmed(store: MetaStore, items: AsyncIterator[T]) -> AsyncIterator[T]:
        return items

    patch.setattr(collection_tasks, "raise_floors_of", raise_floors_of)
    patch.setattr(collection_tasks, "iterate_confirmed", unconfirmed)


STALE_READ_MUTATIONS: Final = (
    Mutation(collect_without_confirming_the_reads, "I6", old_collectors),
    Mutation(executors_do_not_confirm_their_reads, "I6", old_executors),
)
