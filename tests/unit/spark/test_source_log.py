"""What every `SourceLog` promises: the same answers and the same rows, from the stores and through a broker."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from llog.api.leaderless import SharedAppendGroup
from llog.errors import ConfigurationError, DataLoss, PartitionNotInitialized, TopicNotFound
from llog.log.catalog import Catalog
from llog.log.engine import Bounds
from llog.log.opening import opened_log
from llog.log.records import Topic
from llog.model import Record, TopicPartition
from llog.spark import broker_log, process
from llog.spark.offsets import existing_topics, selected_topics
from llog.spark.options import ReadOptions, Selection, read_options
from llog.spark.source import run_read
from llog.spark.source_log import Range, SourceLog, SourceTask
from tests.unit.client.backends import Harness, remote

FIRST, SECOND = TopicPartition("t", 0), TopicPartition("t", 1)
COLUMNS = ("topic", "partition", "offset", "key", "value", "timestamp", "timestampType")


@pytest.fixture
def harness() -> Iterator[Harness]:
    """A log of two partitions, with a broker before it."""
    kept: list[dict[Any, Any]] = [process._connections, broker_log._clients]
    before = [set(each) for each in kept]
    with remote() as found:
        found.create(partitions=2)
        records = [Record(payload=b"%d" % n, key=b"k", timestamp=1000 + n) for n in range(6)]
        found.writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=records)])
        found.append("x", partition=1)
        yield found
        for opened, earlier in zip(kept, before, strict=True):
            for key in set(opened) - earlier:
                opened.pop(key).close()


@pytest.fixture(params=["stores", "broker"])
def options(request: pytest.FixtureRequest, harness: Harness) -> ReadOptions:
    return options_of(harness, request.param)


def options_of(harness: Harness, way: str) -> ReadOptions:
    """Spark refuses a log in memory, which its processes do not share; the stores are set behind its back."""
    given = {"broker": harness.url, "subscribe": "t", "minPartitions": "3"}
    options = read_options(given, streaming=False, settings=harness.settings)
    if way == "stores":
        options = msgspec.structs.replace(options, broker=None)
    return options


def rows(options: ReadOptions, tasks: list[SourceTask]) -> list[tuple[object, ...]]:
    """What the tasks read, each after its way to an executor."""
    found: list[tuple[object, ...]] = []
    for task in tasks:
        copy: SourceTask = pickle.loads(pickle.dumps(task))
        for batch in copy.read(options, COLUMNS):
            found += zip(*(batch[name].to_pylist() for name in COLUMNS), strict=True)
    return sorted(found, key=repr)


async def plan_ranges(log: SourceLog, options: ReadOptions, *ranges: Range) -> list[SourceTask]:
    topics = await selected_topics(log, options.selection)
    pin = await log.pin("test")
    try:
        return list(await log.plan(ranges, topics, options, pin=pin))
    finally:
        await log.release(pin)


def test_topics_and_bounds(options: ReadOptions) -> None:
    async def look(log: SourceLog) -> None:
        topic = await log.topic("t")
        assert (topic.name, topic.partitions) == ("t", 2)
        assert [each.name for each in await log.topics()] == ["t"]
        log.check_readable(topic)
        assert await existing_topics(log, ["t", "missing"]) == {"t": topic}
        assert await log.bounds([SECOND, FIRST]) == {SECOND: Bounds(1, 2), FIRST: Bounds(1, 7)}
        assert [await log.offset_for_time(FIRST, time_ms) for time_ms in (0, 1003, 9999)] == [1, 4, 7]
        with pytest.raises(TopicNotFound):
            await log.topic("missing")
        with pytest.raises(TopicNotFound):
            await selected_topics(log, Selection(topics=("missing",)))
        with pytest.raises(PartitionNotInitialized):
            await log.bounds([TopicPartition("t", 7)])

    run_read(options, look)


def test_tasks_read_every_record_of_their_ranges_once(options: ReadOptions) -> None:
    ranges = (Range(FIRST, 2, 6), Range(SECOND, 1, 2))
    tasks = run_read(options, lambda log: plan_ranges(log, options, *ranges))
    assert len(tasks) == 3
    assert [row[:3] for row in rows(options, tasks)] == [*(("t", 0, n) for n in range(2, 6)), ("t", 1, 1)]
    [nothing] = run_read(options, lambda log: plan_ranges(log, options, Range(FIRST, 7, 7)))
    assert rows(options, [nothing]) == []


def test_both_ways_give_the_same_rows(harness: Harness) -> None:
    def read(options: ReadOptions) -> list[tuple[object, ...]]:
        return rows(options, run_read(options, lambda log: plan_ranges(log, options, Range(FIRST, 1, 7))))

    from_stores = read(options_of(harness, "stores"))
    assert len(from_stores) == 6
    assert read(options_of(harness, "broker")) == from_stores


def test_a_topic_that_was_created_again_is_not_planned(harness: Harness, options: ReadOptions) -> None:
    async def plan_with_old_topic(log: SourceLog) -> None:
        old: Topic = await log.topic("t")
        await log.plan([Range(FIRST, 1, 1)], {"t": old}, options, pin=None)
        await recreate()
        with pytest.raises(DataLoss, match="'t' was deleted while its read was planned"):
            await log.plan([Range(FIRST, 1, 1)], {"t": old}, options, pin=None)

    async def recreate() -> None:
        async with opened_log(harness.settings) as log:
            await Catalog(log).delete("t")
            await Catalog(log).create("t", 2)

    run_read(options, plan_with_old_topic)


def test_what_a_broker_cannot_do_is_refused_by_the_option_that_asks_for_it(harness: Harness) -> None:
    async def ask(log: SourceLog) -> None:
        with pytest.raises(ConfigurationError, match="maxBytesPerTrigger is not for a read through a broker"):
            await log.cut_by_bytes({FIRST: 1}, {FIRST: 7}, 10, fail_on_data_loss=True)
        with pytest.raises(ConfigurationError, match="groupIdForCommit is not for a read through a broker"):
            await log.commit("g", {FIRST: 7})

    run_read(options_of(harness, "broker"), ask)
