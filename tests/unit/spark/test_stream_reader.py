"""The stream reader, called as Spark calls it: how far each batch goes, and what happens when topics change under
it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from pyspark.sql.types import IntegerType, StructType

from llog.engines.object.retention import trim
from llog.errors import ConfigurationError, DataLoss, InvalidArgument, LogNotFound, TopicNotFound
from llog.groups.groups import Groups
from llog.log.catalog import Catalog
from llog.log.engine import Bounds
from llog.log.log import Log
from llog.log.pins import alive_pins
from llog.model import TopicPartition
from llog.spark import stored_log
from llog.spark.planner import read_bounds
from llog.spark.schema import source_schema
from llog.spark.stored_log import StoredTask
from llog.spark.stream import LlogStreamReader
from tests.spark.logs import LogOnDisk

Offset = dict[str, Any]


def reader(disk: LogOnDisk, schema: StructType | None = None, **options: str) -> LlogStreamReader:
    given = {"startingOffsets": "earliest", **disk.options, **options}
    return LlogStreamReader(given, schema or source_schema(include_headers=False))


def advance(stream: LlogStreamReader, start: Offset) -> Offset:
    return stream.latestOffset(start, stream.getDefaultReadLimit())


def rows(stream: LlogStreamReader, start: Offset, end: Offset) -> list[tuple[str, int, str]]:
    """What the tasks of this batch read, on copies of the reader."""
    found = []
    copy: LlogStreamReader = pickle.loads(pickle.dumps(stream))
    for task in stream.partitions(start, end):
        for batch in copy.read(pickle.loads(pickle.dumps(task))):
            columns = batch.to_pydict()
            found += [
                (f"{topic}/{partition}", offset, value.decode())
                for topic, partition, offset, value in zip(
                    columns["topic"], columns["partition"], columns["offset"], columns["value"], strict=True
                )
            ]
    return sorted(found)


def offsets(place: Offset) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = place["offsets"]
    return found


def test_the_start_is_settled_once_though_records_come_in_between(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.append("t", 0, "a")
    stream = reader(disk, subscribe="t", startingOffsets="latest")
    start = stream.initialOffset()
    disk.append("t", 0, "b")
    assert stream.initialOffset() == start
    end = advance(stream, start)
    assert rows(stream, start, end) == [("t/0", 2, "b")]
    assert advance(stream, end) == end
    assert stream.reportLatestOffset() == end


def test_limits_cut_a_batch_and_a_trigger_without_limits_takes_all(disk: LogOnDisk) -> None:
    disk.create("t", 2)
    for partition in (0, 1):
        disk.append("t", partition, *["x" * 100] * 50)
    by_records = reader(disk, subscribe="t", maxOffsetsPerTrigger="10")
    start = by_records.initialOffset()
    assert by_records.getDefaultReadLimit() == ReadMaxRows(10)
    assert offsets(advance(by_records, start)) == {"t": {"0": 6, "1": 6}}
    assert offsets(by_records.latestOffset(start, ReadAllAvailable())) == {"t": {"0": 51, "1": 51}}
    by_bytes = reader(disk, subscribe="t", maxBytesPerTrigger="4KiB")
    assert by_bytes.getDefaultReadLimit() == ReadMaxBytes(4096)
    cut = offsets(advance(by_bytes, start))["t"]
    assert all(10 <= cut[partition] <= 25 for partition in ("0", "1"))


def test_a_batch_waits_for_its_least_records_or_for_the_longest_delay(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.append("t", 0, "a", "b")
    patient = reader(disk, subscribe="t", minOffsetsPerTrigger="3")
    start = patient.initialOffset()
    assert patient.getDefaultReadLimit() == ReadMinRows(3)
    assert advance(patient, start) == start
    hasty = reader(disk, subscribe="t", minOffsetsPerTrigger="3", maxTriggerDelay="1m")
    assert advance(hasty, start) == start
    hasty._last_advance -= 60
    assert offsets(advance(hasty, start)) == {"t": {"0": 3}}
    disk.append("t", 0, "c")
    assert offsets(advance(patient, start)) == {"t": {"0": 4}}
    bounded = reader(disk, subscribe="t", minOffsetsPerTrigger="100")
    bounded.prepareForTriggerAvailableNow()
    assert offsets(advance(bounded, start)) == {"t": {"0": 4}}


def test_available_now_ends_where_the_log_ended_when_it_began(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.append("t", 0, "a", "b", "c")
    stream = reader(disk, subscribe="t", maxOffsetsPerTrigger="2")
    stream.prepareForTriggerAvailableNow()
    disk.append("t", 0, "late")
    place, seen = stream.initialOffset(), []
    while (end := advance(stream, place)) != place:
        seen.append(offsets(end)["t"]["0"])
        place = end
    assert seen == [3, 4]


def test_new_partitions_and_new_topics_of_a_pattern_are_read_from_their_beginning(disk: LogOnDisk) -> None:
    disk.create("a1")
    disk.append("a1", 0, "seen before")
    stream = reader(disk, subscribePattern="a.*", startingOffsets="latest")
    start = stream.initialOffset()
    disk.create("a2")
    disk.create("b")
    disk.append("a2", 0, "new topic")
    disk.do(lambda log: Catalog(log).add_partitions("a1", 2))
    disk.append("a1", 1, "new partition")
    end = advance(stream, start)
    assert rows(stream, start, end) == [("a1/1", 1, "new partition"), ("a2/0", 1, "new topic")]


def test_a_topic_that_is_deleted_under_a_stream_is_a_loss_or_gone_without(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.create("kept")
    disk.append("t", 0, "a")
    selections = ({"subscribe": "t,kept"}, {"assign": '{"t": [0], "kept": [0]}'}, {"subscribePattern": "t|kept"})
    strict = [reader(disk, **selection) for selection in selections]
    lenient = [reader(disk, **selection, failOnDataLoss="false") for selection in selections]
    start = strict[0].initialOffset()
    planned = advance(strict[0], start)
    disk.delete("t")
    disk.append("kept", 0, "b")
    for stream in strict:
        with pytest.raises(DataLoss, match="topic 't' was deleted while it was read"):
            advance(stream, start)
        with pytest.raises(DataLoss, match="topic 't' was deleted before its records up to 2 of t/0 were read"):
            stream.partitions(start, planned)
    for stream in lenient:
        assert rows(stream, start, planned) == []
        stream.prepareForTriggerAvailableNow()
        end = advance(stream, start)
        assert rows(stream, start, end) == [("kept/0", 1, "b")]


def test_a_topic_that_is_created_again_is_told_from_the_old_one(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.append("t", 0, "old", "old", "old")
    strict, lenient = reader(disk, subscribe="t"), reader(disk, subscribe="t", failOnDataLoss="false")
    start = advance(strict, strict.initialOffset())
    disk.delete("t")
    disk.create("t")
    disk.append("t", 0, "n1", "n2", "n3", "n4", "n5")
    with pytest.raises(DataLoss, match="topic 't' was deleted and created again while it was read"):
        advance(strict, start)
    end = advance(lenient, start)
    assert [value for _, _, value in rows(lenient, start, end)] == ["n1", "n2", "n3", "n4", "n5"]
    assert advance(lenient, end) == end


def test_records_that_retention_took_before_a_batch_are_a_loss_or_gone_without(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.append("t", 0, "a", "b")
    disk.append("t", 0, "c", "d")
    start = reader(disk, subscribe="t").initialOffset()
    disk.do(lambda log: trim(log, TopicPartition("t", 0), 3))
    for limit in ({}, {"maxBytesPerTrigger": "1"}, {"maxOffsetsPerTrigger": "3"}):
        strict = reader(disk, subscribe="t", **limit)
        with pytest.raises(DataLoss, match="2 records of t/0 from offset 1 on are gone by retention: it starts at 3"):
            strict.partitions(start, advance(strict, start))
        lenient = reader(disk, subscribe="t", failOnDataLoss="false", **limit)
        place, seen = start, []
        while (end := advance(lenient, place)) != place:
            seen += [value for _, _, value in rows(lenient, place, end)]
            place = end
        assert seen == ["c", "d"]


def test_a_log_that_is_behind_its_stream_is_a_loss(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.append("t", 0, "a")
    stream = reader(disk, subscribe="t")
    start = stream.initialOffset()
    ahead = {**start, "offsets": {"t": {"0": 9}}}
    with pytest.raises(DataLoss, match="at offset 9 of t/0, beyond its next offset 2"):
        advance(stream, ahead)
    with pytest.raises(InvalidArgument, match="would go back from offset 9 to 2 of t/0"):
        stream.partitions(ahead, advance(stream, start))


def test_progress_is_published_for_a_group_as_far_as_it_can_be(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.create("gone")
    disk.append("t", 0, "a", "b")
    disk.append("gone", 0, "c")
    stream = reader(disk, subscribe="gone,t", groupIdForCommit="g")
    end = advance(stream, stream.initialOffset())
    disk.delete("gone")
    stream.commit(end)

    async def position(log: Log) -> int | None:
        return await (await Groups(log).partition("g", TopicPartition("t", 0))).position()

    assert disk.do(position) == 3


def test_a_stream_holds_one_pin_at_a_time(disk: LogOnDisk) -> None:
    disk.create("t")
    disk.append("t", 0, "a")
    stream = reader(disk, subscribe="t")
    start = stream.initialOffset()
    end = advance(stream, start)
    for _ in range(3):
        [task] = stream.partitions(start, end)
        [(pin_id, record)] = disk.do(alive_pins)
        assert isinstance(task, StoredTask)
        assert (task.pin, record.owner) == (pin_id, "spark stream")


def test_wrong_options_are_told_by_the_first_call_and_not_by_making_the_reader(disk: LogOnDisk) -> None:
    with pytest.raises(ConfigurationError, match="option endingOffsets is not for a stream"):
        reader(disk, subscribe="t", endingOffsets="latest").initialOffset()
    wrong = reader(disk, source_schema(include_headers=False).add("more", IntegerType()), subscribe="t")
    with pytest.raises(ConfigurationError, match="column more int is not one of llog's"):
        wrong.getDefaultReadLimit()
    with pytest.raises(LogNotFound, match="there is no log"):
        reader(disk, subscribe="t").initialOffset()
    assert not disk.blobs.parent.joinpath("meta.sqlite").exists()
    disk.create("other")
    with pytest.raises(TopicNotFound, match="there is no topic 't'"):
        reader(disk, subscribe="t").initialOffset()
    disk.create("t")
    with pytest.raises(InvalidArgument, match="start at offset 5 of t/0, beyond its end 1"):
        reader(disk, subscribe="t", startingOffsets='{"t": {"0": 5}}').initialOffset()


@pytest.mark.parametrize("foreign", [{"orders": {"0": 5}}, {"offset": 3}, {}])
def test_a_checkpoint_of_another_source_is_told_from_a_wrong_offset(disk: LogOnDisk, foreign: Offset) -> None:
    disk.create("t")
    stream = reader(disk, subscribe="t")
    start = stream.initialOffset()
    with pytest.raises(InvalidArgument, match=r"not llog's .* needs a new checkpointLocation"):
        advance(stream, foreign)
    with pytest.raises(InvalidArgument, match=r"not llog's .* needs a new checkpointLocation"):
        stream.partitions(foreign, start)


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_topic_that_is_deleted_while_it_is_looked_at_is_a_loss_and_nothing_else(
    disk: LogOnDisk, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    for name in ("a", "b"):
        disk.create(name)
        disk.append(name, 0, "x")
    reading = reader(disk, subscribePattern="[ab]", failOnDataLoss=fails)
    start = reading.initialOffset()

    async def deleted_first(log: Log, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        monkeypatch.setattr(stored_log, "read_bounds", read_bounds)
        await Catalog(log).delete("b")
        return await read_bounds(log, partitions)

    monkeypatch.setattr(stored_log, "read_bounds", deleted_first)
    if fails == "true":
        with pytest.raises(DataLoss, match="'b' was deleted while it was read"):
            advance(reading, start)
    else:
        assert offsets(advance(reading, start)) == {"a": {"0": 2}}
