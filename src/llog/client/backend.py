"""The port of clients, with two implementations: a log of this process (`embedded.py`) and a broker
(`remote/backend.py`).

Calls block, and several threads may call at once. Every backend raises the errors of `llog.errors`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from llog.groups.acks import AckResult, ack_warnings, committed_offsets
from llog.groups.options import ConsumeOptions
from llog.sql.result import Result

logger: Final = logging.getLogger("llog.client")

Params = Sequence[Any] | Mapping[str, Any]
"""Values for the parameters of a statement, by number or by name."""


class Backend(Protocol):
    def execute(self, sql: str, params: Params = ()) -> list[Result]:
        """Run all statements of `sql` in order; return one result for each."""
        ...

    def insert(self, table: str, rows: pa.Table | pa.RecordBatch) -> int:
        """Insert all rows at once or none of them; return the number of rows."""
        ...

    def consume(self, options: ConsumeOptions) -> pa.Table:
        """Return messages, as `llog.groups.messages.CONSUMED_SCHEMA`; none if none came in time."""
        ...

    def ack(self, topic: str, group: str, upto: Mapping[int | None, int], member: str = "") -> dict[int, AckResult]:
        """Acknowledge up to these offsets, by partition; return the outcome in each."""
        ...

    def release(self, topic: str, group: str, partition: int, offset: int, *, member: str, delay_ms: int = 0) -> None:
        """Have one message delivered again after `delay_ms`; do nothing if the member does not hold it any more."""
        ...

    def heartbeat(self, topic: str, group: str, member: str, *, visibility_ms: int) -> None:
        """Keep a member of an assigned group alive for `visibility_ms`; raise `StaleMember` if it was dropped."""
        ...

    def leave(self, topic: str, group: str, member: str) -> None:
        """Give the partitions of a member of an assigned group to the other members."""
        ...

    def close(self) -> None:
        """Idempotent. Calls after it are refused."""
        ...


class HasBackend(Protocol):
    """An object that works through a backend, as a connection does."""

    @property
    def backend(self) -> Backend: ...


def acknowledge(
    backend: Backend, topic: str, group: str, upto: Mapping[int | None, int], member: str
) -> dict[int, int]:
    """Acknowledge up to these offsets and log a warning where nothing was acknowledged; return the next offset that the
    group wants, by partition.
    """
    results = backend.ack(topic, group, upto, member)
    for warning in ack_warnings(topic, results):
        logger.warning("member %r of group %r %s", member, group, warning)
    return committed_offsets(results)


def backend_of(client: Backend | HasBackend) -> Backend:
    found: Any = getattr(client, "backend", client)
    backend: Backend = found
    return backend
