"""Idempotent producers on topics whose engine does not keep their states: the owner of such a topic remembers them.

Kafka's clients are idempotent unless told otherwise, and each topic of these engines has one owner, through which all
appends go. So the owner recognises a repetition as long as it runs. It does not know a producer from before its start:
that producer's next append is taken as it comes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from llog.broker.auto_creation import AutoCreatingProducer
from llog.broker.batching import Outcome, Part
from llog.errors import IdempotenceUnsupported, LlogError, OutcomeUnknown
from llog.log.engine import AppendResult
from llog.log.record_producers import RecordProducer, RecordProducerState, find_repeated_records, remember_records
from llog.model import TopicPartition

_PRODUCERS_MAX: Final = 100_000


class _Known:
    """What is remembered of a producer in one partition; the lock keeps its appends in their order."""

    __slots__ = ("lock", "state")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.state: RecordProducerState | None = None


class IdempotentProducer:
    """Appends as `AutoCreatingProducer` does, for idempotent producers on topics of every engine."""

    def __init__(self, producer: AutoCreatingProducer) -> None:
        self._producer = producer
        self._known: OrderedDict[tuple[TopicPartition, str], _Known] = OrderedDict()

    async def append(self, parts: Sequence[Part]) -> list[Outcome]:
        """Return the offsets of each part, once its records are durable, or its error."""
        outcomes = await self._producer.append(parts)
        once = [
            (index, part, part.producer)
            for index, (part, outcome) in enumerate(zip(parts, outcomes, strict=True))
            if isinstance(outcome, IdempotenceUnsupported) and part.producer is not None
        ]
        # All at once: the producer's next request must not overtake a part that waits for another one.
        found = await asyncio.gather(*(self._append_once(part, producer) for _, part, producer in once))
        for (index, _, _), outcome in zip(once, found, strict=True):
            outcomes[index] = outcome
        return outcomes

    async def _append_once(self, part: Part, producer: RecordProducer) -> Outcome:
        known = self._find((part.tp, producer.id))
        async with known.lock:
            count = part.columns.count
            if known.state is not None:
                try:
                    repeated = find_repeated_records(known.state, producer, count, str(part.tp))
                except LlogError as error:
                    return error
                if repeated is not None:
                    topic, partition = part.tp
                    return AppendResult(
                        topic=topic,
                        partition=partition,
                        start_offset=repeated,
                        end_offset=repeated + count - 1,
                        repeated=True,
                    )
            (outcome,) = await self._producer.append([part._replace(producer=None)])
            if isinstance(outcome, AppendResult):
                known.state = remember_records(known.state, producer, count, outcome.start_offset, 0)
            elif isinstance(outcome, OutcomeUnknown):
                known.state = None
            return outcome

    def _find(self, key: tuple[TopicPartition, str]) -> _Known:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known()
            if len(self._known) > _PRODUCERS_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known
