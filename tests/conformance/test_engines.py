"""What every engine promises through the two ports, asked of each. Another engine is one more line in `ENGINES`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from devtools.servers.postgres import PostgresServer
from llog.batch.columns import records_of
from llog.config import Secret, Settings
from llog.engines.routing import EngineAppender, EngineReader
from llog.engines.upkeep import retain_all
from llog.errors import (
    InvalidArgument,
    LlogError,
    LogOwned,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PartitionNotInitialized,
    RecordTooLarge,
    StoreUnavailable,
    TopicNotFound,
    UnknownProducer,
)
from llog.log.catalog import DISK, OBJECT, ROCKSDB, Catalog
from llog.log.engine import AppendGroup, AppendResult, Batch, RetentionResult, WriterOptions
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.log.producers import PRODUCERS_MAX, Producer
from llog.log.records import Cleanup, Topic
from llog.model import Record, TimestampType, TopicPartition
from llog.runtime import SystemRuntime

START_MS = 1_700_000_000_000
TP = TopicPartition("orders", 0)
ENGINES = ["object on sqlite", "object on postgres", "object in memory", "disk", "rocksdb"]
SHARED = ["object on sqlite", "object on postgres", "disk"]
"""Those that other processes can see."""


class Clock(SystemRuntime):
    """A wall clock that only tests move."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START_MS

    def now_ms(self) -> int:
        return self.now


class World:
    """One log with a topic of four partitions, and as many others on it as a test wants."""

    def __init__(self, kind: str, directory: Path, stack: AsyncExitStack, postgres: PostgresServer | None) -> None:
        self.engine = kind.split()[0]
        store = f"memory://{directory}" if "memory" in kind else ""
        self.settings = Settings(
            data_dir=str(directory),
            meta=store if postgres is None else postgres.url(f"s_{uuid4().hex}"),
            blobs=store if postgres is None else f"file://{directory}/blobs",
            postgres_password=None if postgres is None else Secret(postgres.password),
            segment_bytes=1024,
            segment_index_bytes=64,
        )
        self.clock = Clock()
        self._stack = stack

    async def start(self) -> None:
        self.log = await self.opened()
        self.catalog, self.reader, self.appender = Catalog(self.log), EngineReader(self.log), EngineAppender(self.log)
        await self.create()

    async def beside(self) -> Log:
        """Another one on the same stores, as another process would have it; the same one where there can be no
        other.
        """
        return self.log if self.engine == ROCKSDB else await self.opened()

    async def let_go(self) -> None:
        """Of what only one process can have."""
        for engine in self.log.engines.values():
            await engine.close()

    async def opened(self) -> Log:
        return await self._stack.enter_async_context(opened_log(self.settings, runtime=self.clock))

    async def create(self, timestamp_type: TimestampType = TimestampType.CREATE, name: str = TP.topic) -> Topic:
        return await self.catalog.create(name, 4, engine=self.engine, timestamp_type=timestamp_type)

    async def append(
        self,
        *payloads: str | Record,
        tp: TopicPartition = TP,
        producer: Producer | None = None,
        appender: EngineAppender | None = None,
    ) -> AppendResult:
        [result] = await (appender or self.appender).append([group(*payloads, tp=tp, producer=producer)])
        if isinstance(result, LlogError):
            raise result
        return result

    async def fill(self, appends: int, records: int = 3) -> list[str]:
        """Appends a minute apart; the payloads, by offset from 1 on."""
        payloads = [f"{number:03} {'x' * 40}" for number in range(appends * records)]
        for first in range(0, len(payloads), records):
            await self.append(*payloads[first : first + records])
            self.clock.now += 60_000
        return payloads

    async def records(self, tp: TopicPartition = TP, start: int | None = None) -> list[Record]:
        """Everything from the log start on; its offsets must be dense."""
        expected = (await self.reader.bounds(tp)).log_start_offset if start is None else start
        found: list[Record] = []
        async for batch in self.reader.iter_from(tp, expected):
            assert batch.start_offset == expected
            expected = batch.end_offset + 1
            found += records_of(batch.columns, batch.start_offset)
        assert expected == (await self.reader.bounds(tp)).next_offset
        return found

    async def payloads(self, tp: TopicPartition = TP, start: int | None = None) -> list[str]:
        return [(record.payload or b"").decode() for record in await self.records(tp, start)]


