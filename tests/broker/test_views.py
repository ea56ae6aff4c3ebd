"""What a broker knows of partitions: hot reads and waits ask nobody, and nothing is called absent that is there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from devtools.servers.postgres import PostgresServer, postgres_server
from devtools.servers.weed import ServerError
from llog.engines.object.fencing import fence
from llog.engines.object.retention import trim
from llog.errors import StoreUnavailable
from llog.model import TopicPartition
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import Changes, MetaStore, Watch
from llog.stores.oxia.store import OxiaMetaStore
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.store import PostgresMetaStore
from llog.stores.sqlite.store import SqliteMetaStore
from tests.broker.serving import Served
from tests.conftest import unavailable

LIMIT_S = 300
LONG_MS = 60_000
T0 = TopicPartition("t", 0)
Open = Callable[[], MetaStore]


def _postgres(server: PostgresServer, schema: str) -> MetaStore:
    return PostgresMetaStore(PostgresAddress.parse(server.url(schema)), password=server.password)


@pytest.fixture(params=["memory", "sqlite", "postgres", "oxia"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens clients of one metadata store, as several processes would."""
    if request.param == "memory":
        meta = MemoryMeta()
        return lambda: MemoryMetaStore(meta)
    if request.param == "sqlite":
        return lambda: SqliteMetaStore.open(tmp_path / "meta.db")
    server = request.getfixturevalue(request.param)
    if request.param == "postgres":
        schema = f"s_{uuid4().hex}"
        return lambda: _postgres(server, schema)
    server.wipe()
    return lambda: OxiaMetaStore(server.addresses, server.namespace)


Start = Callable[..., Served]


@pytest.fixture
async def start(open_store: Open) -> AsyncIterator[Start]:
    """Starts brokers, each with a client of its own."""
    started: list[Served] = []

    def start_one(**settings: Any) -> Served:
        settings = {"tail_staleness_ms": LONG_MS, **settings}
        started.append(Served(started[0] if started else None, meta_store=open_store(), **settings))
        return started[-1]

    yield start_one
    for each in started:
        await each.close()
        await each.log.meta.close()


def operations(served: Served) -> Counter[str]:
    """The operations of the broker's metadata client so far, without the poll that all its watches share."""
    count: Counter[str] = Counter(served.log.meta.counts.count)  # type: ignore[attr-defined]
    del count["watch"]
    return count


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await look():
            await asyncio.sleep(0.01)


async def until_waiting(served: Served, number: int) -> None:
    async def look() -> bool:
        return served.broker.metrics.waiting == number

    await until(look)


async def until_quiet(served: Served) -> None:
    """Return after a moment in which the broker asked the metadata store nothing; polls that ask never get there."""

    async def look() -> bool:
        before = operations(served)
        await asyncio.sleep(0.3)
        return operations(served) == before

    await until(look)


def payloads(answer: dict[str, Any]) -> list[str]:
    return [each["payload"] for each in answer["records"]]


async def test_a_hot_record_costs_no_operation_of_either_store(start: Start) -> None:
    served = start()
    await served.produce("t", "a")
    assert payloads(await served.consume("t", 1)) == ["a"]
    for number in range(5):
        await served.produce("t", str(number))
        before = operations(served)
        assert payloads(await served.consume("t", 2 + number, max_wait_ms=LONG_MS)) == [str(number)]
        assert operations(served) == before
    assert served.blobs.reads == 0


async def test_polls_that_wait_cost_nothing_and_wake_on_an_append_through_any_broker(start: Start) -> None:
    here, there = start(), start()
    await there.produce("t", "a")
    count = 50
    waiting = [asyncio.ensure_future(here.consume("t", 2, max_wait_ms=LONG_MS)) for _ in range(count)]
    await until_waiting(here, count)
    await until_quiet(here)
    assert operations(here).total() < 10, "all polls together ask as one does"
    await there.produce("t", "b")
    for answer in await asyncio.gather(*waiting):
        assert payloads(answer) == ["b"]
    assert operations(here)["get_many"] < 10

    waiting = [asyncio.ensure_future(here.consume("t", 3, max_wait_ms=LONG_MS)) for _ in range(count)]
    await until_waiting(here, count)
    reads = here.blobs.reads
    await here.produce("t", "c")
    for answer in await asyncio.gather(*waiting):
        assert payloads(answer) == ["c"]
    # A notification may overtake the store's answer to the append, and wake the polls before the tail has the batch.
    assert here.blobs.reads <= reads + 1


async def test_an_empty_answer_and_a_refusal_know_all_that_was_acknowledged_before_the_request(start: Start) -> None:
    here, there = start(), start()
    await there.produce("t", "0")
    assert payloads(await here.consume("t", 1)) == ["0"]
    for offset in range(2, 12):
        assert payloads(await here.consume("t", offset)) == []
        await there.produce("t", str(offset))
        assert payloads(await here.consume("t", offset)) == [str(offset)]
    for number in range(3):
        await there.produce("t", "x")
        answer = await here.consume("t", 12 + number + 1)
        assert "error" not in answer, "it is at the end by now"
    refused = await here.consume("t", 99)
    assert (refused["error"]["code"], refused["high_watermark"]) == ("offset_out_of_range", 14)


async def test_empty_answers_at_the_same_time_share_what_they_ask(start: Start) -> None:
    served = start()
    await served.produce("t", "a")
    await served.consume("t", 2)
    before = operations(served)
    answers = await asyncio.gather(*(served.consume("t", 2) for _ in range(300)))
    assert [payloads(answer) for answer in answers] == [[]] * 300
    assert (operations(served) - before).total() < 100


