"""The engine `rocksdb` over a whole log: who owns it, upkeep, verification, what a look inside shows."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest

from llog.broker.maintenance import Maintenance
from llog.config import Settings
from llog.engines.registry import all_engines
from llog.engines.rocksdb.engine import RocksEngine, rocksdb_of
from llog.engines.rocksdb.handle import RocksHandle
from llog.engines.rocksdb.keys import LOGS, record_key
from llog.engines.rocksdb.store import Changes, RocksStore
from llog.engines.routing import EngineAppender, EngineReader
from llog.engines.upkeep import clean_all, retain_all
from llog.engines.verify import EngineVerifier
from llog.errors import (
    ConfigurationError,
    InvalidArgument,
    LlogError,
    LogOwned,
    OwnerUnavailable,
    PartitionNotInitialized,
    RecordRemoved,
    TopicElsewhere,
    TopicExists,
    TopicNotFound,
)
from llog.log.catalog import DISK, ROCKSDB, Catalog
from llog.log.engine import AppendGroup, WriterOptions
from llog.log.findings import ProblemKind, VerifyReport
from llog.log.log import Log
from llog.log.opening import close_log, open_log, opened_log
from llog.log.records import Cleanup, Topic
from llog.model import Record, TopicPartition
from tests.unit.engines.rocksdb.tools import damage

SHORT = TopicPartition("short", 0)
STATE = TopicPartition("state", 0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=str(tmp_path))


@pytest.fixture
async def log(settings: Settings) -> AsyncIterator[Log]:
    """A topic of little retention and one that is compacted by key, both with more than that in them."""
    async with opened_log(settings) as opened:
        await Catalog(opened).create(SHORT.topic, engine=ROCKSDB, retention_bytes=2000)
        await Catalog(opened).create(STATE.topic, engine=ROCKSDB, cleanup=Cleanup.COMPACT)
        await _fill(opened)
        yield opened


async def _fill(log: Log) -> None:
    for turn in range(30):
        records = [Record(payload=b"%d " % turn + b"x" * 40, key=b"k%d" % key) for key in range(5)]
        groups = [AppendGroup(topic=tp.topic, partition=0, records=records) for tp in (SHORT, STATE)]
        assert not any(isinstance(result, LlogError) for result in await EngineAppender(log).append(groups))


def _rocks(log: Log) -> RocksHandle:
    rocks = rocksdb_of(log).rocks
    assert rocks is not None
    return rocks


async def verify(log: Log, tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
    return await EngineVerifier(log).verify(tp, progress=progress)


def _change(log: Log, change: str, tp: TopicPartition, offset: int) -> None:
    store = _rocks(log).logs().store
    changes = store.changes()
    if change == "delete":
        changes.delete(LOGS, record_key(tp.topic, tp.partition, offset))
    else:
        changes.put(LOGS, record_key(tp.topic, tp.partition, offset), b"damaged")
    store.write(changes, sync=False)


async def test_nothing_is_made_or_locked_before_it_is_used(settings: Settings) -> None:
    async with opened_log(settings) as log:
        assert not _rocks(log).directory.exists()
        await retain_all(log, EngineAppender(log))
        await clean_all(log)
        assert not _rocks(log).directory.exists()


async def test_without_a_directory_there_are_no_such_topics() -> None:
    name = "memory://no-rocksdb"
    async with opened_log(Settings(meta=name, blobs=name)) as log:
        assert rocksdb_of(log).rocks is None
        with pytest.raises(ConfigurationError, match="LLOG_ROCKSDB_DIR"):
            await Catalog(log).create("t", engine=ROCKSDB)


async def test_what_works_without_rocksdb_does_not_import_it() -> None:
    code = (
        "import sys, llog, llog.cli.main, llog.engines.routing, llog.log.opening; assert 'rocksdict' not in sys.modules"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True)


async def test_a_log_has_one_rocksdb_whatever_directory_others_name(
    log: Log, settings: Settings, tmp_path: Path
) -> None:
    moved = Settings(data_dir=settings.data_dir, rocksdb_dir=str(tmp_path / "elsewhere"))
    none = Settings(data_dir=settings.data_dir, meta=settings.meta, blobs=settings.blobs)
    msgspec.structs.force_setattr(none, "rocksdb_dir", None)
    for others in (moved, none):
        async with opened_log(others) as other:
            for call in (EngineReader(other).bounds(SHORT), Catalog(other).create("new", engine=ROCKSDB)):
                with pytest.raises(LogOwned, match=f"process {os.getpid()} "):
                    await call
    await close_log(log)
    for others in (moved, none):
        async with opened_log(others) as other:
            for call in (EngineReader(other).bounds(SHORT), Catalog(other).create("new", engine=ROCKSDB)):
                with pytest.raises(OwnerUnavailable, match="Start a broker with that directory"):
                    await call
    assert not (tmp_path / "elsewhere").exists()
    async with opened_log(settings) as again:
        assert (await EngineReader(again).bounds(SHORT)).log_start_offset == 1


async def test_a_topic_that_is_not_in_the_rocksdb_that_is_here_is_elsewhere(log: Log, tmp_path: Path) -> None:
    """As a log of a version that let each directory have its own may have them."""
    other = log._replace(engines=all_engines(rocks=RocksHandle(tmp_path / "elsewhere", log.runtime)), owners=None)
    with pytest.raises(TopicElsewhere, match="LLOG_ROCKSDB_DIR"):
        await EngineReader(other).bounds(SHORT)
    assert not (tmp_path / "elsewhere").exists()
    await Catalog(other).create("new", engine=ROCKSDB)
    with pytest.raises(TopicElsewhere):
        await EngineReader(other).bounds(SHORT)
    await _rocks(other).close()


async def test_a_topic_created_again_lies_under_another_directory(log: Log) -> None:
    catalog = Catalog(log)
    await catalog.delete(SHORT.topic)
    assert (await catalog.create(SHORT.topic, engine=ROCKSDB)).directory == "short~2"
    await EngineAppender(log).append([AppendGroup(topic="short", partition=0, records=[Record(payload=b"new")])])
    assert await EngineReader(log).view(SHORT) == ("short~2", (1, 2))
    store = _rocks(log).logs().store
    assert store.items(LOGS, b"topic/short/", b"topic/short0") == []


async def test_an_interrupted_deletion_is_finished(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise InvalidArgument("interrupted")

    monkeypatch.setattr(RocksEngine, "remove", fail)
    with pytest.raises(InvalidArgument):
        await Catalog(log).delete(SHORT.topic)
    monkeypatch.undo()
    with pytest.raises(TopicNotFound):
        await Catalog(log).get(SHORT.topic)
    await Catalog(log).finish_deletions()
    assert _rocks(log).logs().store.items(LOGS, b"topic/short/", b"topic/short0") == []


async def test_a_deletion_is_not_finished_where_there_is_no_rocksdb(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RocksEngine, "remove", AsyncMock(side_effect=OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        await Catalog(log).delete(SHORT.topic)
    monkeypatch.undo()
    elsewhere = log._replace(engines=all_engines(rocks=RocksHandle(tmp_path / "other", log.runtime)))
    await Catalog(elsewhere).finish_deletions()
    assert not (tmp_path / "other").exists()
    await Catalog(log).finish_deletions()
    assert _rocks(log).logs().store.get(LOGS, record_key(SHORT.topic, 0, 1)) is None


@pytest.mark.parametrize("engine", [ROCKSDB, DISK])
async def test_whoever_is_slower_to_create_a_topic_that_is_in_use_already_is_told_that_it_exists(
    log: Log, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = log.engines[engine].create

    async def slower(log: Log, topic: Topic) -> Topic:
        monkeypatch.undo()
        await Catalog(log).create(topic.name, engine=engine)
        await EngineAppender(log).append([AppendGroup(topic=topic.name, partition=0, records=[Record(payload=b"a")])])
        return await shipped(log, topic)

    monkeypatch.setattr(log.engines[engine], "create", slower)
    with pytest.raises(TopicExists):
        await Catalog(log).create("t", engine=engine)
    assert await EngineReader(log).bounds(TopicPartition("t", 0)) == (1, 2)


async def test_partitions_that_are_not_there_are_not_remembered(log: Log) -> None:
    appender = rocksdb_of(log).appender(log, WriterOptions())
    for partition in range(1, 9):
        [result] = await appender.append(
            [AppendGroup(topic=SHORT.topic, partition=partition, records=[Record(payload=b"a")])]
        )
        assert isinstance(result, PartitionNotInitialized)
    assert len(appender._gates) <= 1  # that of the last one, whose error is still at hand


async def test_appends_that_come_together_share_one_write(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bool] = []
    write = RocksStore.write

    def counted(self: RocksStore, changes: Changes, *, sync: bool) -> None:
        writes.append(sync)
        write(self, changes, sync=sync)

    monkeypatch.setattr(RocksStore, "write", counted)
    appenders = [rocksdb_of(log).appender(log, WriterOptions()) for _ in range(4)]
    groups = [AppendGroup(topic="short", partition=0, records=[Record(payload=b"%d" % number)]) for number in range(40)]
    for appender in appenders:
        await appender.append(groups[:1])
    writes.clear()
    await asyncio.gather(*(appenders[place % 4].append([group]) for place, group in enumerate(groups)))
    assert writes == [True]


async def test_an_append_whose_caller_gives_up_is_finished_before_the_end(settings: Settings) -> None:
    log = await open_log(settings)
    await Catalog(log).create("t", engine=ROCKSDB)
    appender = EngineAppender(log)
    await appender.append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"a")])])
    calls = [
        asyncio.create_task(appender.append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"b")])]))
        for _ in range(5)
    ]
    while not _rocks(log)._queue:
        await asyncio.sleep(0)
    calls[2].cancel()
    await close_log(log)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[2], asyncio.CancelledError)
    async with opened_log(settings) as again:
        assert (await EngineReader(again).bounds(TopicPartition("t", 0))).next_offset == 7


_APPENDING = """
import asyncio
from llog.config.loading import load_settings
from llog.engines.routing import EngineAppender
from llog.model import Record
from llog.log.opening import opened_log
from llog.log.engine import AppendGroup
async def main():
    async with opened_log(load_settings()) as log:
        appender = EngineAppender(log)
        number = 0
        while True:
            number += 1
            records = [Record(payload=b"%d" % number), Record(payload=b"%d" % number)]
            [result] = await appender.append([AppendGroup(topic="t", partition=0, records=records)])
            print(result.end_offset, flush=True)
