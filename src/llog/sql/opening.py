"""Opens a database, for modules that must be importable without the extra `sql`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from llog.config import Settings
from llog.errors import MissingExtra
from llog.log.log import Log

if TYPE_CHECKING:
    from llog.sql.database import Database


async def open_database(log: Log, settings: Settings, *, stopping: asyncio.Event | None = None) -> Database:
    """Start a database on this log; close it before the log. `MissingExtra` names a package that is not installed."""
    try:
        from llog.sql.database import Database
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "llog":
            raise  # a module of llog is missing, which installing packages cannot mend
        raise MissingExtra(f"SQL needs {error.name}: pip install 'leaderless-log[sql]'") from error
    database = Database(log, settings, stopping=stopping)
    try:
        await database.start()
    except BaseException:
        await database.close()
        raise
    return database