async def test_a_topic_that_was_deleted_or_created_again_elsewhere_is_known_before_it_is_called_absent(
    start: Start,
) -> None:
    here, there = start(), start()
    await there.produce("t", "old 1", "old 2")
    assert payloads(await here.consume("t", 1)) == ["old 1", "old 2"]
    waiting = asyncio.ensure_future(here.consume("t", 3, max_wait_ms=LONG_MS))
    await until_waiting(here, 1)
    await there.client.delete("/topics/t")
    assert (await waiting)["error"]["code"] in ("topic_not_found", "partition_not_initialized")
    assert (await here.consume("t", 3))["error"]["code"] == "topic_not_found"
    await there.produce("t", "new 1")
    assert (await here.consume("t", 3))["error"]["code"] == "offset_out_of_range"
    assert payloads(await here.consume("t", 1)) == ["new 1"]


async def test_trimmed_records_are_served_no_longer_than_the_staleness(start: Start) -> None:
    brief, exact = start(tail_staleness_ms=50), start(tail_staleness_ms=0)
    await brief.produce("t", "a", "b", "c")
    for served in (brief, exact):
        assert payloads(await served.consume("t", 1)) == ["a", "b", "c"]
    await trim(exact.log, T0, 3)
    refused = await exact.consume("t", 1)
    assert (refused["error"]["code"], refused["log_start_offset"]) == ("offset_out_of_range", 3)

    async def is_refused() -> bool:
        return bool((await brief.consume("t", 1)).get("error", {}).get("code") == "offset_out_of_range")

    await until(is_refused)
    assert payloads(await brief.consume("t", 3)) == ["c"]


async def test_a_fenced_partition_is_read_on(start: Start) -> None:
    here, there = start(), start()
    await there.produce("t", "a")
    waiting = asyncio.ensure_future(here.consume("t", 2, max_wait_ms=500))
    await until_waiting(here, 1)
    await fence(there.log, T0)
    assert (await waiting).keys() == {"topic", "partition", "high_watermark", "log_start_offset", *_EMPTY}
    assert (await here.produce("t", "b"))["error"]["code"] == "partition_fenced"
    assert payloads(await here.consume("t", 1)) == ["a"]


_EMPTY = ("next_fetch_offset", "records")


async def test_a_consume_of_many_partitions_looks_them_up_together(start: Start) -> None:
    here, there = start(), start()
    await there.client.post("/topics", json={"name": "t", "partitions": 8})
    items: list[dict[str, Any]] = [{"topic": "t", "partition": p, "records": [f"{p}"]} for p in range(8)]
    await there.client.post("/produce", json={"topic_partitions": items})
    wanted = [{"topic": "t", "partition": p, "fetch_offset": 1} for p in range(8)]
    found = (await here.client.post("/consume", json={"topic_partitions": wanted})).json()["topic_partitions"]
    assert [payloads(answer) for answer in found] == [[f"{p}"] for p in range(8)]
    counted = operations(here)
    assert counted["get_many"] == 2, "the topic, and all control records"
    assert counted.keys() <= {"get_many", "ceiling"}


class BreakingMeta(MemoryMetaStore):
    """A client whose watches fail while `is_broken`: their connection is lost, while reads go on."""

    is_broken = False

    def watch(self, prefix: str) -> Any:
        return _BreakingWatch(self, super().watch(prefix))


class _BreakingWatch:
    def __init__(self, store: BreakingMeta, watch: Watch) -> None:
        self._store, self._watch = store, watch

    def __aiter__(self) -> _BreakingWatch:
        return self

    async def __anext__(self) -> Changes:
        changes = await anext(self._watch)
        self._check()
        return changes

    def take(self) -> Changes:
        return frozenset() if self._store.is_broken else self._watch.take()

    async def confirm(self) -> None:
        self._check()

    def _check(self) -> None:
        if self._store.is_broken:
            raise StoreUnavailable("the connection of the watch is lost")


async def test_while_a_watch_is_broken_absence_is_read_and_waits_go_on() -> None:
    meta = MemoryMeta()
    store = BreakingMeta(meta)
    here = Served(meta_store=store, tail_staleness_ms=LONG_MS)
    there = Served(here, meta_store=MemoryMetaStore(meta))
    await there.produce("t", "a")
    assert payloads(await here.consume("t", 1)) == ["a"]
    store.is_broken = True
    await there.produce("t", "b")
    assert payloads(await here.consume("t", 2)) == ["b"]
    assert payloads(await here.consume("t", 3)) == []
    waiting = asyncio.ensure_future(here.consume("t", 3, max_wait_ms=LONG_MS))
    await until_waiting(here, 1)
    await there.produce("t", "c")
    store.is_broken = False
    assert payloads(await waiting) == ["c"]
    for each in (here, there):
        await each.close()


async def test_a_poll_outlives_a_restart_of_the_metadata_server() -> None:
    try:
        servers = postgres_server()
        with servers as server:
            schema = f"s_{uuid4().hex}"
            here = Served(meta_store=_postgres(server, schema))
            there = Served(here, meta_store=_postgres(server, schema))
            await there.produce("t", "a")
            waiting = asyncio.ensure_future(here.consume("t", 2, max_wait_ms=LONG_MS))
            await until_waiting(here, 1)
            await asyncio.to_thread(server.restart)

            async def is_appended() -> bool:
                return "error" not in await there.produce("t", "b")

            await until(is_appended)
            assert payloads(await waiting)[:1] == ["b"]
            for each in (here, there):
                await each.close()
                await each.log.meta.close()
    except ServerError as error:
        unavailable(str(error))
