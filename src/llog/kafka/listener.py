"""The Kafka port of a broker: its socket, what is served there, and an end that loses no accepted request."""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from ipaddress import ip_address
from typing import Final, NamedTuple

from llog.base.concurrency import run_until
from llog.broker.app import Broker
from llog.broker.http.connections import allowed_files
from llog.broker.listeners import listen
from llog.config import Settings
from llog.config.kafka import KAFKA_PORT_DEFAULT
from llog.errors import ConfigurationError
from llog.groups.groups import Groups
from llog.kafka.admin import AdminHandlers
from llog.kafka.bounds import BoundsFinder
from llog.kafka.connection import Connection
from llog.kafka.dispatcher import Dispatcher
from llog.kafka.fetch import FetchHandlers
from llog.kafka.groups.coordinator import GroupCoordinator
from llog.kafka.groups.handlers import GroupHandlers
from llog.kafka.handlers import Handlers
from llog.kafka.idempotence import IdempotentProducer
from llog.kafka.intake import Intake
from llog.kafka.live_brokers import LiveBroker, LiveBrokers
from llog.kafka.metadata import MetadataHandlers
from llog.kafka.positions import PositionHandlers
from llog.kafka.produce import ProduceHandlers
from llog.kafka.producer_ids import ProducerIdHandlers
from llog.kafka.topic_ids import TopicIds
from llog.log.keys import LOG_ID

logger: Final = logging.getLogger("llog.kafka")

_REQUEST_OVERHEAD: Final = 1 << 20
"""What a request may have besides LLOG_REQUEST_MAX_BYTES of records: names, numbers and lists."""

_FILES_SHARE: Final = 4
"""Connections of Kafka clients get one file in this many; those over HTTP get half of all files."""


class Address(NamedTuple):
    """Where Kafka clients reach a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class KafkaPort:
    """The socket on which a broker serves Kafka clients, and the address that they are told."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self.address = _advertised(settings, listener)
        self._settings = settings
        self._listener = listener

    @classmethod
    def open(cls, settings: Settings) -> KafkaPort | None:
        """Listen as the settings say; return None if they turn Kafka off, or if the port is taken that nobody chose."""
        if settings.kafka_port == 0 or (settings.kafka_port is None and settings.role != "both"):
            return None
        if settings.role != "both":
            raise ConfigurationError(
                f"LLOG_KAFKA_PORT is {settings.kafka_port}, but this broker has the role {settings.role}: Kafka "
                "clients write and read through the same broker. Use --role both, or set LLOG_KAFKA_PORT to 0"
            )
        port = KAFKA_PORT_DEFAULT if settings.kafka_port is None else settings.kafka_port
        try:
            return cls(settings, listen(settings.broker_bind_host, port, "LLOG_KAFKA"))
        except ConfigurationError:
            if settings.kafka_port is not None:
                raise
            logger.warning(
                "port %d is taken, so Kafka clients are not served: set LLOG_KAFKA_PORT to another port, or to 0",
                port,
            )
            return None

    async def serve(self, broker: Broker) -> None:
        """Serve Kafka clients until the broker stops, and finish what was accepted."""
        settings, log = self._settings, broker.log
        log_id = await log.meta.get(LOG_ID)
        assert log_id is not None  # a broker ties its stores together when it opens the log
        http_address = None if log.owners is None else log.owners.address
        me = LiveBroker(host=self.address.host, port=self.address.port, zone=settings.zone, address=http_address)
        brokers = LiveBrokers(log, me, refresh_s=settings.session_timeout_ms / 3000)
        await brokers.start()
        coordinator = GroupCoordinator(Groups(log, broker.reader), brokers)
        dispatcher = Dispatcher(
            _handlers(broker, settings, log_id.value.decode(), brokers, coordinator),
            broker.metrics,
            settings.request_max_bytes + _REQUEST_OVERHEAD,
        )
        intake = Intake(settings.batch_max_buffer_bytes, broker.metrics)
        connections: set[Connection] = set()
        connections_max = max(1, allowed_files() // _FILES_SHARE)
        server = await asyncio.get_running_loop().create_server(
            partial(Connection, dispatcher, intake, connections, connections_max, http_address or "another port"),
            sock=self._listener,
        )
        try:
            await run_until(broker.stopping, _run(brokers, coordinator))
        finally:
            server.close()
            await asyncio.gather(*(connection.finish() for connection in connections))
            await server.wait_closed()


def _advertised(settings: Settings, listener: socket.socket) -> Address:
    """Return the address that clients are told; raise `ConfigurationError` if LLOG_KAFKA_ADVERTISED is none."""
    host, port = listener.getsockname()[:2]
    if settings.kafka_advertised is not None:
        name, _, number = settings.kafka_advertised.rpartition(":")
        if not name or not number.isdecimal() or not 0 < int(number) <= 65_535:
            raise ConfigurationError(
                f"LLOG_KAFKA_ADVERTISED is {settings.kafka_advertised!r}: it must be host:port, as clients reach it"
            )
        return Address(name.strip("[]"), int(number))
    return Address(socket.gethostname() if ip_address(host).is_unspecified else host, port)


async def _run(brokers: LiveBrokers, coordinator: GroupCoordinator) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(brokers.run())
        tasks.create_task(coordinator.run())


def _handlers(
    broker: Broker, settings: Settings, log_id: str, brokers: LiveBrokers, coordinator: GroupCoordinator
) -> Handlers:
    topic_ids = TopicIds(log_id, broker.catalog, broker.log.runtime)

    def note_change(topic: str) -> None:
        broker.note_change(topic)
        topic_ids.forget(topic)

    served = (
        ProduceHandlers(IdempotentProducer(broker.producer), topic_ids, broker.metrics, settings.request_max_bytes),
        FetchHandlers(broker.fetcher, brokers, topic_ids, broker.metrics),
        MetadataHandlers(broker.log, log_id, broker.catalog, broker.producer, brokers, topic_ids),
        PositionHandlers(BoundsFinder(broker.views, broker.reader), broker.reader, broker.appender),
        ProducerIdHandlers(broker.log),
        AdminHandlers(broker.log, log_id, broker.catalog, settings, note_change),
        GroupHandlers(coordinator, brokers),
    )
    return {key: handler for each in served for key, handler in each.handlers().items()}
