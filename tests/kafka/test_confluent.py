"""confluent-kafka, and so librdkafka, works unmodified."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic, ResourceType

from tests.broker.test_process import LIMIT_S
from tests.kafka.serving import KafkaBroker, consume, produce, take


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_records_come_back_in_order_whatever_acks_the_producer_wants(
    broker: KafkaBroker, topic: str, acks: str
) -> None:
    values: list[bytes | None] = [b"%d" % number for number in range(1000)]
    produce(broker.bootstrap, topic, values, acks=acks)
    found = consume(broker.bootstrap, topic, 1000)
    assert [message.value() for message in found] == values
    assert [message.offset() for message in found] == list(range(1000))


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression_is_understood(broker: KafkaBroker, topic: str, codec: str) -> None:
    values: list[bytes | None] = [b"a value that compresses well " * 20 for _ in range(100)]
    produce(broker.bootstrap, topic, values, **{"compression.type": codec, "linger.ms": 50})
    assert [message.value() for message in consume(broker.bootstrap, topic, 100)] == values


def test_an_idempotent_producer_gets_consecutive_offsets(broker: KafkaBroker, topic: str) -> None:
    values: list[bytes | None] = [b"%d" % number for number in range(500)]
    delivered = produce(broker.bootstrap, topic, values, **{"enable.idempotence": True, "batch.num.messages": 10})
    assert sorted(message.offset() for message in delivered) == list(range(500))
    assert [message.value() for message in consume(broker.bootstrap, topic, 500)] == values


def test_keys_headers_timestamps_and_tombstones_are_kept(broker: KafkaBroker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(topic, b"v", key=b"k", headers=[("one", b"1"), ("none", None), ("one", b"2")], timestamp=1234567)
    producer.produce(topic, None, key=b"k", partition=0)
    assert producer.flush(LIMIT_S) == 0
    first, second = consume(broker.bootstrap, topic, 2)
    assert (first.key(), first.value(), first.timestamp()) == (b"k", b"v", (1, 1234567))
    assert first.headers() == [("one", b"1"), ("none", None), ("one", b"2")]
    assert (second.key(), second.value(), second.headers()) == (b"k", None, None)


def test_a_consumer_seeks_pauses_and_finds_times(broker: KafkaBroker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 100})
    for number in range(100):
        producer.produce(topic, b"%d" % number, partition=0, timestamp=1_000_000 + number)
    assert producer.flush(LIMIT_S) == 0
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "unused", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    assert take(consumer, 1)[0].value() == b"0"
    consumer.seek(TopicPartition(topic, 0, 57))
    assert [message.offset() for message in take(consumer, 3)] == [57, 58, 59], "in the middle of a batch"
    consumer.pause([TopicPartition(topic, 0)])
    assert consumer.consume(10, timeout=0.5) == []
    consumer.resume([TopicPartition(topic, 0)])
    assert take(consumer, 1)[0].offset() == 60
    (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, 1_000_042)], timeout=LIMIT_S)
    assert found.offset == 42
    (none,) = consumer.offsets_for_times([TopicPartition(topic, 0, 9_000_000)], timeout=LIMIT_S)
    assert none.offset == OFFSET_END
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=LIMIT_S) == (0, 100)
    consumer.close()


def test_an_offset_below_the_log_start_resets_the_consumer(broker: KafkaBroker, topic: str) -> None:
    produce(broker.bootstrap, topic, [b"%d" % number for number in range(10)])
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    deleted = admin.delete_records([TopicPartition(topic, 0, 4)])
    assert next(iter(deleted.values())).result(LIMIT_S).low_watermark == 4
    found = consume(broker.bootstrap, topic, 6)
    assert [message.offset() for message in found] == list(range(4, 10))


def test_topics_are_created_described_changed_grown_and_deleted(broker: KafkaBroker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    wanted = NewTopic(topic, num_partitions=3, replication_factor=1, config={"retention.ms": "60000"})
    admin.create_topics([wanted])[topic].result(LIMIT_S)
    with pytest.raises(KafkaException, match="already exists"):
        admin.create_topics([wanted])[topic].result(LIMIT_S)
    assert len(admin.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions) == 3
    resource = ConfigResource(ResourceType.TOPIC, topic)
    assert _configs(admin, resource)["retention.ms"].value == "60000"
    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(LIMIT_S)
    assert len(admin.list_topics(topic, timeout=LIMIT_S).topics[topic].partitions) == 5
    changed = ConfigResource(ResourceType.TOPIC, topic, set_config={"retention.ms": "1000", "cleanup.policy": "delete"})
    admin.alter_configs([changed])[changed].result(LIMIT_S)
    assert _configs(admin, resource)["retention.ms"].value == "1000"
    admin.delete_topics([topic])[topic].result(LIMIT_S)
    assert topic not in admin.list_topics(timeout=LIMIT_S).topics


def _configs(admin: AdminClient, resource: ConfigResource) -> dict[str, Any]:
    found: dict[str, Any] = admin.describe_configs([resource])[resource].result(LIMIT_S)
    return found
