"""The states of producers of records, as far as a writer knows them.

A state is exact for one version of the control record: the newest that `pending` names or a key holds. Control record
and keys are read in one request, the control record first, from one server. No key is missing that was there when the
control record had the version that was read: whoever replaces `pending` has put its keys before. The writer's own
commits keep its states exact; any other change of the control record voids them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Final

from llog.engines.object.lanes import Lane, Lanes
from llog.errors import InconsistentReadState, LlogError
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.record_producers import ProducerName, RecordProducerState, StoredProducer
from llog.log.records import Control, decode
from llog.model import TopicPartition
from llog.stores.meta import MetaEntry

STATES_MAX: Final = 20_000
"""The number of states that a writer keeps when it reads others, however many those are."""


class ProducerStates:
    """The states that one writer knows, in all of its lanes."""

    def __init__(self, log: Log, lanes: Lanes) -> None:
        self._log = log
        self._lanes = lanes
        self._known: OrderedDict[tuple[Lane, ProducerName], tuple[int, RecordProducerState | None]] = OrderedDict()
        """Each state with the lane's generation for which it is exact; None if the partition knows no such producer."""

    def find(
        self, lane: Lane, producers: Collection[ProducerName]
    ) -> dict[ProducerName, RecordProducerState | None] | None:
        """Return the states that are exact for the lane's known control record; None if any has to be read."""
        if lane.known is None:
            return None
        found = {}
        for producer in producers:
            known = self._known.get((lane, producer))
            if known is None or known[0] != lane.generation:
                return None
            self._known.move_to_end((lane, producer))
            found[producer] = known[1]
        return found

    def keep(self, lane: Lane, states: Mapping[ProducerName, RecordProducerState | None]) -> None:
        """Keep states that are exact for the lane's known control record."""
        for producer, state in states.items():
            self._known[lane, producer] = lane.generation, state
            self._known.move_to_end((lane, producer))

    async def learn(self, wanted: Mapping[Lane, Collection[ProducerName]]) -> dict[TopicPartition, LlogError]:
        """Read the control records of these lanes with the states of these producers; return the errors of those that
        could not be read.

        States that an old server shows beside a control record older than the known one are not kept.
        """
        if not wanted:
            return {}
        while len(self._known) > STATES_MAX:
            self._known.popitem(last=False)
        keys: list[str] = []
        for lane, producers in wanted.items():
            keys.append(lane.keys.control)
            keys += [lane.keys.newest_producer(producer.digest) for producer in producers]
        try:
            answers = iter(await self._log.meta.floor_many(keys))
        except LlogError as error:
            return {lane.tp: error for lane in wanted}
        errors: dict[TopicPartition, LlogError] = {}
        for lane, producers in wanted.items():
            control = next(answers)
            entries = {producer: next(answers) for producer in producers}
            found = control if control is not None and control.key == lane.keys.control else None
            problem = self._lanes.take(lane, found)
            if problem is not None:
                errors[lane.tp] = problem
            elif found is not None and lane.known is not None and lane.known[1] == found.version:
                try:
                    self.keep(lane, _states(lane.keys, lane.known[0], entries))
                except InconsistentReadState as error:
                    errors[lane.tp] = error
        return errors


def _states(
    keys: PartitionKeys, control: Control, entries: Mapping[ProducerName, MetaEntry | None]
) -> dict[ProducerName, RecordProducerState | None]:
    """Return each producer's newest state in `pending` or in its highest key, None if there is none or it has
    expired.
    """
    pending = {stored.name: stored.state for stored in control.pending.producers} if control.pending else {}
    states: dict[ProducerName, RecordProducerState | None] = {}
    for producer, entry in entries.items():
        state = pending.get(producer)
        if entry is not None and entry.key.startswith(f"{keys.producers}{producer.digest}/"):
            stored = decode(StoredProducer, entry.value, entry.key)
            if stored.name != producer:
                raise InconsistentReadState(f"{entry.key} holds the state of producer {stored.id}, not {producer.id}")
            if state is None or state.end_offset < stored.state.end_offset:
                state = stored.state
        states[producer] = None if state and state.end_offset <= control.producers_expired_through else state
    return states
