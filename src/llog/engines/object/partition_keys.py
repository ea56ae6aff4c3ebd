"""The keys of partitions of engine `object` in the metadata store; topics of other engines have none."""

from __future__ import annotations

from llog.errors import WrongEngine
from llog.log.catalog import OBJECT, Catalog, check_partition
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition


async def find_keys(log: Log, tp: TopicPartition) -> PartitionKeys:
    """The keys of a partition that the catalog names; `WrongEngine` if its topic is of another engine."""
    return keys_in(await Catalog(log).get(tp.topic), tp.partition)


def keys_in(topic: Topic, partition: int) -> PartitionKeys:
    """The keys of a partition of this topic; `WrongEngine` if it is of another engine."""
    check_partition(topic, partition)
    if topic.engine != OBJECT:
        raise WrongEngine(
            f"topic {topic.name!r} is of engine {topic.engine!r}, and this works on engine {OBJECT!r} only: its "
            "records are files of one "
            "machine, to be read and written there by `llog`, or from anywhere through the broker that runs there"
        )
    return PartitionKeys(topic.directory, partition)