def group(*payloads: str | Record, tp: TopicPartition = TP, producer: Producer | None = None) -> AppendGroup:
    records = [each if isinstance(each, Record) else Record(payload=each.encode()) for each in payloads]
    return AppendGroup(topic=tp.topic, partition=tp.partition, records=records, producer=producer)


def offsets(batches: list[Batch]) -> list[int]:
    return [offset for batch in batches for offset in range(batch.start_offset, batch.end_offset + 1)]


def pick(kinds: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", kinds, indirect=True)


@pytest.fixture(params=ENGINES)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        postgres = request.getfixturevalue("postgres") if "postgres" in request.param else None
        made = World(request.param, tmp_path, stack, postgres)
        await made.start()
        yield made


async def test_an_empty_partition_begins_at_one_and_has_nothing_to_read(world: World) -> None:
    assert await world.reader.bounds(TP) == (1, 1)
    assert await world.reader.read(TP, 1) == []
    assert await world.payloads() == []
    assert await world.reader.offset_for_time(TP, 0) == 1


async def test_offsets_are_dense_from_one_in_the_order_of_the_appends(world: World) -> None:
    results = [await world.append("a", "b"), await world.append("c"), await world.append("d", "e", "f")]
    assert [(each.start_offset, each.end_offset) for each in results] == [(1, 2), (3, 3), (4, 6)]
    assert not any(each.repeated for each in results)
    assert await world.reader.bounds(TP) == (1, 7)
    assert await world.payloads() == list("abcdef")


async def test_partitions_are_logs_of_their_own(world: World) -> None:
    other = TopicPartition("orders", 3)
    await world.append("a")
    assert (await world.append("b", tp=other)).start_offset == 1
    assert await world.payloads(other) == ["b"]
    assert await world.reader.bounds(TopicPartition("orders", 1)) == (1, 1)


async def test_every_offset_can_be_read_from_and_none_outside_the_bounds(world: World) -> None:
    payloads = await world.fill(12)
    for offset in range(1, len(payloads) + 1):
        assert await world.payloads(start=offset) == payloads[offset - 1 :]
        assert (await world.reader.read_offset(TP, offset)).payload == payloads[offset - 1].encode()
    assert await world.reader.read(TP, len(payloads) + 1) == []
    with pytest.raises(OffsetOutOfRange) as beyond:
        await world.reader.read(TP, len(payloads) + 2)
    assert (beyond.value.log_start_offset, beyond.value.next_offset) == (1, len(payloads) + 1)
    with pytest.raises(OffsetOutOfRange):
        await world.reader.read_offset(TP, len(payloads) + 1)
    for offset in (0, -1):
        with pytest.raises(OffsetOutOfRange):
            await world.reader.read(TP, offset)
        with pytest.raises(OffsetOutOfRange):
            await world.reader.read_offset(TP, offset)


async def test_a_range_begins_within_the_bounds(world: World) -> None:
    next_offset = len(await world.fill(12)) + 1
    await world.appender.trim(TP, 5)
    for start in (-1, 0, 4, next_offset + 1, next_offset + 100):
        for stop in (None, 1, next_offset + 200):
            with pytest.raises(OffsetOutOfRange) as outside:
                [batch async for batch in world.reader.iter_from(TP, start, stop)]
            found = outside.value
            assert (found.offset, found.log_start_offset, found.next_offset) == (start, 5, next_offset)
    for stop in (None, 1, next_offset + 200):
        assert [batch async for batch in world.reader.iter_from(TP, next_offset, stop)] == []
    assert [batch async for batch in world.reader.iter_from(TP, 5, 5)] == []


async def test_the_bounds_of_all_partitions_are_had_at_once(world: World) -> None:
    await world.append("a", "b", tp=TopicPartition("orders", 1))
    await world.append("c", "d", "e", tp=TopicPartition("orders", 3))
    await world.appender.trim(TopicPartition("orders", 3), 3)
    topic = await world.catalog.get("orders")
    assert await world.reader.topic_bounds(topic) == [(1, 1), (1, 3), (1, 1), (3, 4)]
    await world.catalog.delete("orders")
    with pytest.raises(PartitionNotInitialized):
        await world.reader.topic_bounds(topic)


async def test_a_read_ends_at_its_bytes_but_always_gets_on(world: World) -> None:
    payloads = await world.fill(20)
    position = 1
    while batches := await world.reader.read(TP, position, 1):
        assert offsets(batches)[0] == position
        assert len(offsets(batches)) <= 6
        position = batches[-1].end_offset + 1
    assert position == len(payloads) + 1
    assert offsets(await world.reader.read(TP, 1, 1 << 20)) == list(range(1, len(payloads) + 1))


async def test_no_batch_begins_at_the_stop(world: World) -> None:
    await world.fill(10)
    for stop in (1, 4, 5, 30, 31, 99):
        found = await world.reader.read(TP, 1, 1 << 20, stop=stop)
        assert all(batch.start_offset < stop for batch in found)
        assert set(range(1, min(stop, 31))) <= set(offsets(found))
    cut = [batch async for batch in world.reader.iter_from(TP, 3, 8)]
    assert offsets(cut) == [3, 4, 5, 6, 7]


async def test_a_record_comes_back_as_it_went_in(world: World) -> None:
    whole = Record(
        payload=b"\x00\xff",
        key=b"k",
        timestamp=START_MS - 5,
        headers=(("h", b"v"), ("h", None), ("", b"")),
    )
    records = [whole, Record(payload=None, key=b"k"), Record(payload=b"", key=b""), Record(payload=b"plain")]
    await world.append(*records)
    found = await world.records()
    assert [(each.payload, each.key, each.headers) for each in found] == [
        (each.payload, each.key, each.headers) for each in records
    ]
    assert [each.timestamp for each in found] == [START_MS - 5, START_MS, START_MS, START_MS]
    assert [each.offset for each in found] == [1, 2, 3, 4]


async def test_large_records_are_read_back_and_an_append_has_a_limit(world: World) -> None:
    large = [bytes([number]) * (3 << 20) for number in range(3)]
    await world.append("before", *(Record(payload=each) for each in large))
    await world.append("after")
    assert [record.payload for record in await world.records()] == [b"before", *large, b"after"]
    limited = EngineAppender(world.log, WriterOptions(append_bytes_max=1000))
    with pytest.raises(RecordTooLarge):
        await world.append("x" * 600, "y" * 600, appender=limited)
    assert (await world.reader.bounds(TP)).next_offset == 6


async def test_an_append_of_nothing_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument):
        await world.appender.append([])
    with pytest.raises(InvalidArgument):
        await world.appender.append([group()])