asyncio.run(main())
"""


async def test_what_was_acknowledged_survives_a_kill_and_the_next_process_becomes_the_owner(settings: Settings) -> None:
    async with opened_log(settings) as log:
        await Catalog(log).create("t", engine=ROCKSDB)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _APPENDING, env=settings.as_environment(), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    acknowledged = [int(await child.stdout.readline()) for _ in range(50)]
    child.kill()
    await child.wait()
    tp = TopicPartition("t", 0)
    async with opened_log(settings) as log:
        reader = EngineReader(log)
        bounds = await reader.bounds(tp)
        assert bounds.next_offset > acknowledged[-1]
        found = [value async for batch in reader.iter_from(tp, 1) for value in batch.columns.values.to_pylist()]
        assert found == [b"%d" % (offset // 2 + 1) for offset in range(bounds.next_offset - 1)]
        assert (await verify(log, tp)).healthy


async def test_the_owner_retains_and_compacts(log: Log, settings: Settings) -> None:
    reports: list[str] = []
    maintenance = Maintenance(log, settings, reports.append)
    await maintenance.retain_owned()
    await maintenance.clean()
    reader = EngineReader(log)
    assert (await reader.bounds(SHORT)).log_start_offset > 100
    assert [batch.start_offset async for batch in reader.iter_from(STATE, 1)] == [146]
    with pytest.raises(RecordRemoved):
        await reader.read_offset(STATE, 3)
    with pytest.raises(InvalidArgument, match="keeps all records"):
        await log.engines[ROCKSDB].clean(log, SHORT)
    assert reports == []


async def test_upkeep_in_the_background_does_not_become_the_owner(settings: Settings) -> None:
    async with opened_log(settings) as log:
        await Catalog(log).create(STATE.topic, engine=ROCKSDB, cleanup=Cleanup.COMPACT, retention_bytes=0)
    async with opened_log(settings) as log:
        reports: list[str] = []
        maintenance = Maintenance(log, settings, reports.append)
        await maintenance.retain()
        await maintenance.clean()
        assert _rocks(log).logs_if_open is None
        async with opened_log(settings) as other:
            assert await EngineReader(other).bounds(STATE) == (1, 1)


async def test_a_healthy_partition_is_found_whole_and_so_is_a_compacted_one(log: Log) -> None:
    seen: list[int] = []
    report = await verify(log, SHORT, progress=seen.append)
    assert (report.healthy, report.records, seen[-1]) == (True, 150, 150)
    await clean_all(log, topic=STATE.topic)
    report = await verify(log, STATE)
    assert (report.healthy, report.records) == (True, 5)
    await EngineAppender(log).trim(SHORT, 151)
    assert (await verify(log, SHORT)).records == 0


async def test_damage_and_what_is_missing_are_reported_with_their_offsets(log: Log) -> None:
    _change(log, "damage", SHORT, 7)
    _change(log, "delete", SHORT, 20)
    _change(log, "delete", SHORT, 150)
    report = await verify(log, SHORT)
    assert [(each.kind, each.start_offset, each.end_offset) for each in report.problems] == [
        (ProblemKind.CORRUPT, 7, 7),
        (ProblemKind.GAP, 20, 20),
        (ProblemKind.GAP, 150, 150),
    ]
    assert report.records == 147
    await clean_all(log, topic=STATE.topic)
    _change(log, "delete", STATE, 150)
    report = await verify(log, STATE)
    assert [(each.kind, each.start_offset, each.end_offset) for each in report.problems] == [
        (ProblemKind.GAP, 150, 150)
    ]


async def test_damage_of_a_file_is_reported_and_the_rest_is_verified(settings: Settings) -> None:
    tp, random_bytes = TopicPartition("t", 0), random.Random(7).randbytes
    records = [Record(payload=random_bytes(300)) for _ in range(3000)]
    async with opened_log(settings) as log:
        await Catalog(log).create("t", engine=ROCKSDB)
        await EngineAppender(log).append([AppendGroup(topic="t", partition=0, records=records)])
    async with opened_log(settings) as log:
        await _rocks(log).open()  # which moves the records from the write-ahead log to a file
        directory = _rocks(log).directory
    damage(directory)
    async with opened_log(settings) as log:
        report = await verify(log, tp)
    assert not report.healthy
    lost = [each.start_offset for each in report.problems]
    assert {each.kind for each in report.problems} == {ProblemKind.CORRUPT}
    assert lost == list(range(lost[0], lost[0] + len(lost)))
    assert report.records == 3000 - len(lost)


async def test_a_look_inside_shows_the_state_and_the_records(log: Log) -> None:
    shown = await rocksdb_of(log).describe(log, SHORT, 3, from_offset=10)
    assert (shown.state.last_offset, shown.state.log_start_offset) == (150, 1)
    assert [each.offset for each in shown.records] == [10, 11, 12]
    assert shown.more_from == 13
    assert (await rocksdb_of(log).describe(log, SHORT, 3, from_offset=148)).more_from is None
