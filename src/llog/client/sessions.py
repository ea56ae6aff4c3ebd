"""The port of SQL for connections and the shell: a session on a log of this process (`embedded.py`) or at a broker
(`remote/sql.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from llog.client.backend import Backend
from llog.config import Settings
from llog.config.loading import load_settings
from llog.errors import InvalidArgument
from llog.sql.result import Names, Result


class SqlSession(Protocol):
    """Calls block, and run one after the other if several threads make them. They raise the errors of `llog.errors`."""

    is_remote: bool
    """Whether the session is at a broker, where a transaction must be one `execute`."""

    @property
    def in_transaction(self) -> bool: ...

    @property
    def backend(self) -> Backend:
        """The backend for consumers of the same log; it works while statements run."""
        ...

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Result]:
        """Run all statements in order, up to the first that fails. An interrupt (Ctrl-C) cancels the one that runs."""
        ...

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> Result:
        """Run the statement for each row of parameters; all of them take effect or none does."""
        ...

    def insert(self, table: str, data: pa.Table) -> Result:
        """Insert all rows or none."""
        ...

    def names(self) -> Names: ...

    def close(self) -> None:
        """Roll back an open transaction and refuse further calls. Idempotent."""
        ...


def open_session(target: str | Settings | None = None, *, member: str | None = None, **settings: Any) -> SqlSession:
    """Return a session at the broker whose address `target` is, or else on the log of this process's settings.

    `settings` override the environment: `open_session(data_dir="…")`. Nothing is opened before the first call.
    """
    if isinstance(target, str):
        from llog.client.remote.sql import RemoteSession

        if settings:
            raise InvalidArgument(f"{', '.join(settings)}: a broker has settings of its own, set them there")
        return RemoteSession(target, member=member)
    from llog.client.embedded import EmbeddedSession

    if isinstance(target, Settings):
        if settings:
            raise InvalidArgument(f"{', '.join(settings)}: set these in the Settings that you pass")
        return EmbeddedSession(target, member=member)
    overrides = {name: None if value is None else str(value) for name, value in settings.items()}
    return EmbeddedSession(load_settings(overrides), member=member)
