"""Consumer groups as a broker sees them: for those who cannot open what it owns."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from llog.base.decoders import json_decoder
from llog.client.http import JSON, Http
from llog.client.remote import TIMEOUT_S, start_out
from llog.groups.listing import GroupShare
from llog.groups.requests import Start

R = TypeVar("R", bound=msgspec.Struct)


class Listed(msgspec.Struct):
    groups: dict[str, list[GroupShare]]
    missing: str | None
    """Why groups on some topics are not there."""


class _Moved(msgspec.Struct):
    offsets: dict[int, int]


class _Deleted(msgspec.Struct):
    deleted: int


class RemoteGroups(NamedTuple):
    url: str

    def list(self, group: str | None = None) -> Listed:
        """All groups, or one."""
        return self._asked("/groups/list", {"group_id": group}, Listed)

    def reset(self, group: str, topic: str, start: Start, partition: int | None = None) -> dict[int, int]:
        """Returns where it is now, by partition."""
        asked = {"group_id": group, "topic": topic, "to": start_out(start), "partition_id": partition}
        return self._asked("/groups/reset", asked, _Moved).offsets

    def delete(self, group: str, topic: str | None = None, *, force: bool = False) -> int:
        """Returns in how many partitions it had a position."""
        return self._asked("/groups/delete", {"group_id": group, "topic": topic, "force": force}, _Deleted).deleted

    def _asked(self, path: str, asked: dict[str, Any], kind: type[R]) -> R:
        http = Http(self.url, timeout_s=TIMEOUT_S)
        try:
            body = msgspec.json.encode(asked)
            found = http.post(path, body, content=JSON, accept=JSON, repeatable=path == "/groups/list").body
            return json_decoder(kind, strict=False).decode(found)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise http.strange(error) from error
        finally:
            http.close()
