"""One group of Kafka consumers as a state machine: Kafka's classic group protocol, without I/O.

Members join; when all have, a generation begins: one of them, the leader, gets the list of all, assigns partitions, and
sends the assignments, for which the others wait in a sync. Whenever a member comes, goes or dies, the members join
again. The broker understands neither subscriptions nor assignments, so eager and cooperative members look alike.

Every call gets the time from outside. Answers that have to wait go to the callback of their request; `next_deadline_ms`
says when `tick` has something to do. A generation begins in two steps, because its number has to be recorded first:
`is_ready` says that one may begin, and `begin_generation` begins it under the number that the caller recorded.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups.membership import (
    GroupView,
    Identity,
    JoinAnswer,
    JoinedMember,
    JoinRequest,
    Member,
    MemberView,
    SyncAnswer,
    SyncRequest,
)
from llog.kafka.groups.protocols import NAME_MAX, check_join, elect_protocol

INITIAL_DELAY_MS: Final = 100
"""How long an empty group waits for more members after each one that joins, so that consumers that are started together
share one rebalance. Kafka waits for 3 s; a person who starts one consumer would wait with it.
"""
INITIAL_DELAY_MS_MAX: Final = 3_000
"""How long an empty group waits in all, while members keep joining."""
MEMBERS_MAX: Final = 1_000


class State(StrEnum):
    """The states of a group, named as Kafka's tools show them."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    """Members join, and wait for the others."""
    COMPLETING = "CompletingRebalance"
    """A generation has begun, and its members wait for the leader's assignments."""
    STABLE = "Stable"
    DEAD = "Dead"


