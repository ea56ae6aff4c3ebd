"""What members of a Kafka group send and receive, and what their coordinator remembers of each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llog.kafka.error_codes import ErrorCode


class AssignmentProtocol(NamedTuple):
    """A way to assign partitions that a member knows, with what its leader needs to know of the member.

    The broker understands neither: members agree on a protocol by votes, and the leader of the group assigns.
    """

    name: str
    metadata: bytes


class Identity(NamedTuple):
    """Names a member. Its coordinator chose the id; a static member also has an instance id of its own choice."""

    member_id: str
    instance_id: str | None = None


class JoinRequest(NamedTuple):
    member: Identity
    client_id: str
    host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[AssignmentProtocol, ...]
    needs_known_id: bool = False
    """Whether a member without an id is sent back with one, so that a client that gives up leaves no member behind."""
    may_skip_assignment: bool = False
    """Whether the client understands that it leads the group and shall not assign."""


class JoinedMember(NamedTuple):
    member: Identity
    metadata: bytes


class JoinAnswer(NamedTuple):
    error: ErrorCode
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    """All members, for the leader; none for others."""
    skip_assignment: bool = False


class SyncRequest(NamedTuple):
    member: Identity
    generation: int
    protocol_type: str | None
    """None if the client does not say: then it is not compared."""
    protocol: str | None
    assignments: dict[str, bytes]
    """By member id; only the leader has any."""


class SyncAnswer(NamedTuple):
    error: ErrorCode
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class MemberView(NamedTuple):
    """A member as administrators see it."""

    member: Identity
    client_id: str
    host: str
    metadata: bytes
    assignment: bytes


class GroupView(NamedTuple):
    """A group as administrators see it."""

    state: str
    protocol_type: str = ""
    protocol: str = ""
    members: tuple[MemberView, ...] = ()


class Member:
    """A member of a group. While it waits for an answer to a join or a sync, its session does not end."""

    def __init__(self, member_id: str, request: JoinRequest) -> None:
        self.id = member_id
        self.instance_id = request.member.instance_id
        self.client_id = request.client_id
        self.host = request.host
        self.session_timeout_ms = request.session_timeout_ms
        self.rebalance_timeout_ms = request.rebalance_timeout_ms
        self.protocols = request.protocols
        self.assignment = b""
        self.deadline_ms = 0
        self.answer_join: Callable[[JoinAnswer], None] | None = None
        self.answer_sync: Callable[[SyncAnswer], None] | None = None
        self.has_synced = False

    @property
    def identity(self) -> Identity:
        return Identity(self.id, self.instance_id)

    @property
    def is_static(self) -> bool:
        return self.instance_id is not None

    @property
    def is_waiting(self) -> bool:
        return self.answer_join is not None or self.answer_sync is not None

    def renew(self, now_ms: int) -> None:
        self.deadline_ms = now_ms + self.session_timeout_ms

    def update(self, request: JoinRequest) -> None:
        """Take over what the member says when it joins again."""
        self.client_id, self.host = request.client_id, request.host
        self.session_timeout_ms = request.session_timeout_ms
        self.rebalance_timeout_ms = request.rebalance_timeout_ms
        self.protocols = request.protocols

    def metadata(self, protocol: str | None) -> bytes:
        return next((each.metadata for each in self.protocols if each.name == protocol), b"")

    def vote(self, candidates: frozenset[str]) -> str:
        """Return the candidate that the member prefers: it lists its protocols in the order of its preference."""
        return next(each.name for each in self.protocols if each.name in candidates)

    def finish_join(self, answer: JoinAnswer) -> None:
        """Answer the join that the member waits for, if it waits for one."""
        if self.answer_join is not None:
            waiting, self.answer_join = self.answer_join, None
            waiting(answer)

    def finish_sync(self, answer: SyncAnswer) -> None:
        """Answer the sync that the member waits for, if it waits for one."""
        if self.answer_sync is not None:
            waiting, self.answer_sync = self.answer_sync, None
            waiting(answer)
