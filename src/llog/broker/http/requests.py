"""Bodies, queries and paths of requests, decoded into types: anything else is refused, with the place where it differs.

The structs themselves are in `routes/`, beside the handlers that take them; here is what several of them share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from llog.base.decoders import json_decoder
from llog.errors import InvalidArgument
from llog.model import PARTITIONS_MAX, TopicPartition, check_topic_name

if TYPE_CHECKING:
    from starlette.requests import Request

JSON: Final = "application/json"
FORM: Final = "application/x-www-form-urlencoded"
ITEMS_MAX: Final = 1000
WAIT_MS_MAX: Final = 60_000
FETCH_BYTES_MAX: Final = 16 << 20

T = TypeVar("T")
Partition = Annotated[int, Meta(ge=0, lt=PARTITIONS_MAX)]
FetchBytes = Annotated[int, Meta(ge=1, le=FETCH_BYTES_MAX)]


class _PathParameters(msgspec.Struct, frozen=True):
    partition: Partition


def decode_body(kind: type[T], body: bytes | bytearray) -> T:
    """Return the request in a JSON body; `InvalidArgument` says what is wrong and where."""
    try:
        return json_decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body is not what it should be: {error}") from error


def decode_query(kind: type[T], query: Mapping[str, object]) -> T:
    """Return the parameters after the '?' of an address; `InvalidArgument` says what is wrong and where."""
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the query is not what it should be: {error}") from error


def path_partition(request: Request) -> TopicPartition:
    """Return the partition that the address names, as `/topics/{name}/partitions/{partition}`."""
    partition = decode_query(_PathParameters, {"partition": request.path_params["partition"]}).partition
    return TopicPartition(check_topic_name(request.path_params["name"]), partition)


def is_from_page(request: Request) -> bool:
    """Return whether a web page sent the request, perhaps behind its visitor's back."""
    return any(header in request.headers for header in ("origin", "sec-fetch-site"))


def content_type(request: Request) -> str:
    """Return the content type of the body, in lower case and without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
