"""A clock that is far ahead: what it may do to a log, and how that is undone."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from llog.batch.columns import columns_of
from llog.engines.object.clocks import AHEAD_MS, present_ms
from llog.engines.object.collector import Collector
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.repair.clock import find_clock_damage, repair_clock
from llog.engines.object.retention import trim
from llog.engines.object.sink import SinkUploader, Upload, publish
from llog.engines.object.writer import Writer
from llog.errors import BlobCollected
from llog.log.keys import CLOCK, LOG_ID, sink_key
from llog.log.log import Log
from llog.log.pins import pin
from llog.log.records import Control, Sink, decode, encode
from llog.model import Record
from llog.runtime import stamp_of
from tests.unit.world import START_MS, TP, Crash, Faults, ManualRuntime, Stall, World

HOUR = 3_600_000
DAY = 24 * HOUR
FAR = 400 * DAY


def names(world: World) -> list[str]:
    return [name for name in world.blob_server.names if not name.startswith(LOG_ID)]


def stamps(world: World) -> list[int]:
    return [stamp_of(name) or 0 for name in names(world)]


def process_ahead(world: World, ahead_ms: int = FAR) -> Log:
    """A process whose clock is ahead of the blob store's."""
    runtime = ManualRuntime(seed=7)
    runtime.now = world.runtime.now + ahead_ms
    return world.process()._replace(runtime=runtime)


async def collected(world: World, log: Log | None = None) -> int:
    return (await Collector(log or world.log).collect_once()).deleted


async def make_garbage(world: World, log: Log | None = None) -> None:
    """Appends two records and compacts them, so that their blobs are no longer named."""
    for _ in range(2):
        await world.append("x", writer=Writer(log or world.log))
    await Compactor(world.log).compact_once(TP, force=True)


async def jump(world: World) -> None:
    """For a moment the machine's clock, which is the store's as well, is far ahead, and a writer and a collector use
    it.
    """
    before = world.runtime.now
    world.runtime.now += FAR
    await make_garbage(world)
    world.runtime.now += HOUR + 1
    assert await collected(world) > 0
    world.runtime.now = before


# --- what a clock may do


async def test_a_collector_whose_clock_is_far_ahead_takes_the_stores(world: World) -> None:
    await make_garbage(world)
    ahead = process_ahead(world)
    assert await present_ms(ahead) == world.runtime.now
    assert await collected(world, ahead) == 0
    world.runtime.now += 2 * HOUR
    assert await collected(world, process_ahead(world)) == 2
    assert (await world.control()).blob_floor_ms == world.runtime.now - HOUR


async def test_a_probe_of_the_stores_clock_that_was_left_over_is_collected(world: World) -> None:
    class Dies(Faults):
        async def before(self, operation: str, key: str) -> None:
            if operation == "delete blobs":
                raise Crash

    with pytest.raises(Crash):
        await present_ms(world.process(Dies()))
    [probe] = names(world)
    assert probe.startswith(CLOCK)
    world.runtime.now += HOUR + 1
    assert await collected(world) == 1
    assert names(world) == []


async def test_a_collector_whose_clock_is_far_ahead_leaves_pins_alone(world: World) -> None:
    await pin(world.log, "reader")
    await make_garbage(world)
    world.runtime.now += HOUR + 1
    pinned = await pin(world.log, "reader")
    await collected(world, process_ahead(world))
    assert [key for key in await world.meta.keys("llog/pins/", "llog/pins0", 10) if key.endswith(pinned)]


async def test_a_writer_whose_clock_is_far_ahead_stamps_by_the_stores_once_there_is_a_ceiling(world: World) -> None:
    await make_garbage(world)
    world.runtime.now += HOUR + 1
    assert await collected(world) == 2
    await world.append("x", writer=Writer(process_ahead(world)))
    assert max(stamps(world)) <= world.runtime.now
    control = await world.control()
    assert control.max_append_ms <= world.runtime.now
    assert control.blob_ceiling_ms <= world.runtime.now + AHEAD_MS


async def test_a_blob_stamped_far_ahead_goes_once_a_ceiling_is_below_it(world: World) -> None:
    await make_garbage(world, process_ahead(world))
    assert max(stamps(world)) > START_MS + FAR // 2
    world.runtime.now += HOUR + 1
    assert await collected(world) == 2
    assert max(stamps(world)) < START_MS + DAY
    assert len(await world.payloads()) == 2


async def test_ceilings_go_up_with_the_time_though_nobody_collects(world: World) -> None:
    await make_garbage(world)
    world.runtime.now += HOUR + 1
    await collected(world)
    for _ in range(5):
        world.runtime.now += DAY
        await world.append("later")
        assert max(stamps(world)) == world.runtime.now
    assert (await world.control()).clock_repairs == 1


async def test_a_writer_that_stalled_under_no_ceiling_uploads_again(world: World) -> None:
    """Its blob is stamped far ahead; the collector that sets the first ceiling deletes it, and the writer must not name
    it.
    """
    stall = Stall(lambda operation, key: operation == "put_many")
    log = world.process(stall)._replace(runtime=process_ahead(world).runtime)
    appending = asyncio.create_task(world.append("stalled", writer=Writer(log)))
    await stall.stalled.wait()
    world.runtime.now += HOUR + 1
    assert await collected(world) == 1
    stall.go.set()
    await appending
    assert await world.payloads() == ["stalled"]


