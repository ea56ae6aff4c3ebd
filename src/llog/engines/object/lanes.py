"""Lanes: the keys and the last known control record of each partition that a writer appends to, read in one request
for many partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from llog.engines.object.clocks import AHEAD_MS, is_near_ceiling, present_ms, raise_bounds
from llog.engines.object.partition_keys import keys_in
from llog.errors import InconsistentReadState, LlogError, OutcomeUnknown, PartitionNotInitialized
from llog.log.catalog import Catalog
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Control, decode, encode
from llog.model import TopicPartition
from llog.stores.meta import MetaEntry, Put

_RAISES_MAX: Final = 5
"""The attempts to raise a ceiling; after them, blobs are stamped no higher than the ceiling."""


class Lane:
    """The state of one partition, as far as a writer knows it."""

    __slots__ = ("generation", "keys", "known", "last", "tp")

    def __init__(self, tp: TopicPartition, keys: PartitionKeys) -> None:
        self.tp = tp
        self.keys = keys
        self.known: tuple[Control, int] | None = None
        """The control record and its version; None if the record is known to have changed."""
        self.last = Control()
        """The control record that was known last, which may be outdated."""
        self.generation = 0
        """The number of control records that this writer did not put itself, but read."""

    def know(self, control: Control, version: int) -> None:
        """Know the control record that this writer has put, unless a later one is known already."""
        if self.known is None or self.known[1] <= version:
            self.known, self.last = (control, version), control


class Lanes:
    """The lanes of one writer."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._catalog = Catalog(log)
        self._lanes: dict[TopicPartition, Lane] = {}

    async def find(self, tps: Sequence[TopicPartition]) -> list[Lane | LlogError]:
        """Return the lane of each partition with its control record known, or the error why there is none."""
        errors = await self._open([tp for tp in dict.fromkeys(tps) if tp not in self._lanes])
        lanes = {tp: self._lanes[tp] for tp in tps if tp not in errors}
        errors |= await self.learn([lane for lane in lanes.values() if lane.known is None])
        return [errors[tp] if tp in errors else lanes[tp] for tp in tps]

    async def learn(self, lanes: Sequence[Lane]) -> dict[TopicPartition, LlogError]:
        """Read the control records of these lanes; return the errors of those that could not be read."""
        if not lanes:
            return {}
        try:
            entries = await self._log.meta.get_many([lane.keys.control for lane in lanes])
        except LlogError as error:
            return {lane.tp: error for lane in lanes}
        errors: dict[TopicPartition, LlogError] = {}
        for lane, found in zip(lanes, entries, strict=True):
            problem = self.take(lane, found)
            if problem is not None:
                errors[lane.tp] = problem
        return errors

    def take(self, lane: Lane, found: MetaEntry | None) -> LlogError | None:
        """Let the lane know the control record that was read, unless it knows a later one; return the error if it
        cannot.
        """
        if found is None:
            self.forget(lane)
            return PartitionNotInitialized(f"partition {lane.tp} has no control record")
        if lane.known is None or lane.known[1] < found.version:  # An append may have advanced it meanwhile.
            try:
                control = decode(Control, found.value, found.key)
            except InconsistentReadState as error:
                return error
            lane.know(control, found.version)
            lane.generation += 1
        return None

    def forget(self, lane: Lane) -> None:
        """Look the topic up again at the next append: it may have been created again, with other keys."""
        self._lanes.pop(lane.tp, None)

    async def present_ms(self, lanes: Collection[Lane]) -> int:
        """Return the present by a clock that is not far ahead, after raising the ceilings that are near it."""
        now = self._log.runtime.now_ms()
        if any(is_near_ceiling(lane.last, now) for lane in lanes):
            now = await present_ms(self._log)
            await self._raise_ceilings(lanes, now)
        return now

    async def _open(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, LlogError]:
        """Create lanes that know only their keys; return the errors of partitions that do not exist."""
        if not tps:
            return {}
        try:
            topics = await self._catalog.find(sorted({tp.topic for tp in tps}))
        except LlogError as error:
            return dict.fromkeys(tps, error)
        errors: dict[TopicPartition, LlogError] = {}
        for tp in tps:
            topic = topics[tp.topic]
            if isinstance(topic, LlogError):
                errors[tp] = topic
                continue
            try:
                self._lanes.setdefault(tp, Lane(tp, keys_in(topic, tp.partition)))
            except LlogError as error:
                errors[tp] = error
        return errors

    async def _raise_ceilings(self, lanes: Collection[Lane], now_ms: int) -> None:
        for _ in range(_RAISES_MAX):
            await self.learn([lane for lane in lanes if lane.known is None])  # The commit reports errors.
            known = [(lane, *lane.known) for lane in lanes if lane.known is not None]
            low = [(lane, control, version) for lane, control, version in known if is_near_ceiling(control, now_ms)]
            if not low:
                return
            changed = [raise_bounds(control, control.blob_floor_ms, now_ms + AHEAD_MS) for _, control, _ in low]
            puts = [
                Put(lane.keys.control, encode(control), version)
                for (lane, _, version), control in zip(low, changed, strict=True)
            ]
            results: Sequence[int | LlogError]
            try:
                results = await self._log.meta.put_many(puts)
            except OutcomeUnknown as error:
                results = [error] * len(low)
            for (lane, _, _), control, result in zip(low, changed, results, strict=True):
                if isinstance(result, LlogError):
                    lane.known = None
                else:
                    lane.know(control, result)