async def test_groups_are_appended_on_their_own_and_one_may_fail(world: World) -> None:
    groups = [
        group("a", tp=TopicPartition("orders", 2)),
        group("b", tp=TopicPartition("orders", 9)),
        group("c", tp=TopicPartition("nothing", 0)),
        group("d", "e"),
        group("f", tp=TopicPartition("orders", 2)),
    ]
    results = await world.appender.append(groups)
    assert isinstance(results[1], PartitionNotInitialized)
    assert isinstance(results[2], TopicNotFound)
    appended = [result for result in results if isinstance(result, AppendResult)]
    assert [(each.partition, each.start_offset, each.end_offset) for each in appended] == [
        (2, 1, 1),
        (0, 1, 2),
        (2, 2, 2),
    ]
    assert await world.payloads(TopicPartition("orders", 2)) == ["a", "f"]


async def test_if_all_groups_fail_the_append_does(world: World) -> None:
    with pytest.raises(PartitionNotInitialized) as refused:
        await world.appender.append([group("a", tp=TopicPartition("nothing", 0))])
    assert type(refused.value) is TopicNotFound
    with pytest.raises(PartitionNotInitialized) as refused:
        await world.reader.bounds(TopicPartition("nothing", 0))
    assert type(refused.value) is TopicNotFound
    with pytest.raises(PartitionNotInitialized):
        await world.reader.read(TopicPartition("orders", 4), 1)


