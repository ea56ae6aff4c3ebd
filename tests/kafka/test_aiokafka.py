"""aiokafka works unmodified."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.kafka.serving import KafkaBroker


async def test_records_come_back_in_order(broker: KafkaBroker, topic: str, group: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all", enable_idempotence=True)
    await producer.start()
    sent = [await producer.send(topic, b"%d" % number, key=b"k", partition=0) for number in range(300)]
    offsets = [(await each).offset for each in sent]
    await producer.stop()
    assert offsets == list(range(300))
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=broker.bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    found = [await consumer.getone() for _ in range(300)]
    assert [each.value for each in found] == [b"%d" % number for number in range(300)]
    await consumer.commit()
    assert await consumer.committed(TopicPartition(topic, 0)) == 300
    await consumer.stop()


async def test_a_waiting_consumer_gets_a_record_that_arrives(broker: KafkaBroker, topic: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
    await producer.start()
    await producer.send_and_wait(topic, b"first", partition=0)
    consumer = AIOKafkaConsumer(bootstrap_servers=broker.bootstrap, fetch_max_wait_ms=30_000)
    await consumer.start()
    consumer.assign([TopicPartition(topic, 0)])
    await consumer.seek_to_end()
    waiting = consumer.getone()
    await producer.send_and_wait(topic, b"second", partition=0)
    assert (await waiting).value == b"second"
    await consumer.stop()
    await producer.stop()
