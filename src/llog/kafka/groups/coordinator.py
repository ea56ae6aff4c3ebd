"""All groups of Kafka clients that this broker coordinates: their members in memory, their offsets in the stores.

When a group moves to another broker, its members are sent there and join anew; what they committed stays where it is.
`llog.kafka.groups.fence` has the rule that keeps two coordinators of one group apart.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from llog.errors import GroupConflict, InvalidArgument, LlogError
from llog.groups.groups import Groups
from llog.groups.records import check_group_name
from llog.kafka.error_codes import PASSING, ErrorCode, error_code
from llog.kafka.groups.fence import Fence, raise_fence, remove_fence
from llog.kafka.groups.group import Group, State
from llog.kafka.groups.membership import (
    GroupView,
    Identity,
    JoinAnswer,
    JoinRequest,
    SyncAnswer,
    SyncRequest,
)
from llog.kafka.groups.offsets import Commit, CommittedOffsets, Fenced, Results
from llog.kafka.groups.protocols import CONSUMER, subscribed_topics
from llog.kafka.nodes import Cluster
from llog.log.keys import kafka_group_key
from llog.model import TopicPartition

logger: Final = logging.getLogger("llog.kafka")

GROUPS_MAX: Final = 10_000
_IDLE_MS: Final = 600_000
"""How long a group without members stays in memory after its last commit."""
_WAIT_S_MAX: Final = 1.0
"""How long the timer sleeps at most while there are groups: brokers come and go, and the clock may jump."""

A = TypeVar("A")


class ListedGroup(NamedTuple):
    name: str
    view: GroupView


class _Coordinated:
    """A group that this broker coordinates."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.fence: Fence | None = None
        """None until this broker has put the group's record."""
        self.lock = asyncio.Lock()
        """Held by each commit, so that commits keep their order, and by whatever puts the group's record: else a commit
        would take this broker's own put for that of another one.
        """
        self.is_beginning = False
        self.due_ms: int | None = None
        self.used_ms = 0