async def test_calls_that_overlap_keep_their_order(world: World) -> None:
    results = await asyncio.gather(*(world.append(f"{number}") for number in range(50)))
    assert [result.start_offset for result in results] == list(range(1, 51))
    assert await world.payloads() == [f"{number}" for number in range(50)]


async def test_a_repeated_append_gets_its_offsets_again(world: World) -> None:
    first = await world.append("a", "b", producer=Producer(id="p", sequence=0, since=1))
    await world.append("other")
    again = await world.append("a", "b", producer=Producer(id="p", sequence=0, since=1))
    assert (again.start_offset, again.end_offset, again.repeated) == (first.start_offset, first.end_offset, True)
    assert (await world.append("c", producer=Producer(id="p", sequence=1, since=1))).start_offset == 4
    assert await world.payloads() == ["a", "b", "other", "c"]


async def test_a_sequence_out_of_order_is_refused_and_one_with_gaps_only_has_to_grow(world: World) -> None:
    for sequence in range(7):
        await world.append(f"{sequence}", producer=Producer(id="p", sequence=sequence, since=1))
    for sequence in (0, 8):
        with pytest.raises(OutOfOrderSequence):
            await world.append("x", producer=Producer(id="p", sequence=sequence, since=1))
    await world.append("x", producer=Producer(id="p", sequence=20, since=1, dense=False))
    assert (await world.reader.bounds(TP)).next_offset == 9


async def test_a_forgotten_producer_is_told_so_and_a_new_one_is_not(world: World) -> None:
    await world.append("first", producer=Producer(id="old", sequence=0, since=1))
    for number in range(PRODUCERS_MAX):
        world.clock.now += 1
        await world.append("x", producer=Producer(id=f"p{number}", sequence=0, since=1))
    with pytest.raises(UnknownProducer):
        await world.append("first", producer=Producer(id="old", sequence=0, since=1))
    assert (
        await world.append("y", producer=Producer(id="new", sequence=0, since=PRODUCERS_MAX + 2))
    ).start_offset == 66


async def test_producers_are_remembered_by_whoever_appends_next(world: World) -> None:
    await world.append("a", producer=Producer(id="p", sequence=0, since=1))
    await world.let_go()
    other = EngineAppender(await world.opened())
    again = await world.append("a", producer=Producer(id="p", sequence=0, since=1), appender=other)
    assert (again.start_offset, again.repeated) == (1, True)


@pytest.mark.parametrize("by", list(TimestampType))
async def test_an_offset_is_found_by_either_time(world: World, by: TimestampType) -> None:
    """Records were made an hour before they are appended; one of them came late."""
    times = [START_MS + number * 60_000 for number in range(12)]
    times[7] = START_MS
    for created in times:
        await world.append(Record(payload=b"x" * 300, timestamp=created - 3_600_000))
        world.clock.now += 60_000
    shift = 3_600_000 if by is TimestampType.CREATE else 0
    assert await world.reader.offset_for_time(TP, 0, by) == 1
    assert await world.reader.offset_for_time(TP, START_MS - shift, by) == 1
    assert await world.reader.offset_for_time(TP, START_MS + 1 - shift, by) == 2
    assert await world.reader.offset_for_time(TP, START_MS + 5 * 60_000 - shift, by) == 6
    assert await world.reader.offset_for_time(TP, START_MS + 6 * 60_000 + 1 - shift, by) == (
        9 if by is TimestampType.CREATE else 8
    )
    assert await world.reader.offset_for_time(TP, START_MS + 12 * 60_000 - shift, by) == 13


async def test_a_topic_of_append_time_shows_and_goes_by_the_time_of_the_append(world: World) -> None:
    await world.create(TimestampType.APPEND, "stamped")
    tp = TopicPartition("stamped", 0)
    await world.append(Record(payload=b"a", timestamp=5), tp=tp)
    world.clock.now += 1000
    await world.append(Record(payload=b"b", timestamp=6), tp=tp)
    assert [record.timestamp for record in await world.records(tp)] == [START_MS, START_MS + 1000]
    assert await world.reader.offset_for_time(tp, START_MS + 1) == 2


