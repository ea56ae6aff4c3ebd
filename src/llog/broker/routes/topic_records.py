"""Records of a topic: `POST /topics/{name}/records`, whose records the broker distributes over the partitions.

A value may be any JSON: text is stored as its bytes, `{"base64": …}` as the bytes that it stands for, null marks the
key as deleted, and everything else is stored as its JSON text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answer_shapes import TopicRecordsAnswer
from llog.broker.http.answers import item_problem, json_answer
from llog.broker.http.bodies import Bodies
from llog.broker.http.forwarding import ItemAnswers
from llog.broker.http.json_records import Base64, Data, JsonRecord
from llog.broker.http.operations import Operation
from llog.broker.http.requests import JSON, Partition, decode_body
from llog.broker.http.routing import Route
from llog.broker.routes.records import ProduceItem, ProducerId, SequenceNumber
from llog.errors import InvalidArgument

ProduceItems = Callable[[Request, Sequence[ProduceItem]], Awaitable[ItemAnswers]]


class ValueRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose value is any JSON, or bytes in base64. A number as its key stands for its digits."""

    value: Raw | UnsetType = UNSET
    base64: bytes | UnsetType = UNSET
    key: Data | int | None = None
    timestamp: int | None = None
    headers: tuple[tuple[str, Data | None], ...] = ()


class TopicRecordsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    records: Annotated[list[str | ValueRecord], Meta(min_length=1)]
    partition: Partition | None = None
    producer_id: ProducerId | None = None
    producer_epoch: SequenceNumber = 0
    sequence: SequenceNumber | None = None


class _Base64Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base64: str


_PRODUCE: Final = Operation(
    "Records", "Append records to a topic", {JSON: TopicRecordsRequest}, answers={JSON: TopicRecordsAnswer}
)


class TopicRecordRoutes:
    def __init__(self, produce_items: ProduceItems, bodies: Bodies) -> None:
        self._produce_items = produce_items
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [Route("write", "POST", "/topics/{name}/records", self._produce, operation=_PRODUCE)]

    async def _produce(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            sent = decode_body(TopicRecordsRequest, body)
            item = ProduceItem(
                topic=request.path_params["name"],
                records=[record if isinstance(record, str) else _json_record(record) for record in sent.records],
                partition=sent.partition,
                producer_id=sent.producer_id,
                producer_epoch=sent.producer_epoch,
                sequence=sent.sequence,
            )
            (answer,) = await self._produce_items(request, [item])
        records = _appended(answer, len(item.records))
        if records is None:
            return item_problem(answer["error"])
        found = {"topic": item.topic, "records": records}
        return json_answer(found | {name: answer[name] for name in ("error", "repeated") if name in answer})


def _appended(answer: dict[str, Any], count: int) -> list[dict[str, Any]] | None:
    """Return where each record is, or its error; None if all of them failed."""
    if "start_offset" in answer:
        return [{"partition": answer["partition"], "offset": answer["start_offset"] + n} for n in range(count)]
    records: list[dict[str, Any]] | None = answer.get("records")
    return records


def _json_record(record: ValueRecord) -> JsonRecord:
    key = str(record.key) if isinstance(record.key, int) else record.key
    value = record.value if isinstance(record.value, UnsetType) else _value(record.value)
    return JsonRecord(value, record.base64, key, record.timestamp, record.headers)


def _value(raw: Raw) -> Data | None:
    text = bytes(raw)
    try:
        if text.startswith(b'"'):
            return msgspec.json.decode(text, type=str)
        if text == b"null":
            return None
        if text.startswith(b"{"):
            try:
                msgspec.json.decode(text, type=_Base64Text)
            except msgspec.ValidationError:
                pass  # any other object
            else:
                return msgspec.json.decode(text, type=Base64)
        return text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"a value is not what it should be: {error}") from None
