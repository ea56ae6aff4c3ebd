"""Kafka's messages: what is written is read again in every version, and bytes from outside are checked."""

from __future__ import annotations

import pytest

from llog.kafka.messages import (
    APIS,
    Api,
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
from llog.kafka.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from llog.kafka.messages.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
)
from llog.kafka.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from llog.kafka.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from llog.kafka.wire import MalformedMessage
from tests.unit.kafka.sample_messages import VERSION_NAMES, VERSIONS, frame, sample, seeded

SAMPLES = 5
CLIENTS = {  # the lowest and the highest version that a client in use sends
    "Produce": (7, 13),
    "Fetch": (11, 18),
    "ListOffsets": (2, 11),
    "Metadata": (4, 13),
    "OffsetCommit": (3, 9),
    "OffsetFetch": (3, 10),
    "FindCoordinator": (1, 6),
    "JoinGroup": (5, 9),
    "SyncGroup": (3, 5),
    "InitProducerId": (0, 5),
    "ApiVersions": (0, 4),
    "DescribeCluster": (2, 2),
    "DescribeTopicPartitions": (0, 0),
    "DescribeConfigs": (4, 4),
    "ListGroups": (5, 5),
    "DescribeGroups": (6, 6),
    "ListPartitionReassignments": (0, 0),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_every_version_that_clients_send_is_known(name: str) -> None:
    api = next(each for each in APIS.values() if each.name == name)
    assert api.lowest <= CLIENTS[name][0] <= CLIENTS[name][1] <= api.highest


@pytest.mark.parametrize(("api", "version"), VERSIONS, ids=VERSION_NAMES)
def test_a_request_is_read_as_it_was_written(api: Api, version: int) -> None:
    rng = seeded(api, version)
    for _ in range(SAMPLES):
        message = sample(api.request, version, rng)
        header, body = decode_header(frame(encode_request(api, version, 7, "a client", message)))
        assert header == (api.key, version, 7, "a client")
        assert decode_request(api, version, body) == message


@pytest.mark.parametrize(("api", "version"), VERSIONS, ids=VERSION_NAMES)
def test_a_response_is_read_as_it_was_written(api: Api, version: int) -> None:
    rng = seeded(api, version)
    for _ in range(SAMPLES):
        message = sample(api.response, version, rng)
        assert decode_response(api, version, frame(encode_response(api, version, -1, message))) == (-1, message)


@pytest.mark.parametrize("version", range(4))
def test_what_members_of_a_group_say_is_read_as_it_was_written(version: int) -> None:
    rng = seeded(APIS[11], version)
    for _ in range(SAMPLES):
        subscription = sample(ConsumerProtocolSubscription, version, rng)
        assert decode_subscription(encode_subscription(subscription, version)) == subscription
        assignment = sample(ConsumerProtocolAssignment, version, rng)
        assert decode_assignment(encode_assignment(assignment, version)) == assignment


def test_a_newer_version_of_the_consumer_protocol_is_read_as_far_as_it_is_known() -> None:
    subscription = ConsumerProtocolSubscription(topics=["a"], generation_id=4)
    data = bytearray(encode_subscription(subscription) + b"more")
    data[:2] = (9).to_bytes(2, "big")
    assert decode_subscription(data) == subscription


def test_large_records_are_neither_copied_when_written_nor_when_read() -> None:
    records = bytes(5000)
    partition = PartitionData(records=[b"head", records, memoryview(records)[2000:]])
    response = FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=[partition])])
    pieces = encode_response(APIS[1], 11, 1, response)
    assert any(piece is records for piece in pieces)
    data = frame(pieces)
    _, decoded = decode_response(APIS[1], 11, data)
    found = decoded.responses[0].partitions[0].records
    assert found == b"head" + bytes(8000)
    assert found.obj is data.obj


def test_an_answer_about_versions_has_the_oldest_header_in_every_version() -> None:
    api = APIS[18]
    request = ApiVersionsRequest(client_software_name="x", client_software_version="1")
    header, body = decode_header(frame(encode_request(api, 3, 5, None, request)))
    assert header == (18, 3, 5, None)
    assert decode_request(api, 3, body) == request
    assert bytes(frame(encode_response(api, 3, 5, ApiVersionsResponse()))) == b"\0\0\0\5\0\0\1\0\0\0\0\0"


def test_an_unknown_version_is_named_with_those_that_are_known() -> None:
    with pytest.raises(MalformedMessage, match="Fetch has no version 99, but versions 4 to 18"):
        decode_request(APIS[1], 99, memoryview(b""))


def test_the_header_of_an_unknown_api_is_read() -> None:
    header, body = decode_header(memoryview(b"\x7f\xff\0\1\0\0\0\2\0\1cbody"))
    assert header == (0x7FFF, 1, 2, "c")
    assert bytes(body) == b"body"


def test_an_array_that_claims_more_items_than_can_follow_is_refused() -> None:
    request = ProduceRequest(topic_data=[TopicProduceData(name="t", partition_data=[PartitionProduceData()])])
    _, body = decode_header(frame(encode_request(APIS[0], 7, 1, None, request)))
    data = bytearray(body)
    data[8:12] = b"\x7f\xff\xff\xff"
    with pytest.raises(MalformedMessage, match="an array before byte 12 has the length 2147483647, but 15 bytes"):
        decode_request(APIS[0], 7, memoryview(data))


def test_a_null_where_none_may_be_is_refused_in_both_directions() -> None:
    with pytest.raises(MalformedMessage, match="an array before byte 12 is null"):
        decode_request(APIS[0], 7, memoryview(b"\xff\xff\0\1\0\0\0\0\xff\xff\xff\xff"))
    with pytest.raises(ValueError, match="a FetchResponse does not fit version 11 of its API"):
        encode_response(APIS[1], 11, 1, FetchResponse(responses=None))  # type: ignore[arg-type]
