"""Kafka clients on topics of every engine, and beside clients over HTTP."""

from __future__ import annotations

import socket

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker.test_process import LIMIT_S
from tests.kafka.serving import KafkaBroker, consume, produce, take


@pytest.mark.parametrize("engine", ["object", "disk", "rocksdb"])
def test_an_idempotent_producer_writes_to_topics_of_every_engine(broker: KafkaBroker, topic: str, engine: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1, config={"llog.engine": engine})])[topic].result(LIMIT_S)
    values: list[bytes | None] = [b"%d" % number for number in range(100)]
    produce(broker.bootstrap, topic, values, **{"enable.idempotence": True, "batch.num.messages": 10})
    assert [message.value() for message in consume(broker.bootstrap, topic, 100)] == values


def test_what_http_clients_write_kafka_clients_read(broker: KafkaBroker, topic: str) -> None:
    records = [{"value": f"{number}", "key": "k", "timestamp": 1000 + number} for number in range(10)]
    item = {"topic": topic, "partition": 0, "records": records}
    broker.process.client.post("/produce", json={"topic_partitions": [item]}).raise_for_status()
    found = consume(broker.bootstrap, topic, 10)
    assert [(each.value(), each.key(), each.timestamp()) for each in found] == [
        (b"%d" % number, b"k", (1, 1000 + number)) for number in range(10)
    ]


def test_what_kafka_clients_write_http_clients_read(broker: KafkaBroker, topic: str) -> None:
    produce(broker.bootstrap, topic, [b"a", b"b"], **{"compression.type": "zstd"})
    item = {"topic": topic, "partition": 0, "fetch_offset": 1}
    answer = broker.process.client.post("/consume", json={"topic_partitions": [item]}).json()["topic_partitions"][0]
    assert [(record["offset"], record["payload"]) for record in answer["records"]] == [(1, "a"), (2, "b")]


def test_where_the_append_time_counts_consumers_see_it(broker: KafkaBroker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    config = {"message.timestamp.type": "LogAppendTime"}
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(LIMIT_S)
    produce(broker.bootstrap, topic, [b"a"])
    produce(broker.bootstrap, topic, [b"b"])
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "unused"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    first, second = take(consumer, 2)
    consumer.close()
    assert first.timestamp()[0] == second.timestamp()[0] == 2
    assert 1_700_000_000_000 < first.timestamp()[1] <= second.timestamp()[1]


def test_a_kafka_client_on_the_http_port_is_told_in_the_log(broker: KafkaBroker) -> None:
    url = broker.process.client.base_url
    with socket.create_connection((url.host, url.port), timeout=LIMIT_S) as client:
        client.sendall(b"\x00\x00\x00\x0e\x00\x12\x00\x00\x00\x00\x00\x01\x00\x04test")
        assert client.recv(1) == b""
    broker.process.wait_for("probably a request of a Kafka client: LLOG_KAFKA_PORT has the port")
