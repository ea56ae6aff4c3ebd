"""Produce: batches of records into partitions, as one append for all partitions of a request."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

from llog.batch.kafka_batch import decode, heads
from llog.broker.batching import Outcome, Part
from llog.broker.metrics import Metrics
from llog.errors import (
    InvalidArgument,
    LlogError,
    OutOfOrderSequence,
    StoreUnavailable,
    UnknownProducer,
)
from llog.kafka.error_codes import PASSING, ErrorCode, error_code
from llog.kafka.handlers import Caller, Handlers
from llog.kafka.idempotence import IdempotentProducer
from llog.kafka.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from llog.kafka.offsets import to_kafka
from llog.kafka.topic_ids import TopicIds, UnknownTopicId
from llog.log.record_producers import ProducerKind, RecordProducer
from llog.model import TopicPartition, check_topic_name

_ALL_ACKS: Final = (-1, 0, 1)
_FAILED_MAX: Final = 10_000
_RETRY_S: Final = 300.0
_TOPIC_IDS_FROM: Final = 13
"""The version from which on requests name topics by their ids."""


class ProduceHandlers:
    def __init__(
        self, producer: IdempotentProducer, topic_ids: TopicIds, metrics: Metrics, append_bytes_max: int
    ) -> None:
        self._producer = producer
        self._topic_ids = topic_ids
        self._metrics = metrics
        self._append_bytes_max = append_bytes_max
        self._failed: OrderedDict[tuple[TopicPartition, str, int], float] = OrderedDict()
        """The producers, with their epochs, whose last append to a partition failed here but may pass, and how long
        the producer is expected to send it again.
        """

    def handlers(self) -> Handlers:
        return {0: self.produce}

    async def produce(self, request: ProduceRequest, caller: Caller) -> ProduceResponse | None:
        """Append the batches. An acknowledgement always means that the records are durable, whatever `acks` asks for;
        a client that wants none gets no answer.
        """
        names: list[str | LlogError] = [topic.name for topic in request.topic_data]
        if caller.version >= _TOPIC_IDS_FROM:
            names = await self._topic_ids.names([topic.topic_id for topic in request.topic_data])
        items = [
            (name, data) for name, topic in zip(names, request.topic_data, strict=True) for data in topic.partition_data
        ]
        if request.acks not in _ALL_ACKS:
            wrong = f"acks is {request.acks}: it must be one of {', '.join(map(str, _ALL_ACKS))}"
            outcomes: list[Outcome] = [_InvalidAcks(wrong)] * len(items)
        else:
            parts = [self._part_or_error(topic, data) for topic, data in items]
            results = iter(await self._producer.append([part for part in parts if isinstance(part, Part)]))
            outcomes = [self._judge(part, next(results)) if isinstance(part, Part) else part for part in parts]
        if request.acks == 0:
            return None
        answers = iter([self._answer(data, outcome) for (_, data), outcome in zip(items, outcomes, strict=True)])
        return ProduceResponse(
            responses=[
                TopicProduceResponse(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partition_responses=[next(answers) for _ in range(len(topic.partition_data))],
                )
                for topic in request.topic_data
            ]
        )

    def _part_or_error(self, topic: str | LlogError, data: PartitionProduceData) -> Part | LlogError:
        if isinstance(topic, LlogError):
            return topic
        try:
            tp = TopicPartition(check_topic_name(topic), data.index)
            records = data.records
            assert records is None or isinstance(records, memoryview)
            found = heads(records or b"")
            if len(found) != 1:
                raise InvalidArgument(f"the records for {tp} are {len(found)} batches: send exactly one")
            (head,) = found
            if head.is_transactional or head.is_control:
                raise InvalidArgument(f"the batch for {tp} belongs to a transaction, which llog does not have")
            columns = decode(records or b"", head, bytes_max=self._append_bytes_max)
        except LlogError as error:
            return error
        producer = None
        if head.producer_id >= 0:
            producer = RecordProducer(
                kind=ProducerKind.KAFKA,
                id=str(head.producer_id),
                epoch=head.producer_epoch,
                sequence=head.base_sequence,
            )
        return Part(tp, columns, producer)

    def _judge(self, part: Part, outcome: Outcome) -> Outcome:
        """Return the outcome; a passing error if only the failure of the producer's append before this one refused it.

        Clients send the next append before they know of the failure. After a passing error they send both again, under
        the same sequences, so that an append of unknown outcome is recognised. After a gap of sequences they would
        send both again under a new epoch, and the append would be doubled if it was there after all.
        """
        if part.producer is None:
            return outcome
        key, now = (part.tp, part.producer.id, part.producer.epoch), time.monotonic()
        if not isinstance(outcome, LlogError):
            self._failed.pop(key, None)
        elif isinstance(outcome, PASSING):
            self._failed[key] = now + _RETRY_S
            if len(self._failed) > _FAILED_MAX:
                self._failed.popitem(last=False)
        elif isinstance(outcome, (OutOfOrderSequence, UnknownProducer)) and self._failed.get(key, now) > now:
            return StoreUnavailable(f"an append of this producer failed before this one: send both again ({outcome})")
        return outcome

    def _answer(self, data: PartitionProduceData, outcome: Outcome) -> PartitionProduceResponse:
        if isinstance(outcome, LlogError):
            self._metrics.errors[outcome.code] += 1
            return PartitionProduceResponse(
                index=data.index, error_code=_produce_code(outcome), base_offset=-1, error_message=str(outcome)
            )
        return PartitionProduceResponse(
            index=data.index, error_code=ErrorCode.NONE, base_offset=to_kafka(outcome.start_offset)
        )


class _InvalidAcks(InvalidArgument):
    """A client asked for acknowledgements that do not exist."""


def _produce_code(error: LlogError) -> ErrorCode:
    if isinstance(error, UnknownTopicId):
        return ErrorCode.UNKNOWN_TOPIC_ID
    if isinstance(error, _InvalidAcks):
        return ErrorCode.INVALID_REQUIRED_ACKS
    if isinstance(error, InvalidArgument):
        return ErrorCode.INVALID_RECORD
    return error_code(error)
