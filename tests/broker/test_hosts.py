"""Which names a broker answers to: a web page that points its own name at this machine must not reach the log."""

from __future__ import annotations

import pytest

from llog.errors import ConfigurationError
from tests.broker.serving import Served

SERVED = [
    "localhost",
    "localhost:8080",
    "LocalHost.",
    "app.localhost:1",
    "127.0.0.1:8080",
    "10.1.2.3",
    "[::1]:8080",
    "[fe80::1]",
]
FOREIGN = [
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "notlocalhost",
    "evil.example@localhost",
    "localhost:8080:80",
    "[evil.example]",
    "0x7f.1",
    "2130706433",
    ".localhost.evil",
    "",
]


@pytest.mark.parametrize("host", SERVED)
async def test_addresses_and_names_of_this_machine_are_served(served: Served, host: str) -> None:
    assert (await served.client.get("/topics", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize(("verb", "path"), [("POST", "/sql"), ("GET", "/topics"), ("GET", "/topics/"), ("GET", "/no")])
async def test_a_foreign_name_reaches_nothing(served: Served, host: str, verb: str, path: str) -> None:
    response = await served.client.request(verb, path, headers={"host": host})
    assert (response.status_code, response.json()["code"]) == (421, "wrong_host")
    assert "LLOG_BROKER_HOSTS" in response.json()["detail"]
    counted = (await served.client.get("/metrics")).json()
    assert {"code": "wrong_host", "value": 1} in counted["llog_errors_total"]


async def test_a_request_that_names_no_host_or_two_reaches_nothing(served: Served) -> None:
    for headers in ([], [("host", "localhost"), ("host", "evil.example")]):
        request = served.client.build_request("GET", "/topics")
        del request.headers["host"]
        request.headers = type(request.headers)([*request.headers.multi_items(), *headers])
        assert (await served.client.send(request)).status_code == 421


@pytest.mark.parametrize("path", ["/health", "/metrics", "/metrics/prometheus"])
async def test_monitors_may_ask_by_any_name(served: Served, path: str) -> None:
    assert (await served.client.get(path, headers={"host": "llog-0.pods.example"})).status_code == 200


async def test_preflights_of_pages_that_may_ask_are_checked_too() -> None:
    served = Served(cors_origins="*")
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    response = await served.client.options("/sql", headers=asked | {"host": "evil.example"})
    assert response.status_code == 421
    assert (await served.client.options("/sql", headers=asked)).status_code == 200
    await served.close()


@pytest.mark.parametrize("path", ["/topics/", "/metrics/", "/health/"])
@pytest.mark.parametrize("host", ["evil.example", "6.6.6.6"])
async def test_no_answer_sends_a_client_to_a_host_of_the_requests_choice(served: Served, path: str, host: str) -> None:
    response = await served.client.get(path, headers={"host": host})
    assert response.status_code in (404, 421)
    assert "location" not in response.headers


@pytest.mark.parametrize(
    ("names", "host", "status"),
    [
        ("llog.example.com, other", "LLOG.example.com:80", 200),
        ("llog.example.com, other", "other", 200),
        ("llog.example.com, other", "x.llog.example.com", 421),
        ("*.example.com", "a.b.example.com", 200),
        ("*.example.com", "example.com", 421),
        ("*.example.com", "evilexample.com", 421),
        ("*", "anything", 200),
    ],
)
async def test_names_that_are_configured_are_served(names: str, host: str, status: int) -> None:
    served = Served(broker_hosts=names)
    assert (await served.client.get("/topics", headers={"host": host})).status_code == status
    await served.close()


async def test_the_name_that_a_broker_is_bound_to_is_served() -> None:
    served = Served(broker_bind_host="Broker.internal")
    assert (await served.client.get("/topics", headers={"host": "broker.internal:8080"})).status_code == 200
    await served.close()


@pytest.mark.parametrize("names", ["http://llog.example.com", "llog.example.com:8080", "a b", "*.*.example.com", "x/y"])
def test_a_setting_that_is_no_name_is_refused(names: str) -> None:
    with pytest.raises(ConfigurationError, match="LLOG_BROKER_HOSTS"):
        Served(broker_hosts=names)