class GroupCoordinator:
    """Answers the requests of group members and administrators. Requests need `run` to be running."""

    def __init__(self, groups: Groups, cluster: Cluster) -> None:
        self._log = groups.log
        self._cluster = cluster
        self._offsets = CommittedOffsets(groups)
        self._groups: dict[str, _Coordinated] = {}
        self._due: list[tuple[int, int, _Coordinated]] = []
        self._order = itertools.count()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- members

    async def join(self, name: str, request: JoinRequest) -> JoinAnswer:
        member_id = request.member.member_id
        error = self.check(name)
        if error:
            return JoinAnswer(error, member_id)
        found = self._groups.get(name)
        if found is None and member_id:
            return JoinAnswer(ErrorCode.UNKNOWN_MEMBER_ID, member_id)
        found = found or self._add(name)
        if found is None:
            return JoinAnswer(ErrorCode.COORDINATOR_NOT_AVAILABLE, member_id)
        group = found.group
        return await self._answer(found, lambda answer: group.join(request, self._now_ms(), answer))

    async def sync(self, name: str, request: SyncRequest) -> SyncAnswer:
        error = self.check(name)
        if error:
            return SyncAnswer(error)
        found = self._groups.get(name)
        if found is None:
            return SyncAnswer(ErrorCode.UNKNOWN_MEMBER_ID)
        group = found.group
        return await self._answer(found, lambda answer: group.sync(request, self._now_ms(), answer))

    def heartbeat(self, name: str, identity: Identity, generation: int) -> ErrorCode:
        error = self.check(name)
        if error:
            return error
        found = self._groups.get(name)
        if found is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return found.group.heartbeat(identity, generation, self._now_ms())

    def leave(self, name: str, identities: Sequence[Identity]) -> tuple[ErrorCode, list[ErrorCode]]:
        """Return the error of the request as a whole, and that of each member."""
        error = self.check(name)
        if error:
            return error, []
        found = self._groups.get(name)
        if found is None:
            return ErrorCode.NONE, [ErrorCode.UNKNOWN_MEMBER_ID] * len(identities)
        errors = [found.group.leave(each, self._now_ms()) for each in identities]
        self._settle(found)
        return ErrorCode.NONE, errors

    # --- offsets

    async def commit(
        self, name: str, identity: Identity, generation: int, commits: dict[TopicPartition, Commit]
    ) -> Results:
        """Store these offsets if the group's current generation, or nobody, has the group; return the error of each."""
        error = self.check(name)
        found = self._groups.get(name)
        if not error and found is None and generation >= 0:
            error = ErrorCode.ILLEGAL_GENERATION
        if error:
            return dict.fromkeys(commits, error)

        async def store(fence: Fence) -> Results:
            return await self._offsets.commit(name, fence, commits)

        def judge(group: Group) -> ErrorCode:
            return group.check_commit(identity, generation, self._now_ms())

        return await self._change_offsets(found or self._add(name), judge, [*commits], store)

    async def fetch(
        self, name: str, partitions: Sequence[TopicPartition] | None
    ) -> dict[TopicPartition, Commit | ErrorCode] | ErrorCode:
        """Return what the group has committed in these partitions, or in all; the error of the request as a whole."""
        error = self.check(name)
        if error:
            return error
        try:
            if partitions is None:
                return {**await self._offsets.fetch_all(name)}
            return await self._offsets.fetch(name, partitions)
        except LlogError as failure:
            return self._refusal(name, failure)

    async def delete_offsets(self, name: str, partitions: Sequence[TopicPartition]) -> Results | ErrorCode:
        """Delete committed offsets of topics to which no member subscribes; return the error of each, or of all."""
        error = self.check(name)
        if error:
            return error
        found = self._groups.get(name)
        view = GroupView(State.EMPTY) if found is None else found.group.view()
        try:
            if found is None and not await self._exists(name):
                return ErrorCode.GROUP_ID_NOT_FOUND
        except LlogError as failure:
            return self._refusal(name, failure)
        subscribed: frozenset[str] | None = frozenset()
        if view.state != State.EMPTY:
            is_known = view.protocol_type == CONSUMER and view.state == State.STABLE
            subscribed = subscribed_topics(view.members) if is_known else None
        if subscribed is None:
            return ErrorCode.NON_EMPTY_GROUP
        results = dict.fromkeys(
            [tp for tp in partitions if tp.topic in subscribed], ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
        )
        others = [tp for tp in partitions if tp.topic not in subscribed]

        def judge(group: Group) -> ErrorCode:
            return ErrorCode.NONE if group.state == view.state else ErrorCode.NON_EMPTY_GROUP

        async def delete(fence: Fence) -> Results:
            return await self._offsets.delete(name, fence, others)

        return results | await self._change_offsets(found or self._add(name), judge, others, delete)

    # --- administration

    async def describe(self, name: str) -> GroupView | ErrorCode:
        """Return the group's state and members; a dead group if none of that name exists."""
        error = self.check(name)
        if error:
            return error
        found = self._groups.get(name)
        if found is not None and found.group.state is not State.EMPTY:
            return found.group.view()
        try:
            return GroupView(State.EMPTY if await self._exists(name) else State.DEAD)
        except LlogError as failure:
            return self._refusal(name, failure)

    async def list(self) -> list[ListedGroup] | ErrorCode:
        """Return the groups that this broker coordinates, those of llog's own consumers included."""
        try:
            stored = await self._offsets.listing.names()
        except LlogError as failure:
            return self._refusal("", failure)
        mine = {name: GroupView(State.EMPTY) for name in stored if not self.check(name)}
        mine |= {
            name: found.group.view() for name, found in self._groups.items() if found.group.state is not State.EMPTY
        }
        return [ListedGroup(name, mine[name]) for name in sorted(mine)]

    async def delete(self, name: str) -> ErrorCode:
        """Delete a group without members, and everything that it has committed."""
        error = self.check(name)
        if error:
            return error
        try:
            if not await self._exists(name):
                return ErrorCode.GROUP_ID_NOT_FOUND
            found = self._groups.get(name) or self._add(name)
            if found is None:
                return ErrorCode.COORDINATOR_NOT_AVAILABLE
            async with found.lock:
                if found.group.state is not State.EMPTY:
                    return ErrorCode.NON_EMPTY_GROUP
                # A coordinator that was replaced must not bring offsets back.
                found.fence = await self._raise_fence(name)
                unreachable = await self._offsets.listing.unreachable()
                if unreachable is not None:
                    raise unreachable
                await self._offsets.listing.delete(name)
                fence, found.fence = found.fence, None
                await remove_fence(self._log, name, fence)
        except GroupConflict:
            return ErrorCode.NON_EMPTY_GROUP
        except LlogError as failure:
            return self._refusal(name, failure)
        return ErrorCode.NONE

    # --- time, and the set of live brokers

    def check(self, name: str) -> ErrorCode:
        """Return why this broker does not serve the group; send its members away if the group has moved."""
        try:
            check_group_name(name)
        except InvalidArgument:
            return ErrorCode.INVALID_GROUP_ID
        node = self._cluster.coordinator_of(name)
        if node is not None and node.id == self._cluster.me.id:
            return ErrorCode.NONE
        found = self._groups.get(name)
        if found is not None:
            self._drop(found, ErrorCode.NOT_COORDINATOR)
        return ErrorCode.COORDINATOR_NOT_AVAILABLE if node is None else ErrorCode.NOT_COORDINATOR

    def drop_moved(self) -> None:
        """Send the members of all groups away that other brokers coordinate by now, also those that wait."""
        for name in [*self._groups]:
            self.check(name)

    def tick(self) -> None:
        """Serve the time limits that have passed."""
        now_ms = self._now_ms()
        while self._due and self._due[0][0] <= now_ms:
            due_ms, _, found = heapq.heappop(self._due)
            if due_ms != found.due_ms or found.group.state is State.DEAD:
                continue
            found.due_ms = None
            found.group.tick(now_ms)
            if found.group.is_forgettable and found.used_ms + _IDLE_MS <= now_ms and not found.lock.locked():
                self._drop(found, ErrorCode.UNKNOWN_MEMBER_ID)
            else:
                self._settle(found)

    async def run(self) -> None:
        """Serve the time limits of all groups, and let go of groups that move to other brokers, until cancelled; then
        send all members away.
        """
        try:
            while True:
                self.drop_moved()
                self.tick()
                self._wake.clear()
                wait_s = (self._due[0][0] - self._now_ms()) / 1000 if self._due else None
                try:
                    async with asyncio.timeout(None if wait_s is None else min(max(wait_s, 0.001), _WAIT_S_MAX)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            for found in [*self._groups.values()]:
                self._drop(found, ErrorCode.NOT_COORDINATOR)
            for task in self._tasks:
                task.cancel()

    # --- how

    def _now_ms(self) -> int:
        return self._log.runtime.now_ms()

    def _add(self, name: str) -> _Coordinated | None:
        """Begin to coordinate the group, in the place of one without members if there are very many; None if there is
        no such place.
        """
        if len(self._groups) >= GROUPS_MAX:
            idle = (each for each in self._groups.values() if each.group.is_forgettable and not each.lock.locked())
            unused = next(idle, None)
            if unused is None:
                return None
            self._drop(unused, ErrorCode.UNKNOWN_MEMBER_ID)
        found = self._groups[name] = _Coordinated(Group(name, self._log.runtime.random()))
        self._settle(found)
        return found

    def _drop(self, found: _Coordinated, error: ErrorCode) -> None:
        if self._groups.get(found.group.name) is found:
            del self._groups[found.group.name]
        found.group.close(error)

    async def _answer(self, found: _Coordinated, ask: Callable[[Callable[[A], None]], None]) -> A:
        """Return the answer to a request that may have to wait for other members."""
        waiting: asyncio.Future[A] = asyncio.get_running_loop().create_future()

        def answer(value: A) -> None:
            if not waiting.done():
                waiting.set_result(value)

        ask(answer)
        self._settle(found)
        try:
            return await waiting
        except asyncio.CancelledError:
            found.group.abandon(answer, self._now_ms())
            self._settle(found)
            raise

    def _settle(self, found: _Coordinated) -> None:
        """After a change of the group: begin a generation if one may begin, and look at the group again in time."""
        now_ms = self._now_ms()
        found.used_ms = now_ms
        if found.group.is_ready(now_ms) and not found.is_beginning:
            found.is_beginning = True
            task = asyncio.ensure_future(self._begin_generation(found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        due_ms = found.group.next_deadline_ms()
        if due_ms is None:
            due_ms = now_ms + _IDLE_MS
        if found.is_beginning or found.group.state is State.DEAD or (found.due_ms or due_ms + 1) <= due_ms:
            return
        found.due_ms = due_ms
        heapq.heappush(self._due, (due_ms, next(self._order), found))
        if self._due[0][2] is found:
            self._wake.set()

    async def _begin_generation(self, found: _Coordinated) -> None:
        """Record the next generation, and begin it. Members that join or leave meanwhile belong to it, or do not."""
        name = found.group.name
        try:
            async with found.lock:
                found.fence = fence = await self._raise_fence(name, begins_generation=True)
            found.group.begin_generation(fence.generation, self._now_ms())
        except LlogError as error:
            found.group.postpone(self._refusal(name, error), self._now_ms())
        except BaseException:
            self._drop(found, ErrorCode.COORDINATOR_NOT_AVAILABLE)
            raise
        found.is_beginning = False
        self._settle(found)

    async def _raise_fence(self, name: str, *, begins_generation: bool = False) -> Fence:
        return await raise_fence(self._log, name, self._cluster.me.id, begins_generation=begins_generation)

    async def _change_offsets(
        self,
        found: _Coordinated | None,
        judge: Callable[[Group], ErrorCode],
        partitions: Sequence[TopicPartition],
        change: Callable[[Fence], Awaitable[Results]],
    ) -> Results:
        """Change committed offsets, one change of the group after the other, if `judge` finds no error at that time."""
        if found is None:
            return dict.fromkeys(partitions, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        name = found.group.name
        try:
            async with found.lock:
                error = ErrorCode.NOT_COORDINATOR if found.group.state is State.DEAD else judge(found.group)
                if error:
                    return dict.fromkeys(partitions, error)
                if found.fence is None:
                    found.fence = await self._raise_fence(name)
                found.used_ms = self._now_ms()
                return await change(found.fence)
        except Fenced:
            logger.info("group %r of Kafka clients is coordinated by another broker: its members are sent there", name)
            self._drop(found, ErrorCode.NOT_COORDINATOR)
            return dict.fromkeys(partitions, ErrorCode.NOT_COORDINATOR)
        except LlogError as failure:
            return dict.fromkeys(partitions, self._refusal(name, failure))

    async def _exists(self, name: str) -> bool:
        if await self._offsets.fetch_all(name):
            return True
        return await self._log.meta.get(kafka_group_key(name)) is not None

    def _refusal(self, name: str, error: LlogError) -> ErrorCode:
        """Return the code that has clients try again where that helps."""
        logger.warning("a request for the group %r of Kafka clients failed: %s", name, error)
        return ErrorCode.COORDINATOR_NOT_AVAILABLE if isinstance(error, PASSING) else error_code(error)
