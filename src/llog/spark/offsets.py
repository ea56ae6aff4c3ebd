"""From options to offsets: which partitions, from where to where. Runs on the driver, before any task."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llog.engines.object.reader import Reader
from llog.engines.port import Bounds
from llog.errors import ConfigurationError, DataLoss, InvalidArgument, TopicNotFound, WrongEngine
from llog.log.catalog import OBJECT, Catalog
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import FIRST_OFFSET, TopicPartition
from llog.spark.broker_client import BrokerLog
from llog.spark.options import EARLIEST, LATEST, Position, Selection

logger = logging.getLogger("llog.spark")

Opened = Log | BrokerLog
"""The log itself, or a broker that answers for it."""


class Range(NamedTuple):
    """Offsets [start, stop) of one partition."""

    tp: TopicPartition
    start: int
    stop: int


async def selected_topics(log: Opened, selection: Selection) -> dict[str, Topic]:
    """The topics that are to be read. Named ones must exist; a pattern may match none yet."""
    if selection.pattern is not None:
        return await remaining_topics(log, selection)
    catalog = _catalog(log)
    return _readable(log, {name: await catalog.get(name) for name in _names(selection)})


async def remaining_topics(log: Opened, selection: Selection) -> dict[str, Topic]:
    """Those of the selected topics that exist now: some may have been deleted since reading began."""
    if selection.pattern is None:
        return await existing_topics(log, _names(selection))
    pattern = re.compile(selection.pattern)
    topics = await _catalog(log).topics()
    return _readable(log, {topic.name: topic for topic in topics if pattern.fullmatch(topic.name)})


async def existing_topics(log: Opened, names: Sequence[str]) -> dict[str, Topic]:
    catalog = _catalog(log)
    found = {}
    for name in names:
        try:
            found[name] = await catalog.get(name)
        except TopicNotFound:
            continue
    return _readable(log, found)


def _catalog(log: Opened) -> Catalog | BrokerLog:
    return log if isinstance(log, BrokerLog) else Catalog(log)


def _readable(log: Opened, topics: dict[str, Topic]) -> dict[str, Topic]:
    """These topics; `WrongEngine` if the records of one are not in the blob store, where tasks would look for them."""
    for topic in topics.values():
        if topic.engine != OBJECT and not isinstance(log, BrokerLog):
            raise WrongEngine(
                f"topic {topic.name!r} is of engine {topic.engine!r}: its records are files of one machine. Give "
                "the option broker "
                "with the address of the broker that runs there, such as http://host:8080"
            )
    return topics


def selected_partitions(selection: Selection, topics: Mapping[str, Topic]) -> list[TopicPartition]:
    """The partitions of these topics that are read."""
    if selection.assigned:
        assigned = [tp for tp in selection.assigned if tp.topic in topics]
        for tp in assigned:
            if tp.partition >= topics[tp.topic].partitions:
                raise ConfigurationError(
                    f"option assign names partition {tp.partition} of topic {tp.topic!r}, which has "
                    f"{topics[tp.topic].partitions}"
                )
        return assigned
    return [TopicPartition(topic.name, p) for topic in topics.values() for p in range(topic.partitions)]


async def read_bounds(log: Opened, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
    if isinstance(log, BrokerLog):
        return await log.all_bounds(partitions)
    reader = Reader(log)
    return dict(zip(partitions, await asyncio.gather(*map(reader.bounds, partitions)), strict=True))


async def resolve_position(
    log: Opened, position: Position, bounds: Mapping[TopicPartition, Bounds], *, is_start: bool
) -> dict[TopicPartition, int]:
    """The offset of every partition; explicit ones are not held against the bounds here.

    Offsets begin at 1: an explicit 0, where Kafka's begin, means the same record.
    """
    _check_listed(position, bounds)
    reader = log if isinstance(log, BrokerLog) else Reader(log)
    found = {}
    for tp, (log_start, next_offset) in bounds.items():
        wanted = position.offsets.get(str(tp), position.everywhere)
        if wanted is not None:
            found[tp] = {EARLIEST: log_start, LATEST: next_offset}.get(wanted, max(wanted, FIRST_OFFSET))
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


def within_bounds(wanted: Range, bounds: Bounds, *, fail_on_data_loss: bool) -> Range:
    """The part of it that exists. What does not is lost (`lose`)."""
    tp, start, stop = wanted
    if start < bounds.log_start_offset:
        gone = min(bounds.log_start_offset, stop) - start
        lose(
            f"{gone} records of {tp} from offset {start} on are gone by retention: it starts at "
            f"{bounds.log_start_offset}",
            fail=fail_on_data_loss,
        )
    if max(start, stop) > bounds.next_offset:
        lose(
            f"offset {max(start, stop)} of {tp} is beyond its next offset {bounds.next_offset}: "
            "was it ever there, or was the metadata restored from a backup?",
            fail=fail_on_data_loss,
        )
    low = min(max(start, bounds.log_start_offset), bounds.next_offset)
    return Range(tp, low, max(low, min(stop, bounds.next_offset)))


def lose(what: str, *, fail: bool) -> None:
    """Raises `DataLoss`, or logs what a read without `failOnDataLoss` goes on without."""
    if fail:
        raise DataLoss(f"{what}. Set failOnDataLoss=false to go on without them")
    logger.warning("llog skipped: %s", what)


def _names(selection: Selection) -> Sequence[str]:
    return selection.topics or sorted({tp.topic for tp in selection.assigned})
