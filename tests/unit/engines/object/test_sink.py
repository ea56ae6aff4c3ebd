"""Exactly once by manifest: one attempt of a batch counts, whatever was done for it before and by whom."""

from __future__ import annotations

import asyncio

import pytest

from llog.batch.columns import columns_of
from llog.engines.object import sink
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.sink import SinkUploader, Upload, forget_sink, publish
from llog.errors import (
    BlobNotFound,
    OutcomeUnknown,
    PartitionNotInitialized,
    RecordTooLarge,
    StaleWrite,
    UnknownProducer,
)
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.log.producers import PRODUCERS_MAX
from llog.log.records import Sink, decode
from llog.model import Record, TopicPartition
from llog.stores.meta import MetaEntry
from tests.unit.world import Crash, CrashAt, Faults, Interleaved, LostAnswers, Stall, World

ONE, TWO = TopicPartition("orders", 0), TopicPartition("orders", 1)
SINK = "query"


class DiesAtItsRecord(Faults):
    """A driver that dies at the n-th put of its sink's record: the first names the manifest, the second clears it."""

    def __init__(self, number: int, *, done: bool) -> None:
        super().__init__()
        self._left, self._done = number, done

    async def before(self, operation: str, key: str) -> None:
        self._left -= operation == "put" and "/sinks/" in key
        if self._left == 0 and not self._done:
            raise Crash

    async def after(self, operation: str, key: str) -> None:
        if self._left == 0:
            raise Crash


async def attempt(log: Log, name: str) -> list[Upload]:
    """Two tasks, each with records for both partitions."""
    uploader = SinkUploader(log, SINK)
    uploads = []
    for task in ("a", "b"):
        groups = [(tp, columns_of([Record(payload=f"{name}-{task}{tp.partition}".encode())])) for tp in (ONE, TWO)]
        uploads.append(await uploader.upload(groups))
    return uploads


def records_of(name: str, partition: int) -> list[str]:
    return [f"{name}-{task}{partition}" for task in ("a", "b")]


async def contents(world: World) -> tuple[list[str], list[str]]:
    return await world.payloads(ONE), await world.payloads(TWO)


async def sink_record(world: World) -> Sink:
    found: MetaEntry | None = await world.log.meta.get("llog/sinks/query")
    assert found is not None
    return decode(Sink, found.value, found.key)


async def write_as_many_others(world: World) -> list[str]:
    """More other producers write to the first partition than it remembers."""
    names = [f"other-{number}" for number in range(PRODUCERS_MAX + 1)]
    for name in names:
        upload = await SinkUploader(world.log, name).upload([(ONE, columns_of([Record(payload=name.encode())]))])
        await publish(world.log, name, 0, [upload])
    return names


async def run_batch(log: Log, name: str, batch: int = 0) -> None:
    await publish(log, SINK, batch, await attempt(log, name))


async def test_a_batch_is_one_append_per_partition_in_the_order_of_its_tasks(world: World) -> None:
    await run_batch(world.log, "x")
    assert await contents(world) == (records_of("x", 0), records_of("x", 1))


async def test_a_repeated_batch_is_the_first_attempt_and_nothing_more(world: World) -> None:
    await run_batch(world.log, "x")
    published = await publish(world.log, SINK, 0, await attempt(world.log, "y"))
    assert published.repeated
    assert await contents(world) == (records_of("x", 0), records_of("x", 1))


@pytest.mark.parametrize("done", [False, True])
async def test_a_driver_that_dies_at_any_store_call_is_finished_by_the_next_with_one_attempt(done: bool) -> None:
    finished = False
    number = 0
    seen = set()
    while not finished:
        number += 1
        world = World()
        await Catalog(world.log).create("orders", 2)
        try:
            await run_batch(world.process(CrashAt(number, done=done)), "x")
            finished = True
        except Crash:
            pass
        await run_batch(world.log, "y")
        await run_batch(world.log, "z", batch=1)
        first, second = await contents(world)
        name = first[0][0]
        seen.add(name)
        assert first == records_of(name, 0) + records_of("z", 0), number
        assert second == records_of(name, 1) + records_of("z", 1), number
    assert seen == {"x", "y"}  # some crashes came before the manifest and some after
    assert number > 10


@pytest.mark.parametrize("done", [False, True])
async def test_an_answer_that_is_lost_anywhere_changes_nothing(done: bool) -> None:
    for number in range(1, 12):
        world = World()
        await Catalog(world.log).create("orders", 2)
        lost = LostAnswers(OutcomeUnknown("lost"), lambda operation, _: "put" in operation, done=done, number=number)
        uploads = await attempt(world.log, "x")
        await publish(world.process(lost), SINK, 0, uploads)
        assert await contents(world) == (records_of("x", 0), records_of("x", 1)), number


@pytest.mark.parametrize("seed", range(30))
async def test_two_drivers_of_one_batch_race_and_one_attempt_counts(world: World, seed: int) -> None:
    names = ("x", "y")
    await asyncio.gather(*(run_batch(world.process(Interleaved(seed * 2 + i)), name) for i, name in enumerate(names)))
    first, second = await contents(world)
    name = first[0][0]
    assert (first, second) == (records_of(name, 0), records_of(name, 1))


