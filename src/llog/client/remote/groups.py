"""Consumer groups at a broker, for processes that cannot open the stores that the broker owns."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import msgspec

from llog.client.remote.backend import encode_start
from llog.groups.listing import GroupProgress
from llog.groups.options import Start
from llog.transport import BrokerClient

R = TypeVar("R", bound=msgspec.Struct)


class GroupsAnswer(msgspec.Struct):
    groups: dict[str, list[GroupProgress]]
    missing: str | None
    """Why the groups of some topics are not listed."""


class _ResetAnswer(msgspec.Struct):
    offsets: dict[int, int]


class _DeleteAnswer(msgspec.Struct):
    deleted: int


class RemoteGroups(NamedTuple):
    url: str

    def list(self, group: str | None = None) -> GroupsAnswer:
        """Return all groups, or one."""
        return self._post(GroupsAnswer, "/groups/list", {"group_id": group}, repeatable=True)

    def reset(self, group: str, topic: str, start: Start, partition: int | None = None) -> dict[int, int]:
        """Move a group; return its new offsets, by partition."""
        message = {"group_id": group, "topic": topic, "to": encode_start(start), "partition_id": partition}
        return self._post(_ResetAnswer, "/groups/reset", message).offsets

    def delete(self, group: str, topic: str | None = None, *, force: bool = False) -> int:
        """Delete a group; return the number of partitions in which it had a position."""
        return self._post(_DeleteAnswer, "/groups/delete", {"group_id": group, "topic": topic, "force": force}).deleted

    def _post(self, kind: type[R], path: str, message: dict[str, Any], *, repeatable: bool = False) -> R:
        with closing(BrokerClient(self.url)) as client:
            return client.post_json(kind, path, message, repeatable=repeatable)
