"""The requests of group members and administrators, and the coordinator's answers, as Kafka's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llog.errors import InvalidArgument
from llog.groups.records import check_group_name
from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups.coordinator import GroupCoordinator
from llog.kafka.groups.group import State
from llog.kafka.groups.membership import AssignmentProtocol, GroupView, Identity, JoinRequest, SyncRequest
from llog.kafka.groups.offsets import Commit
from llog.kafka.handlers import Caller, Handlers
from llog.kafka.messages.delete_groups import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse
from llog.kafka.messages.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from llog.kafka.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse
from llog.kafka.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from llog.kafka.messages.join_group import JoinGroupRequest, JoinGroupResponse, JoinGroupResponseMember
from llog.kafka.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberResponse
from llog.kafka.messages.list_groups import ListedGroup, ListGroupsRequest, ListGroupsResponse
from llog.kafka.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from llog.kafka.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from llog.kafka.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from llog.kafka.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from llog.kafka.nodes import Cluster
from llog.model import TopicPartition

_GROUP: Final = 0
"""The key type of groups; others are those of transactions and share groups."""
_CLASSIC: Final = "classic"
_NOWHERE: Final = Commit(-1)
_ByTopic = dict[str, dict[int, Commit | ErrorCode]]


class GroupHandlers:
    def __init__(self, coordinator: GroupCoordinator, cluster: Cluster) -> None:
        self._coordinator = coordinator
        self._cluster = cluster

    def handlers(self) -> Handlers:
        return {
            8: self.offset_commit,
            9: self.offset_fetch,
            10: self.find_coordinator,
            11: self.join_group,
            12: self.heartbeat,
            13: self.leave_group,
            14: self.sync_group,
            15: self.describe_groups,
            16: self.list_groups,
            42: self.delete_groups,
            47: self.offset_delete,
        }

    # --- members

    async def find_coordinator(self, request: FindCoordinatorRequest, caller: Caller) -> FindCoordinatorResponse:
        if caller.version >= 4:
            found = [self._locate(key, request.key_type) for key in request.coordinator_keys]
            return FindCoordinatorResponse(coordinators=found)
        one = self._locate(request.key, request.key_type)
        return FindCoordinatorResponse(
            error_code=one.error_code,
            error_message=one.error_message,
            node_id=one.node_id,
            host=one.host,
            port=one.port,
        )

    def _locate(self, key: str, key_type: int) -> Coordinator:
        refused = Coordinator(key=key, node_id=-1, port=-1)
        if key_type != _GROUP:
            refused.error_code = ErrorCode.INVALID_REQUEST
            refused.error_message = "llog coordinates consumer groups only: it has no transactions and no share groups"
            return refused
        try:
            check_group_name(key)
        except InvalidArgument as error:
            refused.error_code, refused.error_message = ErrorCode.INVALID_GROUP_ID, str(error)
            return refused
        node = self._cluster.coordinator_of(key)
        if node is None:
            refused.error_code = ErrorCode.COORDINATOR_NOT_AVAILABLE
            refused.error_message = "no broker is known to be alive: try again"
            return refused
        return Coordinator(key=key, node_id=node.id, host=node.host, port=node.port, error_message=None)

    async def join_group(self, request: JoinGroupRequest, caller: Caller) -> JoinGroupResponse:
        rebalance_timeout_ms = request.rebalance_timeout_ms
        answer = await self._coordinator.join(
            request.group_id,
            JoinRequest(
                Identity(request.member_id, request.group_instance_id),
                caller.client_id,
                caller.host,
                request.session_timeout_ms,
                request.session_timeout_ms if rebalance_timeout_ms < 0 else rebalance_timeout_ms,
                request.protocol_type,
                tuple(AssignmentProtocol(each.name, bytes(each.metadata)) for each in request.protocols),
                needs_known_id=caller.version >= 4,
                may_skip_assignment=caller.version >= 9,
            ),
        )
        return JoinGroupResponse(
            error_code=answer.error,
            generation_id=answer.generation,
            protocol_type=answer.protocol_type,
            protocol_name="" if answer.protocol is None and caller.version < 7 else answer.protocol,
            leader=answer.leader,
            skip_assignment=answer.skip_assignment,
            member_id=answer.member_id,
            members=[
                JoinGroupResponseMember(
                    member_id=each.member.member_id, group_instance_id=each.member.instance_id, metadata=each.metadata
                )
                for each in answer.members
            ],
        )

    async def sync_group(self, request: SyncGroupRequest, _: Caller) -> SyncGroupResponse:
        answer = await self._coordinator.sync(
            request.group_id,
            SyncRequest(
                Identity(request.member_id, request.group_instance_id),
                request.generation_id,
                request.protocol_type,
                request.protocol_name,
                {each.member_id: bytes(each.assignment) for each in request.assignments},
            ),
        )
        return SyncGroupResponse(
            error_code=answer.error,
            protocol_type=answer.protocol_type,
            protocol_name=answer.protocol,
            assignment=answer.assignment,
        )

    async def heartbeat(self, request: HeartbeatRequest, _: Caller) -> HeartbeatResponse:
        identity = Identity(request.member_id, request.group_instance_id)
        return HeartbeatResponse(
            error_code=self._coordinator.heartbeat(request.group_id, identity, request.generation_id)
        )

    async def leave_group(self, request: LeaveGroupRequest, caller: Caller) -> LeaveGroupResponse:
        identities = [Identity(each.member_id, each.group_instance_id) for each in request.members]
        if caller.version < 3:
            identities = [Identity(request.member_id)]
        error, errors = self._coordinator.leave(request.group_id, identities)
        if caller.version < 3:
            return LeaveGroupResponse(error_code=error or errors[0])
        return LeaveGroupResponse(
            error_code=error,
            members=[
                MemberResponse(member_id=each.member_id, group_instance_id=each.instance_id, error_code=code)
                for each, code in zip(identities, errors, strict=False)
            ],
        )

    # --- offsets

    async def offset_commit(self, request: OffsetCommitRequest, _: Caller) -> OffsetCommitResponse:
        commits = {
            TopicPartition(topic.name, each.partition_index): Commit(
                each.committed_offset, each.committed_leader_epoch, each.committed_metadata or ""
            )
            for topic in request.topics
            for each in topic.partitions
        }
        results = await self._coordinator.commit(
            request.group_id,
            Identity(request.member_id, request.group_instance_id),
            request.generation_id_or_member_epoch,
            commits,
        )
        return OffsetCommitResponse(
            topics=[
                OffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=[
                        OffsetCommitResponsePartition(
                            partition_index=each.partition_index,
                            error_code=results[TopicPartition(topic.name, each.partition_index)],
                        )
                        for each in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    async def offset_fetch(self, request: OffsetFetchRequest, caller: Caller) -> OffsetFetchResponse:
        if caller.version >= 8:
            return OffsetFetchResponse(
                groups=[await self._fetch_group(each.group_id, each.topics) for each in request.groups]
            )
        error, found = await self._fetch(request.group_id, request.topics)
        if error and caller.version < 2:  # only partitions have errors then
            for partitions in found.values():
                partitions.update(dict.fromkeys(partitions, error))
        return OffsetFetchResponse(
            error_code=error,
            topics=[
                OffsetFetchResponseTopic(
                    name=name,
                    partitions=[
                        OffsetFetchResponsePartition(
                            partition_index=partition,
                            committed_offset=_commit(each).offset,
                            committed_leader_epoch=_commit(each).leader_epoch,
                            metadata=_commit(each).metadata,
                            error_code=_error(each),
                        )
                        for partition, each in partitions.items()
                    ],
                )
                for name, partitions in found.items()
            ],
        )

    async def _fetch_group(
        self, group: str, topics: Sequence[OffsetFetchRequestTopics] | None
    ) -> OffsetFetchResponseGroup:
        error, found = await self._fetch(group, topics)
        return OffsetFetchResponseGroup(
            group_id=group,
            error_code=error,
            topics=[
                OffsetFetchResponseTopics(
                    name=name,
                    partitions=[
                        OffsetFetchResponsePartitions(
                            partition_index=partition,
                            committed_offset=_commit(each).offset,
                            committed_leader_epoch=_commit(each).leader_epoch,
                            metadata=_commit(each).metadata,
                            error_code=_error(each),
                        )
                        for partition, each in partitions.items()
                    ],
                )
                for name, partitions in found.items()
            ],
        )

    async def _fetch(
        self, group: str, topics: Sequence[OffsetFetchRequestTopic] | Sequence[OffsetFetchRequestTopics] | None
    ) -> tuple[ErrorCode, _ByTopic]:
        """Return the error of the request as a whole, and what was asked for, by topic and partition."""
        wanted: list[TopicPartition] | None = None
        if topics is not None:
            wanted = [TopicPartition(topic.name, each) for topic in topics for each in topic.partition_indexes]
        found = await self._coordinator.fetch(group, wanted)
        by_topic: _ByTopic = {}
        if isinstance(found, ErrorCode):
            for tp in wanted or ():
                by_topic.setdefault(tp.topic, {})[tp.partition] = _NOWHERE
            return found, by_topic
        for tp in found if wanted is None else wanted:
            by_topic.setdefault(tp.topic, {})[tp.partition] = found.get(tp, _NOWHERE)
        return ErrorCode.NONE, by_topic

    async def offset_delete(self, request: OffsetDeleteRequest, _: Caller) -> OffsetDeleteResponse:
        wanted = [
            TopicPartition(topic.name, each.partition_index) for topic in request.topics for each in topic.partitions
        ]
        results = await self._coordinator.delete_offsets(request.group_id, wanted)
        if isinstance(results, ErrorCode):
            return OffsetDeleteResponse(error_code=results)
        return OffsetDeleteResponse(
            topics=[
                OffsetDeleteResponseTopic(
                    name=topic.name,
                    partitions=[
                        OffsetDeleteResponsePartition(
                            partition_index=each.partition_index,
                            error_code=results[TopicPartition(topic.name, each.partition_index)],
                        )
                        for each in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    # --- administration

    async def describe_groups(self, request: DescribeGroupsRequest, caller: Caller) -> DescribeGroupsResponse:
        return DescribeGroupsResponse(
            groups=[_described(name, await self._coordinator.describe(name), caller.version) for name in request.groups]
        )

    async def list_groups(self, request: ListGroupsRequest, _: Caller) -> ListGroupsResponse:
        found = await self._coordinator.list()
        if isinstance(found, ErrorCode):
            return ListGroupsResponse(error_code=found)
        states = {each.lower() for each in request.states_filter}
        types = {each.lower() for each in request.types_filter}
        if types and _CLASSIC not in types:
            found = []
        return ListGroupsResponse(
            groups=[
                ListedGroup(
                    group_id=name, protocol_type=view.protocol_type, group_state=view.state, group_type=_CLASSIC
                )
                for name, view in found
                if not states or view.state.lower() in states
            ]
        )

    async def delete_groups(self, request: DeleteGroupsRequest, _: Caller) -> DeleteGroupsResponse:
        return DeleteGroupsResponse(
            results=[
                DeletableGroupResult(group_id=name, error_code=await self._coordinator.delete(name))
                for name in request.groups_names
            ]
        )


def _commit(found: Commit | ErrorCode) -> Commit:
    return _NOWHERE if isinstance(found, ErrorCode) else found


def _error(found: Commit | ErrorCode) -> ErrorCode:
    return found if isinstance(found, ErrorCode) else ErrorCode.NONE


def _described(name: str, view: GroupView | ErrorCode, version: int) -> DescribedGroup:
    if isinstance(view, ErrorCode):
        return DescribedGroup(group_id=name, error_code=view)
    described = DescribedGroup(
        group_id=name,
        group_state=view.state,
        protocol_type=view.protocol_type,
        protocol_data=view.protocol,
        members=[
            DescribedGroupMember(
                member_id=each.member.member_id,
                group_instance_id=each.member.instance_id,
                client_id=each.client_id,
                client_host=f"/{each.host}",  # with the slash that Java puts before addresses
                member_metadata=each.metadata,
                member_assignment=each.assignment,
            )
            for each in view.members
        ],
    )
    if view.state == State.DEAD and version >= 6:
        described.error_code = ErrorCode.GROUP_ID_NOT_FOUND
        described.error_message = f"there is no group {name!r}"
    return described