async def test_a_leftover_driver_of_an_older_batch_writes_nothing(world: World) -> None:
    stalled = Stall(lambda operation, key: operation == "put" and "/sinks/" in key)
    uploads = await attempt(world.log, "zombie")
    zombie = asyncio.create_task(publish(world.process(stalled), SINK, 0, uploads))
    await stalled.stalled.wait()
    await run_batch(world.log, "x")
    await run_batch(world.log, "y", batch=1)
    stalled.go.set()
    with pytest.raises(StaleWrite):
        await zombie
    assert await contents(world) == (records_of("x", 0) + records_of("y", 0), records_of("x", 1) + records_of("y", 1))


async def test_a_driver_that_comes_late_to_another_s_manifest_looks_again(world: World) -> None:
    uploads = await attempt(world.log, "x")
    with pytest.raises(Crash):
        await publish(world.process(DiesAtItsRecord(1, done=True)), SINK, 0, uploads)
    stalled = Stall(lambda operation, key: operation == "get blob" and "/sink/" in key)
    late = asyncio.create_task(publish(world.process(stalled), SINK, 0, await attempt(world.log, "late")))
    await stalled.stalled.wait()
    await run_batch(world.log, "y")  # applies what the first one named
    await world.log.blobs.delete_many([upload.blob for upload in uploads])  # as after compaction and collection
    stalled.go.set()
    assert (await late).repeated


async def test_a_manifest_whose_blob_is_lost_is_an_error(world: World) -> None:
    uploads = await attempt(world.log, "x")
    with pytest.raises(Crash):
        await publish(world.process(DiesAtItsRecord(1, done=True)), SINK, 0, uploads)
    await world.log.blobs.delete_many([uploads[0].blob])
    with pytest.raises(BlobNotFound):
        await run_batch(world.log, "y")


async def test_a_forgotten_sink_cannot_be_published_by_a_leftover_driver(world: World) -> None:
    uploads = await attempt(world.log, "x")
    await publish(world.log, SINK, 0, uploads)
    await forget_sink(world.log, SINK)
    with pytest.raises(StaleWrite):
        await publish(world.log, SINK, 0, uploads)


async def test_an_empty_batch_counts_as_the_batch(world: World) -> None:
    await publish(world.log, SINK, 0, [])
    await run_batch(world.log, "late")
    assert await contents(world) == ([], [])
    assert (await sink_record(world)).batch == 0


async def test_a_topic_deleted_before_its_batch_is_applied_takes_the_records_with_it(world: World) -> None:
    uploads = await attempt(world.log, "x")
    with pytest.raises(Crash):
        await publish(world.process(DiesAtItsRecord(1, done=True)), SINK, 0, uploads)
    await Catalog(world.log).delete("orders")
    await Catalog(world.log).create("orders", 2)
    await publish(world.log, SINK, 0, [])
    assert await contents(world) == ([], [])


@pytest.mark.parametrize("applied", [False, True])
async def test_a_driver_that_died_goes_on_though_its_partition_has_forgotten_the_sink(
    world: World, applied: bool
) -> None:
    dying = world.process(DiesAtItsRecord(2, done=False) if applied else DiesAtItsRecord(1, done=True))
    with pytest.raises(Crash):
        await publish(dying, SINK, 0, await attempt(world.log, "x"))
    others = await write_as_many_others(world)
    assert f"sink:{SINK}" not in (await world.control()).producers
    await run_batch(world.log, "y")
    await run_batch(world.log, "z", batch=1)
    mine = records_of("x", 0)
    expected = [*mine, *others] if applied else [*others, *mine]
    assert await contents(world) == (expected + records_of("z", 0), records_of("x", 1) + records_of("z", 1))


async def test_a_batch_of_which_nobody_can_tell_whether_it_was_appended_is_not_appended_again(world: World) -> None:
    with pytest.raises(Crash):
        await publish(world.process(DiesAtItsRecord(2, done=False)), SINK, 0, await attempt(world.log, "x"))
    await write_as_many_others(world)
    await Compactor(world.log).compact_once(ONE, force=True)
    before = await contents(world)
    with pytest.raises(UnknownProducer, match=r"orders/0 no longer shows whether batch 0 of sink:query was appended"):
        await run_batch(world.log, "y")
    assert await contents(world) == before


async def test_a_batch_of_too_many_uploads_is_refused_before_it_can_stop_its_sink(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "VALUE_BYTES_MAX", sink._CONTROL_BYTES + 2000)
    uploads = [upload for number in range(4) for upload in await attempt(world.log, str(number))]
    with pytest.raises(RecordTooLarge, match=r"a batch of 8 uploads, 8 of them to one partition, is too many"):
        await publish(world.log, SINK, 0, uploads)
    record = await sink_record(world)
    assert (record.batch, record.manifest) == (-1, None)
    await run_batch(world.log, "x")
    await run_batch(world.log, "y", batch=1)
    assert await contents(world) == (records_of("x", 0) + records_of("y", 0), records_of("x", 1) + records_of("y", 1))


async def test_a_topic_created_again_between_an_upload_and_its_batch_is_an_error_and_no_loss(world: World) -> None:
    old = await attempt(world.log, "old")
    await Catalog(world.log).delete("orders")
    await Catalog(world.log).create("orders", 2)
    new = await attempt(world.log, "new")
    with pytest.raises(PartitionNotInitialized, match=r"'orders' was deleted and created again .*: write them again"):
        await publish(world.log, SINK, 0, [*old, *new])
    assert await contents(world) == ([], [])
    await run_batch(world.log, "again")
    assert await contents(world) == (records_of("again", 0), records_of("again", 1))
