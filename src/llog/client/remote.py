"""A broker as a backend: consume and acknowledge over HTTP, messages as Arrow.

Acknowledging and releasing may be repeated, and are if the broker did not answer. What a group consumes is not asked
for again: that is for the caller to do, under another name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from llog.base.decoders import json_decoder
from llog.client.backend import Params
from llog.client.http import ARROW, JSON, Http
from llog.groups.acks import Acked, Held
from llog.groups.requests import ConsumeCall, Start
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.client.remote_sql import RemoteSession

TIMEOUT_S: Final = 60.0
"""Besides the wait that a call asks for."""
_WAIT_MS_MAX: Final = 60_000
"""As long as a broker waits in one request."""


class _Acked(msgspec.Struct):
    committed: dict[int, int]
    held_by_others: dict[int, tuple[Held, ...]] = {}


class RemoteBackend:
    """See `Backend`. Nothing is opened before the first call."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._http = Http(url, timeout_s=timeout_s)
        self._mutex = threading.Lock()
        self._session: RemoteSession | None = None

    def consume(self, call: ConsumeCall) -> pa.Table:
        left_ms = call.wait_ms
        while True:
            found = self._consumed(call, min(left_ms, _WAIT_MS_MAX))
            left_ms -= _WAIT_MS_MAX
            if len(found) or left_ms <= 0:
                return found

    def _consumed(self, call: ConsumeCall, wait_ms: int) -> pa.Table:
        asked: dict[str, Any] = {
            "topic": call.topic,
            "group_id": call.group,
            "member": call.member,
            "partition_id": call.partition,
            "start": start_out(call.start),
            "limit": call.limit,
            "wait_ms": wait_ms,
            "visibility_ms": call.visibility_ms,
            "max_attempts": call.max_attempts,
            "dead_letter": call.dead_letter,
            "mode": call.mode,
            "max_bytes": call.max_bytes,
        }
        # A group's consume must not be repeated under one member: what the lost answer carried would count as
        # delivered.
        repeatable = call.group is None
        body = self._posted("/topics/consume", asked, accept=ARROW, wait_s=wait_ms / 1000, repeatable=repeatable)
        try:
            with pa.ipc.open_stream(body) as reader:
                return reader.read_all()
        except (pa.ArrowException, OSError) as error:
            raise self._http.strange(error) from error

    def ack(self, topic: str, group: str, upto: Mapping[int | None, int], member: str = "") -> dict[int, Acked]:
        asked: dict[str, Any] = {"topic": topic, "group_id": group, "member": member}
        if None in upto and len(upto) == 1:
            asked["upto_offset"] = upto[None]
        else:
            asked["upto"] = [{"partition_id": partition, "offset": offset} for partition, offset in upto.items()]
        body = self._posted("/topics/ack", asked)
        try:
            found = json_decoder(_Acked, strict=False).decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._http.strange(error) from error
        return {place: Acked(offset, found.held_by_others.get(place, ())) for place, offset in found.committed.items()}

    def release(self, topic: str, group: str, partition: int, offset: int, *, member: str, delay_ms: int = 0) -> None:
        asked = {
            "topic": topic,
            "group_id": group,
            "partition_id": partition,
            "offset": offset,
            "member": member,
            "delay_ms": delay_ms,
        }
        self._posted("/topics/release", asked)

    def heartbeat(self, topic: str, group: str, member: str, *, visibility_ms: int) -> None:
        asked = {"topic": topic, "group_id": group, "member": member, "visibility_ms": visibility_ms}
        self._posted("/topics/heartbeat", asked)

    def leave(self, topic: str, group: str, member: str) -> None:
        self._posted("/topics/leave", {"topic": topic, "group_id": group, "member": member})

    def execute(self, sql: str, params: Params = ()) -> list[Result]:
        return self._sql().execute(sql, params)

    def insert(self, table: str, rows: pa.Table | pa.RecordBatch) -> int:
        data = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        return self._sql().insert(table, data).changed

    def close(self) -> None:
        self._http.close()
        with self._mutex:
            if self._session is not None:
                self._session.close()

    def _sql(self) -> RemoteSession:
        from llog.client.remote_sql import RemoteSession

        with self._mutex:
            if self._session is None:
                self._session = RemoteSession(self._http.url)
            return self._session

    def _posted(
        self, path: str, asked: dict[str, Any], *, accept: str = JSON, wait_s: float = 0.0, repeatable: bool = True
    ) -> bytes:
        body = msgspec.json.encode(asked)
        return self._http.post(path, body, content=JSON, accept=accept, repeatable=repeatable, wait_s=wait_s).body


def start_out(start: Start | None) -> str | dict[str, int | None] | None:
    """As the broker's JSON has it."""
    if start is None:
        return None
    if start.kind in ("latest", "earliest"):
        return start.kind.capitalize()
    return {start.kind.capitalize(): start.value}
