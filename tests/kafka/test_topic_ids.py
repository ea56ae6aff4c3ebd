"""Requests that name topics by their ids: Produce from version 13 and Fetch from version 13 on."""

from __future__ import annotations

from typing import cast

import pytest
from confluent_kafka.admin import AdminClient

from llog.batch.columns import columns_of, stamp
from llog.batch.kafka_batch import decode, encode, heads
from llog.kafka.error_codes import ErrorCode
from llog.kafka.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData
from llog.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from llog.kafka.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from llog.model import Record
from tests.broker.test_process import LIMIT_S
from tests.kafka.requests import Client, connected
from tests.kafka.serving import KafkaBroker, produce

UNKNOWN = b"\x07" * 16


def find_id(client: Client, topic: str) -> bytes:
    answer = client.ask(3, 13, MetadataRequest(topics=[MetadataRequestTopic(name=topic)]))
    return cast(MetadataResponse, answer).topics[0].topic_id


def append(client: Client, identity: bytes, value: bytes) -> PartitionProduceResponse:
    records = b"".join(encode(stamp(columns_of([Record(payload=value, timestamp=1)]), 1), 0))
    data = TopicProduceData(topic_id=identity, partition_data=[PartitionProduceData(index=0, records=records)])
    answer = cast(ProduceResponse, client.ask(0, 13, ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[data])))
    assert answer.responses[0].topic_id == identity
    return answer.responses[0].partition_responses[0]


def fetch(client: Client, version: int, *ids: bytes, offset: int = 0) -> list[PartitionData]:
    partition = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=1 << 20)
    topics = [FetchTopic(topic_id=each, partitions=[partition]) for each in ids]
    request = FetchRequest(max_wait_ms=int(LIMIT_S * 1000), min_bytes=1 << 20, max_bytes=1 << 20, topics=topics)
    answer = cast(FetchResponse, client.ask(1, version, request))
    assert [each.topic_id for each in answer.responses] == list(ids)
    return [each.partitions[0] for each in answer.responses]


def values_of(found: PartitionData) -> list[bytes]:
    data = cast(memoryview, found.records)
    return [bytes(value) for head in heads(data) for value in decode(data, head, bytes_max=1 << 20).values.to_pylist()]


@pytest.mark.parametrize("version", range(13, 19))
def test_records_are_written_and_read_by_the_id_of_their_topic(broker: KafkaBroker, topic: str, version: int) -> None:
    produce(broker.bootstrap, topic, [b"by name"])
    with connected(broker) as client:
        identity = find_id(client, topic)
        done = append(client, identity, b"by id")
        assert (done.error_code, done.base_offset) == (ErrorCode.NONE, 1)
        # An id that no topic has ends the wait for more records of the other topic.
        known, unknown = fetch(client, version, identity, UNKNOWN)
    assert values_of(known) == [b"by name", b"by id"]
    assert (unknown.error_code, bytes(cast(memoryview, unknown.records or b""))) == (ErrorCode.UNKNOWN_TOPIC_ID, b"")


def test_the_id_of_a_deleted_topic_is_not_that_of_the_topic_that_is_created_again(
    broker: KafkaBroker, topic: str
) -> None:
    produce(broker.bootstrap, topic, [b"1", b"2", b"3"])
    with connected(broker) as client:
        old = find_id(client, topic)
        assert append(client, old, b"4").error_code == ErrorCode.NONE
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.delete_topics([topic])[topic].result(LIMIT_S)
        produce(broker.bootstrap, topic, [b"new"])
        assert append(client, old, b"5").error_code == ErrorCode.UNKNOWN_TOPIC_ID
        (beyond,) = fetch(client, 18, old, offset=4)
        assert beyond.error_code == ErrorCode.UNKNOWN_TOPIC_ID, "not that the offset is out of range"
        new = find_id(client, topic)
        assert new != old
        found, _ = fetch(client, 18, new, UNKNOWN)
    assert values_of(found) == [b"new"]