# --- repair


async def test_after_a_jump_nothing_is_collected_until_the_clock_is_repaired(world: World) -> None:
    await jump(world)
    await make_garbage(world)
    world.runtime.now += 2 * HOUR
    assert await collected(world) == 0
    assert max(stamps(world)) > START_MS + FAR // 2

    damage = await find_clock_damage(world.log)
    assert damage.present_ms == world.runtime.now
    assert {each.name for each in damage.partitions} == {f"orders/{partition}" for partition in range(4)}
    assert damage.blobs == len([stamp for stamp in stamps(world) if stamp > world.runtime.now + DAY])
    await repair_clock(world.log, damage)
    control = await world.control()
    assert (control.blob_floor_ms, control.blob_ceiling_ms) == (world.runtime.now, world.runtime.now + AHEAD_MS)
    assert not (await find_clock_damage(world.log)).is_repairable

    assert await collected(world) > 0
    await make_garbage(world)
    world.runtime.now += HOUR + 1
    assert await collected(world) == 2
    count = len(await world.payloads())
    await trim(world.log, TP, count + 1)
    await collected(world)
    assert names(world) == []  # also what was named at the time of the repair


async def test_a_repair_changes_nothing_where_clocks_were_right(world: World) -> None:
    await make_garbage(world)
    world.runtime.now += HOUR + 1
    await collected(world)
    await upload(world)
    await pin(world.log, "reader", 5 * 60_000)
    assert not (await find_clock_damage(world.log)).is_repairable


async def test_what_was_uploaded_before_a_repair_is_not_committed_after_it(world: World) -> None:
    """A collector has judged it by a floor in the future: a repair that lowers the floor must not bring it back."""
    before = world.runtime.now
    stall = Stall(lambda operation, key: operation == "put_many")
    appending = asyncio.create_task(world.append("stalled", writer=Writer(world.process(stall))))
    await stall.stalled.wait()
    [uploaded] = names(world)
    world.runtime.now += FAR
    assert await collected(world) == 1
    world.runtime.now = before - 10 * DAY  # so that the repaired floor is below the stamp
    await repair_clock(world.log, await find_clock_damage(world.log))
    world.runtime.now = before
    stall.go.set()
    await appending
    assert uploaded not in names(world)
    assert await world.payloads() == ["stalled"]


async def test_a_repair_that_dies_is_repeated(world: World) -> None:
    class Dies(Faults):
        async def before(self, operation: str, key: str) -> None:
            if operation == "put" and key.endswith("partitions/0000000002/meta/control"):
                raise Crash

    await jump(world)
    damage = await find_clock_damage(world.log)
    with pytest.raises(Crash):
        await repair_clock(world.process(Dies()), damage)
    left = await find_clock_damage(world.log)
    assert [each.name for each in left.partitions] == ["orders/2", "orders/3"]
    await repair_clock(world.log, left)
    assert not (await find_clock_damage(world.log)).is_repairable


async def test_pins_far_in_the_future_are_released_and_others_stay(world: World) -> None:
    await pin(process_ahead(world), "reader")
    kept = await pin(world.log, "reader")
    damage = await find_clock_damage(world.log)
    assert len(damage.pins) == 1
    await repair_clock(world.log, damage)
    assert await world.meta.keys("llog/pins/", "llog/pins0", 10) == [f"llog/pins/{kept}"]


async def test_a_control_record_of_before_there_were_ceilings_is_read(world: World) -> None:
    old = decode(Control, b'{"sequence_counter":3,"blob_floor_ms":5}', "key")
    assert (old.blob_ceiling_ms, old.clock_repairs) == (0, 0)


# --- sinks


async def upload(world: World, log: Log | None = None) -> Upload:
    return await SinkUploader(log or world.log, "s").upload([(TP, columns_of([Record(payload=b"x")]))])


async def sink(world: World) -> Sink:
    found = await world.meta.get(sink_key("s"))
    assert found is not None
    return decode(Sink, found.value, found.key)


async def test_a_task_whose_clock_is_far_ahead_stamps_no_higher_than_its_sinks_ceiling(world: World) -> None:
    await upload(world, process_ahead(world))
    record = await sink(world)
    assert record.touched_ms == world.runtime.now
    assert max(stamps(world)) <= record.blob_ceiling_ms == world.runtime.now + AHEAD_MS


async def test_a_sink_whose_times_are_in_the_future_is_repaired_and_its_uploads_are_void(world: World) -> None:
    await upload(world)
    far = msgspec.structs.replace(
        await sink(world), touched_ms=START_MS + FAR, finished_ms=START_MS + FAR, blob_ceiling_ms=0
    )
    await world.meta.put(sink_key("s"), encode(far))
    uploaded = await upload(world, process_ahead(world))
    assert stamp_of(uploaded.blob) == START_MS + FAR
    damage = await find_clock_damage(world.log)
    assert [each.name for each in damage.sinks] == ["s"]
    await repair_clock(world.log, damage)
    with pytest.raises(BlobCollected, match="llog repair clock"):
        await publish(world.log, "s", 0, [uploaded])
    again = await upload(world)
    await publish(world.log, "s", 0, [again])
    assert await world.payloads() == ["x"]
    record = await sink(world)
    assert max(record.touched_ms, record.finished_ms) <= world.runtime.now
    world.runtime.now += HOUR + 1
    assert await collected(world) == 2
