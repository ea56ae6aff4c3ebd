"""A broker as a backend: consume and acknowledge over HTTP, messages as Arrow.

Acknowledgements and releases are sent again if the broker does not answer. A group's consume is not: the caller asks
again, under another member's name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from llog.client.backend import Params
from llog.groups.acks import Acked, Held
from llog.groups.requests import ConsumeCall, Start
from llog.sql.result import Result
from llog.transport import ARROW, BrokerClient
from llog.transport.client import TIMEOUT_S

if TYPE_CHECKING:
    from llog.client.remote.sql import RemoteSession

_WAIT_MS_MAX: Final = 60_000
"""The longest that a broker waits in one request."""


class _Acked(msgspec.Struct):
    committed: dict[int, int]
    held_by_others: dict[int, tuple[Held, ...]] = {}


class RemoteBackend:
    """See `Backend`. Nothing is opened before the first call."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s` is besides the wait that a call asks for."""
        self._client = BrokerClient(url, timeout_s=timeout_s)
        self._mutex = threading.Lock()
        self._session: RemoteSession | None = None

    def consume(self, call: ConsumeCall) -> pa.Table:
        left_ms = call.wait_ms
        while True:
            messages = self._consume_once(call, min(left_ms, _WAIT_MS_MAX))
            left_ms -= _WAIT_MS_MAX
            if len(messages) or left_ms <= 0:
                return messages

    def _consume_once(self, call: ConsumeCall, wait_ms: int) -> pa.Table:
        request = {
            "topic": call.topic,
            "group_id": call.group,
            "member": call.member,
            "partition_id": call.partition,
            "start": encode_start(call.start),
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
        body = msgspec.json.encode(request)
        answer = self._client.post("/topics/consume", body, accept=ARROW, repeatable=repeatable, wait_s=wait_ms / 1000)
        try:
            with pa.ipc.open_stream(answer.body) as reader:
                return reader.read_all()
        except (pa.ArrowException, OSError) as error:
            raise self._client.unreadable(error) from error

    def ack(self, topic: str, group: str, upto: Mapping[int | None, int], member: str = "") -> dict[int, Acked]:
        request: dict[str, Any] = {"topic": topic, "group_id": group, "member": member}
        if None in upto and len(upto) == 1:
            request["upto_offset"] = upto[None]
        else:
            request["upto"] = [{"partition_id": partition, "offset": offset} for partition, offset in upto.items()]
        answer = self._client.post_json(_Acked, "/topics/ack", request, repeatable=True)
        held = answer.held_by_others
        return {partition: Acked(offset, held.get(partition, ())) for partition, offset in answer.committed.items()}

    def release(self, topic: str, group: str, partition: int, offset: int, *, member: str, delay_ms: int = 0) -> None:
        request = {
            "topic": topic,
            "group_id": group,
            "partition_id": partition,
            "offset": offset,
            "member": member,
            "delay_ms": delay_ms,
        }
        self._post("/topics/release", request)

    def heartbeat(self, topic: str, group: str, member: str, *, visibility_ms: int) -> None:
        request = {"topic": topic, "group_id": group, "member": member, "visibility_ms": visibility_ms}
        self._post("/topics/heartbeat", request)

    def leave(self, topic: str, group: str, member: str) -> None:
        self._post("/topics/leave", {"topic": topic, "group_id": group, "member": member})

    def execute(self, sql: str, params: Params = ()) -> list[Result]:
        return self._sql().execute(sql, params)

    def insert(self, table: str, rows: pa.Table | pa.RecordBatch) -> int:
        data = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        return self._sql().insert(table, data).changed

    def close(self) -> None:
        self._client.close()
        with self._mutex:
            if self._session is not None:
                self._session.close()

    def _sql(self) -> RemoteSession:
        from llog.client.remote.sql import RemoteSession

        with self._mutex:
            if self._session is None:
                self._session = RemoteSession(self._client.url)
            return self._session

    def _post(self, path: str, request: dict[str, Any]) -> None:
        self._client.post(path, msgspec.json.encode(request), repeatable=True)


def encode_start(start: Start | None) -> str | dict[str, int | None] | None:
    """Return the start as the JSON of a request has it."""
    if start is None:
        return None
    if start.kind in ("latest", "earliest"):
        return start.kind.capitalize()
    return {start.kind.capitalize(): start.value}
