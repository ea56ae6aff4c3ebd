"""Recording of `POST /produce` and `POST /consume`, through any client with the interface of httpx's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from llog.base.decoders import json_decoder
from llog.broker.http.json_records import JsonRecord, columns_from_json
from llog.history.recorder import HistoryRecorder, OpenOperation
from llog.log.engine import Batch
from llog.log.record_producers import RecordProducer
from llog.model import TopicPartition

Item = Mapping[str, Any]

json_decoder(JsonRecord)  # msgspec examines the type now, before several threads convert records to it.


class Response(Protocol):
    @property
    def status_code(self) -> int: ...

    @property
    def content(self) -> bytes: ...


class Client(Protocol):
    """The interface of `httpx.Client`."""

    def post(self, url: str, *, json: Any) -> Any: ...


class AsyncClient(Protocol):
    """The interface of `httpx.AsyncClient`."""

    async def post(self, url: str, *, json: Any) -> Any: ...


class RecordedBroker:
    """Produces and consumes through one broker, which the history calls `via`."""

    def __init__(self, recorder: HistoryRecorder, client: Client, *, via: str) -> None:
        self._starter = _OperationStarter(recorder, via)
        self._client = client

    def produce(self, items: Sequence[Item]) -> Any:
        """Return the response to `POST /produce` with these `topic_partitions`."""
        under_way = self._starter.begin_produce(items)
        try:
            response = self._client.post("/produce", json={"topic_partitions": items})
        except BaseException as error:
            _record_raised(under_way, error)
            raise
        _record_produce_answer(under_way, response)
        return response

    def consume(self, items: Sequence[Item], **options: int) -> Any:
        """Return the response to `POST /consume` with these `topic_partitions` and options such as `max_wait_ms`."""
        under_way = self._starter.begin_consume(items)
        try:
            response = self._client.post("/consume", json={"topic_partitions": items, **options})
        except BaseException as error:
            _record_raised(under_way, error)
            raise
        _record_consume_answer(under_way, items, response)
        return response


class RecordedAsyncBroker:
    """Produces and consumes through one broker, which the history calls `via`."""

    def __init__(self, recorder: HistoryRecorder, client: AsyncClient, *, via: str) -> None:
        self._starter = _OperationStarter(recorder, via)
        self._client = client

    async def produce(self, items: Sequence[Item]) -> Any:
        """Return the response to `POST /produce` with these `topic_partitions`."""
        under_way = self._starter.begin_produce(items)
        try:
            response = await self._client.post("/produce", json={"topic_partitions": items})
        except BaseException as error:
            _record_raised(under_way, error)
            raise
        _record_produce_answer(under_way, response)
        return response

    async def consume(self, items: Sequence[Item], **options: int) -> Any:
        """Return the response to `POST /consume` with these `topic_partitions` and options such as `max_wait_ms`."""
        under_way = self._starter.begin_consume(items)
        try:
            response = await self._client.post("/consume", json={"topic_partitions": items, **options})
        except BaseException as error:
            _record_raised(under_way, error)
            raise
        _record_consume_answer(under_way, items, response)
        return response


class _OperationStarter:
    def __init__(self, recorder: HistoryRecorder, via: str) -> None:
        self._recorder = recorder
        self._via = via

    def begin_produce(self, items: Sequence[Item]) -> list[OpenOperation]:
        return [
            self._recorder.append(
                _partition(item),
                columns_from_json(msgspec.convert(item["records"], list[str | JsonRecord])),
                _producer(item),
                via=self._via,
            )
            for item in items
        ]

    def begin_consume(self, items: Sequence[Item]) -> list[OpenOperation]:
        return [self._recorder.read(_partition(item), item["fetch_offset"], via=self._via) for item in items]


class _ErrorIn(msgspec.Struct):
    code: str
    log_start_offset: int | None = None
    next_offset: int | None = None


class _RecordOut(msgspec.Struct):
    offset: int
    payload: Any
    key: Any = None
    headers: Any = ()


class _ItemOut(msgspec.Struct):
    error: _ErrorIn | None = None
    start_offset: int | None = None
    end_offset: int | None = None
    high_watermark: int | None = None
    log_start_offset: int | None = None
    records: list[_RecordOut] = []


class _Answer(msgspec.Struct):
    """The answer to a request whose items go well or fail one by one, or the problem of the whole request."""

    topic_partitions: list[_ItemOut] | None = None
    code: str | None = None


def _record_produce_answer(under_way: Sequence[OpenOperation], response: Response) -> None:
    for operation, item in zip(under_way, _items(response, len(under_way)), strict=True):
        if isinstance(item, str):
            operation.lost(item)
        elif item.error is not None:
            operation.refused(item.error.code)
        elif item.start_offset is not None and item.end_offset is not None:
            operation.appended(item.start_offset, item.end_offset)
        else:
            operation.lost("an answer without offsets")


def _record_consume_answer(under_way: Sequence[OpenOperation], items: Sequence[Item], response: Response) -> None:
    for operation, asked, item in zip(under_way, items, _items(response, len(under_way)), strict=True):
        if isinstance(item, str):
            operation.lost(item)
        elif item.error is not None:
            error = item.error
            operation.refused(error.code, log_start_offset=error.log_start_offset, next_offset=error.next_offset)
        else:
            next_offset = None if item.high_watermark is None else item.high_watermark + 1
            batches = _batches(_partition(asked), item.records)
            operation.answered(batches, log_start_offset=item.log_start_offset, next_offset=next_offset)


def _items(response: Response, count: int) -> Sequence[_ItemOut | str]:
    """Return the answer for each item, or a text that says why there is none."""
    unclear = f"status {response.status_code}"
    try:
        answer = json_decoder(_Answer).decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [unclear] * count
    if answer.topic_partitions is not None:
        return answer.topic_partitions if len(answer.topic_partitions) == count else [unclear] * count
    # Only an error code of llog proves that nothing was done; a failure without one, or of a proxy, may follow an
    # effect.
    if answer.code is None or response.status_code in (500, 502, 504):
        return [unclear] * count
    return [_ItemOut(error=_ErrorIn(code=answer.code))] * count


def _batches(tp: TopicPartition, records: Sequence[_RecordOut]) -> list[Batch]:
    """Return the records as batches of consecutive offsets, in the order of the answer."""
    batches: list[Batch] = []
    first = 0
    for position in range(1, len(records) + 1):
        if position == len(records) or records[position].offset != records[position - 1].offset + 1:
            shown = [
                {"value": each.payload, "key": each.key, "headers": each.headers} for each in records[first:position]
            ]
            batches.append(
                Batch(tp, records[first].offset, columns_from_json(msgspec.convert(shown, list[str | JsonRecord])))
            )
            first = position
    return batches


def _record_raised(under_way: Sequence[OpenOperation], error: BaseException) -> None:
    for operation in under_way:
        operation.lost(type(error).__name__)


def _producer(item: Item) -> RecordProducer | None:
    if item.get("producer_id") is None:
        return None
    return RecordProducer(id=item["producer_id"], epoch=item.get("producer_epoch", 0), sequence=item["sequence"])


def _partition(item: Item) -> TopicPartition:
    return TopicPartition(item["topic"], item["partition"])
