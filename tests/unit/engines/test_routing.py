"""Which engine a topic is asked of, and what happens when that changes; on both engines at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from llog.base.lockfile import DIRECTORY_ID
from llog.config import Settings
from llog.engines.disk import segment_pool as segments
from llog.engines.disk import topics
from llog.engines.disk.directories import remove_directories
from llog.engines.disk.segment_pool import SegmentPool
from llog.engines.fifo_gate import FifoGate
from llog.engines.object import fencing
from llog.engines.object.compaction.compactor import lagging_partitions
from llog.engines.object.partition_keys import find_keys
from llog.engines.object.reader import Reader
from llog.engines.object.snapshot import take_snapshot
from llog.engines.registry import all_engines
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import (
    ConfigurationError,
    InvalidArgument,
    LlogError,
    PartitionNotInitialized,
    TopicElsewhere,
    TopicNotFound,
    WrongEngine,
    WrongStore,
)
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.log.catalog import DISK, OBJECT, Catalog
from llog.log.engine import AppendGroup, AppendResult
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.log.producers import Producer
from llog.log.records import Cleanup
from llog.model import Record, TopicPartition
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from tests.unit.world import ManualRuntime

ON_DISK = TopicPartition("on-disk", 0)
IN_BLOBS = TopicPartition("in-blobs", 0)


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[Log]:
    """With a topic of two partitions on each engine."""
    async with opened_log(Settings(data_dir=str(tmp_path))) as opened:
        await Catalog(opened).create(ON_DISK.topic, 2, engine=DISK)
        await Catalog(opened).create(IN_BLOBS.topic, 2)
        yield opened


def _group(tp: TopicPartition, *payloads: str) -> AppendGroup:
    return AppendGroup(
        topic=tp.topic, partition=tp.partition, records=[Record(payload=payload.encode()) for payload in payloads]
    )


async def _payloads(log: Log, tp: TopicPartition) -> list[str]:
    batches = [batch async for batch in EngineReader(log).iter_from(tp, 1)]
    return [value.decode() for batch in batches for value in batch.columns.values.to_pylist()]


def _offsets(results: Sequence[AppendResult | LlogError]) -> list[int]:
    return [each.start_offset if isinstance(each, AppendResult) else -1 for each in results]


async def _refused(call: Awaitable[Sequence[object]]) -> object:
    """Why nothing was appended: engines raise it, or have it as the result of every group."""
    try:
        results = await call
    except LlogError as error:
        return error
    assert all(isinstance(result, LlogError) for result in results)
    return results[0]


async def test_one_append_reaches_topics_of_several_engines_and_answers_in_order(log: Log) -> None:
    appender = EngineAppender(log)
    nowhere, beyond = TopicPartition("nowhere", 0), TopicPartition(ON_DISK.topic, 7)
    places = [IN_BLOBS, ON_DISK, nowhere, IN_BLOBS, beyond, ON_DISK]
    results = await appender.append([_group(tp, str(number)) for number, tp in enumerate(places)])
    assert _offsets(results) == [1, 1, -1, 2, -1, 2]
    assert isinstance(results[2], TopicNotFound)
    assert isinstance(results[4], PartitionNotInitialized)
    assert await _payloads(log, IN_BLOBS) == ["0", "3"]
    assert await _payloads(log, ON_DISK) == ["1", "5"]


async def test_a_bad_group_stops_the_append_on_every_engine(log: Log) -> None:
    with pytest.raises(InvalidArgument):
        await EngineAppender(log).append([_group(IN_BLOBS, "a"), _group(ON_DISK)])
    assert await _payloads(log, IN_BLOBS) == []


async def test_if_every_engine_refuses_nothing_is_appended(log: Log) -> None:
    groups = [_group(TopicPartition(each.topic, 9), "a") for each in (IN_BLOBS, ON_DISK)]
    assert isinstance(await _refused(EngineAppender(log).append(groups)), PartitionNotInitialized)


async def test_appends_to_both_engines_keep_the_order_of_the_calls(log: Log) -> None:
    appender = EngineAppender(log)
    calls = []
    for number in range(30):
        mine = [_group(tp, str(number)) for tp in (ON_DISK, IN_BLOBS)]
        calls.append(appender.append(mine[number % 3 // 2 :]))
    await asyncio.gather(*calls)
    assert await _payloads(log, IN_BLOBS) == [str(number) for number in range(30)]
    assert await _payloads(log, ON_DISK) == [str(number) for number in range(30) if number % 3 < 2]


async def test_a_topic_that_changes_its_engine_is_followed_both_ways(log: Log) -> None:
    appender, reader, catalog = EngineAppender(log), EngineReader(log), Catalog(log)
    for engine in (DISK, OBJECT, DISK):
        await appender.append([_group(IN_BLOBS, "old"), _group(IN_BLOBS, "old")])
        assert await reader.bounds(IN_BLOBS) == (1, 3)
        before = (await reader.view(IN_BLOBS)).directory
        await catalog.delete(IN_BLOBS.topic)
        with pytest.raises(TopicNotFound):
            await reader.bounds(IN_BLOBS)
        await catalog.create(IN_BLOBS.topic, 2, engine=engine)
        assert _offsets(await appender.append([_group(IN_BLOBS, "new"), _group(ON_DISK, "x")]))[0] == 1
        assert (await reader.read_offset(IN_BLOBS, 1)).payload == b"new"
        directory, bounds = await reader.view(IN_BLOBS)
        assert directory != before
        assert bounds == (1, 2)
        await catalog.delete(IN_BLOBS.topic)
        await catalog.create(IN_BLOBS.topic, 2, engine=engine)


async def test_a_producer_of_a_topic_created_again_is_not_judged_by_the_old_one(log: Log) -> None:
    tp = TopicPartition("renewed", 0)
    catalog, appender = Catalog(log), EngineAppender(log)

    def group(name: str, since: int) -> AppendGroup:
        producer = Producer(id=name, sequence=0, since=since)
        return AppendGroup(topic=tp.topic, partition=0, records=[Record(payload=b"x")], producer=producer)

    await catalog.create(tp.topic)
    await appender.append([group("before", 1)])
    await catalog.delete(tp.topic)
    await catalog.create(tp.topic)
    others = EngineAppender(log)
    for _ in range(9):
        await others.append([AppendGroup(topic=tp.topic, partition=0, records=[Record(payload=b"y")])])
    [result] = await appender.append([group("after", 10)])
    assert isinstance(result, AppendResult)
    assert (result.start_offset, result.repeated) == (10, False)


async def test_what_works_on_object_topics_only_says_so(log: Log) -> None:
    refused: list[Callable[[], Awaitable[object]]] = [
        lambda: Reader(log).bounds(ON_DISK),
        lambda: take_snapshot(log, ON_DISK, 1, 1),
        lambda: fencing.fence(log, ON_DISK),
        lambda: find_keys(log, ON_DISK),
    ]
    for call in refused:
        with pytest.raises(WrongEngine, match="broker"):
            await call()
    assert [each.tp async for each in lagging_partitions(log, min_offsets=0)] == [
        IN_BLOBS,
        TopicPartition("in-blobs", 1),
    ]


async def test_a_group_has_a_position_in_topics_of_both_engines(log: Log) -> None:
    await EngineAppender(log).append([_group(tp, "a", "b", "c") for tp in (ON_DISK, IN_BLOBS)])
    reader = EngineReader(log)
    for tp in (ON_DISK, IN_BLOBS):
        await (await Groups(log, reader).partition("g", tp)).commit(2)
    lags = await GroupListing(Groups(log, reader)).lag("g")
    assert [(each.topic, each.lag) for each in lags] == [("in-blobs", 2), ("on-disk", 2)]
    assert [each.topic for each in await GroupListing(Groups(log, Reader(log))).lag("g")] == ["in-blobs"]


async def test_a_deletion_that_was_interrupted_is_finished_and_refuses_appends_before(log: Log, tmp_path: Path) -> None:
    appender, catalog = EngineAppender(log), Catalog(log)
    await appender.append([_group(ON_DISK, "a")])
    directory = tmp_path / "segments" / ON_DISK.topic

    def crash(_: Path) -> None:
        raise RuntimeError("power cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llog.engines.disk.engine.remove_directories", crash)
        with pytest.raises(RuntimeError):
            await catalog.delete(ON_DISK.topic)
    assert directory.is_dir()
    with pytest.raises(TopicNotFound):
        await EngineReader(log).bounds(ON_DISK)
    await catalog.finish_deletions()
    assert not directory.exists()
    assert isinstance(await _refused(appender.append([_group(ON_DISK, "b")])), TopicNotFound)


async def test_an_owner_looks_at_the_catalog_again_though_the_directory_is_there(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    appender = EngineAppender(log)
    await appender.append([_group(ON_DISK, "a")])
    monkeypatch.setattr("llog.engines.disk.engine.remove_directories", lambda _: None)
    await Catalog(log).delete(ON_DISK.topic)
    monkeypatch.setattr(topics, "CACHED_MS", 0)
    assert isinstance(await _refused(appender.append([_group(ON_DISK, "b")])), TopicNotFound)


async def test_a_topic_that_is_deleted_while_it_is_opened_does_not_come_back(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = SegmentPool._open

    async def late(self: SegmentPool, path: Path, tp: TopicPartition) -> object:
        await Catalog(log).delete(tp.topic)
        return await opening(self, path, tp)

    monkeypatch.setattr(SegmentPool, "_open", late)
    refused = await _refused(EngineAppender(log).append([_group(ON_DISK, "a")]))
    assert isinstance(refused, TopicNotFound | PartitionNotInitialized)
    assert [each.name for each in (tmp_path / "segments").iterdir()] == [DIRECTORY_ID]


def test_an_interrupted_removal_is_done_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for name in ("t", "t~deleted"):
        (tmp_path / name / "0").mkdir(parents=True)
        (tmp_path / name / "0" / "file").write_bytes(b"x")
    remove_directories(path)
    assert list(tmp_path.iterdir()) == []
    remove_directories(path)


async def test_a_disk_topic_is_not_made_over_files_that_are_there(log: Log, tmp_path: Path) -> None:
    stray = tmp_path / "segments" / "new" / "1"
    stray.mkdir(parents=True)
    (stray / "00000000000000000001.log").write_bytes(b"x")
    with pytest.raises(WrongStore, match=str(stray)):
        await Catalog(log).create("new", 2, engine=DISK)
    with pytest.raises(TopicNotFound):
        await Catalog(log).get("new")


async def test_without_a_directory_there_are_no_disk_topics() -> None:
    log = Log(MemoryMetaStore(MemoryMeta()), MemoryBlobStore(MemoryBlobs()), ManualRuntime(), all_engines())
    with pytest.raises(ConfigurationError, match="LLOG_SEGMENTS_DIR"):
        await Catalog(log).create("t", engine=DISK)
    with pytest.raises(TopicNotFound):
        await Catalog(log).get("t")
    with pytest.raises(InvalidArgument, match="'tape' is unknown: there are 'object', 'disk', 'rocksdb'"):
        await Catalog(log).create("t", engine="tape")
    with pytest.raises(InvalidArgument, match="needs engine 'disk'"):
        await Catalog(log).create("t", cleanup=Cleanup.COMPACT)


async def test_a_topic_whose_files_are_gone_is_told_as_such(log: Log, tmp_path: Path) -> None:
    (tmp_path / "segments" / ON_DISK.topic).rename(tmp_path / "elsewhere")
    for call in (EngineReader(log).view(ON_DISK), EngineAppender(log).append([_group(ON_DISK, "a")])):
        error = await _refused(call)
        assert isinstance(error, TopicElsewhere)
        assert "LLOG_SEGMENTS_DIR" in str(error)
    await Catalog(log).delete(ON_DISK.topic)


async def test_upkeep_does_not_become_the_owner(log: Log, tmp_path: Path) -> None:
    await EngineAppender(log).retain(ON_DISK, retention_ms=1, retention_bytes=None)
    async with opened_log(Settings(data_dir=str(tmp_path))) as other:
        assert _offsets(await EngineAppender(other).append([_group(ON_DISK, "a")])) == [1]


async def test_readers_are_bounded_and_their_files_closed(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "READERS_MAX", 3)
    await Catalog(log).create("many", 20, engine=DISK)
    tps = [TopicPartition("many", partition) for partition in range(20)]
    async with opened_log(Settings(data_dir=str(tmp_path))) as other:
        await EngineAppender(other).append([_group(tp, "a") for tp in tps])
    reader = EngineReader(log)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for tp in tps:
            assert (await reader.read_offset(tp, 1)).payload == b"a"
    assert len(os.listdir("/proc/self/fd")) - before <= 3 * 6  # the tail, three files of a segment, and what maps them


async def test_a_closed_log_has_let_go_of_its_topics(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path))
    async with opened_log(settings) as first:
        await Catalog(first).create("t", engine=DISK)
        await EngineAppender(first).append([_group(TopicPartition("t", 0), "a")])
    await first.engines[DISK].close()
    async with opened_log(settings) as second:
        assert _offsets(await EngineAppender(second).append([_group(TopicPartition("t", 0), "b")])) == [2]


async def test_nobody_overtakes_those_who_wait_in_line() -> None:
    gate, is_prepared = FifoGate(), asyncio.Event()
    known: list[str] = []
    order: list[int] = []

    async def prepared() -> str:
        await is_prepared.wait()
        known.append("ready")
        return "ready"

    async def come(number: int) -> None:
        assert await gate.enter(lambda: known[0] if known else None, prepared) == "ready"
        order.append(number)

    early = [asyncio.create_task(come(number)) for number in range(3)]
    await asyncio.sleep(0)
    is_prepared.set()
    late = []
    for number in range(3, 8):
        late.append(asyncio.create_task(come(number)))
        await asyncio.sleep(0)
    await asyncio.gather(*early, *late)
    assert order == list(range(8))
