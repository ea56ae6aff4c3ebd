"""Resolves options to topics, partitions and offsets. Runs on the driver, before any task."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from llog.errors import ConfigurationError, DataLoss, InvalidArgument, TopicNotFound
from llog.log.engine import Bounds
from llog.log.records import Topic
from llog.model import FIRST_OFFSET, TopicPartition
from llog.spark.options import EARLIEST, LATEST, OffsetSpec, Selection
from llog.spark.source_log import Range, SourceLog

logger = logging.getLogger("llog.spark")


async def selected_topics(log: SourceLog, selection: Selection) -> dict[str, Topic]:
    """Return the topics to read. Named topics must exist; a pattern may match none yet."""
    if selection.pattern is not None:
        return await remaining_topics(log, selection)
    return _check_readable(log, {name: await log.topic(name) for name in _names(selection)})


async def remaining_topics(log: SourceLog, selection: Selection) -> dict[str, Topic]:
    """Return the selected topics that exist now: some may have been deleted since reading began."""
    if selection.pattern is None:
        return await existing_topics(log, _names(selection))
    pattern = re.compile(selection.pattern)
    topics = {topic.name: topic for topic in await log.topics() if pattern.fullmatch(topic.name)}
    return _check_readable(log, topics)


async def existing_topics(log: SourceLog, names: Sequence[str]) -> dict[str, Topic]:
    found = {}
    for name in names:
        try:
            found[name] = await log.topic(name)
        except TopicNotFound:
            continue
    return _check_readable(log, found)


def _check_readable(log: SourceLog, topics: dict[str, Topic]) -> dict[str, Topic]:
    for topic in topics.values():
        log.check_readable(topic)
    return topics


async def check_unchanged(find: Callable[[str], Awaitable[Topic]], topics: Mapping[str, Topic]) -> None:
    """Raise `DataLoss` if one of these topics was deleted, or deleted and created again, since it was looked up."""
    for name, topic in topics.items():
        try:
            is_same = (await find(name)).incarnation == topic.incarnation
        except TopicNotFound:
            is_same = False
        if not is_same:
            raise DataLoss(f"topic {name!r} was deleted while its read was planned: start the read again")


def selected_partitions(selection: Selection, topics: Mapping[str, Topic]) -> list[TopicPartition]:
    """Return the partitions of these topics that are read."""
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


async def resolve_offsets(
    log: SourceLog, spec: OffsetSpec, bounds: Mapping[TopicPartition, Bounds], *, is_start: bool
) -> dict[TopicPartition, int]:
    """Return the offset of every partition. Explicit offsets are not compared with the bounds here.

    Offsets begin at 1: an explicit 0, where Kafka's begin, means the same record.
    """
    _check_partitions_listed(spec, bounds)
    found = {}
    for tp, (log_start, next_offset) in bounds.items():
        wanted = spec.offsets.get(str(tp), spec.everywhere)
        if wanted is not None:
            found[tp] = {EARLIEST: log_start, LATEST: next_offset}.get(wanted, max(wanted, FIRST_OFFSET))
            continue
        time_ms = spec.timestamps.get(str(tp), spec.timestamp_ms)
        if spec.ago_ms is not None:
            time_ms = log.now_ms() - spec.ago_ms
        assert time_ms is not None
        found[tp] = await log.offset_for_time(tp, time_ms)
        missing = found[tp] >= next_offset and is_start and spec.ago_ms is None
        if missing and not spec.latest_if_missing:
            raise InvalidArgument(
                f"no record of {tp} has the starting timestamp {time_ms} or a later one: "
                "set startingOffsetsByTimestampStrategy=latest to start at the end there"
            )
    return found


def _check_partitions_listed(spec: OffsetSpec, bounds: Mapping[TopicPartition, Bounds]) -> None:
    """Raise unless offsets or times by partition name exactly the partitions that are read, as with Kafka."""
    listed = set(spec.offsets or spec.timestamps)
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
    """Return the part of a range that exists. `lose` reports the rest."""
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
            "did it ever exist, or was the metadata restored from a backup?",
            fail=fail_on_data_loss,
        )
    low = min(max(start, bounds.log_start_offset), bounds.next_offset)
    return Range(tp, low, max(low, min(stop, bounds.next_offset)))


def lose(what: str, *, fail: bool) -> None:
    """Raise `DataLoss`, or log what a read without `failOnDataLoss` skips."""
    if fail:
        raise DataLoss(f"{what}. Set failOnDataLoss=false to continue without them")
    logger.warning("llog skipped: %s", what)


def _names(selection: Selection) -> Sequence[str]:
    return selection.topics or sorted({tp.topic for tp in selection.assigned})
