"""Whole messages: their headers, and requests and responses as frames that can be sent.

Bytes behind the last field of a message are ignored, as Kafka ignores them.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Any, Final, NamedTuple

from llog.kafka import wire
from llog.kafka.messages.codec import UNREADABLE, Codec, compiled, malformed
from llog.kafka.messages.registry import APIS
from llog.kafka.messages.schema import Api, Message
from llog.kafka.wire import Buffer, MalformedMessage

API_VERSIONS_KEY: Final = 18
_SIZE: Final = Struct(">i")
_REQUEST: Final = Struct(">hhi")
_RESPONSE: Final = Struct(">i")


class RequestHeader(NamedTuple):
    """What precedes every request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None


def decode_header(frame: memoryview) -> tuple[RequestHeader, memoryview]:
    """Return the header of a request and its body, which is what follows. `frame` is what follows the size.

    The body of an API that is not in `APIS` may begin with the tagged fields of the header.
    """
    try:
        api_key, version, correlation_id = _REQUEST.unpack_from(frame)
        client_id, pos = wire.read_nullable_string(frame, _REQUEST.size)
        api = APIS.get(api_key)
        if api is not None and version >= api.flexible_from:
            pos = wire.read_tags(frame, pos, None, {})
    except UNREADABLE as error:
        raise malformed("the header of a request", frame, error) from None
    return RequestHeader(api_key, version, correlation_id, client_id), frame[pos:]


def decode_request(api: Api, version: int, body: memoryview) -> Any:
    """Return the request, a struct of type `api.request`. Its bytes and records are slices of `body`."""
    return _decode(f"{api.name} request", api, version, api.request, body, 0)


def encode_request(
    api: Api, version: int, correlation_id: int, client_id: str | None, message: Message
) -> list[Buffer]:
    """Return the frame of a request, with its size and header, in pieces: large buffers are not copied."""
    out = bytearray(_SIZE.size) + _REQUEST.pack(api.key, version, correlation_id)
    wire.write_nullable_string(out, client_id)
    if version >= api.flexible_from:
        out.append(0)
    return _framed(out, _codec(api, version, api.request), message, version)


def encode_response(api: Api, version: int, correlation_id: int, message: Message) -> list[Buffer]:
    """Return the frame of a response, with its size and header, in pieces: large buffers are not copied."""
    out = bytearray(_SIZE.size) + _RESPONSE.pack(correlation_id)
    if _tagged_response_header(api, version):
        out.append(0)
    return _framed(out, _codec(api, version, api.response), message, version)


def decode_response(api: Api, version: int, frame: memoryview) -> tuple[int, Any]:
    """Return the correlation id and the response, a struct of type `api.response`. `frame` is what follows the size."""
    try:
        (correlation_id,) = _RESPONSE.unpack_from(frame)
        pos = _RESPONSE.size
        if _tagged_response_header(api, version):
            pos = wire.read_tags(frame, pos, None, {})
    except UNREADABLE as error:
        raise malformed("the header of a response", frame, error) from None
    return correlation_id, _decode(f"{api.name} response", api, version, api.response, frame, pos)


def _tagged_response_header(api: Api, version: int) -> bool:
    # A client that asks for the versions does not know yet which header the server has.
    return version >= api.flexible_from and api.key != API_VERSIONS_KEY


def _codec(api: Api, version: int, message: type[Message]) -> Codec:
    if not api.lowest <= version <= api.highest:
        raise MalformedMessage(f"{api.name} has no version {version}, but versions {api.lowest} to {api.highest}")
    return compiled(message, version, version >= api.flexible_from)


def _decode(name: str, api: Api, version: int, message: type[Message], data: memoryview, pos: int) -> Any:
    codec = _codec(api, version, message)
    try:
        return codec.read(data, pos)[0]
    except UNREADABLE as error:
        raise malformed(f"a {name} of version {version}", data, error) from None


def _framed(out: bytearray, codec: Codec, message: Message, version: int) -> list[Buffer]:
    splices: wire.Splices = []
    try:
        codec.write(out, splices, message)
    except (StructError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"a {type(message).__name__} does not fit version {version} of its API: {error}") from error
    size = len(out) - _SIZE.size + sum(len(buffer) for _, buffer in splices)
    _SIZE.pack_into(out, 0, size)
    return wire.pieces(out, splices)
