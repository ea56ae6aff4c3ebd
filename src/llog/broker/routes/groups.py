"""`POST /groups/list`, `/groups/reset` and `/groups/delete`: consumer groups on topics of every engine that this broker
can reach.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.messages import Partition, decoded
from llog.broker.routes.topic_groups import Body, Handler, StartAt, answer, start_of
from llog.groups.consumption import Consuming
from llog.groups.listing import GroupListing


class ListRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    group_id: str | None = None


class ResetRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topic: str
    group_id: str
    to: Literal["Latest", "Earliest"] | StartAt
    partition_id: Partition | None = None


class DeleteRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    group_id: str
    topic: str | None = None
    force: bool = False


class GroupRoutes:
    def __init__(self, listing: GroupListing, consuming: Consuming, body: Body) -> None:
        self._listing = listing
        self._consuming = consuming
        self._body = body

    def routes(self) -> list[tuple[str, str, str, Handler]]:
        """Role, method, path and handler of each."""
        return [
            ("read", "POST", "/groups/list", self._list),
            ("read", "POST", "/groups/reset", self._reset),
            ("read", "POST", "/groups/delete", self._delete),
        ]

    async def _list(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(ListRequest, body)
        names = await self._listing.names() if asked.group_id is None else [asked.group_id]
        found = {name: await self._listing.describe(name) for name in names}
        if asked.group_id is not None and not found[asked.group_id]:
            await self._listing.check_there(asked.group_id)
        missing = await self._listing.unreachable()
        shown = {name: list(map(_shown, shares)) for name, shares in found.items()}
        return answer({"groups": shown, "missing": None if missing is None else str(missing)})

    async def _reset(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(ResetRequest, body)
        start = start_of(asked.to)
        assert start is not None
        moved = await self._consuming.reset(asked.group_id, asked.topic, start, asked.partition_id)
        return answer({"offsets": {str(partition): offset for partition, offset in sorted(moved.items())}})

    async def _delete(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(DeleteRequest, body)
        return answer({"deleted": await self._listing.delete_whole(asked.group_id, asked.topic, force=asked.force)})


def _shown(share: msgspec.Struct) -> dict[str, Any]:
    """With the fields that are at their defaults, too."""
    return msgspec.structs.asdict(share)
