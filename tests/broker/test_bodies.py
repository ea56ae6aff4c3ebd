"""Bodies of requests: what counts as held, how slowly they may come, and what one of them leaves to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from llog.broker.http.bodies import Pace
from tests.broker.serving import Served

LIMIT_S = 300
BUFFER = 64 << 10
LARGE = 16 << 10
JSON = {"content-type": "application/json"}


class Stalled:
    """A request whose body comes up to `sent` bytes and then no further, until it is told to go on."""

    def __init__(self, served: Served, *, declared: int | None, sent: int) -> None:
        self._go_on = asyncio.Event()
        headers = JSON if declared is None else JSON | {"content-length": str(declared)}
        self.answer = asyncio.ensure_future(
            served.client.post("/produce", content=self._body(sent), headers=headers, timeout=LIMIT_S)
        )

    async def _body(self, sent: int) -> AsyncIterator[bytes]:
        for _ in range(sent // 1024):
            yield b" " * 1024
        yield b" " * (sent % 1024)
        await self._go_on.wait()
        yield b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["late"]}]}'

    async def finish(self) -> httpx.Response:
        self._go_on.set()
        return await self.answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
async def small() -> AsyncIterator[Served]:
    served = Served(batch_max_buffer_bytes=BUFFER, batch_max_bytes=1024, request_max_bytes=LARGE)
    yield served
    await served.close()


async def test_bodies_that_are_only_declared_take_no_room(small: Served) -> None:
    idle = [Stalled(small, declared=LARGE, sent=0) for _ in range(8)]
    await asyncio.sleep(0)
    assert (await small.produce("t", "x" * 10_000))["start_offset"] == 1
    assert small.broker.metrics.buffered_bytes == 0
    for each in idle:
        each.answer.cancel()
    await asyncio.gather(*(each.answer for each in idle), return_exceptions=True)


async def test_large_bodies_under_way_leave_room_for_small_requests(small: Served) -> None:
    size = LARGE - 1024
    first = [Stalled(small, declared=None, sent=size) for _ in range(3)]
    await until(lambda: small.broker.metrics.buffered_bytes == 3 * size)
    fourth = Stalled(small, declared=None, sent=size)
    refused = await fourth.answer
    assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
    assert (await small.produce("t", "x" * 1000))["start_offset"] == 1
    assert [(await each.finish()).status_code for each in first] == [200] * 3
    assert small.broker.metrics.buffered_bytes == 0


async def test_a_body_larger_than_its_share_of_the_buffer_is_refused_with_the_setting_that_bounds_it() -> None:
    served = Served(batch_max_buffer_bytes=BUFFER, batch_max_bytes=1024)
    response = await served.client.post("/produce", content=b" " * (BUFFER // 2 + 1), headers=JSON)
    assert (response.status_code, response.json()["code"]) == (413, "request_too_large")
    assert "LLOG_BATCH_MAX_BUFFER_BYTES" in response.json()["detail"]
    await served.close()


async def test_a_body_that_stalls_is_cut_off_and_gives_its_room_back() -> None:
    served = Served(request_timeout_ms=100)
    stalled = Stalled(served, declared=None, sent=5000)
    response = await stalled.answer
    assert (response.status_code, response.json()["code"]) == (408, "request_timeout")
    assert response.headers["connection"] == "close"
    assert "LLOG_REQUEST_MIN_BYTES_PER_SECOND" in response.json()["detail"]
    assert served.broker.metrics.buffered_bytes == 0
    await served.close()


def test_bytes_that_come_buy_time_up_to_the_patience_and_no_further() -> None:
    pace = Pace(patience_s=10.0, bytes_per_s=100)
    deadline = pace.begin(now=50.0)
    assert deadline == 60.0
    assert pace.extend(deadline, now=51.0, size=50) == 60.5, "half a second for half a second's bytes"
    assert pace.extend(deadline, now=51.0, size=1 << 30) == 61.0, "a burst saves no more than the patience"
    for second in range(1, 1000):  # as slow as allowed: for ever
        deadline = pace.extend(deadline, now=50.0 + second, size=100)
    assert deadline == 50.0 + 999 + 10.0
