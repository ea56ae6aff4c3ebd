"""What the Kafka port does while the metadata store is away: clients keep what they know, and ask again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from llog.batch.columns import Buffer
from llog.broker.auto_creation import AutoCreatingProducer
from llog.broker.metrics import Metrics
from llog.errors import Contention, LlogError, OutcomeUnknown, StoreUnavailable, TopicNotFound
from llog.kafka.connection import Connection
from llog.kafka.dispatcher import Dispatcher
from llog.kafka.error_codes import ErrorCode
from llog.kafka.handlers import Caller
from llog.kafka.intake import Intake
from llog.kafka.live_brokers import LiveBroker, LiveBrokers
from llog.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponseTopic
from llog.kafka.metadata import MetadataHandlers
from llog.kafka.topic_ids import TopicIds
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.log.records import Topic
from llog.stores.meta import Changes
from tests.unit.world import World

_BROKER = LiveBroker(host="127.0.0.1", port=9092)


@pytest.fixture
def log() -> Log:
    return World().process()


class _Away:
    """A catalog, and a producer that creates topics, which both may fail."""

    def __init__(self) -> None:
        self.finding: LlogError | None = None
        self.creation: LlogError = StoreUnavailable("down")
        self.topics: dict[str, Topic] = {}

    async def find(self, names: Sequence[str]) -> dict[str, Topic | LlogError]:
        if self.finding is not None:
            raise self.finding
        return {name: self.topics.get(name) or TopicNotFound(f"there is no topic {name!r}") for name in names}

    async def find_topics(self, names: Sequence[str]) -> dict[str, Topic | LlogError]:
        return dict.fromkeys(names, self.creation)

    def engine(self, _: Topic) -> _Away:
        return self

    def ownership_name(self, _: Topic) -> str | None:
        return None

    async def ask(self, log: Log) -> Callable[[], Awaitable[MetadataResponseTopic]]:
        """Return a function that asks for the topic `t`."""
        brokers = LiveBrokers(log, _BROKER, refresh_s=1)
        await brokers.start()
        catalog = cast(Catalog, self)
        topic_ids = TopicIds("log", catalog, log.runtime)
        handlers = MetadataHandlers(log, "log", catalog, cast(AutoCreatingProducer, self), brokers, topic_ids)
        request = MetadataRequest(topics=[MetadataRequestTopic(name="t")], allow_auto_topic_creation=True)

        async def ask() -> MetadataResponseTopic:
            (topic,) = (await handlers.metadata(request, Caller("tests", "127.0.0.1", 9))).topics
            return topic

        return ask


async def test_a_topic_is_described_as_it_was_while_the_catalog_cannot_be_read(log: Log) -> None:
    away = _Away()
    away.topics["t"] = Topic(name="t", partitions=3, directory="t")
    ask = await away.ask(log)
    described = await ask()
    away.finding = StoreUnavailable("down")
    assert (await ask()) == described
    assert (described.error_code, len(described.partitions)) == (ErrorCode.NONE, 3)
    del away.topics["t"]
    away.finding = None
    assert (await ask()).partitions == []


async def test_a_broker_that_does_not_know_a_topic_leaves_the_question_to_another_one(log: Log) -> None:
    away = _Away()
    away.finding = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable):
        await (await away.ask(log))()


@pytest.mark.parametrize("creation", [StoreUnavailable("down"), OutcomeUnknown("lost"), Contention("busy")])
async def test_a_topic_that_cannot_be_created_now_has_the_error_after_which_clients_ask_again(
    creation: LlogError, log: Log
) -> None:
    away = _Away()
    away.creation = creation
    topic = await (await away.ask(log))()
    assert (topic.name, topic.error_code) == ("t", ErrorCode.LEADER_NOT_AVAILABLE)


class _BrokenWatch:
    """Fails whenever it is waited for."""

    def __init__(self) -> None:
        self.waits = 0

    async def __anext__(self) -> Changes:
        self.waits += 1
        raise StoreUnavailable("down")


async def test_brokers_go_on_to_follow_each_other_after_a_watch_has_failed(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = LiveBrokers(log, _BROKER, refresh_s=0.01)
    await brokers.start()
    watch = _BrokenWatch()
    with monkeypatch.context() as patch:
        patch.setattr(log.meta, "watch", lambda _: watch)
        running = asyncio.ensure_future(brokers.run())
        while watch.waits < 3:
            assert not running.done()
            await asyncio.sleep(0.01)
    running.cancel()


class _Failing:
    """A dispatcher whose requests fail by an error of llog."""

    frame_bytes_max = 1000
    metrics = Metrics()

    def begin(self, frame: memoryview, peer: str) -> tuple[bool, Coroutine[Any, Any, list[Buffer] | None]]:
        return False, self._fail()

    async def _fail(self) -> list[Buffer] | None:
        raise StoreUnavailable("the metadata store is down")


async def test_a_request_that_has_no_room_for_its_error_closes_the_connection_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    intake = Intake(1 << 20, Metrics())
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(cast(Dispatcher, _Failing()), intake, set(), 10, "http"), "127.0.0.1", 0
    )
    with caplog.at_level(logging.WARNING, "llog.kafka"):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"\0\0\0\x01x")
        assert await reader.read() == b""
        writer.close()
    server.close()
    (line,) = caplog.records
    assert "the metadata store is down" in line.getMessage()
    assert line.exc_info is None
