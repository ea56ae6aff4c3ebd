"""Requests that are sent on to another broker, and what becomes of them when this one stops."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llog.broker.http.answers import with_error_answers
from llog.broker.http.bodies import Bodies
from llog.broker.http.forwarding import FORWARDED, Forwarding
from llog.broker.metrics import Metrics
from llog.config import Settings


@pytest.mark.parametrize(("method", "code"), [("GET", "store_unavailable"), ("POST", "outcome_unknown")])
async def test_a_request_that_a_stopping_broker_gives_up_may_have_been_done_unless_it_reads(
    method: str, code: str
) -> None:
    settings, metrics, stopping, arrived = Settings(), Metrics(), asyncio.Event(), asyncio.Event()
    forwarding = Forwarding(settings, Bodies(settings, metrics), metrics, stopping)

    async def never_answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await stopping.wait()
        writer.close()

    async def find_owner() -> str:
        return f"http://127.0.0.1:{owner.sockets[0].getsockname()[1]}"

    async def handle(_: Request) -> Response:
        raise AssertionError("the owner is asked instead")

    handler = with_error_answers(forwarding.to_owner(find_owner, handle, 60_000), "/", metrics)
    transport = httpx.ASGITransport(app=Starlette(routes=[Route("/", handler, methods=["GET", "POST"])]))
    async with (
        await asyncio.start_server(never_answer, "127.0.0.1", 0) as owner,
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        asking = asyncio.ensure_future(client.request(method, "/"))
        await arrived.wait()
        stopping.set()
        answer = await asking
    await forwarding.close()
    assert (answer.status_code, answer.json()["code"]) == (503, code)


@pytest.mark.parametrize(
    ("came_by", "to_sibling", "to_others", "to_any"),
    [(None, True, True, True), ("1", True, False, True), ("2", False, False, False)],
)
def test_a_request_takes_one_hop_to_a_broker_and_one_more_to_a_worker_of_it(
    came_by: str | None, to_sibling: bool, to_others: bool, to_any: bool
) -> None:
    settings, metrics = Settings(), Metrics()
    bodies, sibling, other = Bodies(settings, metrics), "http://127.0.0.1:1", "http://10.0.0.1:8080"
    headers = [] if came_by is None else [(FORWARDED.encode(), came_by.encode())]
    request = Request({"type": "http", "headers": headers})
    worker = Forwarding(settings, bodies, metrics, asyncio.Event(), [sibling])
    assert worker.may_forward(request, sibling) == to_sibling
    assert worker.may_forward(request, other) == to_others
    assert worker.may_forward(request) == to_any
    alone = Forwarding(settings, bodies, metrics, asyncio.Event())
    assert alone.may_forward(request, other) == alone.may_forward(request) == (came_by is None)
