"""What producers are answered when appends fail, so that they send again what they should."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
from awscrt.checksums import crc32c

from llog.batch.columns import columns_of
from llog.batch.kafka_batch import encode
from llog.broker.auto_creation import AutoCreatingProducer
from llog.broker.batching import Outcome, Part
from llog.broker.metrics import Metrics
from llog.errors import (
    IdempotenceUnsupported,
    InvalidRecord,
    LlogError,
    OutcomeUnknown,
    OutOfOrderSequence,
    StoreUnavailable,
    UnknownProducer,
)
from llog.kafka.error_codes import ErrorCode
from llog.kafka.handlers import Caller
from llog.kafka.idempotence import IdempotentProducer
from llog.kafka.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from llog.kafka.produce import ProduceHandlers
from llog.kafka.topic_ids import TopicIds
from llog.log.engine import AppendResult
from llog.log.record_producers import RecordProducer
from llog.model import Record, TopicPartition

_CALLER = Caller("tests", "127.0.0.1", 9)
_RESULT = AppendResult(topic="t", partition=0, start_offset=1, end_offset=1)


class _Scripted:
    """Answers one append after the other as it was told."""

    def __init__(self, *outcomes: Outcome) -> None:
        self._outcomes = list(outcomes)

    async def append(self, parts: Sequence[Part]) -> list[Outcome]:
        return [self._outcomes.pop(0) for _ in parts]


def _request(sequence: int, epoch: int = 0) -> ProduceRequest:
    batch = bytearray(b"".join(encode(columns_of([Record(payload=b"x", timestamp=1)]), 0)))
    batch[43:51] = (7).to_bytes(8, "big")
    batch[51:53] = epoch.to_bytes(2, "big")
    batch[53:57] = sequence.to_bytes(4, "big")
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")
    data = PartitionProduceData(index=0, records=memoryview(bytes(batch)))
    return ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[TopicProduceData(name="t", partition_data=[data])])


async def _codes(*outcomes: Outcome, epochs: Sequence[int] | None = None) -> list[int]:
    no_ids = cast(TopicIds, None)  # the requests name their topics
    handlers = ProduceHandlers(cast(IdempotentProducer, _Scripted(*outcomes)), no_ids, Metrics(), 1 << 20)
    codes = []
    for sequence, epoch in enumerate(epochs or [0] * len(outcomes)):
        response = await handlers.produce(_request(sequence, epoch), _CALLER)
        assert response is not None
        codes.append(response.responses[0].partition_responses[0].error_code)
    return codes


@pytest.mark.parametrize("failure", [StoreUnavailable("down"), OutcomeUnknown("lost")])
@pytest.mark.parametrize("refusal", [OutOfOrderSequence("gap"), UnknownProducer("new")])
async def test_an_append_after_one_that_failed_is_refused_in_a_way_that_has_both_sent_again(
    failure: LlogError, refusal: LlogError
) -> None:
    codes = await _codes(failure, refusal, refusal)
    assert codes[1:] == [ErrorCode.LEADER_NOT_AVAILABLE] * 2


async def test_a_gap_of_sequences_is_named_if_no_append_before_it_failed_or_is_sent_again() -> None:
    gap = OutOfOrderSequence("gap")
    assert await _codes(gap) == [ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER]
    assert await _codes(StoreUnavailable("down"), _RESULT, gap) == [5, 0, 45], "the failed one was sent again"
    assert await _codes(InvalidRecord("bad"), gap) == [87, 45], "the failed one is not sent again"
    assert await _codes(StoreUnavailable("down"), gap, epochs=[0, 1]) == [5, 45], "an epoch begins anew"
    assert await _codes(UnknownProducer("expired")) == [ErrorCode.UNKNOWN_PRODUCER_ID]


class _Owned:
    """A topic whose engine keeps no producers' states; appends to partition 0 wait until they are let go."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.appended: list[tuple[int, bytes | None]] = []

    async def append(self, parts: Sequence[Part]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for part in parts:
            if part.producer is not None:
                outcomes.append(IdempotenceUnsupported("no states here"))
                continue
            if part.tp.partition == 0:
                await self.gate.wait()
            self.appended.append((part.tp.partition, part.columns.values[0].as_py()))
            outcomes.append(_RESULT)
        return outcomes


async def test_an_owner_keeps_the_order_of_a_partition_while_another_one_of_the_request_waits() -> None:
    owned = _Owned()
    producer = IdempotentProducer(cast(AutoCreatingProducer, owned))

    def send(payload: bytes, sequence: int, *partitions: int) -> asyncio.Task[list[Outcome]]:
        columns = columns_of([Record(payload=payload)])
        identity = RecordProducer(id="7", sequence=sequence)
        return asyncio.ensure_future(
            producer.append([Part(TopicPartition("t", partition), columns, identity) for partition in partitions])
        )

    requests = [send(b"first", 0, 0, 1), send(b"second", 1, 1)]
    await asyncio.sleep(0.01)
    owned.gate.set()
    for outcomes in await asyncio.gather(*requests):
        assert not any(isinstance(outcome, LlogError) for outcome in outcomes)
    assert [payload for partition, payload in owned.appended if partition == 1] == [b"first", b"second"]
