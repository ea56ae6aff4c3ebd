"""Ways to break the states of producers that number their records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from llog.engines.object import append_parts, pending
from llog.engines.object import writer as object_writer
from llog.engines.object.compaction import plan as compaction_plan
from llog.engines.object.lanes import Lane
from llog.engines.object.producer_states import ProducerStates, _states
from llog.errors import LlogError
from llog.log.keys import PartitionKeys
from llog.log.record_producers import ProducerName, RecordProducerState
from llog.log.records import Pending
from llog.model import TopicPartition
from llog.sim.mutations.patch import Mutation, Patch
from llog.sim.plan import old_brokers, retried_producers
from llog.stores.meta import Put

PendingPuts = Callable[[PartitionKeys, Pending | None], list[Put]]


def replace_a_producers_state_under_one_key(patch: Patch) -> None:
    """A mutable key for each producer: a stalled process puts an older state over a newer one."""
    shipped = pending.pending_puts

    def mutable(keys: PartitionKeys, newest: Pending | None) -> list[Put]:
        return [_without_end(keys, put) for put in shipped(keys, newest)]

    _replace_pending_puts(patch, mutable)


def drop_pending_without_the_states_that_it_names(patch: Patch) -> None:
    """Retention and compactors put only the index entries of what they drop."""
    shipped = pending.pending_puts

    def index_only(keys: PartitionKeys, newest: Pending | None) -> list[Put]:
        return [put for put in shipped(keys, newest) if put.key.startswith(keys.index)]

    patch.setattr(pending, "pending_puts", index_only)
    patch.setattr(compaction_plan, "pending_puts", index_only)


def judge_producers_by_states_from_before_a_lost_cas(patch: Patch) -> None:
    shipped = ProducerStates.keep

    def keep(self: ProducerStates, lane: Lane, states: Mapping[ProducerName, RecordProducerState | None]) -> None:
        known = {name: self._known[lane, name][1] for name in states if (lane, name) in self._known}
        shipped(self, lane, {**states, **known})

    patch.setattr(ProducerStates, "keep", keep)


def read_the_states_apart_from_the_control_record(patch: Patch) -> None:
    """The keys may come from another server than the control record."""

    async def learn(
        self: ProducerStates, wanted: Mapping[Lane, Collection[ProducerName]]
    ) -> dict[TopicPartition, LlogError]:
        errors: dict[TopicPartition, LlogError] = {}
        for lane, names in wanted.items():
            try:
                problem = self._lanes.take(lane, await self._log.meta.get(lane.keys.control))
                bounds = {name: lane.keys.newest_producer(name.digest) for name in names}
                found = {name: (await self._log.meta.floor_many([bound]))[0] for name, bound in bounds.items()}
            except LlogError as error:
                problem = error
            if problem is not None:
                errors[lane.tp] = problem
            elif lane.known is not None:
                self.keep(lane, _states(lane.keys, lane.known[0], found))
        return errors

    patch.setattr(ProducerStates, "learn", learn)


def append_numbered_records_without_judging(patch: Patch) -> None:
    patch.setattr(append_parts, "find_repeated_records", lambda *_: None)


def _without_end(keys: PartitionKeys, put: Put) -> Put:
    if not put.key.startswith(keys.producers):
        return put
    return msgspec.structs.replace(put, key=put.key[:-20] + "0" * 20, expected=None)


def _replace_pending_puts(patch: Patch, changed: PendingPuts) -> None:
    for module in (pending, object_writer, compaction_plan):
        patch.setattr(module, "pending_puts", changed)


PRODUCER_MUTATIONS: Final = (
    Mutation(replace_a_producers_state_under_one_key, "I8", retried_producers),
    Mutation(drop_pending_without_the_states_that_it_names, "I8", retried_producers),
    Mutation(judge_producers_by_states_from_before_a_lost_cas, "I8", retried_producers),
    Mutation(read_the_states_apart_from_the_control_record, "I8", old_brokers),
    Mutation(append_numbered_records_without_judging, "I8"),
)
