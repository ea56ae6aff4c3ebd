"""Backends for the tests of consumers and agents: the log of this process, and a broker before the same log."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from llog.api.leaderless import LeaderlessLogWriter, SharedAppendGroup
from llog.client.backend import Backend
from llog.client.embedded import EmbeddedSession
from llog.config import Settings

_numbers = itertools.count()


class Harness:
    """A log in memory, with one backend on it."""

    def __init__(self, settings: Settings, backend: Backend, url: str = "") -> None:
        self.settings = settings
        self.backend = backend
        self.url = url
        """Address of the broker; empty without one."""
        self.user_agents: list[str | None] = []
        """Those of the requests that came to the broker."""
        self.writer = LeaderlessLogWriter(settings)

    def create(self, topic: str = "t", partitions: int = 1) -> None:
        self.writer.create_topic(topic, partitions)

    def append(self, *payloads: str, topic: str = "t", partition: int = 0) -> None:
        self.writer.append_shared([SharedAppendGroup(topic=topic, partition=partition, payloads=payloads)])

    def committed(self, group: str = "g", topic: str = "t", partition: int = 0) -> int | None:
        from llog.api.portal import LogPortal
        from llog.groups.groups import Groups
        from llog.model import TopicPartition

        connection = LogPortal(self.settings, Groups)
        try:
            found = connection.call(lambda groups: groups.partition(group, TopicPartition(topic, partition)))
            return connection.call(lambda _: found.position())
        finally:
            connection.close()


def new_settings() -> Settings:
    name = f"memory://client-{next(_numbers)}"
    return Settings(meta=name, blobs=name, broker_port=0)


@contextmanager
def embedded() -> Iterator[Harness]:
    settings = new_settings()
    session = EmbeddedSession(settings)
    harness = Harness(settings, session.backend)
    try:
        yield harness
    finally:
        harness.writer.close()
        session.close()


@contextmanager
def remote() -> Iterator[Harness]:
    """Through a broker that listens, on a loop in a thread of its own."""
    import asyncio

    import uvicorn
    from starlette.datastructures import Headers
    from starlette.types import Receive, Scope, Send

    from llog.broker.app import Broker
    from llog.broker.listeners import listen
    from llog.client.remote.backend import RemoteBackend
    from llog.log.opening import opened_log

    settings = new_settings()
    listener = listen("127.0.0.1", 0)
    user_agents: list[str | None] = []
    stop: list[uvicorn.Server] = []
    ready = threading.Event()

    async def serve() -> None:
        async with opened_log(settings) as log:
            broker = Broker(log, settings)
            app = broker.app()

            async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
                user_agents.append(Headers(scope=scope).get("user-agent"))
                await app(scope, receive, send)

            config = uvicorn.Config(recorded, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            stop.append(server)
            ready.set()
            await server.serve([listener])
            await broker.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    backend = RemoteBackend(url)
    harness = Harness(settings, backend, url)
    harness.user_agents = user_agents
    try:
        yield harness
    finally:
        harness.writer.close()
        backend.close()
        stop[0].should_exit = True
        thread.join(30)
        listener.close()
