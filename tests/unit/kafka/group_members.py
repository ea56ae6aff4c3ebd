"""Members of a Kafka group under a clock that tests set, without a network."""

from __future__ import annotations

import random
from collections.abc import Sequence

from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups.group import INITIAL_DELAY_MS, Group, State
from llog.kafka.groups.membership import (
    AssignmentProtocol,
    Identity,
    JoinAnswer,
    JoinRequest,
    SyncAnswer,
    SyncRequest,
)

SESSION_MS = 10_000
REBALANCE_MS = 60_000


def join_request(
    member_id: str = "",
    instance_id: str | None = None,
    *,
    protocols: Sequence[str] = ("range",),
    metadata: bytes = b"topics",
    needs_known_id: bool = False,
    may_skip_assignment: bool = False,
    session_ms: int = SESSION_MS,
    protocol_type: str = "consumer",
    client_id: str = "app",
) -> JoinRequest:
    return JoinRequest(
        Identity(member_id, instance_id),
        client_id,
        "127.0.0.1",
        session_ms,
        REBALANCE_MS,
        protocol_type,
        tuple(AssignmentProtocol(name, metadata) for name in protocols),
        needs_known_id,
        may_skip_assignment,
    )


class Room:
    """One group, and what its members were answered."""

    def __init__(self) -> None:
        self.group = Group("g", random.Random(0))
        self.now_ms = 1_000_000
        self.recorded = 0
        """The highest generation that began."""

    def wait(self, ms: int) -> None:
        """Let time pass, and whatever becomes due happen."""
        end_ms = self.now_ms + ms
        while True:
            self.settle()
            due_ms = self.group.next_deadline_ms()
            if due_ms is None or due_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, due_ms)
            self.group.tick(self.now_ms)
        self.now_ms = end_ms

    def settle(self) -> None:
        if self.group.is_ready(self.now_ms):
            self.recorded += 1
            self.group.begin_generation(self.recorded, self.now_ms)

    def join(self, request: JoinRequest | None = None) -> list[JoinAnswer]:
        answers: list[JoinAnswer] = []
        self.group.join(request or join_request(), self.now_ms, answers.append)
        self.settle()
        return answers

    def sync(
        self, joined: JoinAnswer, assignments: dict[str, bytes] | None = None, instance_id: str | None = None
    ) -> list[SyncAnswer]:
        answers: list[SyncAnswer] = []
        request = SyncRequest(
            Identity(joined.member_id, instance_id), joined.generation, "consumer", joined.protocol, assignments or {}
        )
        self.group.sync(request, self.now_ms, answers.append)
        self.settle()
        return answers

    def heartbeat(self, joined: JoinAnswer, instance_id: str | None = None) -> ErrorCode:
        return self.group.heartbeat(Identity(joined.member_id, instance_id), joined.generation, self.now_ms)

    def leave(self, member_id: str, instance_id: str | None = None) -> ErrorCode:
        error = self.group.leave(Identity(member_id, instance_id), self.now_ms)
        self.settle()
        return error

    def commit(self, member_id: str, generation: int) -> ErrorCode:
        return self.group.check_commit(Identity(member_id), generation, self.now_ms)

    def start(self, *instances: str | None, protocols: Sequence[str] = ("range",)) -> list[JoinAnswer]:
        """A stable group with these members, in which each one's assignment is its number."""
        waiting = [self.join(join_request(instance_id=each, protocols=protocols)) for each in instances]
        self.wait(INITIAL_DELAY_MS)
        joined = [only(answers) for answers in waiting]
        for number in reversed(range(len(joined))):  # the leader comes last
            assignments = {each.member_id: str(place).encode() for place, each in enumerate(joined)}
            self.sync(joined[number], assignments if number == 0 else None, instances[number])
        assert self.group.state is State.STABLE
        return joined


def only(answers: list[JoinAnswer]) -> JoinAnswer:
    """The one answer, which is no error."""
    (answer,) = answers
    assert answer.error is ErrorCode.NONE
    return answer
