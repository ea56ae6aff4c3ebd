"""Clients of a log: SQL by PEP 249 (`import llog.client as dbapi`), consumers and agents.

Threads may share connections. Parameters stand as `?` or `:name` in statements, which are committed one by one: see
`connection.py`.
"""

from __future__ import annotations

from llog.client.agent import AgentResult, Backoff, run_agent
from llog.client.connection import Connection, connect
from llog.client.consumer import Consumer, Message
from llog.client.cursor import Cursor
from llog.client.exceptions import (
    DatabaseError,
    DataError,
    Error,
    IntegrityError,
    InterfaceError,
    InternalError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
    Warning,
)
from llog.client.types import (
    BINARY,
    DATETIME,
    NUMBER,
    ROWID,
    STRING,
    Binary,
    Date,
    DateFromTicks,
    Time,
    TimeFromTicks,
    Timestamp,
    TimestampFromTicks,
)

apilevel = "2.0"
threadsafety = 2
paramstyle = "qmark"

__all__ = [
    "BINARY",
    "DATETIME",
    "NUMBER",
    "ROWID",
    "STRING",
    "AgentResult",
    "Backoff",
    "Binary",
    "Connection",
    "Consumer",
    "Cursor",
    "DataError",
    "DatabaseError",
    "Date",
    "DateFromTicks",
    "Error",
    "IntegrityError",
    "InterfaceError",
    "InternalError",
    "Message",
    "NotSupportedError",
    "OperationalError",
    "ProgrammingError",
    "Time",
    "TimeFromTicks",
    "Timestamp",
    "TimestampFromTicks",
    "Warning",
    "apilevel",
    "connect",
    "paramstyle",
    "run_agent",
    "threadsafety",
]
