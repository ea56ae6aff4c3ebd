"""Records: `POST /produce` and `POST /consume` for many partitions as JSON, and Arrow streams for one partition."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.auto_creation import AutoCreatingProducer
from llog.broker.batching import Part
from llog.broker.fetcher import Fetch, Fetcher
from llog.broker.http.answer_shapes import ConsumeAnswer, OffsetAnswer, PartitionAppendAnswer, ProduceAnswer
from llog.broker.http.answers import item_error, items_answer, json_answer
from llog.broker.http.arrow import MEDIA_TYPE, decode_records
from llog.broker.http.bodies import Bodies
from llog.broker.http.disconnects import unless_gone
from llog.broker.http.forwarding import Forwarding, ItemAnswers
from llog.broker.http.json_records import JSON_RECORD_OVERHEAD, JsonRecord, columns_from_json, records_to_json
from llog.broker.http.operations import Operation
from llog.broker.http.requests import (
    ITEMS_MAX,
    JSON,
    WAIT_MS_MAX,
    FetchBytes,
    Partition,
    decode_body,
    decode_query,
    path_partition,
)
from llog.broker.http.routing import Route
from llog.broker.metrics import Metrics
from llog.broker.partitioner import Partitioner
from llog.broker.routes.partition_records import RECORDS
from llog.engines.routing import EngineReader
from llog.errors import InvalidArgument, LlogError
from llog.log.engine import AppendResult
from llog.log.producers import PRODUCER_ID_MAX
from llog.log.record_producers import SEQUENCE_MAX, RecordProducer, check_record_producer
from llog.model import TopicPartition, check_topic_name

ProducerId = Annotated[str, Meta(min_length=1, max_length=PRODUCER_ID_MAX)]
SequenceNumber = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]


class ProduceItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    topic: str
    records: Annotated[list[str | JsonRecord], Meta(min_length=1)]
    partition: Partition | None = None
    producer_id: ProducerId | None = None
    producer_epoch: SequenceNumber = 0
    sequence: SequenceNumber | None = None


class ProduceQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    producer_id: ProducerId | None = None
    producer_epoch: SequenceNumber = 0
    sequence: SequenceNumber | None = None


class ProduceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic_partitions: Annotated[list[ProduceItem], Meta(min_length=1, max_length=ITEMS_MAX)]


class ConsumeItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic: str
    partition: Partition
    fetch_offset: Annotated[int, Meta(ge=1)]
    partition_max_bytes: FetchBytes = 1 << 20


class ConsumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic_partitions: Annotated[list[ConsumeItem], Meta(min_length=1, max_length=ITEMS_MAX)]
    max_wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    min_bytes: FetchBytes = 1
    max_bytes: FetchBytes = 4 << 20


class TimeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timestamp_ms: int


R = TypeVar("R", ProduceRequest, ConsumeRequest)


_PRODUCE: Final = Operation(
    "Records", "Append records to any number of partitions", {JSON: ProduceRequest}, answers={JSON: ProduceAnswer}
)
_PRODUCE_ARROW: Final = Operation(
    "Records",
    "Append the records of an Arrow stream to a partition",
    {MEDIA_TYPE: None},
    ProduceQuery,
    answers={JSON: PartitionAppendAnswer},
)
_CONSUME: Final = Operation(
    "Records",
    "Read any number of partitions from given offsets on",
    {JSON: ConsumeRequest},
    answers={JSON: ConsumeAnswer},
)
_OFFSET_FOR_TIME: Final = Operation(
    "Records", "Find the offset of the first record of a time or later", query=TimeQuery, answers={JSON: OffsetAnswer}
)


class RecordRoutes:
    def __init__(
        self,
        producer: AutoCreatingProducer,
        fetcher: Fetcher,
        reader: EngineReader,
        bodies: Bodies,
        forwarding: Forwarding,
        metrics: Metrics,
        partitioner: Partitioner,
    ) -> None:
        self._producer = producer
        self._partitioner = partitioner
        self._fetcher = fetcher
        self._reader = reader
        self._bodies = bodies
        self._forwarding = forwarding
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route("write", "POST", "/produce", self._produce, has_shortcut=True, operation=_PRODUCE),
            Route("write", "POST", RECORDS, self._produce_arrow, operation=_PRODUCE_ARROW),
            Route("read", "POST", "/consume", self._consume, has_shortcut=True, operation=_CONSUME),
            Route(
                "read",
                "GET",
                "/topics/{name}/partitions/{partition}/offset",
                self._offset_for_time,
                operation=_OFFSET_FOR_TIME,
            ),
        ]

    # --- JSON, for many partitions

    async def _produce(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            produce = decode_body(ProduceRequest, body)
            body.clear()
            return items_answer(await self.produce_items(request, produce.topic_partitions))

    async def produce_items(self, request: Request, items: Sequence[ProduceItem]) -> ItemAnswers:
        """Append the records of items, here or at their owners; one answer per item, in their order."""
        placement = None
        if any(item.partition is None for item in items):
            placement = await self._partitioner.place(items)
            items = placement.items
        answers = await self._append(items)
        owned = self._forwarding.owned_items(request, answers)
        if owned:
            parts = [
                self._forwarding.ask_owner(owner, "/produce", ProduceRequest([items[index] for index in indexes]))
                for owner, indexes in owned.items()
            ]
            answers = _merge(answers, zip(owned.values(), await asyncio.gather(*parts), strict=True))
        return answers if placement is None else placement.fold(answers, self._metrics)

    async def _append(self, items: Sequence[ProduceItem]) -> ItemAnswers:
        """Append on this broker; one answer per item, in their order. Partitions are appended to independently."""
        parts = [_part_or_error(item) for item in items]
        results = iter(await self._producer.append([part for part in parts if isinstance(part, Part)]))
        outcomes = [next(results) if isinstance(part, Part) else part for part in parts]
        return [self._append_answer(item, outcome) for item, outcome in zip(items, outcomes, strict=True)]

    def _append_answer(self, item: ProduceItem, outcome: AppendResult | LlogError) -> dict[str, Any]:
        if isinstance(outcome, LlogError):
            self._metrics.errors[outcome.code] += 1
            self._metrics.validation_failures["POST /produce"] += isinstance(outcome, InvalidArgument)
            return {"topic": item.topic, "partition": item.partition, "error": item_error(outcome)}
        assert item.partition is not None
        return _appended(item.topic, item.partition, outcome)

    async def _consume(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            consume = decode_body(ConsumeRequest, body)
            body.clear()  # a long poll holds what it needs of it
        answers = await self._fetch(consume)
        owned = self._forwarding.owned_items(request, answers)
        return items_answer(await self._consume_at_owners(request, consume, answers, owned) if owned else answers)

    async def _fetch(self, consume: ConsumeRequest) -> ItemAnswers:
        """Fetch on this broker; one answer per item, in their order.

        Earlier items go first where `max_bytes` is not enough for all.
        """
        fetches = [
            Fetch(
                TopicPartition(item.topic, item.partition),
                item.fetch_offset,
                item.partition_max_bytes,
                record_overhead=JSON_RECORD_OVERHEAD,
            )
            for item in consume.topic_partitions
        ]
        await self._fetcher.fetch(
            fetches, max_bytes=consume.max_bytes, min_bytes=consume.min_bytes, max_wait_ms=consume.max_wait_ms
        )
        for fetch in fetches:
            if fetch.error is not None:
                self._metrics.errors[fetch.error.code] += 1
                self._metrics.validation_failures["POST /consume"] += isinstance(fetch.error, InvalidArgument)
        return [_fetch_answer(fetch) for fetch in fetches]

    async def _consume_at_owners(
        self, request: Request, consume: ConsumeRequest, answers: ItemAnswers, owned: dict[str, list[int]]
    ) -> ItemAnswers:
        """Return the answers, with those of the items that other brokers own replaced by theirs.

        The first broker that has something, this one included, ends the wait of all.
        """
        shares: dict[str | None, list[int]] = dict(owned.items())
        elsewhere = {index for indexes in owned.values() for index in indexes}
        here = [index for index in range(len(answers)) if index not in elsewhere]
        if here:
            shares[None] = here
        if any("error" in answers[index] or answers[index]["records"] for index in here):
            consume = replace(consume, max_wait_ms=0)

        def ask(owner: str | None, indexes: list[int], wait_ms: int) -> Coroutine[Any, Any, ItemAnswers]:
            part = replace(_part(consume, indexes), max_wait_ms=wait_ms)
            if owner is None:
                return self._fetch(part)
            return self._forwarding.ask_owner(owner, "/consume", part, wait_ms)

        tasks = {
            owner: asyncio.ensure_future(ask(owner, indexes, consume.max_wait_ms)) for owner, indexes in shares.items()
        }
        try:
            await unless_gone(request, _wait_for_first(tasks.values()))
            for owner, task in tasks.items():
                if not task.done():
                    task.cancel()
                    tasks[owner] = asyncio.ensure_future(ask(owner, shares[owner], 0))
            found = await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        return _merge(answers, zip(shares.values(), found, strict=True))

    # --- Arrow, for one partition

    async def _produce_arrow(self, request: Request) -> Response:
        tp, query = path_partition(request), decode_query(ProduceQuery, request.query_params)
        async with self._bodies.read(request, MEDIA_TYPE) as body:
            columns = decode_records(body)
            (result,) = await self._producer.append([Part(tp, columns, _producer(tp, query, columns.count))])
        if isinstance(result, LlogError):
            raise result
        return json_answer(_appended(*tp, result))

    async def _offset_for_time(self, request: Request) -> Response:
        query = decode_query(TimeQuery, request.query_params)
        return json_answer({"offset": await self._reader.offset_for_time(path_partition(request), query.timestamp_ms)})


def _part_or_error(item: ProduceItem) -> Part | LlogError:
    assert item.partition is not None
    try:
        tp = TopicPartition(check_topic_name(item.topic), item.partition)
        return Part(tp, columns_from_json(item.records), _producer(tp, item, len(item.records)))
    except LlogError as error:
        return error


def _producer(tp: TopicPartition, sent: ProduceItem | ProduceQuery, records: int) -> RecordProducer | None:
    if sent.producer_id is None:
        if sent.sequence is not None or sent.producer_epoch:
            raise InvalidArgument(f"the records for {tp} have a sequence or an epoch, but no producer_id")
        return None
    if sent.sequence is None:
        raise InvalidArgument(
            f"the records for {tp} have the producer_id {sent.producer_id[:40]!r}, but no sequence: send the number of "
            "the first record, counted from 0 on in each partition"
        )
    producer = RecordProducer(id=sent.producer_id, epoch=sent.producer_epoch, sequence=sent.sequence)
    check_record_producer(producer, records)
    return producer


def _appended(topic: str, partition: int, result: AppendResult) -> dict[str, Any]:
    answer = {
        "topic": topic,
        "partition": partition,
        "start_offset": result.start_offset,
        "end_offset": result.end_offset,
    }
    return answer | {"repeated": True} if result.repeated else answer


def _fetch_answer(fetch: Fetch) -> dict[str, Any]:
    answer: dict[str, Any] = {"topic": fetch.tp.topic, "partition": fetch.tp.partition}
    if fetch.error is not None:
        answer["error"] = item_error(fetch.error)
    if fetch.next_offset is not None:
        answer |= {"high_watermark": fetch.next_offset - 1, "log_start_offset": fetch.log_start_offset}
    records = [record for batch in fetch.batches for record in records_to_json(batch)]
    return answer | {"next_fetch_offset": fetch.position, "records": records}


def _part(request: R, indexes: list[int]) -> R:
    """Return the request with these of its items only."""
    return replace(request, topic_partitions=[request.topic_partitions[index] for index in indexes])


def _merge(answers: ItemAnswers, parts: Iterable[tuple[list[int], ItemAnswers]]) -> ItemAnswers:
    """Return the answers with those at the indexes of each part replaced."""
    answers = list(answers)
    for indexes, part in parts:
        for index, answer in zip(indexes, part, strict=True):
            answers[index] = answer
    return answers


async def _wait_for_first(tasks: Iterable[asyncio.Future[ItemAnswers]]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
