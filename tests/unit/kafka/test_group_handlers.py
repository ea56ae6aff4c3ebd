"""The requests for groups in every version, as bytes, through their handlers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups.group import INITIAL_DELAY_MS
from llog.kafka.groups.handlers import GroupHandlers
from llog.kafka.handlers import Caller
from llog.kafka.messages import APIS, Message, decode_header, decode_request, decode_response, encode_request
from llog.kafka.messages import encode_response as encode_answer
from llog.kafka.messages.delete_groups import DeleteGroupsRequest
from llog.kafka.messages.describe_groups import DescribeGroupsRequest
from llog.kafka.messages.find_coordinator import FindCoordinatorRequest
from llog.kafka.messages.heartbeat import HeartbeatRequest
from llog.kafka.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from llog.kafka.messages.leave_group import LeaveGroupRequest, MemberIdentity
from llog.kafka.messages.list_groups import ListGroupsRequest
from llog.kafka.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from llog.kafka.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from llog.kafka.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from llog.kafka.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from tests.unit.kafka.group_brokers import Broker, settle
from tests.unit.world import TP, World

_HIGHEST = {8: 9, 9: 9}
"""With topic ids, which llog does not offer, these two go further."""


class Client:
    """Sends requests in one version each, as bytes; lower or higher ones where an API does not have it."""

    def __init__(self, broker: Broker, version: int) -> None:
        self.broker = broker
        self.version = version
        self.handlers = GroupHandlers(broker.coordinator, broker.view).handlers()

    def version_of(self, key: int) -> int:
        return max(APIS[key].lowest, min(self.version, _HIGHEST.get(key, APIS[key].highest)))

    async def send(self, key: int, request: Message) -> Any:
        api, version = APIS[key], self.version_of(key)
        frame = memoryview(b"".join(encode_request(api, version, 7, "app", request)))[4:]
        header, body = decode_header(frame)
        caller = Caller(header.client_id or "", "127.0.0.1", version)
        answer = await self.handlers[key](decode_request(api, version, body), caller)
        sent = memoryview(b"".join(encode_answer(api, version, 7, answer)))[4:]
        correlation_id, message = decode_response(api, version, sent)
        assert correlation_id == 7
        return message

    async def join(self, member_id: str = "") -> Any:
        request = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=10_000,
            member_id=member_id,
            protocol_type="consumer",
            protocols=[JoinGroupRequestProtocol(name="range", metadata=b"topics")],
        )
        joining = asyncio.create_task(self.send(11, request))
        await settle()
        await self.broker.pass_time(INITIAL_DELAY_MS)
        return await joining

    async def committed(self) -> list[tuple[str, int, int, str | None, int]]:
        """Topic, partition, offset, metadata and error of everything that the group has committed."""
        if self.version_of(9) >= 8:
            answer = await self.send(9, OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=None)]))
            [group] = answer.groups
            assert (group.group_id, group.error_code) == ("g", 0)
            topics = group.topics
        else:
            answer = await self.send(9, OffsetFetchRequest(group_id="g", topics=None))
            assert answer.error_code == 0
            topics = answer.topics
        return [
            (topic.name, each.partition_index, each.committed_offset, each.metadata, each.error_code)
            for topic in topics
            for each in topic.partitions
        ]


@pytest.fixture
async def broker() -> Broker:
    world = World()
    await world.catalog.create(TP.topic, 4)
    return Broker(world)


def _commit(member_id: str, generation: int, offset: int) -> OffsetCommitRequest:
    partition = OffsetCommitRequestPartition(partition_index=1, committed_offset=offset, committed_metadata="mine")
    return OffsetCommitRequest(
        group_id="g",
        member_id=member_id,
        generation_id_or_member_epoch=generation,
        topics=[OffsetCommitRequestTopic(name=TP.topic, partitions=[partition])],
    )


@pytest.mark.parametrize("version", range(10))
async def test_a_member_lives_through_its_life_in_every_version(broker: Broker, version: int) -> None:
    client = Client(broker, version)
    joined = await client.join()
    if version >= 4:
        assert joined.error_code == ErrorCode.MEMBER_ID_REQUIRED
        joined = await client.join(joined.member_id)
    assert (joined.error_code, joined.generation_id, joined.protocol_name) == (0, 1, "range")
    assert joined.leader == joined.member_id
    assert [(each.member_id, bytes(each.metadata)) for each in joined.members] == [(joined.member_id, b"topics")]
    assignment = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=b"all")
    synced = await client.send(
        14, SyncGroupRequest(group_id="g", generation_id=1, member_id=joined.member_id, assignments=[assignment])
    )
    assert (synced.error_code, bytes(synced.assignment)) == (0, b"all")
    beat = await client.send(12, HeartbeatRequest(group_id="g", generation_id=1, member_id=joined.member_id))
    assert beat.error_code == 0
    committed = await client.send(8, _commit(joined.member_id, 1, 7))
    assert [each.error_code for topic in committed.topics for each in topic.partitions] == [0]
    if version >= 2:
        assert await client.committed() == [(TP.topic, 1, 7, "mine", 0)]
    described = (await client.send(15, DescribeGroupsRequest(groups=["g"]))).groups[0]
    assert (described.group_state, described.protocol_data) == ("Stable", "range")
    [member] = described.members
    assert (member.client_id, member.client_host, bytes(member.member_assignment)) == ("app", "/127.0.0.1", b"all")
    listed = await client.send(16, ListGroupsRequest())
    assert [(each.group_id, each.protocol_type) for each in listed.groups] == [("g", "consumer")]
    refused = await client.send(42, DeleteGroupsRequest(groups_names=["g", "nobody"]))
    assert [each.error_code for each in refused.results] == [ErrorCode.NON_EMPTY_GROUP, ErrorCode.GROUP_ID_NOT_FOUND]
    left = await client.send(
        13,
        LeaveGroupRequest(
            group_id="g", member_id=joined.member_id, members=[MemberIdentity(member_id=joined.member_id)]
        )
        if client.version_of(13) < 3
        else LeaveGroupRequest(group_id="g", members=[MemberIdentity(member_id=joined.member_id)]),
    )
    assert left.error_code == 0
    assert [each.error_code for each in left.members] == ([0] if version >= 3 else [])
    deleted = await client.send(42, DeleteGroupsRequest(groups_names=["g"]))
    assert [each.error_code for each in deleted.results] == [0]


@pytest.mark.parametrize("version", range(1, 10))
async def test_partitions_without_a_committed_offset_are_fetched_as_such(broker: Broker, version: int) -> None:
    client = Client(broker, version)
    await client.send(8, _commit("", -1, 3))
    if version >= 8:
        topics = [OffsetFetchRequestTopics(name=TP.topic, partition_indexes=[0, 1])]
        request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=topics)])
        [topic] = (await client.send(9, request)).groups[0].topics
    else:
        request = OffsetFetchRequest(
            group_id="g", topics=[OffsetFetchRequestTopic(name=TP.topic, partition_indexes=[0, 1])]
        )
        [topic] = (await client.send(9, request)).topics
    found = [(each.partition_index, each.committed_offset, each.metadata) for each in topic.partitions]
    assert found == [(0, -1, ""), (1, 3, "mine")]


@pytest.mark.parametrize("version", range(1, 10))
async def test_a_fetch_from_a_broker_that_does_not_coordinate_says_so(broker: Broker, version: int) -> None:
    broker.view.coordinator = 2
    client = Client(broker, version)
    if version >= 8:
        request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=None)])
        assert (await client.send(9, request)).groups[0].error_code == ErrorCode.NOT_COORDINATOR
        return
    request = OffsetFetchRequest(group_id="g", topics=[OffsetFetchRequestTopic(name=TP.topic, partition_indexes=[0])])
    answer = await client.send(9, request)
    if version >= 2:
        assert answer.error_code == ErrorCode.NOT_COORDINATOR
    else:
        assert [each.error_code for each in answer.topics[0].partitions] == [ErrorCode.NOT_COORDINATOR]


@pytest.mark.parametrize("version", range(7))
async def test_the_coordinator_is_found_in_every_version(broker: Broker, version: int) -> None:
    broker.view.coordinator = 2
    client = Client(broker, version)
    if version >= 4:
        found = (await client.send(10, FindCoordinatorRequest(coordinator_keys=["g", "a/b"]))).coordinators
        assert [(each.key, each.error_code) for each in found] == [("g", 0), ("a/b", ErrorCode.INVALID_GROUP_ID)]
        assert "a/b" in found[1].error_message
    else:
        found = [await client.send(10, FindCoordinatorRequest(key="g"))]
        refused = await client.send(10, FindCoordinatorRequest(key="a/b"))
        assert refused.error_code == ErrorCode.INVALID_GROUP_ID
    assert (found[0].node_id, found[0].host, found[0].port) == (2, "127.0.0.1", 9002)


async def test_no_coordinator_is_found_for_transactions_or_without_brokers(broker: Broker) -> None:
    client = Client(broker, 4)
    [refused] = (await client.send(10, FindCoordinatorRequest(key_type=1, coordinator_keys=["t"]))).coordinators
    assert refused.error_code == ErrorCode.INVALID_REQUEST
    assert "no transactions" in refused.error_message
    broker.view.coordinator = None
    [refused] = (await client.send(10, FindCoordinatorRequest(coordinator_keys=["g"]))).coordinators
    assert refused.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE


async def test_groups_are_listed_by_state_and_type(broker: Broker) -> None:
    client = Client(broker, 5)
    await client.send(8, _commit("", -1, 3))
    for request, expected in (
        (ListGroupsRequest(), ["g"]),
        (ListGroupsRequest(states_filter=["empty"]), ["g"]),
        (ListGroupsRequest(states_filter=["Stable"]), []),
        (ListGroupsRequest(types_filter=["Classic"]), ["g"]),
        (ListGroupsRequest(types_filter=["consumer"]), []),
    ):
        listed = (await client.send(16, request)).groups
        assert [each.group_id for each in listed] == expected


async def test_a_group_that_does_not_exist_is_described_as_the_version_does_it(broker: Broker) -> None:
    for version, error in ((5, ErrorCode.NONE), (6, ErrorCode.GROUP_ID_NOT_FOUND)):
        [described] = (await Client(broker, version).send(15, DescribeGroupsRequest(groups=["nobody"]))).groups
        assert (described.group_state, described.error_code) == ("Dead", error)


async def test_committed_offsets_are_deleted_one_by_one(broker: Broker) -> None:
    client = Client(broker, 9)
    topics = [
        OffsetDeleteRequestTopic(
            name=TP.topic, partitions=[OffsetDeleteRequestPartition(partition_index=each) for each in (1, 9)]
        )
    ]
    request = OffsetDeleteRequest(group_id="g", topics=topics)
    assert (await client.send(47, request)).error_code == ErrorCode.GROUP_ID_NOT_FOUND
    await client.send(8, _commit("", -1, 3))
    [topic] = (await client.send(47, request)).topics
    assert [each.error_code for each in topic.partitions] == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert await client.committed() == []
