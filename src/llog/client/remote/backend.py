"""A broker as a backend: consume and acknowledge over HTTP, messages as Arrow.

Acknowledgements and releases are sent again if the broker does not answer. A group's consume is not: the caller must
consume again under another member name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from llog.client.backend import Params
from llog.groups.acks import AckResult, HeldRange
from llog.groups.options import ConsumeOptions, Start
from llog.sql.result import Result
from llog.transport import ARROW, BrokerClient
from llog.transport.client import TIMEOUT_S

if TYPE_CHECKING:
    from llog.client.remote.sql import RemoteSession

_WAIT_MS_MAX: Final = 60_000
"""The longest that a broker waits in one request."""


class _AckAnswer(msgspec.Struct):
    committed: dict[int, int]
    held_by_others: dict[int, tuple[HeldRange, ...]] = {}


class RemoteBackend:
    """See `Backend`. Nothing is opened before the first call."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s` is added to the wait that a call asks for."""
        self._client = BrokerClient(url, timeout_s=timeout_s)
        self._mutex = threading.Lock()
        self._session: RemoteSession | None = None

    def consume(self, options: ConsumeOptions) -> pa.Table:
        left_ms = options.wait_ms
        while True:
            messages = self._consume_once(options, min(left_ms, _WAIT_MS_MAX))
            left_ms -= _WAIT_MS_MAX
            if len(messages) or left_ms <= 0:
                return messages

    def _consume_once(self, options: ConsumeOptions, wait_ms: int) -> pa.Table:
        request = {
            "topic": options.topic,
            "group_id": options.group,
            "member": options.member,
            "partition_id": options.partition,
            "start": encode_start(options.start),
            "limit": options.limit,
            "wait_ms": wait_ms,
            "visibility_ms": options.visibility_ms,
            "max_attempts": options.max_attempts,
            "dead_letter": options.dead_letter,
            "mode": options.mode,
            "max_bytes": options.max_bytes,
        }
        # A group's consume must not be repeated under the same member: the messages of the lost answer would count as
        # delivered.
        repeatable = options.group is None
        body = msgspec.json.encode(request)
        answer = self._client.post("/topics/consume", body, accept=ARROW, repeatable=repeatable, wait_s=wait_ms / 1000)
        try:
            with pa.ipc.open_stream(answer.body) as reader:
                return reader.read_all()
        except (pa.ArrowException, OSError) as error:
            raise self._client.unreadable(error) from error

    def ack(self, topic: str, group: str, upto: Mapping[int | None, int], member: str = "") -> dict[int, AckResult]:
        request: dict[str, Any] = {"topic": topic, "group_id": group, "member": member}
        if None in upto and len(upto) == 1:
            request["upto_offset"] = upto[None]
        else:
            request["upto"] = [{"partition_id": partition, "offset": offset} for partition, offset in upto.items()]
        answer = self._client.post_json(_AckAnswer, "/topics/ack", request, repeatable=True)
        held = answer.held_by_others
        return {partition: AckResult(offset, held.get(partition, ())) for partition, offset in answer.committed.items()}

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
