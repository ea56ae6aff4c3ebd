"""kafka-python works unmodified."""

from __future__ import annotations

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

from tests.broker.test_process import LIMIT_S
from tests.kafka.serving import KafkaBroker


@pytest.mark.parametrize("codec", [None, "gzip"])
def test_records_come_back_in_order(broker: KafkaBroker, topic: str, group: str, codec: str | None) -> None:
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap, acks="all", compression_type=codec)
    sent = [
        producer.send(topic, b"%d" % number, key=b"k", headers=[("number", b"%d" % number)], partition=0)
        for number in range(300)
    ]
    assert [each.get(LIMIT_S).offset for each in sent] == list(range(300))
    producer.close()
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=broker.bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=int(LIMIT_S * 1000),
    )
    found = [next(consumer) for _ in range(300)]
    assert [each.value for each in found] == [b"%d" % number for number in range(300)]
    assert [(each.key, tuple(each.headers)) for each in found[:1]] == [(b"k", (("number", b"0"),))]
    consumer.commit()
    assert consumer.committed(TopicPartition(topic, 0)) == 300
    consumer.close()


def test_a_consumer_without_a_group_seeks(broker: KafkaBroker, topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap)
    for number in range(50):
        producer.send(topic, b"%d" % number, partition=0)
    producer.flush(LIMIT_S)
    producer.close()
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap, consumer_timeout_ms=int(LIMIT_S * 1000))
    tp = TopicPartition(topic, 0)
    consumer.assign([tp])
    consumer.seek_to_end(tp)
    assert consumer.position(tp) == 50
    consumer.seek(tp, 20)
    assert next(consumer).offset == 20
    assert consumer.beginning_offsets([tp]) == {tp: 0}
    consumer.close()


def test_topics_are_created_and_deleted(broker: KafkaBroker, topic: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    admin.create_topics([NewTopic(topic, num_partitions=2, replication_factor=1)])
    assert topic in admin.list_topics()
    admin.delete_topics([topic])
    assert topic not in admin.list_topics()
    admin.close()
