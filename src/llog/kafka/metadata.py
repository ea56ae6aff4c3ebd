"""Metadata, DescribeCluster and DescribeTopicPartitions: which brokers there are, and whom to ask for a partition.

Any broker accepts requests for any partition, so "leaders" only spread the load. A topic whose engine has an owner is
served by its owner.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from llog.broker.auto_creation import AutoCreatingProducer
from llog.errors import InvalidArgument, LlogError, TopicNotFound
from llog.kafka.error_codes import PASSING, ErrorCode, error_code
from llog.kafka.handlers import Caller, Handlers
from llog.kafka.live_brokers import LiveBrokers
from llog.kafka.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from llog.kafka.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from llog.kafka.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from llog.kafka.nodes import Node
from llog.kafka.topic_ids import NO_TOPIC_ID, TopicIds
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.log.records import Topic

_KNOWN_MAX: Final = 10_000
"""The most topics that are remembered for the time when the catalog cannot be read."""
_ZONE: Final = re.compile(r"(?:zone_id|diskless_az)=([^,;\s]+)")


class MetadataHandlers:
    def __init__(
        self,
        log: Log,
        log_id: str,
        catalog: Catalog,
        producer: AutoCreatingProducer,
        brokers: LiveBrokers,
        topic_ids: TopicIds,
    ) -> None:
        self._log = log
        self._log_id = log_id
        self._catalog = catalog
        self._producer = producer
        self._brokers = brokers
        self._known: dict[str, Topic] = {}
        self._topic_ids = topic_ids

    def handlers(self) -> Handlers:
        return {3: self.metadata, 60: self.describe_cluster, 75: self.describe_topic_partitions}

    async def metadata(self, request: MetadataRequest, caller: Caller) -> MetadataResponse:
        wants_all = request.topics is None or (caller.version == 0 and not request.topics)
        topics: list[MetadataResponseTopic] = []
        if wants_all:
            topics = [await self._describe(topic, caller) for topic in await self._catalog.topics()]
        elif request.topics:
            # The Java client leaves the name empty where it gives an id; others leave it out.
            by_id = [topic.topic_id for topic in request.topics if topic.name is None or topic.topic_id != NO_TOPIC_ID]
            names = [topic.name for topic in request.topics if topic.name is not None and topic.topic_id == NO_TOPIC_ID]
            topics = await self._describe_names(names, caller, may_create=request.allow_auto_topic_creation)
            topics += await self._describe_ids(by_id, caller)
        return MetadataResponse(
            brokers=[
                MetadataResponseBroker(node_id=node.id, host=node.host, port=node.port, rack=node.rack or None)
                for node in self._brokers.nodes
            ],
            cluster_id=self._log_id,
            controller_id=self._brokers.me.id,
            topics=topics,
        )

    async def _describe_names(
        self, names: Sequence[str], caller: Caller, *, may_create: bool
    ) -> list[MetadataResponseTopic]:
        found = await self._find(names)
        missing = [name for name, topic in found.items() if isinstance(topic, TopicNotFound)]
        if missing and may_create:
            found |= await self._producer.find_topics(missing)
        return [
            MetadataResponseTopic(error_code=topic_error_code(topic), name=name)
            if isinstance(topic, LlogError)
            else await self._describe(topic, caller)
            for name, topic in found.items()
        ]

    async def _find(self, names: Sequence[str]) -> dict[str, Topic | LlogError]:
        """Return the topics of these names as the catalog has them, or had them if it cannot be read now.

        A client that got an error for a topic would forget the topic, and its group would rebalance.
        """
        try:
            found = await self._catalog.find(names)
        except PASSING:
            if not self._known.keys() >= set(names):
                raise
            return {name: self._known[name] for name in names}
        if len(self._known) + len(found) > _KNOWN_MAX:
            self._known.clear()
        self._known |= {name: topic for name, topic in found.items() if isinstance(topic, Topic)}
        return found

    async def _describe_ids(self, ids: Sequence[bytes], caller: Caller) -> list[MetadataResponseTopic]:
        if not ids:
            return []
        topics = {self._topic_ids.id_of(topic.directory): topic for topic in await self._catalog.topics()}
        return [
            await self._describe(topics[each], caller)
            if each in topics
            else MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=None, topic_id=each)
            for each in ids
        ]

    async def _describe(self, topic: Topic, caller: Caller) -> MetadataResponseTopic:
        self._topic_ids.note([topic])
        owner, code = await self._find_owner(topic)
        partitions = []
        for number in range(topic.partitions):
            leader = owner or self._brokers.leader_of(topic.directory, number, _zone_of(caller))
            nodes = [] if code else [leader.id]
            partitions.append(
                MetadataResponsePartition(
                    error_code=code,
                    partition_index=number,
                    leader_id=-1 if code else leader.id,
                    replica_nodes=nodes,
                    isr_nodes=nodes,
                )
            )
        return MetadataResponseTopic(
            error_code=ErrorCode.NONE,
            name=topic.name,
            topic_id=self._topic_ids.id_of(topic.directory),
            partitions=partitions,
        )

    async def _find_owner(self, topic: Topic) -> tuple[Node | None, ErrorCode]:
        """Return the broker that must be asked for the topic, if it is only one, and an error if there is none."""
        try:
            name = self._catalog.engine(topic).ownership_name(topic)
            if name is None or self._log.owners is None or self._log.owners.holds(name):
                return (None, ErrorCode.NONE) if name is None else (self._brokers.me, ErrorCode.NONE)
            lease = await self._log.owners.find(name)
        except LlogError as error:
            return None, topic_error_code(error)
        if lease is None:
            return self._brokers.me, ErrorCode.NONE  # nobody owns it yet: the first request makes this broker its owner
        owner = None if lease.address is None else self._brokers.owner(lease.address)
        return owner, ErrorCode.NONE if owner is not None else ErrorCode.LEADER_NOT_AVAILABLE

    async def describe_cluster(self, request: DescribeClusterRequest, _: Caller) -> DescribeClusterResponse:
        return DescribeClusterResponse(
            cluster_id=self._log_id,
            controller_id=self._brokers.me.id,
            brokers=[
                DescribeClusterBroker(broker_id=node.id, host=node.host, port=node.port, rack=node.rack or None)
                for node in self._brokers.nodes
            ],
        )

    async def describe_topic_partitions(
        self, request: DescribeTopicPartitionsRequest, caller: Caller
    ) -> DescribeTopicPartitionsResponse:
        """Describe topics in the order of their names, from the client's cursor on."""
        names = [topic.name for topic in request.topics]
        if not names:
            names = [topic.name for topic in await self._catalog.topics()]
        start = "" if request.cursor is None else request.cursor.topic_name
        names = sorted({name for name in names if name >= start})
        described = await self._describe_names(names, caller, may_create=False)
        return DescribeTopicPartitionsResponse(topics=[_as_described(topic) for topic in described])


def _as_described(topic: MetadataResponseTopic) -> DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponseTopic(
        error_code=topic.error_code,
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=[
            DescribeTopicPartitionsResponsePartition(
                error_code=partition.error_code,
                partition_index=partition.partition_index,
                leader_id=partition.leader_id,
                replica_nodes=partition.replica_nodes,
                isr_nodes=partition.isr_nodes,
                eligible_leader_replicas=[],  # the Java client does not expect null here
                last_known_elr=[],
            )
            for partition in topic.partitions
        ],
    )


def topic_error_code(error: LlogError) -> ErrorCode:
    if isinstance(error, InvalidArgument):
        return ErrorCode.INVALID_TOPIC_EXCEPTION
    # Clients take this code, of those of passing errors, for one after which they ask again.
    return ErrorCode.LEADER_NOT_AVAILABLE if isinstance(error, PASSING) else error_code(error)


def _zone_of(caller: Caller) -> str:
    """Return the zone that the client names in its id."""
    found = _ZONE.search(caller.client_id)
    return "" if found is None else found.group(1)
