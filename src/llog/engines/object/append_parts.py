"""The parts of an append: groups of one call for one partition, which share one batch and one CAS.

Parts of producers of records are judged one by one, in order. A part that is repeated gets the offsets of its first
time, one that does not follow is refused, and the others are packed together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from llog.batch.columns import Columns, concat
from llog.errors import LlogError
from llog.log.engine import AppendGroup, AppendResult
from llog.log.producers import Producer
from llog.log.record_producers import (
    ProducerName,
    RecordProducer,
    RecordProducerState,
    StoredProducer,
    find_repeated_records,
    remember_records,
)
from llog.model import TopicPartition

PARTS_MAX: Final = 1000
"""The number of parts in one append: `pending` names their producers, and a record in the metadata store is bounded."""


class Part(msgspec.Struct, eq=False, gc=False):
    """One group of a call, while its append is under way."""

    number: int
    """The position of the group in its call."""
    columns: Columns
    producer: RecordProducer | None
    outcome: AppendResult | LlogError | None = None
    """Its own outcome; None while it is that of the whole append."""


class Judgement(NamedTuple):
    """What becomes of the parts that have no outcome yet, at one version of the control record."""

    accepted: list[Part]
    repeated: list[tuple[Part, int]]
    """Each with the offset of its first record."""
    refused: list[tuple[Part, LlogError]]

    def may_be_next(self) -> list[Part]:
        """Return, in order, the accepted parts and the refused ones, which may follow an append that is under way."""
        return sorted([*self.accepted, *(part for part, _ in self.refused)], key=lambda part: part.number)


class AppendParts:
    """The parts of one append to one partition, in order."""

    def __init__(self, tp: TopicPartition, producer: Producer | None) -> None:
        self.tp = tp
        self.producer = producer
        """The producer of the whole append, if it numbers its appends."""
        self.all: list[Part] = []
        self.packed: list[Part] = []
        """The parts in the batch that was packed last."""
        self.is_numbered = False
        """Whether any part has a producer of records."""

    @property
    def left(self) -> list[Part]:
        return [part for part in self.all if part.outcome is None]

    def producers_left(self) -> list[ProducerName]:
        """Return the producers of the parts that have no outcome yet."""
        return list({part.producer.name: None for part in self.left if part.producer is not None})

    def pack(self, parts: Sequence[Part]) -> Columns:
        """Choose the parts of the next batch, and return their records."""
        self.packed = list(parts)
        return concat([part.columns for part in parts]) if len(parts) > 1 else parts[0].columns

    def judge(self, states: Mapping[ProducerName, RecordProducerState | None]) -> Judgement:
        """Judge the parts that have no outcome yet by these states.

        A part that repeats one before it in this append is in none of the lists: it is judged again after the commit.
        """
        after = dict(states)
        judgement = Judgement([], [], [])
        offset = _LATER
        for part in self.left:
            producer, count = part.producer, part.columns.count
            if producer is not None:
                try:
                    start = find_repeated_records(after[producer.name], producer, count, str(self.tp))
                except LlogError as error:
                    judgement.refused.append((part, error))
                    continue
                if start is not None:
                    if start < _LATER:
                        judgement.repeated.append((part, start))
                    continue
                after[producer.name] = remember_records(after[producer.name], producer, count, offset, 0)
            offset += count
            judgement.accepted.append(part)
        return judgement

    def stored_producers(
        self, states: Mapping[ProducerName, RecordProducerState | None], start_offset: int, append_ms: int
    ) -> tuple[StoredProducer, ...]:
        """Return the states of the packed parts' producers after an append at this offset."""
        after: dict[ProducerName, RecordProducerState] = {}
        for part in self.packed:
            producer, count = part.producer, part.columns.count
            if producer is not None:
                before = after.get(producer.name) or states[producer.name]
                after[producer.name] = remember_records(before, producer, count, start_offset, append_ms)
            start_offset += count
        return tuple(StoredProducer(kind=name.kind, id=name.id, state=state) for name, state in after.items())

    def settle(self, parts: Sequence[Part], start_offset: int, *, repeated: bool = False) -> None:
        """Give these parts their offsets from this one on, except those that have an outcome."""
        for part in parts:
            if part.outcome is None:
                part.outcome = self._result(start_offset, part.columns.count, repeated=repeated)
            start_offset += part.columns.count

    def outcomes(self, outcome: AppendResult | LlogError) -> list[AppendResult | LlogError]:
        """Return the outcome of each part: its own, or its share of the whole append's."""
        if isinstance(outcome, AppendResult) and len(self.all) == 1 and self.all[0].outcome is None:
            return [outcome]
        if isinstance(outcome, AppendResult):
            self.settle(self.packed, outcome.start_offset, repeated=outcome.repeated)
        return [outcome if part.outcome is None else part.outcome for part in self.all]

    def _result(self, start_offset: int, count: int, *, repeated: bool) -> AppendResult:
        return AppendResult(
            topic=self.tp.topic,
            partition=self.tp.partition,
            start_offset=start_offset,
            end_offset=start_offset + count - 1,
            repeated=repeated,
        )


_LATER: Final = 1 << 62
"""Stands for the offset of an append that is not committed yet: no partition comes so far."""


def join_groups(groups: Sequence[AppendGroup], columns: Sequence[Columns]) -> list[AppendParts]:
    """Return the appends of a call in order.

    A group with a producer of records shares an append with the groups before and after it for the same partition.
    Every other group is an append of its own.
    """
    joined: list[AppendParts] = []
    newest: dict[TopicPartition, AppendParts] = {}
    for number, (group, part) in enumerate(zip(groups, columns, strict=True)):
        tp = TopicPartition(group.topic, group.partition)
        by_append = group.producer if isinstance(group.producer, Producer) else None
        by_record = group.producer if isinstance(group.producer, RecordProducer) else None
        parts = newest.get(tp)
        shares = parts is not None and (parts.is_numbered or by_record is not None) and len(parts.all) < PARTS_MAX
        if parts is None or not shares or by_append is not None or parts.producer is not None:
            parts = newest[tp] = AppendParts(tp, by_append)
            joined.append(parts)
        parts.all.append(Part(number, part, by_record))
        parts.is_numbered |= by_record is not None
    return joined
