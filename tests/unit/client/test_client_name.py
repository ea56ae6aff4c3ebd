"""Every HTTP client of a broker names its process, as `LLOG_CLIENT_IDENTIFIER` says, in the user agent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import llog
from llog.broker.http.bodies import Bodies
from llog.broker.http.forwarding import Forwarding
from llog.broker.metrics import Metrics
from llog.client.remote.groups import RemoteGroups
from llog.config import Settings
from llog.errors import ConfigurationError, LogOwned
from llog.groups.options import ConsumeOptions
from llog.spark.options import read_options
from llog.spark.source import run_read
from tests.unit.client.backends import Harness, remote

NAME = "worker-7"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setenv("LLOG_CLIENT_IDENTIFIER", NAME)
    with remote() as found:
        found.create()
        yield found


def test_consumers_sql_and_groups_carry_the_name_of_the_process(harness: Harness) -> None:
    harness.backend.consume(ConsumeOptions(topic="t"))
    with llog.connect(harness.url) as connection:
        connection.execute("SELECT 1")
    RemoteGroups(harness.url).list()
    assert harness.user_agents == [NAME] * 3


def test_spark_carries_the_name_that_its_settings_have(harness: Harness) -> None:
    settings = Settings(client_identifier="job-1")
    options = read_options({"broker": harness.url, "subscribe": "t"}, streaming=False, settings=settings)
    run_read(options, lambda log: log.topics())
    assert harness.user_agents == ["job-1"]


def test_without_a_setting_the_name_is_that_of_host_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLOG_CLIENT_IDENTIFIER", raising=False)
    with remote() as harness:
        harness.create()
        harness.backend.consume(ConsumeOptions(topic="t"))
        assert harness.user_agents == [f"llog-{socket.gethostname()}-{os.getpid()}"]


def test_a_name_that_is_no_header_is_refused_and_no_other_setting_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLOG_NO_SUCH_SETTING", "1")
    RemoteGroups("http://127.0.0.1:1")
    monkeypatch.setenv("LLOG_CLIENT_IDENTIFIER", "two words")
    with pytest.raises(llog.client.ProgrammingError, match="LLOG_CLIENT_IDENTIFIER is 'two words'"):
        llog.connect("http://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="LLOG_CLIENT_IDENTIFIER is 'two words'"):
        RemoteGroups("http://127.0.0.1:1").list()


async def test_a_broker_that_forwards_puts_its_name_before_that_of_the_client(harness: Harness) -> None:
    settings = Settings(meta="memory://forwarding", blobs="memory://forwarding", client_identifier="broker-1")
    metrics = Metrics()
    forwarding = Forwarding(settings, Bodies(settings, metrics), metrics, asyncio.Event())

    async def owned(_: Request) -> Response:
        error = LogOwned("another broker owns it")
        error.address = harness.url
        raise error

    app = Starlette(routes=[Route("/topics/{name}", forwarding.on_refusal(owned))])
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for theirs in ("curl/8.5.0", ""):
            answer = await client.get("/topics/t", headers={"user-agent": theirs})
            assert answer.status_code == 200, answer.text
    await forwarding.close()
    assert harness.user_agents == ["broker-1 curl/8.5.0", "broker-1"]