async def test_a_wait_at_the_end_is_over_with_the_time_and_before_it_at_once(world: World) -> None:
    assert not await world.reader.wait(TP, 1, 0.05)
    await world.append("a")
    assert await world.reader.wait(TP, 1, 60)
    assert not await world.reader.wait(TP, 2, 0.05)


async def test_a_wait_is_woken_by_an_append(world: World) -> None:
    await world.append("a")
    waiting = asyncio.create_task(world.reader.wait(TP, 2, 60))
    other = asyncio.create_task(EngineReader(await world.beside()).wait(TP, 2, 60))
    await asyncio.sleep(0)
    await world.append("b")
    assert await waiting
    assert await other


_OTHER = """
import asyncio, sys
from llog.config.loading import load_settings
from llog.engines.routing import EngineAppender
from llog.model import Record
from llog.log.opening import opened_log
from llog.log.engine import AppendGroup, AppendResult
async def main():
    async with opened_log(load_settings()) as log:
        appender = EngineAppender(log)
        for line in sys.stdin:
            [result] = await appender.append([AppendGroup(topic="orders", partition=0, records=[Record(payload=line.strip().encode())])])
            print(result.start_offset if isinstance(result, AppendResult) else repr(result), flush=True)
asyncio.run(main())
"""  # noqa: E501


@pick(SHARED)
async def test_a_reader_sees_and_is_woken_by_what_another_process_appends(world: World) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _OTHER,
        env=world.settings.as_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        for number, word in enumerate(["first", "second", "third"], 1):
            waiting = asyncio.create_task(world.reader.wait(TP, number, 60))
            await asyncio.sleep(0)
            child.stdin.write(f"{word}\n".encode())
            assert (await child.stdout.readline()).strip() == str(number).encode()
            assert await waiting
            assert (await world.reader.read_offset(TP, number)).payload == word.encode()
    finally:
        child.stdin.close()
        await child.wait()
    assert child.returncode == 0
    await world.append("fourth")
    assert await world.payloads() == ["first", "second", "third", "fourth"]


async def test_a_trim_is_exact_and_holds_at_once(world: World) -> None:
    payloads = await world.fill(12)
    for before in (2, 3, 20, 20, 5):
        result = await world.appender.trim(TP, before)
        start = max(before, 20) if before == 5 else before
        assert result.new_start == start
        assert result.records == start - result.old_start
        assert await world.reader.bounds(TP) == (start, 37)
        assert await EngineReader(await world.beside()).bounds(TP) == (start, 37)
        assert await world.payloads() == payloads[start - 1 :]
        with pytest.raises(OffsetOutOfRange):
            await world.reader.read(TP, start - 1)
    with pytest.raises(OffsetOutOfRange):
        await world.appender.trim(TP, 38)
    with pytest.raises(InvalidArgument):
        await world.appender.trim(TP, 0)


async def test_everything_may_be_trimmed_and_offsets_go_on(world: World) -> None:
    await world.fill(12)
    await world.appender.trim(TP, 37)
    assert await world.reader.bounds(TP) == (37, 37)
    assert await world.payloads() == []
    assert (await world.append("next")).start_offset == 37
    assert await world.reader.offset_for_time(TP, 0) == 37


async def test_retention_by_age_takes_what_is_too_old_and_nothing_younger(world: World) -> None:
    await world.fill(30)
    # Appended a minute apart: the last of them a minute ago. Whole pieces go, so a few too old ones may stay.
    result = await world.appender.retain(TP, retention_ms=10 * 60_000, retention_bytes=None)
    assert 90 - 30 - 15 <= result.new_start - 1 <= 90 - 30
    assert result.bytes > 0
    assert await world.reader.bounds(TP) == (result.new_start, 91)
    assert len(await world.payloads()) == 91 - result.new_start
    assert (await world.appender.retain(TP, retention_ms=None, retention_bytes=None)).records == 0


