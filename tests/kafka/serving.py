"""Brokers on a Kafka port, and how tests talk to them by confluent-kafka."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Message, Producer

from devtools.servers.listening import free_ports
from tests.broker.test_process import LIMIT_S, Running, running


class KafkaBroker(NamedTuple):
    """A broker process and the address that Kafka clients use."""

    process: Running
    bootstrap: str


@contextmanager
def kafka_broker(directory: Path, environment: Mapping[str, str] | None = None) -> Iterator[KafkaBroker]:
    (port,) = free_ports(1)
    with running(directory, "serve", environment={"LLOG_KAFKA_PORT": str(port), **(environment or {})}) as started:
        yield KafkaBroker(started, f"127.0.0.1:{port}")


def produce(bootstrap: str, topic: str, values: list[bytes | None], **config: Any) -> list[Message]:
    """Produces the values to partition 0 and returns their messages as they were acknowledged."""
    delivered: list[Message] = []

    def on_delivery(error: object, message: Message) -> None:
        assert error is None, error
        delivered.append(message)

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1, **config})
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=on_delivery)
        producer.poll(0)
    assert producer.flush(LIMIT_S) == 0
    return delivered


def consume(bootstrap: str, topic: str, count: int, **config: Any) -> list[Message]:
    """Consumes as a member of a group until there are `count` messages."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": f"{topic}-readers", "auto.offset.reset": "earliest", **config}
    )
    consumer.subscribe([topic])
    try:
        return take(consumer, count)
    finally:
        consumer.close()


def take(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + LIMIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages arrived"
        for message in consumer.consume(count - len(found), timeout=0.2):
            assert message.error() is None, message.error()
            found.append(message)
    return found
