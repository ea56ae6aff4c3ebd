"""The metadata keys of `object` partitions; topics of other engines have none.

Every part of the engine finds its keys here.
"""

from __future__ import annotations

from llog.errors import WrongEngine
from llog.log.catalog import OBJECT, Catalog, check_partition
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition


async def find_keys(log: Log, tp: TopicPartition) -> PartitionKeys:
    """Look the topic up in the catalog and return the partition's keys; raise `WrongEngine` if the topic is of another
    engine.
    """
    return keys_in(await Catalog(log).get(tp.topic), tp.partition)


def keys_in(topic: Topic, partition: int) -> PartitionKeys:
    """Return the keys of a partition of this topic; raise `WrongEngine` if the topic is of another engine."""
    check_partition(topic, partition)
    if topic.engine != OBJECT:
        raise WrongEngine(
            f"topic {topic.name!r} is of engine {topic.engine!r}, and this works only on engine {OBJECT!r}: its "
            "records are files of one machine. Read and write them there with `llog`, or from anywhere through the "
            "broker that runs there"
        )
    return PartitionKeys(topic.directory, partition)
