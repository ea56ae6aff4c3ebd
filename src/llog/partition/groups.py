"""Consumer groups: how far a group has come in each partition. A position is the next offset that the group wants.

Positions are here whatever the topic's engine. What has to know a partition's bounds takes a `reader`, which is that of engine `object`
unless given.
"""

from __future__ import annotations

import msgspec

from llog.errors import (
    InvalidArgument,
    OffsetOutOfRange,
    OutcomeUnknown,
    PartitionNotInitialized,
    TopicElsewhere,
    TopicNotFound,
    VersionMismatch,
    WrongEngine,
)
from llog.model import FIRST_OFFSET, TopicPartition, check_topic_name
from llog.partition.catalog import Catalog
from llog.partition.keys import GROUPS, group_key
from llog.partition.log import Log
from llog.partition.reader import Reader
from llog.partition.records import GroupOffset, decode, encode
from llog.ports import LogReader
from llog.stores.meta import ABSENT, after, scan


class GroupLag(msgspec.Struct, frozen=True, kw_only=True):
    """`lag` counts the records that the group has yet to read, without those that retention took before it came."""

    topic: str
    partition: int
    offset: int
    next_offset: int
    lag: int


async def commit(log: Log, group: str, tp: TopicPartition, offset: int, reader: LogReader | None = None) -> int:
    """Moves the group on to `offset` and returns where it is then: further, if somebody committed more; never back.

    `OffsetOutOfRange` beyond the partition's next offset, for such a group would pass over records unseen.
    """
    key = await _key(log, group, tp)
    await _check_offset(reader or Reader(log), tp, offset)
    while True:
        found = await log.meta.get(key)
        if found is not None:
            stored = decode(GroupOffset, found.value, key).offset
            if stored >= offset:
                return stored
        try:
            await log.meta.put(key, _record(log, offset), expected=ABSENT if found is None else found.version)
        except (VersionMismatch, OutcomeUnknown):
            continue
        return offset


async def position(log: Log, group: str, tp: TopicPartition) -> int | None:
    """The next offset that the group wants, or None if it never committed one here."""
    found = await log.meta.get(await _key(log, group, tp))
    return None if found is None else decode(GroupOffset, found.value, found.key).offset


async def reset(log: Log, group: str, tp: TopicPartition, offset: int, reader: LogReader | None = None) -> None:
    """Moves the group to `offset`, back as well: for operators, while the group's consumers are stopped."""
    key = await _key(log, group, tp)
    await _check_offset(reader or Reader(log), tp, offset)
    await log.meta.put(key, _record(log, offset))


async def groups(log: Log) -> list[str]:
    """The names of all groups, in order: one lookup each, however many partitions they have."""
    names: list[str] = []
    start, end = GROUPS, after(GROUPS)
    while found := await log.meta.keys(start, end, 1):
        name = found[0].removeprefix(GROUPS).split("/", 1)[0]
        names.append(name)
        start = after(f"{GROUPS}{name}/")
    return names


async def lag(log: Log, group: str, reader: LogReader | None = None) -> list[GroupLag]:
    """Where the group is in every partition it has committed to, by directory and partition; deleted topics are left out.

    So are topics that the reader cannot read, being on disk.
    """
    prefix = f"{GROUPS}{check_group_name(group)}/"
    topics = {topic.directory: topic for topic in await Catalog(log).topics()}
    reader = reader or Reader(log)
    lags = []
    async for found in scan(log.meta, prefix):
        directory, _, number = found.key.removeprefix(prefix).partition("/")
        topic = topics.get(directory)
        if topic is None:
            continue
        tp = TopicPartition(topic.name, int(number))
        offset = decode(GroupOffset, found.value, found.key).offset
        try:
            log_start_offset, next_offset = await reader.bounds(tp)
        except (TopicNotFound, PartitionNotInitialized, WrongEngine, TopicElsewhere):
            continue  # deleted just now, or not to be had here
        behind = max(0, next_offset - max(offset, log_start_offset))
        lags.append(
            GroupLag(topic=tp.topic, partition=tp.partition, offset=offset, next_offset=next_offset, lag=behind)
        )
    return lags


def check_group_name(name: str) -> str:
    """Group names follow the rule of topic names."""
    try:
        return check_topic_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(str(error).replace("topic name", "group name", 1)) from None


async def _key(log: Log, group: str, tp: TopicPartition) -> str:
    check_group_name(group)
    return group_key(group, await Catalog(log).directory(tp), tp.partition)


async def _check_offset(reader: LogReader, tp: TopicPartition, offset: int) -> None:
    if offset < FIRST_OFFSET:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: {offset}")
    bounds = await reader.bounds(tp)
    if offset > bounds.next_offset:
        raise OffsetOutOfRange(str(tp), offset, bounds.log_start_offset, bounds.next_offset)


def _record(log: Log, offset: int) -> bytes:
    return encode(GroupOffset(offset=offset, updated_ms=log.runtime.now_ms()))