async def test_retention_by_bytes_keeps_at_least_as_much_as_it_says(world: World) -> None:
    await world.fill(30)
    whole = await world.appender.retain(TP, retention_ms=None, retention_bytes=1 << 20)
    assert (whole.records, whole.new_start) == (0, 1)
    result = await world.appender.retain(TP, retention_ms=None, retention_bytes=2500)
    left = await world.payloads()
    assert sum(map(len, left)) >= 1000  # what is stored of 2500 bytes, without headers and checksums
    assert 0 < len(left) < 60
    assert result.new_start == 91 - len(left)
    with pytest.raises(InvalidArgument):
        await world.appender.retain(TP, retention_ms=-1, retention_bytes=None)


async def test_each_topic_is_retained_by_its_own_limits(world: World) -> None:
    await world.catalog.set_retention(TP.topic, 60_000, None)
    await world.create(name="kept")
    kept = TopicPartition("kept", 0)
    await world.append("stays", tp=kept)
    await world.fill(30)
    world.clock.now += 3_600_000
    results = await retain_all(world.log, world.appender)
    assert set(results) == {TopicPartition(TP.topic, partition) for partition in range(4)}
    assert (await world.reader.bounds(TP)).log_start_offset > 80
    assert await world.payloads(kept) == ["stays"]


async def test_partitions_can_be_added(world: World) -> None:
    added = TopicPartition(TP.topic, 5)
    await world.append("a")
    with pytest.raises(PartitionNotInitialized):
        await world.append("b", tp=added)
    await world.catalog.add_partitions(TP.topic, 6)
    assert (await world.append("b", tp=added)).start_offset == 1
    assert await world.payloads(added) == ["b"]
    assert await world.payloads() == ["a"]


async def test_a_deleted_topic_is_gone_for_those_who_had_it_open(world: World) -> None:
    await world.append("a", "b")
    assert await world.payloads() == ["a", "b"]
    await Catalog(await world.beside()).delete(TP.topic)
    for call in (world.reader.bounds(TP), world.reader.read(TP, 1), world.append("c"), world.appender.trim(TP, 1)):
        with pytest.raises((TopicNotFound, PartitionNotInitialized)):
            await call


async def test_one_who_waits_is_told_of_a_deletion(world: World) -> None:
    waiting = asyncio.create_task(world.reader.wait(TP, 1, 60))
    await asyncio.sleep(0.05)
    await world.catalog.delete(TP.topic)
    with pytest.raises((TopicNotFound, PartitionNotInitialized)):
        await waiting


async def test_options_can_be_changed(world: World) -> None:
    if world.engine != OBJECT:
        changed = await world.catalog.set_options(TP.topic, cleanup=Cleanup.COMPACT, delete_retention_ms=5)
        assert (changed.cleanup, changed.delete_retention_ms) == (Cleanup.COMPACT, 5)
        world.clock.now += 2000
        with pytest.raises(InvalidArgument, match="give every record a key"):
            await world.append("no key")
        assert (await world.append(Record(payload=b"a", key=b"k"))).start_offset == 1
    else:
        with pytest.raises(InvalidArgument, match="needs engine 'disk' or 'rocksdb'"):
            await world.catalog.set_options(TP.topic, cleanup=Cleanup.COMPACT)
    changed = await world.catalog.set_options(TP.topic, retention_bytes=7)
    changed = await world.catalog.set_options(TP.topic, retention_ms=1)
    assert (changed.retention_ms, changed.retention_bytes) == (1, 7)
    assert await world.catalog.set_options(TP.topic) == changed == await world.catalog.get(TP.topic)
    assert (await world.catalog.set_options(TP.topic, retention_bytes=None)).retention_bytes is None
    with pytest.raises(InvalidArgument):
        await world.catalog.set_options(TP.topic, retention_ms=-1)


async def test_a_topic_that_is_created_again_begins_anew(world: World) -> None:
    await world.append("a", "b")
    await world.catalog.delete(TP.topic)
    again = await world.create()
    assert again.incarnation == 2
    assert await world.reader.bounds(TP) == (1, 1)
    assert (await world.append("new")).start_offset == 1
    assert await world.payloads() == ["new"]


