"""SQL as a connection and the shell see it: a session on a log of this process (`embedded.py`) or at a broker
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
    """Calls block. They may be made from several threads, and run one after the other. Errors are those of
    `llog.errors`.
    """

    is_remote: bool
    """A transaction is then one `execute`."""

    @property
    def in_transaction(self) -> bool: ...

    @property
    def backend(self) -> Backend:
        """For consumers; of the same log, and usable while statements run."""
        ...

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Result]:
        """All statements, in order, up to the first that fails. An interrupt (Ctrl-C) cancels the one that runs."""
        ...

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> Result:
        """One statement for each row of parameters; all of them happen or none does."""
        ...

    def insert(self, table: str, data: pa.Table) -> Result:
        """All rows or none."""
        ...

    def names(self) -> Names: ...

    def close(self) -> None:
        """Idempotent. Rolls back what is open; calls after it are refused."""
        ...


def open_session(target: str | Settings | None = None, *, member: str | None = None, **settings: Any) -> SqlSession:
    """At the broker that `target` is the address of; without one, on the log that the settings of this process name.

    `settings` go before the environment: `open_session(data_dir="…")`. Nothing is opened before the first call.
    """
    if isinstance(target, str):
        from llog.client.remote.sql import RemoteSession

        if settings:
            raise InvalidArgument(f"{', '.join(settings)}: a broker has settings of its own, they cannot be given here")
        return RemoteSession(target, member=member)
    from llog.client.embedded import EmbeddedSession

    if isinstance(target, Settings):
        if settings:
            raise InvalidArgument(f"{', '.join(settings)}: the settings were given already")
        return EmbeddedSession(target, member=member)
    overrides = {name: None if value is None else str(value) for name, value in settings.items()}
    return EmbeddedSession(load_settings(overrides), member=member)
