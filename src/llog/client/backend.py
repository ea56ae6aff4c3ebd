"""The port of a client: a log of this process (`embedded.py`) or a broker (`remote/backend.py`) is behind it.

Calls block, and may be made from several threads at once. Errors are those of `llog.errors`, whichever backend raises
them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from llog.groups.acks import Acked, committed_in, warnings_of
from llog.groups.consumption import ConsumeCall
from llog.sql.result import Result

logger: Final = logging.getLogger("llog.client")

Params = Sequence[Any] | Mapping[str, Any]
"""Values for the places of a statement: by number or by name."""


class Backend(Protocol):
    def execute(self, sql: str, params: Params = ()) -> list[Result]:
        """Runs all statements of `sql`, in order: one result for each."""
        ...

    def insert(self, table: str, rows: pa.Table | pa.RecordBatch) -> int:
        """Inserts all rows at once or none of them; returns how many there were."""
        ...

    def consume(self, call: ConsumeCall) -> pa.Table:
        """Messages (`llog.cdc.events.MESSAGES` and `attempt`); none if nothing came in time."""
        ...

    def ack(self, topic: str, group: str, upto: Mapping[int | None, int], member: str = "") -> dict[int, Acked]:
        """Acknowledges up to these offsets, by partition; returns what became of it in each."""
        ...

    def release(self, topic: str, group: str, partition: int, offset: int, *, member: str, delay_ms: int = 0) -> None:
        """Gives one message back, which is delivered again after `delay_ms`; nothing if the member does not hold it any
        more.
        """
        ...

    def heartbeat(self, topic: str, group: str, member: str, *, visibility_ms: int) -> None:
        """Keeps a member of an assigned group alive for so long; `StaleMember` if it is none any more."""
        ...

    def leave(self, topic: str, group: str, member: str) -> None:
        """Gives the partitions that a member of an assigned group has to the others."""
        ...

    def close(self) -> None:
        """Idempotent. Calls after it are refused."""
        ...


class HasBackend(Protocol):
    """Whatever works through a backend, as connections do."""

    @property
    def backend(self) -> Backend: ...


def acknowledge(
    backend: Backend, topic: str, group: str, upto: Mapping[int | None, int], member: str
) -> dict[int, int]:
    """Returns the next offset that the group wants, by partition; logs a warning where nothing was acknowledged."""
    acked = backend.ack(topic, group, upto, member)
    for warning in warnings_of(topic, acked):
        logger.warning("member %r of group %r %s", member, group, warning)
    return committed_in(acked)


def backend_of(client: Backend | HasBackend) -> Backend:
    found: Any = getattr(client, "backend", client)
    backend: Backend = found
    return backend
