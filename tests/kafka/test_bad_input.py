"""Whatever a client sends, it gets its error or loses its connection; the broker lives, and others notice nothing."""

from __future__ import annotations

import struct
import time

import pytest

from llog.kafka.error_codes import ErrorCode
from llog.kafka.messages import APIS, encode_request
from llog.kafka.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from llog.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from llog.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from llog.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from tests.broker.test_process import LIMIT_S
from tests.kafka.requests import connected
from tests.kafka.serving import KafkaBroker, produce


def head(api_key: int, version: int) -> bytes:
    return struct.pack(">hhih", api_key, version, 7, -1)


def framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (struct.pack(">i", 2_000_000_000), "a frame of 2000000000 bytes"),
        (struct.pack(">i", -1), "a frame of -1 bytes"),
        (struct.pack(">i", 0), "a frame of 0 bytes"),
        (framed(b"\x00"), "the header of a request"),
        (framed(head(999, 0)), "the API 999, which is not served"),
        (framed(head(3, 99) + b"\x00"), "Metadata in version 99"),
        (framed(head(28, 0)), "the API 28, which is not served"),
        (framed(head(3, 4) + struct.pack(">i", 2_000_000_000)), "Metadata request"),
        (framed(head(0, 7) + b"\xff" * 40), "Produce request"),
    ],
)
def test_what_cannot_be_understood_closes_the_connection_with_one_line_in_the_log(
    broker: KafkaBroker, topic: str, sent: bytes, told: str
) -> None:
    before = len(broker.process.errors)
    with connected(broker) as client:
        client.socket.sendall(sent)
        assert client.is_closed()
    deadline = time.monotonic() + LIMIT_S
    while told not in broker.process.errors[before:]:
        assert time.monotonic() < deadline, broker.process.errors[before:]
        time.sleep(0.01)
    lines = [line for line in broker.process.errors[before:].splitlines() if "Kafka client" in line]
    assert len(lines) == 1, lines
    assert [message.offset() for message in produce(broker.bootstrap, topic, [b"others go on"])] == [0]


def test_a_frame_that_never_ends_keeps_nobody_waiting(broker: KafkaBroker, topic: str) -> None:
    with connected(broker) as client:
        client.socket.sendall(struct.pack(">i", 1000) + head(3, 4))
        assert [message.offset() for message in produce(broker.bootstrap, topic, [b"others go on"])] == [0]


def test_a_newer_client_is_told_the_versions_in_the_oldest_form(broker: KafkaBroker) -> None:
    with connected(broker) as client:
        client.socket.sendall(framed(head(18, 99) + b"\x00"))
        response = client.answer(18, 0)
        assert isinstance(response, ApiVersionsResponse)
        assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
        assert 0 in {api.api_key for api in response.api_keys}
        again = client.ask(18, 4, ApiVersionsRequest(client_software_name="test", client_software_version="1"))
        assert isinstance(again, ApiVersionsResponse)
        assert again.error_code == ErrorCode.NONE


def test_an_http_request_is_told_where_http_is(broker: KafkaBroker) -> None:
    with connected(broker) as client:
        client.socket.sendall(b"GET /topics HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = client.socket.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.1 400 ")
    assert str(broker.process.client.base_url) in answer + "/"


def test_a_topic_name_that_is_none_is_refused_by_name(broker: KafkaBroker, topic: str) -> None:
    with connected(broker) as client:
        response = client.ask(
            3, 9, MetadataRequest(topics=[MetadataRequestTopic(name="no/such name"), MetadataRequestTopic(name=topic)])
        )
    assert isinstance(response, MetadataResponse)
    codes = {found.name: found.error_code for found in response.topics}
    assert codes == {"no/such name": ErrorCode.INVALID_TOPIC_EXCEPTION, topic: ErrorCode.NONE}


@pytest.mark.parametrize("validate_only", [False, True])
def test_topics_that_cannot_be_are_not_created_and_each_is_told_why(
    broker: KafkaBroker, topic: str, validate_only: bool
) -> None:
    def wanted(name: str, partitions: int = 1) -> CreatableTopic:
        return CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)

    topics = [wanted(f"{topic}-none", 0), wanted(f"{topic}-many", 100_001), wanted("no/such name")]
    topics += [wanted(f"{topic}-twice"), wanted(f"{topic}-twice"), wanted(topic)]
    with connected(broker) as client:
        response = client.ask(19, 7, CreateTopicsRequest(topics=topics, validate_only=validate_only))
    assert isinstance(response, CreateTopicsResponse)
    assert [found.error_code for found in response.topics] == [
        ErrorCode.INVALID_PARTITIONS,
        ErrorCode.INVALID_PARTITIONS,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.NONE,
    ]
    assert all(found.error_message for found in response.topics[:-1])


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (b"", ErrorCode.INVALID_RECORD),
        (bytes(61), ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        (bytes(16) + b"\x02" + bytes(60), ErrorCode.CORRUPT_MESSAGE),
    ],
)
def test_records_that_are_no_batch_are_refused(
    broker: KafkaBroker, topic: str, records: bytes, code: ErrorCode
) -> None:
    assert _produce_raw(broker, topic, records) == code


@pytest.mark.parametrize("acks", [2, -2])
def test_acks_that_do_not_exist_are_refused(broker: KafkaBroker, topic: str, acks: int) -> None:
    assert _produce_raw(broker, topic, b"", acks=acks) == ErrorCode.INVALID_REQUIRED_ACKS


def _produce_raw(broker: KafkaBroker, topic: str, records: bytes, acks: int = -1) -> int:
    data = TopicProduceData(name=topic, partition_data=[PartitionProduceData(index=0, records=records)])
    with connected(broker) as client:
        response = client.ask(0, 9, ProduceRequest(acks=acks, timeout_ms=1000, topic_data=[data]))
    assert isinstance(response, ProduceResponse)
    return response.responses[0].partition_responses[0].error_code


def test_a_client_that_does_not_read_its_answers_disturbs_nobody(broker: KafkaBroker, topic: str) -> None:
    produce(broker.bootstrap, topic, [bytes(100_000)] * 50)
    with connected(broker) as client:
        request = b"".join(encode_request(APIS[3], 4, 7, "test", MetadataRequest(topics=None)))
        client.socket.settimeout(1)
        with pytest.raises(TimeoutError):  # the broker stops reading once too much is under way
            client.socket.sendall(request * 1_000_000)
        assert len(produce(broker.bootstrap, topic, [b"others go on"])) == 1
