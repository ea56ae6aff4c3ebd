"""The relay moves each event exactly once and in order, wherever it dies and whatever the stores answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

import pytest

from llog.cdc.events import Op, PayloadMode, encode_event_headers
from llog.cdc.outbox import Cut, OutboxEntry, OutboxStore, OutboxWriter, RocksOutbox
from llog.cdc.relay import Relay, RelayOptions, topic_of
from llog.engines.object.partition_keys import find_keys
from llog.engines.object.retention import trim
from llog.engines.rocksdb.store import RocksStore
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import (
    InconsistentReadState,
    LlogError,
    OutcomeUnknown,
    PartitionNotInitialized,
    StaleReads,
    StoreUnavailable,
    UnknownProducer,
)
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, WriterOptions
from llog.log.keys import TOPICS
from llog.log.producers import PRODUCERS_MAX, Producer
from llog.model import Record, TopicPartition
from tests.unit.cdc.memory_outbox import MemoryOutbox
from tests.unit.world import TP, Crash, CrashAt, Faults, LostAnswers, World

SMALL: Final = RelayOptions(batch_records_max=3)


class FaultyOutbox:
    """An outbox with `Faults` around its calls."""

    def __init__(self, inner: OutboxStore, faults: Faults) -> None:
        self.inner, self.faults = inner, faults

    async def name(self) -> str:
        return await self.faults.around("name", "", self.inner.name)

    async def partitions(self) -> list[tuple[str, int]]:
        return await self.faults.around("partitions", "", self.inner.partitions)

    async def entries(
        self, directory: str, partition: int, after: int, limit: int, max_bytes: int
    ) -> list[OutboxEntry]:
        entries = self.inner.entries
        return await self.faults.around(
            "entries", directory, lambda: entries(directory, partition, after, limit, max_bytes)
        )

    async def batch(self, directory: str, partition: int, cut: Cut) -> list[OutboxEntry]:
        return await self.faults.around("batch", directory, lambda: self.inner.batch(directory, partition, cut))

    async def cut(self, directory: str, partition: int) -> Cut | None:
        return await self.faults.around("cut", directory, lambda: self.inner.cut(directory, partition))

    async def put_cut(self, directory: str, partition: int, cut: Cut) -> bool:
        return await self.faults.around("put_cut", directory, lambda: self.inner.put_cut(directory, partition, cut))

    async def finish(self, directory: str, partition: int, cut: Cut) -> None:
        return await self.faults.around("finish", directory, lambda: self.inner.finish(directory, partition, cut))

    async def drop(self, directory: str, partition: int) -> None:
        return await self.faults.around("drop", directory, lambda: self.inner.drop(directory, partition))


class Box(Protocol):
    """Some outbox that a test puts events into."""

    @property
    def store(self) -> OutboxStore: ...

    def add(self, directory: str, partition: int, payload: bytes, headers: bytes) -> None: ...


class MemoryBox:
    def __init__(self) -> None:
        self.store = MemoryOutbox()

    def add(self, directory: str, partition: int, payload: bytes, headers: bytes) -> None:
        self.store.add(directory, partition, timestamp_ms=5, key=payload, headers=headers, payload=payload)


class RocksBox:
    def __init__(self, rocks: RocksStore, world: World) -> None:
        self.rocks = rocks
        self.store = RocksOutbox(rocks, world.runtime)
        self._writer = OutboxWriter(rocks)

    def add(self, directory: str, partition: int, payload: bytes, headers: bytes) -> None:
        with self.rocks.mutex:
            changes = self.rocks.changes()
            self._writer.add(changes, directory, partition, [payload], keys=[payload], headers=[headers], now_ms=5)
            self.rocks.write(changes, sync=False)


class Scene:
    """A target topic, an outbox, and processes that relay from one to the other."""

    def __init__(self, world: World, box: Box) -> None:
        self.world, self.box = world, box
        self.added: list[str] = []

    def add(self, count: int, tp: TopicPartition = TP, directory: str = "") -> None:
        for _ in range(count):
            number = len(self.added) + 1
            [headers] = encode_event_headers(Op.INSERT, PayloadMode.KEY, "t", range(number, number + 1))
            self.box.add(directory or tp.topic, tp.partition, str(number).encode(), headers)
            self.added.append(str(number))

    def relay(self, faults: Faults | None = None, *, attempts_max: int = 200) -> Relay:
        """As a process that has just begun has it."""
        faults = faults or Faults()
        log = self.world.process(faults)
        appender = EngineAppender(log, WriterOptions(attempts_max=attempts_max))
        return Relay(FaultyOutbox(self.box.store, faults), appender, EngineReader(log), self.world.runtime, SMALL)

    async def crashed(self, faults: Faults) -> bool:
        """Whether a relay died of this."""
        try:
            await self.relay(faults).drain()
        except Crash:
            return True
        return False

    async def others(self, count: int) -> None:
        """So many other producers append one record each."""
        for number in range(count):
            self.world.runtime.now += 1
            producer = Producer(
                id=f"other-{number}", sequence=0, since=(await self.world.reader.bounds(TP)).next_offset
            )
            record = Record(payload=b"other")
            await self.world.writer.append(
                [AppendGroup(topic=TP.topic, partition=0, records=[record], producer=producer)]
            )

    async def relayed(self, tp: TopicPartition = TP) -> list[str]:
        return [each for each in await self.world.payloads(tp) if each != "other"]


async def new_scene(box: Callable[[World], Box] = lambda _: MemoryBox()) -> Scene:
    world = World()
    await world.catalog.create(TP.topic, 4)
    return Scene(world, box(world))


@pytest.fixture
def rocks(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksStore.open(tmp_path)
    yield store
    store.close()


@pytest.fixture(params=["memory", "rocksdb"])
async def scene(request: pytest.FixtureRequest, rocks: RocksStore) -> Scene:
    if request.param == "memory":
        return await new_scene()
    return await new_scene(lambda world: RocksBox(rocks, world))


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0)


async def test_events_arrive_in_order_with_their_key_time_and_headers(scene: Scene) -> None:
    scene.add(7)
    scene.add(2, TopicPartition(TP.topic, 3))
    await scene.relay().drain()
    assert await scene.relayed() == ["1", "2", "3", "4", "5", "6", "7"]
    assert await scene.relayed(TopicPartition(TP.topic, 3)) == ["8", "9"]
    assert await scene.box.store.partitions() == []
    record = await scene.world.reader.read_offset(TP, 2)
    assert (record.key, record.timestamp) == (b"2", 5)
    assert [name for name, _ in record.headers] == ["llog-event"]


@pytest.mark.parametrize("done", [False, True])
async def test_a_relay_that_dies_at_any_step_loses_and_repeats_nothing(tmp_path: Path, done: bool) -> None:
    number, died = 0, True
    while died:
        number += 1
        store = RocksStore.open(tmp_path / str(number))
        scene = await new_scene(lambda world, store=store: RocksBox(store, world))  # type: ignore[misc]
        scene.add(7)
        died = await scene.crashed(CrashAt(number, done=done))
        scene.add(2)
        await scene.relay().drain()
        assert await scene.relayed() == scene.added, number
        assert await scene.box.store.partitions() == []
        store.close()
    assert number > 30


@pytest.mark.parametrize("done", [False, True])
async def test_a_relay_that_dies_while_it_takes_over_loses_and_repeats_nothing(done: bool) -> None:
    first = 0
    died = True
    while died:
        first += 1
        second, died_again = 0, True
        while died_again:
            second += 1
            scene = await new_scene()
            scene.add(5)
            died = await scene.crashed(CrashAt(first, done=True))
            scene.add(1)
            died_again = await scene.crashed(CrashAt(second, done=done))
            await scene.relay().drain()
            assert await scene.relayed() == scene.added, (first, second)
    assert first > 20


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("error", [StoreUnavailable, OutcomeUnknown])
@pytest.mark.parametrize("operation", ["put_many", "put_cut", "finish", "cut", "entries", "put blob", "partitions"])
async def test_a_running_relay_outlives_errors_of_its_stores(
    operation: str, error: type[LlogError], done: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scene = await new_scene()
    scene.add(7)
    faults = LostAnswers(
        error("lost"), lambda name, _: name == operation, done=done, number=2 if operation != "partitions" else 1
    )
    relay = scene.relay(faults, attempts_max=1)
    running = asyncio.create_task(relay.run())

    async def empty() -> bool:
        return not scene.box.store.waiting  # type: ignore[attr-defined]

    await eventually(empty)
    running.cancel()
    assert await scene.relayed() == scene.added
    assert "lost" in caplog.text
    assert relay.problems == {}


async def test_a_poke_from_another_thread_wakes_a_running_relay(scene: Scene) -> None:
    relay = scene.relay()
    relay.poke()
    running = asyncio.create_task(relay.run())

    async def arrived() -> bool:
        return await scene.relayed() == scene.added

    for _ in range(20):
        scene.add(1)
        poking = threading.Thread(target=relay.poke)
        poking.start()
        await eventually(arrived)
        poking.join()
        scene.add(1)
        relay.poke()
        await eventually(arrived)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    relay.poke()


async def test_an_event_that_comes_while_its_partition_is_found_empty_is_moved() -> None:
    scene = await new_scene()

    class Late(Faults):
        async def after(self, operation: str, key: str) -> None:
            if operation == "entries" and len(scene.added) == 2 and self.calls.count((operation, key)) == 2:
                scene.add(1)
                looks = self.calls.count(("partitions", ""))
                relay.poke()
                while self.calls.count(("partitions", "")) == looks:
                    await asyncio.sleep(0)

    scene.add(2)
    relay = scene.relay(Late())
    running = asyncio.create_task(relay.run())

    async def arrived() -> bool:
        return await scene.relayed() == ["1", "2", "3"]

    await eventually(arrived)
    running.cancel()


async def test_one_partition_that_cannot_be_reached_does_not_hold_up_the_others(scene: Scene) -> None:
    other = TopicPartition(TP.topic, 1)
    keys = await find_keys(scene.world.log, TP)

    class Down(Faults):
        async def before(self, operation: str, key: str) -> None:
            if key == keys.control:
                raise StoreUnavailable("down")

    scene.add(4)
    scene.add(4, other)
    relay = scene.relay(Down())
    with pytest.raises(StoreUnavailable):
        await relay.drain()
    assert await scene.relayed(other) == ["5", "6", "7", "8"]
    assert list(relay.problems) == [(TP.topic, 0)]
    assert not await relay.decide(TP.topic, 0, appended=True), "it is only late"
    await scene.relay().drain()
    assert await scene.relayed() == ["1", "2", "3", "4"]


async def test_a_partition_that_forgot_an_idle_relay_takes_its_next_batch(scene: Scene) -> None:
    scene.add(2)
    relay = scene.relay()
    await relay.drain()
    await scene.others(2 * PRODUCERS_MAX)
    assert not any(name.startswith("outbox/") for name in (await scene.world.control()).producers)
    scene.add(2)
    await relay.drain()
    assert await scene.relayed() == scene.added


async def forgotten(scene: Scene, operation: str, *, done: bool) -> None:
    """A relay died at this step, and the partition has forgotten it since."""

    class Dies(Faults):
        async def before(self, name: str, key: str) -> None:
            if name == operation and not done:
                raise Crash

        async def after(self, name: str, key: str) -> None:
            if name == operation:
                raise Crash

    await scene.others(3)
    scene.add(3)
    assert await scene.crashed(Dies())
    await scene.others(2 * PRODUCERS_MAX)
    scene.add(2)


async def test_a_batch_of_a_forgotten_relay_that_is_there_is_not_appended_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    await forgotten(scene, "finish", done=False)
    await scene.relay().drain()
    assert await scene.relayed() == scene.added
    assert "no longer remembers" in caplog.text


async def test_a_batch_of_a_forgotten_relay_that_is_not_there_is_appended(scene: Scene) -> None:
    await forgotten(scene, "put_cut", done=True)
    await scene.relay().drain()
    assert await scene.relayed() == scene.added


@pytest.mark.parametrize("appended", [True, False])
async def test_a_batch_that_nobody_can_tell_of_waits_for_a_decision(scene: Scene, appended: bool) -> None:
    await forgotten(scene, "finish" if appended else "put_cut", done=not appended)
    await trim(scene.world.log, TP, 20)
    before = await scene.world.reader.bounds(TP)
    relay = scene.relay()
    for _ in range(2):
        with pytest.raises(UnknownProducer, match="it is unknown whether"):
            await relay.drain()
    assert await scene.world.reader.bounds(TP) == before
    assert list(relay.problems) == [(TP.topic, 0)]
    assert "AS APPENDED (or AS MISSING)" in (relay.problem(TP.topic) or "")
    assert await relay.decide(TP.topic, 0, appended=appended)
    assert relay.problem(TP.topic) is None
    await relay.drain()
    assert await scene.relayed() == (["4", "5"] if appended else scene.added)
    assert relay.problems == {}


async def test_a_batch_that_the_partition_has_otherwise_is_held(scene: Scene) -> None:
    name = await scene.box.store.name()
    producer = Producer(id=f"outbox/{name}", sequence=0, since=1)
    record = Record(payload=b"of the store before an old copy was brought back")
    await scene.world.writer.append([AppendGroup(topic=TP.topic, partition=0, records=[record], producer=producer)])
    scene.add(2)
    relay = scene.relay()
    with pytest.raises(InconsistentReadState, match="older copy"):
        await relay.drain()
    assert await scene.box.store.partitions() == [(TP.topic, 0)]
    assert await relay.decide(TP.topic, 0, appended=False)
    scene.add(2)
    await relay.drain()
    assert (await scene.relayed())[1:] == scene.added


async def test_events_of_a_topic_that_an_old_state_does_not_show_are_kept() -> None:
    scene = await new_scene()
    log, meta = scene.world.stale_process()
    meta.pause(TOPICS)
    late = TopicPartition("late", 0)
    await scene.world.catalog.create("late")
    scene.add(2, late)
    relay = Relay(scene.box.store, EngineAppender(log), EngineReader(log), scene.world.runtime, SMALL)
    with pytest.raises(StaleReads):
        await relay.drain()
    meta.wake()
    await relay.drain()
    assert await scene.relayed(late) == scene.added


async def test_events_of_a_deleted_topic_are_dropped_and_do_not_go_to_its_successor(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    catalog, relay = Catalog(scene.world.log), scene.relay()
    scene.add(2)
    await relay.drain()
    scene.add(2)
    await catalog.delete(TP.topic)
    await relay.drain()
    assert await scene.box.store.partitions() == []
    assert await scene.box.store.cut(TP.topic, 0) is None
    assert "was deleted" in caplog.text
    again = await catalog.create(TP.topic, 1)
    assert topic_of(again.directory) == TP.topic
    scene.add(1)
    scene.add(1, directory=again.directory)
    await relay.drain()
    assert await scene.relayed() == ["6"]
    assert await scene.box.store.partitions() == []


async def test_events_of_a_partition_that_is_missing_though_its_topic_is_not_wait(scene: Scene) -> None:
    keys = await find_keys(scene.world.log, TP)
    control = await scene.world.meta.get(keys.control)
    assert control is not None
    await scene.world.meta.delete(keys.control)
    scene.add(2)
    with pytest.raises(PartitionNotInitialized):
        await scene.relay().drain()
    await scene.world.meta.put(keys.control, control.value)
    await scene.relay().drain()
    assert await scene.relayed() == ["1", "2"]


async def test_events_of_a_partition_that_the_topics_successor_does_not_have_are_dropped(scene: Scene) -> None:
    scene.add(2, TopicPartition(TP.topic, 3))
    await scene.world.catalog.delete(TP.topic)
    await scene.world.catalog.create(TP.topic, 1)
    await scene.relay().drain()
    assert await scene.box.store.partitions() == []


async def test_a_cut_of_entries_that_were_dropped_meanwhile_is_not_put(scene: Scene) -> None:
    scene.add(1)
    cut = Cut(producer="p", number=0, after=0, through=1, since=1, open=True)
    await scene.box.store.drop(TP.topic, 0)
    assert not await scene.box.store.put_cut(TP.topic, 0, cut)
    await scene.box.store.finish(TP.topic, 0, cut)
    assert await scene.box.store.cut(TP.topic, 0) is None


async def test_two_stores_that_relay_to_one_partition_are_two_producers(rocks: RocksStore, tmp_path: Path) -> None:
    scene = await new_scene(lambda world: RocksBox(rocks, world))
    other_rocks = RocksStore.open(tmp_path / "other")
    other = Scene(scene.world, RocksBox(other_rocks, scene.world))
    scene.add(2)
    other.add(2)
    await scene.relay().drain()
    await other.relay().drain()
    assert await scene.relayed() == ["1", "2", "1", "2"]
    assert await scene.box.store.name() != await other.box.store.name()
    other_rocks.close()
