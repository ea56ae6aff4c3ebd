"""Retention and key compaction of topics of both engines, as the owner of the disk topics does them beside a broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from llog.batch.columns import records_of
from llog.broker.maintenance import Maintenance
from llog.config import Settings
from llog.engines.disk.engine import DiskEngine
from llog.engines.disk.segment_pool import SegmentPool, _SharedWriter
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import (
    InvalidArgument,
    LlogError,
    LogOwned,
    OffsetOutOfRange,
    PartitionNotInitialized,
    RecordRemoved,
    StoreUnavailable,
)
from llog.log.catalog import DISK, Catalog
from llog.log.engine import AppendGroup, WriterOptions
from llog.log.keys import topic_key
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.log.records import Cleanup, Topic, decode, encode
from llog.model import Record, TopicPartition
from llog.stores.meta import ABSENT

SHORT = TopicPartition("short", 0)
STATE = TopicPartition("state", 0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=str(tmp_path), segment_bytes=1024)


@pytest.fixture
async def log(settings: Settings) -> AsyncIterator[Log]:
    """Owns a disk topic of little retention and one that is compacted by key, both with more than that in them."""
    async with opened_log(settings) as opened:
        await Catalog(opened).create(SHORT.topic, engine=DISK, retention_bytes=2000)
        await Catalog(opened).create(STATE.topic, engine=DISK, cleanup=Cleanup.COMPACT)
        await _fill(opened)
        yield opened


async def _fill(log: Log) -> None:
    appender = EngineAppender(log)
    for turn in range(30):
        records = [Record(payload=b"%d " % turn + b"x" * 40, key=b"k%d" % key) for key in range(5)]
        groups = [AppendGroup(topic=tp.topic, partition=0, records=records) for tp in (SHORT, STATE)]
        assert not any(isinstance(result, LlogError) for result in await appender.append(groups))


async def _newest(log: Log, tp: TopicPartition) -> dict[bytes, int]:
    """Of each key, the turn of its newest record."""
    found: dict[bytes, int] = {}
    start = (await EngineReader(log).bounds(tp)).log_start_offset
    async for batch in EngineReader(log).iter_from(tp, start):
        for record in records_of(batch.columns, batch.start_offset):
            found[record.key or b""] = int((record.payload or b"").split()[0])
    return found


async def test_the_owner_keeps_its_topics_in_order_while_it_appends(log: Log, settings: Settings) -> None:
    reports: list[str] = []
    upkeep = Maintenance(log, settings, reports.append)
    await asyncio.gather(upkeep.retain(DISK), upkeep.clean(), _fill(log))
    await upkeep.clean()
    assert reports == []
    assert (await EngineReader(log).bounds(SHORT)).log_start_offset > 1
    assert await _newest(log, STATE) == {b"k%d" % key: 29 for key in range(5)}
    read = [batch async for batch in EngineReader(log).iter_from(STATE, 1)]
    assert sum(batch.columns.count for batch in read) < 150
    assert (await EngineReader(log).bounds(STATE)) == (1, 301)


async def test_topics_of_another_owner_are_left_to_it(log: Log, settings: Settings) -> None:
    reports: list[str] = []
    async with opened_log(settings) as other:
        upkeep = Maintenance(other, settings, reports.append)
        await upkeep.retain()
        await upkeep.clean()
        assert reports == []
        with pytest.raises(LogOwned):
            await other.engines[DISK].clean(other, STATE)
    assert await EngineReader(log).bounds(SHORT) == (1, 151)


async def test_only_topics_that_want_it_are_compacted_by_key(log: Log) -> None:
    with pytest.raises(InvalidArgument, match="cleanup delete"):
        await log.engines[DISK].clean(log, SHORT)
    assert (await log.engines[DISK].clean(log, STATE, force=True)).removed > 0


async def test_a_removed_record_is_told_from_one_that_never_was(log: Log) -> None:
    await log.engines[DISK].clean(log, STATE, force=True)
    reader = EngineReader(log)
    assert (await reader.bounds(STATE)).log_start_offset == 1
    with pytest.raises(RecordRemoved):
        await reader.read_offset(STATE, 1)
    with pytest.raises(OffsetOutOfRange):
        await reader.read_offset(STATE, 151)
    assert [batch async for batch in reader.iter_from(STATE, 1, 20)] == []
    assert (await reader.read(STATE, 1, 1))[0].start_offset > 1


async def test_a_log_that_closes_ends_its_compaction(settings: Settings, log: Log) -> None:
    cleaning = asyncio.create_task(log.engines[DISK].clean(log, STATE, force=True))
    await asyncio.sleep(0)
    await log.engines[DISK].close()
    await asyncio.wait([cleaning])
    async with opened_log(settings) as other:
        assert await _newest(other, STATE) == {b"k%d" % key: 29 for key in range(5)}
        assert (await other.engines[DISK].clean(other, STATE, force=True)).through > 1


async def test_upkeep_closes_the_files_of_deleted_topics_that_nobody_asks_for(log: Log, settings: Settings) -> None:
    engine = log.engines[DISK]
    assert isinstance(engine, DiskEngine)
    assert engine.segments is not None
    path = engine.segments.directory / SHORT.topic / "0"
    kept_writer = engine.segments.kept_writer(path)
    assert kept_writer is not None
    await Catalog(log).delete(SHORT.topic)
    reports: list[str] = []
    await Maintenance(log, settings, reports.append).clean()
    assert engine.segments.kept_writer(path) is None
    with pytest.raises(StoreUnavailable, match="closed"):
        await kept_writer.sync()
    assert not reports


async def test_upkeep_does_not_bring_a_topic_back_that_is_deleted_meanwhile(
    log: Log, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_log(settings) as other:
        await Catalog(other).create("brief", engine=DISK, cleanup=Cleanup.COMPACT)
        appender, tp = other.engines[DISK].appender(other, WriterOptions()), TopicPartition("brief", 0)
        real = SegmentPool._get_or_open

        async def deleted_first(self: SegmentPool, path: Path, tp: TopicPartition) -> _SharedWriter:
            monkeypatch.setattr(SegmentPool, "_get_or_open", real)
            await Catalog(log).delete("brief")
            return await real(self, path, tp)

        for upkeep in (
            lambda: appender.retain(tp, retention_ms=None, retention_bytes=1),
            lambda: appender.trim(tp, 1),
            lambda: other.engines[DISK].clean(other, tp),
        ):
            monkeypatch.setattr(SegmentPool, "_get_or_open", deleted_first)
            with pytest.raises(PartitionNotInitialized):
                await upkeep()
            assert not [path for path in Path(str(settings.segments_dir)).iterdir() if path.name.startswith("brief")]
            await Catalog(other).create("brief", engine=DISK, cleanup=Cleanup.COMPACT)


async def test_a_topic_of_an_engine_of_a_later_version_is_left_alone_and_keeps_no_others(
    log: Log, settings: Settings
) -> None:
    topic = msgspec.structs.replace(
        await Catalog(log).get(STATE.topic), name="later", directory="later", engine="tape", retention_bytes=0
    )
    await log.meta.put(topic_key("later"), encode(topic), expected=ABSENT)
    reports: list[str] = []
    upkeep = Maintenance(log, settings, reports.append)
    await upkeep.retain()
    await upkeep.clean()
    assert (await EngineReader(log).bounds(SHORT)).log_start_offset > 100
    assert {report.partition(": ")[0] for report in reports} == {"retention of later/0", "key compaction of later/0"}
    deleted = msgspec.structs.replace(topic, deleted=True)
    await log.meta.put(topic_key("later"), encode(deleted))
    await Catalog(log).finish_deletions()
    found = await log.meta.get(topic_key("later"))
    assert found is not None
    assert decode(Topic, found.value, found.key) == deleted
