"""From options to offsets: which partitions, from where to where. Runs on the driver, before any task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llog.errors import ConfigurationError, DataLoss, InvalidArgument, TopicNotFound
from llog.model import TopicPartition
from llog.partition.catalog import Catalog
from llog.partition.log import Log
from llog.partition.reader import Bounds, Reader
from llog.partition.records import Topic
from llog.spark.options import EARLIEST, LATEST, Position, Selection


class Range(NamedTuple):
    """Offsets [start, stop) of one partition."""

    tp: TopicPartition
    start: int
    stop: int


async def selected_topics(log: Log, selection: Selection) -> dict[str, Topic]:
    """The topics that are read now. Named ones must exist; a pattern may match none yet."""
    catalog = Catalog(log)
    if selection.pattern is not None:
        pattern = re.compile(selection.pattern)
        return {topic.name: topic for topic in await catalog.topics() if pattern.fullmatch(topic.name)}
    names = selection.topics or sorted({tp.topic for tp in selection.assigned})
    return {name: await catalog.get(name) for name in names}


def selected_partitions(selection: Selection, topics: Mapping[str, Topic]) -> list[TopicPartition]:
    if selection.assigned:
        for tp in selection.assigned:
            if tp.partition >= topics[tp.topic].partitions:
                raise ConfigurationError(
                    f"option assign names partition {tp.partition} of topic {tp.topic!r}, which has {topics[tp.topic].partitions}"
                )
        return list(selection.assigned)
    return [TopicPartition(topic.name, p) for topic in topics.values() for p in range(topic.partitions)]


async def read_bounds(log: Log, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
    reader = Reader(log)
    return {tp: await reader.bounds(tp) for tp in partitions}


async def resolve_position(
    log: Log, position: Position, bounds: Mapping[TopicPartition, Bounds], *, is_start: bool
) -> dict[TopicPartition, int]:
    """The offset of every partition; explicit ones are not held against the bounds here."""
    _check_listed(position, bounds)
    reader = Reader(log)
    found = {}
    for tp, (log_start, next_offset) in bounds.items():
        wanted = position.offsets.get(str(tp), position.everywhere)
        if wanted is not None:
            found[tp] = {EARLIEST: log_start, LATEST: next_offset}.get(wanted, wanted)
            continue
        time_ms = position.timestamps.get(str(tp), position.timestamp_ms)
        if position.ago_ms is not None:
            time_ms = log.runtime.now_ms() - position.ago_ms
        assert time_ms is not None
        found[tp] = await reader.offset_for_time(tp, time_ms)
        missing = found[tp] >= next_offset and is_start and position.ago_ms is None
        if missing and not position.latest_if_missing:
            raise InvalidArgument(
                f"no record of {tp} has the starting timestamp {time_ms} or a later one: "
                "set startingOffsetsByTimestampStrategy=latest to start at the end there"
            )
    return found


def _check_listed(position: Position, bounds: Mapping[TopicPartition, Bounds]) -> None:
    """Offsets or times by partition must name exactly the partitions that are read, as with Kafka."""
    listed = set(position.offsets or position.timestamps)
    if not listed:
        return
    wanted = {str(tp) for tp in bounds}
    if listed != wanted:
        missing, foreign = sorted(wanted - listed), sorted(listed - wanted)
        raise ConfigurationError(
            "offsets or timestamps by partition must name exactly the partitions that are read: "
            f"missing are {missing[:5] or 'none'}, not read are {foreign[:5] or 'none'}"
        )


def within_bounds(
    tp: TopicPartition, start: int, stop: int, bounds: Bounds, *, fail_on_data_loss: bool
) -> tuple[Range, str | None]:
    """The part of [start, stop) that exists, and what is lost of it; raises instead if losses are to fail."""
    lost = None
    if start < bounds.log_start_offset:
        gone = min(bounds.log_start_offset, stop) - start
        lost = f"{gone} records of {tp} from offset {start} on are gone by retention: it starts at {bounds.log_start_offset}"
    elif start > bounds.next_offset or stop > bounds.next_offset:
        beyond = max(start, stop)
        lost = f"offset {beyond} of {tp} is beyond its next offset {bounds.next_offset}: was the topic deleted and re-created?"
    if lost and fail_on_data_loss:
        raise DataLoss(f"{lost}. Set failOnDataLoss=false to read what is there")
    low = min(max(start, bounds.log_start_offset), bounds.next_offset)
    return Range(tp, low, max(low, min(stop, bounds.next_offset))), lost


async def existing_topics(log: Log, names: Sequence[str]) -> dict[str, Topic]:
    """Those of the topics that still exist."""
    catalog = Catalog(log)
    found = {}
    for name in names:
        try:
            found[name] = await catalog.get(name)
        except TopicNotFound:
            continue
    return found