class Group:
    """The members of one group. `source` gives the members their ids."""

    def __init__(self, name: str, source: random.Random) -> None:
        self.name = name
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol: str | None = None
        self.leader: str | None = None
        self.members: dict[str, Member] = {}
        self._source = source
        self._statics: dict[str, str] = {}
        """The member id of each instance id."""
        self._expected: dict[str, int] = {}
        """The ids that were given to members which have yet to join with them, and until when each counts."""
        self._join_deadline_ms = 0
        self._initial_end_ms: int | None = None
        """Set while a group that was empty waits for more members: its delay ends here at the latest."""
        self._sync_deadline_ms: int | None = None

    @property
    def is_forgettable(self) -> bool:
        """Whether nobody is a member, or about to be one."""
        return self.state is State.EMPTY and not self._expected

    # --- requests

    def join(self, request: JoinRequest, now_ms: int, answer: Callable[[JoinAnswer], None]) -> None:
        """Let a new member join, or a known one join again; answer when the next generation begins, or at once."""
        others = [each for each in self.members.values() if each.id != request.member.member_id]
        error = check_join(request, self.protocol_type, others)
        if error:
            answer(JoinAnswer(error, request.member.member_id))
        elif not request.member.member_id:
            self._join_unknown(request, now_ms, answer)
        elif self._expected.pop(request.member.member_id, None) is not None:
            self._add(request.member.member_id, request, now_ms, answer)
        else:
            self._join_again(request, now_ms, answer)

    def sync(self, request: SyncRequest, now_ms: int, answer: Callable[[SyncAnswer], None]) -> None:
        """Take the leader's assignments, and answer with the member's own once they are known."""
        member = self._find(request.member)
        if isinstance(member, ErrorCode):
            answer(SyncAnswer(member))
        elif request.generation != self.generation:
            answer(SyncAnswer(ErrorCode.ILLEGAL_GENERATION))
        elif request.protocol_type not in (None, self.protocol_type) or request.protocol not in (None, self.protocol):
            answer(SyncAnswer(ErrorCode.INCONSISTENT_GROUP_PROTOCOL))
        elif self.state is State.PREPARING:
            answer(SyncAnswer(ErrorCode.REBALANCE_IN_PROGRESS))
        else:
            member.has_synced = True
            member.renew(now_ms)
            if self.state is State.STABLE:
                answer(self._synced(member))
                return
            member.finish_sync(SyncAnswer(ErrorCode.REBALANCE_IN_PROGRESS))
            member.answer_sync = answer
            if member.id == self.leader:
                self._assign(request.assignments, now_ms)

    def heartbeat(self, identity: Identity, generation: int, now_ms: int) -> ErrorCode:
        """Renew the member's session; the answer says whether the member has to join again."""
        member = self._find(identity)
        if isinstance(member, ErrorCode):
            return member
        if generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        member.renew(now_ms)
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is State.PREPARING else ErrorCode.NONE

    def leave(self, identity: Identity, now_ms: int) -> ErrorCode:
        """Remove a member. An instance id without a member id removes the static member, whoever it is."""
        if self._expected.pop(identity.member_id, None) is not None:
            return ErrorCode.NONE
        if identity.instance_id is not None and not identity.member_id:
            identity = Identity(self._statics.get(identity.instance_id, ""), identity.instance_id)
        member = self._find(identity)
        if isinstance(member, ErrorCode):
            return member
        self._remove([member], now_ms)
        return ErrorCode.NONE

    def check_commit(self, identity: Identity, generation: int, now_ms: int) -> ErrorCode:
        """Return whether a commit by this member is allowed, and renew its session if it is.

        A commit without a generation comes from a consumer without a group, or from an administrator: only an empty
        group lets it pass.
        """
        if generation < 0 and self.state is State.EMPTY:
            return ErrorCode.NONE
        member = self._find(identity)
        if isinstance(member, ErrorCode):
            return member
        if generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        member.renew(now_ms)
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is State.COMPLETING else ErrorCode.NONE

    def abandon(self, answer: Callable[..., None], now_ms: int) -> None:
        """Forget the request with this callback, because its connection is gone: from now on its session may end."""
        for member in self.members.values():
            if answer in (member.answer_join, member.answer_sync):
                member.answer_join = member.answer_sync = None
                member.renew(now_ms)

    def postpone(self, error: ErrorCode, now_ms: int) -> None:
        """Send those who have joined away with this error, because no generation can begin now: they join again."""
        for member in self.members.values():
            member.renew(now_ms)
            member.finish_join(JoinAnswer(error, member.id))
        if self.state is State.PREPARING:
            self._initial_end_ms = None
            self._wait_for_joins(now_ms)

    # --- generations

    def is_ready(self, now_ms: int) -> bool:
        """Return whether a generation may begin: all members have joined, or those who have waited for long enough."""
        if self.state is not State.PREPARING:
            return False
        if now_ms >= self._join_deadline_ms:
            return True
        have_all_joined = all(member.answer_join is not None for member in self.members.values())
        return self._initial_end_ms is None and not self._expected and have_all_joined

    def begin_generation(self, generation: int, now_ms: int) -> None:
        """Begin the generation of this number, which is higher than that of any before it, with those who have joined.

        Dynamic members that have not joined are dropped. Static ones stay until their session ends: they may be
        restarting.
        """
        if self.state is not State.PREPARING:
            return
        for member in [*self.members.values()]:
            if member.answer_join is None and not member.is_static:
                self._forget(member, ErrorCode.UNKNOWN_MEMBER_ID)
        joined = [member for member in self.members.values() if member.answer_join is not None]
        if not joined:
            self._wait_for_joins(now_ms)
            return
        if self.leader not in {member.id for member in joined}:
            self.leader = joined[0].id
        self.generation, self.protocol, self.state = generation, elect_protocol(self.members.values()), State.COMPLETING
        self._initial_end_ms = None
        self._sync_deadline_ms = now_ms + self._rebalance_timeout_ms()
        for member in joined:
            member.has_synced, member.assignment = False, b""
            member.renew(now_ms)
        for member in joined:
            member.finish_join(self._joined(member))

    # --- time

    def next_deadline_ms(self) -> int | None:
        """Return when `tick` has something to do at the earliest; None if nothing is due ever."""
        deadlines = [member.deadline_ms for member in self.members.values() if not member.is_waiting]
        deadlines += self._expected.values()
        if self.state is State.PREPARING:
            deadlines.append(self._join_deadline_ms)
        elif self._sync_deadline_ms is not None:
            deadlines.append(self._sync_deadline_ms)
        return min(deadlines, default=None)

    def tick(self, now_ms: int) -> None:
        """Drop the members whose session has ended, and those that did not sync in time."""
        self._expected = {name: ms for name, ms in self._expected.items() if ms > now_ms}
        dead = [each for each in self.members.values() if not each.is_waiting and each.deadline_ms <= now_ms]
        if self._sync_deadline_ms is not None and self._sync_deadline_ms <= now_ms:
            self._sync_deadline_ms = None
            dead += [each for each in self.members.values() if not each.has_synced and each not in dead]
        self._remove(dead, now_ms)

    def close(self, error: ErrorCode) -> None:
        """End the group: answer every waiting member with this error."""
        self.state = State.DEAD
        for member in [*self.members.values()]:
            self._forget(member, error)

    def view(self) -> GroupView:
        """Describe the group. What members sent and got is only shown while it is settled, as Kafka does."""
        is_settled = self.state is State.STABLE
        return GroupView(
            self.state,
            self.protocol_type,
            (self.protocol or "") if is_settled else "",
            tuple(
                MemberView(
                    each.identity,
                    each.client_id,
                    each.host,
                    each.metadata(self.protocol) if is_settled else b"",
                    each.assignment if is_settled else b"",
                )
                for each in self.members.values()
            ),
        )

    # --- joining

    def _join_unknown(self, request: JoinRequest, now_ms: int, answer: Callable[[JoinAnswer], None]) -> None:
        instance_id = request.member.instance_id
        if instance_id is not None and instance_id in self._statics:
            self._replace_static(self.members[self._statics[instance_id]], request, now_ms, answer)
            return
        if len(self.members) + len(self._expected) >= MEMBERS_MAX:
            answer(JoinAnswer(ErrorCode.GROUP_MAX_SIZE_REACHED))
            return
        member_id = self._new_id(request)
        if request.needs_known_id and instance_id is None:
            self._expected[member_id] = now_ms + request.session_timeout_ms
            answer(JoinAnswer(ErrorCode.MEMBER_ID_REQUIRED, member_id))
            return
        self._add(member_id, request, now_ms, answer)

    def _new_id(self, request: JoinRequest) -> str:
        prefix = request.member.instance_id or request.client_id[:NAME_MAX]
        return f"{prefix}-{uuid.UUID(int=self._source.getrandbits(128), version=4)}"

    def _add(self, member_id: str, request: JoinRequest, now_ms: int, answer: Callable[[JoinAnswer], None]) -> None:
        if not self.members:
            self.protocol_type = request.protocol_type
        member = self.members[member_id] = Member(member_id, request)
        if member.instance_id is not None:
            self._statics[member.instance_id] = member_id
        self.leader = self.leader or member_id
        member.answer_join = answer
        member.renew(now_ms)
        self._rebalance(now_ms)
        if self._initial_end_ms is not None:
            self._join_deadline_ms = min(now_ms + INITIAL_DELAY_MS, self._initial_end_ms)

    def _join_again(self, request: JoinRequest, now_ms: int, answer: Callable[[JoinAnswer], None]) -> None:
        member = self._find(request.member)
        if isinstance(member, ErrorCode):
            answer(JoinAnswer(member, request.member.member_id))
            return
        is_unchanged = member.protocols == request.protocols
        if is_unchanged and (
            self.state is State.COMPLETING or (self.state is State.STABLE and member.id != self.leader)
        ):
            member.renew(now_ms)
            answer(self._joined(member))  # it missed the answer
            return
        member.update(request)
        self._wait_for_generation(member, now_ms, answer)

    def _wait_for_generation(self, member: Member, now_ms: int, answer: Callable[[JoinAnswer], None]) -> None:
        member.finish_join(JoinAnswer(ErrorCode.REBALANCE_IN_PROGRESS, member.id))
        member.answer_join = answer
        member.renew(now_ms)
        self._rebalance(now_ms)

    def _replace_static(
        self, old: Member, request: JoinRequest, now_ms: int, answer: Callable[[JoinAnswer], None]
    ) -> None:
        """Give the place of a static member to its restarted self, under a new id that fences the old one.

        In a stable group whose protocol stays the same, the member keeps its assignment, and nobody else notices.
        """
        member = Member(self._new_id(request), request)
        member.assignment, member.has_synced = old.assignment, old.has_synced
        former_leader = self.leader
        self.members = {
            (member.id if each is old else each.id): (member if each is old else each) for each in self.members.values()
        }
        assert member.instance_id is not None
        self._statics[member.instance_id] = member.id
        if self.leader == old.id:
            self.leader = member.id
        _fence(old)
        if self.state is State.STABLE and elect_protocol(self.members.values()) == self.protocol:
            member.renew(now_ms)
            joined = self._joined(member)
            if not request.may_skip_assignment:
                # It must not take itself for the leader, or it would assign.
                joined = joined._replace(leader=former_leader or "", members=())
            answer(joined._replace(skip_assignment=request.may_skip_assignment and member.id == self.leader))
            return
        self._wait_for_generation(member, now_ms, answer)

    # --- rebalances

    def _rebalance(self, now_ms: int) -> None:
        """Have all members join again, unless they are doing so already."""
        if self.state is State.PREPARING:
            return
        for member in self.members.values():
            if member.answer_sync is not None:
                member.renew(now_ms)
                member.finish_sync(SyncAnswer(ErrorCode.REBALANCE_IN_PROGRESS))
        if self.state is State.EMPTY:
            self._initial_end_ms = now_ms + INITIAL_DELAY_MS_MAX
        self._sync_deadline_ms = None
        self.state = State.PREPARING
        self._wait_for_joins(now_ms)

    def _wait_for_joins(self, now_ms: int) -> None:
        if self.members:
            self._join_deadline_ms = now_ms + self._rebalance_timeout_ms()
            return
        self.state = State.EMPTY
        self.protocol, self.leader = None, None
        self._initial_end_ms, self._sync_deadline_ms = None, None

    def _rebalance_timeout_ms(self) -> int:
        return max(member.rebalance_timeout_ms for member in self.members.values())

    def _assign(self, assignments: dict[str, bytes], now_ms: int) -> None:
        self.state = State.STABLE
        for member in self.members.values():
            member.assignment = assignments.get(member.id, b"")
        for member in self.members.values():
            if member.answer_sync is not None:
                member.renew(now_ms)
                member.finish_sync(self._synced(member))

    # --- members

    def _find(self, identity: Identity) -> Member | ErrorCode:
        if identity.instance_id is not None:
            owner = self._statics.get(identity.instance_id)
            if owner is not None and owner != identity.member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return self.members.get(identity.member_id, ErrorCode.UNKNOWN_MEMBER_ID)

    def _remove(self, members: list[Member], now_ms: int) -> None:
        for member in members:
            self._forget(member, ErrorCode.UNKNOWN_MEMBER_ID)
        if members and self.members:
            self._rebalance(now_ms)
        elif members:
            self._wait_for_joins(now_ms)

    def _forget(self, member: Member, error: ErrorCode) -> None:
        del self.members[member.id]
        if member.instance_id is not None:
            self._statics.pop(member.instance_id, None)
        if self.leader == member.id:
            self.leader = next(iter(self.members), None)
        member.finish_join(JoinAnswer(error, member.id))
        member.finish_sync(SyncAnswer(error))

    def _joined(self, member: Member) -> JoinAnswer:
        everyone: tuple[JoinedMember, ...] = ()
        if member.id == self.leader:
            everyone = tuple(
                JoinedMember(each.identity, each.metadata(self.protocol)) for each in self.members.values()
            )
        return JoinAnswer(
            ErrorCode.NONE,
            member.id,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader or "",
            everyone,
        )

    def _synced(self, member: Member) -> SyncAnswer:
        return SyncAnswer(ErrorCode.NONE, self.protocol_type, self.protocol, member.assignment)


def _fence(member: Member) -> None:
    member.finish_join(JoinAnswer(ErrorCode.FENCED_INSTANCE_ID, member.id))
    member.finish_sync(SyncAnswer(ErrorCode.FENCED_INSTANCE_ID))