async def test_a_topic_that_is_created_again_on_another_engine_is_found_there(world: World) -> None:
    if not await world.log.engines[DISK].is_here():
        world.settings = msgspec.structs.replace(
            world.settings,
            segments_dir=f"{world.settings.data_dir}/segments",
            rocksdb_dir=f"{world.settings.data_dir}/rocksdb",
        )
        log = await world.opened()
        world.log, world.catalog, world.reader = log, Catalog(log), EngineReader(log)
        world.appender = EngineAppender(log)
    await world.append("a", "b")
    assert await world.payloads() == ["a", "b"]
    first = world.engine
    for world.engine in [each for each in (OBJECT, DISK, ROCKSDB) if each != first]:
        await world.catalog.delete(TP.topic)
        await world.create()
        assert (await world.append(world.engine)).start_offset == 1
        assert await world.payloads() == [world.engine]


@pick(["disk"])
async def test_a_second_writer_is_refused_and_told_who_the_first_is(world: World) -> None:
    await world.append("a")
    other = EngineAppender(await world.opened())
    with pytest.raises(LogOwned, match=rf"process {os.getpid()} .*POST /produce"):
        await world.append("b", appender=other)
    assert (await world.append("c", tp=TopicPartition("orders", 1), appender=other)).start_offset == 1
    await world.log.engines[DISK].close()
    assert (await world.append("b", appender=other)).start_offset == 2
    assert await EngineReader(await world.opened()).read_offset(TP, 2)


@pick(["rocksdb"])
async def test_a_second_process_is_refused_whatever_it_wants_and_told_who_the_owner_is(world: World) -> None:
    await world.append("a")
    log = await world.opened()
    owner = rf"process {os.getpid()} .*POST /produce"
    for call in (
        world.append("b", appender=EngineAppender(log)),
        EngineReader(log).read(TP, 1),
        EngineReader(log).wait(TP, 9, 60),
        EngineAppender(log).trim(TP, 1),
        Catalog(log).delete(TP.topic),
        Catalog(log).create("another", engine=ROCKSDB),
    ):
        with pytest.raises(LogOwned, match=owner):
            await call
    assert isinstance((await retain_all_of(log))[TP], LogOwned)
    assert await world.payloads() == ["a"]
    await world.let_go()
    assert (await world.append("b", appender=EngineAppender(log))).start_offset == 2
    await Catalog(log).delete(TP.topic)


async def retain_all_of(log: Log) -> dict[TopicPartition, RetentionResult | LlogError]:
    await Catalog(log).set_retention(TP.topic, 0, None)
    return await retain_all(log, EngineAppender(log))


@pick(["object on sqlite", "object on postgres", "object in memory"])
async def test_several_writers_append_to_one_partition(world: World) -> None:
    writers = [EngineAppender(await world.opened()) for _ in range(4)]

    async def write(number: int) -> list[AppendResult]:
        return [await world.append(f"{number} {step}", appender=writers[number]) for step in range(10)]

    results = await asyncio.gather(*map(write, range(4)))
    assert sorted(each.start_offset for mine in results for each in mine) == list(range(1, 41))
    payloads = await world.payloads()
    for number, mine in enumerate(results):
        assert [payloads[each.start_offset - 1] for each in mine] == [f"{number} {step}" for step in range(10)]


async def test_appends_while_others_read_are_seen_whole(world: World) -> None:
    seen: list[str] = []

    async def follow() -> None:
        position = 1
        while len(seen) < 100:
            assert await world.reader.wait(TP, position, 60)
            for batch in await world.reader.read(TP, position):
                assert batch.start_offset == position
                seen.extend(value.decode() for value in batch.columns.values.to_pylist())
                position = batch.end_offset + 1

    following = asyncio.create_task(follow())
    for number in range(50):
        await world.append(f"{number} a", f"{number} b")
    await following
    assert seen == [f"{number} {part}" for number in range(50) for part in "ab"]


async def test_all_is_there_after_closing_and_opening_again(world: World) -> None:
    payloads = await world.fill(12)
    await world.appender.trim(TP, 5)
    await world.let_go()
    if world.engine in (DISK, ROCKSDB):
        with pytest.raises(StoreUnavailable):
            await world.append("x")
    log = await world.opened()
    world.reader = EngineReader(log)
    assert await world.reader.bounds(TP) == (5, 37)
    assert await world.payloads() == payloads[4:]
    assert (await world.append("next", appender=EngineAppender(log))).start_offset == 37
