"""Batches as Spark wants them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.snapshot import take_snapshot
from llog.log.engine import AppendGroup
from llog.model import Record, TimestampType, TopicPartition
from llog.spark.fetcher import fetch_ranges
from llog.spark.planner import LocatedRange
from llog.spark.schema import to_arrow
from tests.unit.world import START_MS, World


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("kind", list(TimestampType))
async def test_times_are_of_the_kind_that_the_topic_has(world: World, kind: TimestampType, compacted: bool) -> None:
    topic = await world.catalog.create("timed", timestamp_type=kind)
    tp = TopicPartition("timed", 0)
    for number in range(2):
        world.runtime.now = START_MS + number
        records = [Record(payload=b"given", timestamp=1000), Record(payload=b"none")]
        await world.writer.append([AppendGroup(topic="timed", partition=0, records=records)])
    if compacted:
        await Compactor(world.log).compact_once(tp, force=True)
    located = LocatedRange(topic, 1, 5, await take_snapshot(world.log, tp, 1, 5))
    found = []
    async for _, batch in fetch_ranges(world.log, [located], pin=None, fail_on_data_loss=True):
        columns = to_arrow(batch, ("timestamp", "timestampType"), kind).to_pydict()
        found += list(zip(columns["timestampType"], columns["timestamp"], strict=True))
    if kind is TimestampType.APPEND:
        expected = [(1, ms) for ms in (START_MS, START_MS, START_MS + 1, START_MS + 1)]
    else:
        expected = [(0, ms) for ms in (1000, START_MS, 1000, START_MS + 1)]
    assert found == [(number, datetime.fromtimestamp(ms / 1000, UTC)) for number, ms in expected]
