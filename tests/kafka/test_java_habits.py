"""What the Java client and its tools need, sent by hand in their versions: they cannot be had from PyPI."""

from __future__ import annotations

from typing import cast

from llog.kafka.error_codes import ErrorCode
from llog.kafka.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
)
from llog.kafka.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    TopicRequest,
)
from llog.kafka.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from llog.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from tests.kafka.requests import connected
from tests.kafka.serving import KafkaBroker, produce

TOPIC_RESOURCE = 2
LONG = 5
DEFAULT_SOURCE = 5


def test_described_partitions_have_lists_of_eligible_leaders_that_are_not_null(broker: KafkaBroker, topic: str) -> None:
    produce(broker.bootstrap, topic, [b"1"])
    with connected(broker) as client:
        request = DescribeTopicPartitionsRequest(topics=[TopicRequest(name=topic)])
        answer = cast(DescribeTopicPartitionsResponse, client.ask(75, 0, request))
    (partition,) = answer.topics[0].partitions
    assert (partition.eligible_leader_replicas, partition.last_known_elr) == ([], [])


def test_a_topic_is_found_by_its_id_whether_its_name_is_empty_or_left_out(broker: KafkaBroker, topic: str) -> None:
    produce(broker.bootstrap, topic, [b"1"])
    with connected(broker) as client:

        def ask(wanted: MetadataRequestTopic) -> MetadataResponse:
            return cast(MetadataResponse, client.ask(3, 13, MetadataRequest(topics=[wanted])))

        identity = ask(MetadataRequestTopic(name=topic)).topics[0].topic_id
        for name in ("", None):
            (found,) = ask(MetadataRequestTopic(name=name, topic_id=identity)).topics
            assert (found.name, found.topic_id, found.error_code) == (topic, identity, ErrorCode.NONE)
            (missing,) = ask(MetadataRequestTopic(name=name, topic_id=b"\x01" * 16)).topics
            assert (missing.topic_id, missing.error_code) == (b"\x01" * 16, ErrorCode.UNKNOWN_TOPIC_ID)


def test_offsets_that_only_tiered_storage_has_are_unknown(broker: KafkaBroker, topic: str) -> None:
    produce(broker.bootstrap, topic, [b"1", b"2"])
    with connected(broker) as client:
        found = []
        for timestamp in (-1, -2, -4, -5, -6):
            partition = ListOffsetsPartition(partition_index=0, timestamp=timestamp)
            request = ListOffsetsRequest(topics=[ListOffsetsTopic(name=topic, partitions=[partition])])
            (answer,) = cast(ListOffsetsResponse, client.ask(2, 11, request)).topics[0].partitions
            assert answer.error_code == ErrorCode.NONE
            found.append(answer.offset)
    assert found == [2, 0, 0, -1, -1]


def test_options_of_topics_have_types_and_say_where_they_come_from(broker: KafkaBroker, topic: str) -> None:
    produce(broker.bootstrap, topic, [b"1"])
    with connected(broker) as client:

        def describe(*, include_synonyms: bool) -> DescribeConfigsResourceResult:
            resource = DescribeConfigsResource(
                resource_type=TOPIC_RESOURCE, resource_name=topic, configuration_keys=["retention.ms"]
            )
            request = DescribeConfigsRequest(resources=[resource], include_synonyms=include_synonyms)
            (config,) = cast(DescribeConfigsResponse, client.ask(32, 4, request)).results[0].configs
            return config

        config = describe(include_synonyms=True)
        assert (config.config_type, config.config_source) == (LONG, DEFAULT_SOURCE)
        assert [(each.name, each.value, each.source) for each in config.synonyms] == [
            ("retention.ms", "-1", DEFAULT_SOURCE)
        ]
        assert describe(include_synonyms=False).synonyms == []
