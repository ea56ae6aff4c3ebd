"""kafka-python, whose codec is independent of ours, reads what we write and writes what we read."""

from __future__ import annotations

import importlib
import pkgutil
import random
from typing import Any
from uuid import UUID

import kafka.protocol
import pytest
from kafka.protocol.api_message import ApiMessage
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment as TheirAssignment
from kafka.protocol.consumer.metadata import ConsumerProtocolSubscription as TheirSubscription

from llog.kafka.messages import (
    Api,
    Message,
    decode_assignment,
    decode_header,
    decode_request,
    decode_response,
    decode_subscription,
    encode_assignment,
    encode_request,
    encode_response,
    encode_subscription,
)
from llog.kafka.messages.consumer_protocol import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from llog.kafka.messages.schema import Field, in_range
from tests.unit.kafka.sample_messages import VERSIONS, sample, seeded

SAMPLES = 3
CORRELATION_ID = 12


def _their_messages() -> dict[str, Any]:
    for module in pkgutil.walk_packages(kafka.protocol.__path__, "kafka.protocol."):
        if not module.name.startswith("kafka.protocol.old") and "stubs" not in module.name:
            importlib.import_module(module.name)
    return {each.__name__: each for each in ApiMessage.__subclasses__()}


THEIRS = _their_messages()
COVERED = [(api, version) for api, version in VERSIONS if f"{api.name}Request" in THEIRS]
NAMES = [f"{api.name}-{version}" for api, version in COVERED]


def test_the_oracle_knows_every_api() -> None:
    assert {api.name for api, _ in VERSIONS} == {api.name for api, _ in COVERED}


@pytest.mark.parametrize(("api", "version"), COVERED, ids=NAMES)
def test_kafka_python_reads_what_was_written(api: Api, version: int) -> None:
    rng = seeded(api, version)
    for _ in range(SAMPLES):
        request = sample(api.request, version, rng)
        data = b"".join(encode_request(api, version, CORRELATION_ID, "client", request))
        theirs = THEIRS[api.request.__name__].decode(data, version=version, header=True, framed=True)
        assert theirs.header.correlation_id == CORRELATION_ID
        assert theirs.header.client_id == "client"
        _assert_same(request, theirs, version)
        response = _response(api, version, rng)
        data = b"".join(encode_response(api, version, CORRELATION_ID, response))
        theirs = THEIRS[api.response.__name__].decode(data, version=version, header=True, framed=True)
        assert theirs.header.correlation_id == CORRELATION_ID
        _assert_same(response, theirs, version)


@pytest.mark.parametrize(("api", "version"), COVERED, ids=NAMES)
def test_what_kafka_python_writes_is_read(api: Api, version: int) -> None:
    rng = seeded(api, version)
    for _ in range(SAMPLES):
        request = sample(api.request, version, rng)
        theirs = _as_theirs(request, THEIRS[api.request.__name__], version)
        theirs.with_header(correlation_id=CORRELATION_ID, client_id="client")
        header, body = decode_header(memoryview(theirs.encode(header=True, framed=True))[4:])
        assert header == (api.key, version, CORRELATION_ID, "client")
        assert decode_request(api, version, body) == request
        response = _response(api, version, rng)
        theirs = _as_theirs(response, THEIRS[api.response.__name__], version)
        theirs.with_header(correlation_id=CORRELATION_ID)
        frame = memoryview(theirs.encode(header=True, framed=True))[4:]
        assert decode_response(api, version, frame) == (CORRELATION_ID, response)


@pytest.mark.parametrize("version", range(4))
def test_kafka_python_agrees_on_subscriptions_and_assignments(version: int) -> None:
    rng = random.Random(version)
    for _ in range(SAMPLES):
        subscription = sample(ConsumerProtocolSubscription, version, rng)
        _assert_same(subscription, TheirSubscription.decode(encode_subscription(subscription, version)), version)
        assert decode_subscription(_as_theirs(subscription, TheirSubscription, version).encode()) == subscription
        assignment = sample(ConsumerProtocolAssignment, version, rng)
        _assert_same(assignment, TheirAssignment.decode(encode_assignment(assignment, version)), version)
        assert decode_assignment(_as_theirs(assignment, TheirAssignment, version).encode()) == assignment


def _response(api: Api, version: int, rng: random.Random) -> Any:
    message = sample(api.response, version, rng)
    if api.name == "ApiVersions":
        message.error_code = 0  # an answer with an error has the layout of version 0
    return message


def _assert_same(ours: Message, theirs: Any, version: int) -> None:
    for field in _fields(ours, version):
        name = _their_name(field, theirs)
        value, other = getattr(ours, field.name), getattr(theirs, name)
        where = f"{type(ours).__name__}.{field.name}"
        if isinstance(field.kind, str) or value is None:
            assert _plain(field, value, theirs.fields[name].type_str) == other, where
        elif field.array:
            assert len(value) == len(other), where
            for item, other_item in zip(value, other, strict=True):
                _assert_same(item, other_item, version)
        else:
            _assert_same(value, other, version)


def _as_theirs(ours: Message, theirs: Any, version: int) -> Any:
    values = {}
    for field in _fields(ours, version):
        name = _their_name(field, theirs)
        value = getattr(ours, field.name)
        if isinstance(field.kind, str) or value is None:
            values[name] = _plain(field, value, theirs.fields[name].type_str)
        else:
            data_class = theirs.fields[name].data_class
            if field.array:
                values[name] = [_as_theirs(item, data_class, version) for item in value]
            else:
                values[name] = _as_theirs(value, data_class, version)
    return theirs(version=version, **values)


def _fields(message: Message, version: int) -> list[Field]:
    return [field for field in message.FIELDS if in_range(version, field.versions)]


def _their_name(field: Field, theirs: Any) -> str:
    return field.name if field.name in theirs.fields else field.name.replace("cluster_", "").replace("topic_", "")


def _plain(field: Field, value: Any, their_type: str) -> Any:
    """Return the value as kafka-python has it: a UUID, or a set of bits."""
    if field.kind == "uuid" and value is not None:
        return [UUID(bytes=item) for item in value] if field.array else UUID(bytes=value)
    if their_type == "bitfield":
        bits = {bit for bit in range(32) if value >> bit & 1}
        return None if bits == {31} else bits
    return value
