"""Consumer groups of Kafka clients, on one broker and on two."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker.test_process import LIMIT_S
from tests.kafka.serving import KafkaBroker, kafka_broker, produce, take

PARTITIONS = 4
_MEMBER = """
import sys
from confluent_kafka import Consumer
consumer = Consumer({"bootstrap.servers": sys.argv[1], "group.id": sys.argv[2], "session.timeout.ms": 6000})
consumer.subscribe([sys.argv[3]])
while True:
    consumer.poll(0.1)
    print(len(consumer.assignment()), flush=True)
"""


@pytest.fixture
def wide(broker: KafkaBroker, topic: str) -> str:
    """A topic of four partitions."""
    create(broker, topic)
    return topic


def create(broker: KafkaBroker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for created in admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values():
        created.result(LIMIT_S)


@contextmanager
def members(bootstrap: str, group: str, topic: str, *configs: Mapping[str, object]) -> Iterator[list[Consumer]]:
    consumers = [
        Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **config,
            }
        )
        for config in configs
    ]
    for consumer in consumers:
        consumer.subscribe([topic])
    try:
        yield consumers
    finally:
        for consumer in consumers:
            consumer.close()


def poll_until(consumers: Sequence[Consumer], is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < deadline, [len(each.assignment()) for each in consumers]
        for consumer in consumers:
            message = consumer.poll(0.05)
            assert message is None or message.error() is None


def share(consumers: Sequence[Consumer]) -> list[int]:
    """How many partitions each has, if together they have each one once."""
    owned = [partition.partition for consumer in consumers for partition in consumer.assignment()]
    return [len(each.assignment()) for each in consumers] if sorted(owned) == [*range(PARTITIONS)] else []


def committed(admin: AdminClient, group: str) -> dict[int, int]:
    """The committed offset by partition."""
    found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(LIMIT_S)
    return {each.partition: each.offset for each in found.topic_partitions}


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_members_share_the_partitions_and_take_over_those_of_one_that_leaves(
    broker: KafkaBroker, wide: str, group: str, strategy: str
) -> None:
    config: dict[str, object] = {"partition.assignment.strategy": strategy}
    with members(broker.bootstrap, group, wide, config, config) as (first, second):
        poll_until([first, second], lambda: share([first, second]) == [2, 2])
        with members(broker.bootstrap, group, wide, config) as (third,):
            everyone = [first, second, third]
            poll_until(everyone, lambda: sorted(share(everyone)) == [1, 1, 2])
        poll_until([first, second], lambda: share([first, second]) == [2, 2])


def test_the_others_take_over_when_a_member_is_killed(broker: KafkaBroker, wide: str, group: str) -> None:
    with members(broker.bootstrap, group, wide, {"session.timeout.ms": 6000}) as (survivor,):
        command = [sys.executable, "-c", _MEMBER, broker.bootstrap, group, wide]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
            poll_until([survivor], lambda: len(survivor.assignment()) == 2)
            victim.kill()
        poll_until([survivor], lambda: len(survivor.assignment()) == PARTITIONS)


def test_a_static_member_that_restarts_keeps_its_partitions(broker: KafkaBroker, wide: str, group: str) -> None:
    one, two = {"group.instance.id": "one"}, {"group.instance.id": "two"}
    with members(broker.bootstrap, group, wide, one) as (stays,):
        with members(broker.bootstrap, group, wide, two) as (restarts,):
            poll_until([stays, restarts], lambda: share([stays, restarts]) == [2, 2])
            before = sorted(each.partition for each in restarts.assignment())
        with members(broker.bootstrap, group, wide, two) as (again,):
            poll_until([stays, again], lambda: bool(again.assignment()))
            assert sorted(each.partition for each in again.assignment()) == before
            assert len(stays.assignment()) == 2


def test_a_member_continues_where_its_group_committed(broker: KafkaBroker, topic: str, group: str) -> None:
    produce(broker.bootstrap, topic, [b"%d" % number for number in range(10)])
    with members(broker.bootstrap, group, topic, {}) as (consumer,):
        first = take(consumer, 4)
        consumer.commit(message=first[2], asynchronous=False)
    with members(broker.bootstrap, group, topic, {}) as (consumer,):
        assert [message.offset() for message in take(consumer, 7)] == [*range(3, 10)]


def test_commits_have_metadata_and_llogs_own_consumers_see_them(broker: KafkaBroker, topic: str, group: str) -> None:
    produce(broker.bootstrap, topic, [b"%d" % number for number in range(10)])
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, 7, metadata="half way")], asynchronous=False)
    (found,) = consumer.committed([TopicPartition(topic, 0)], timeout=LIMIT_S)
    assert (found.offset, found.metadata) == (7, "half way")
    consumer.close()
    shown = broker.process.client.post("/groups/list", json={"group_id": group}).json()
    assert [(each["topic"], each["offset"], each["lag"]) for each in shown["groups"][group]] == [(topic, 8, 3)]


def test_groups_are_administered(broker: KafkaBroker, wide: str, group: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    with members(broker.bootstrap, group, wide, {"client.id": "app"}) as (consumer,):
        poll_until([consumer], lambda: len(consumer.assignment()) == PARTITIONS)
        consumer.commit(offsets=[TopicPartition(wide, each, 5 + each) for each in range(3)], asynchronous=False)
        listed = admin.list_consumer_groups().result(LIMIT_S)
        assert (group, ConsumerGroupState.STABLE) in [(each.group_id, each.state) for each in listed.valid]
        described = admin.describe_consumer_groups([group])[group].result(LIMIT_S)
        assert described.state is ConsumerGroupState.STABLE
        assert [(each.client_id, each.host) for each in described.members] == [("app", "/127.0.0.1")]
        assert len(described.members[0].assignment.topic_partitions) == PARTITIONS
        with pytest.raises(Exception, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups([group])[group].result(LIMIT_S)
    assert committed(admin, group) == {0: 5, 1: 6, 2: 7}
    reset = ConsumerGroupTopicPartitions(group, [TopicPartition(wide, 0, 1)])
    admin.alter_consumer_group_offsets([reset])[group].result(LIMIT_S)
    assert committed(admin, group)[0] == 1
    admin.delete_consumer_groups([group])[group].result(LIMIT_S)
    assert committed(admin, group) == {}


def _commits(consumers: Sequence[Consumer], topic: str, offset: int) -> bool:
    """Whether the one that has partition 0 could commit there."""
    for consumer in consumers:
        if TopicPartition(topic, 0) in consumer.assignment():
            try:
                consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
            except KafkaException:
                continue  # it has not learned yet that its coordinator is gone
            return True
    return False


def test_a_group_moves_to_another_broker_when_its_own_is_killed(tmp_path: Path, topic: str) -> None:
    with kafka_broker(tmp_path) as one, kafka_broker(tmp_path) as two:
        create(one, topic)
        produce(one.bootstrap, topic, [b"%d" % number for number in range(100)])
        both = f"{one.bootstrap},{two.bootstrap}"
        for number in range(8):  # Some are coordinated by each of the two.
            consumer = Consumer({"bootstrap.servers": both, "group.id": f"group-{number}"})
            consumer.commit(offsets=[TopicPartition(topic, 0, 10 + number)], asynchronous=False)
            consumer.close()
        with members(both, "group-0", topic, {"session.timeout.ms": 6000}, {"session.timeout.ms": 6000}) as pair:
            poll_until(pair, lambda: share(pair) == [2, 2])
            one.process.process.kill()
            one.process.process.wait()
            admin = AdminClient({"bootstrap.servers": two.bootstrap})
            for number in range(8):
                assert committed(admin, f"group-{number}") == {0: 10 + number}
            poll_until(pair, lambda: _commits(pair, topic, 50))
            assert committed(admin, "group-0") == {0: 50}
