"""The SQLite file behind a metadata store: its schema, how it is created, opened and locked.

| table | row |
| --- | --- |
| `entries` | key, value, version, and the session that an ephemeral key belongs to |
| `sessions` | id, and the wall clock in ms at which the session ends unless it is renewed |
| `state` | one row: the revision, which grows with every change and gives versions and session ids |

`application_id` marks the file as llog's, and `user_version` is the version of its schema. Both must stay stable.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from llog.base.durable import FILE_MODE, OpenedFile, make_directory
from llog.errors import StoreUnavailable, WrongStore
from llog.stores.sqlite.lock_holder import describe_holder

APPLICATION_ID: Final = 0x4C4C4F47  # "LLOG"
USER_VERSION: Final = 1
BUSY_SECONDS: Final = 5.0
"""How long a call waits for SQLite's own locks, which processes of llog hold only for moments."""
LOCK_SECONDS: Final = 10.0
"""How long a write waits for the writes of other processes."""

_SCHEMA: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE entries (
    key TEXT PRIMARY KEY NOT NULL, value BLOB NOT NULL, version INTEGER NOT NULL, session INTEGER
) WITHOUT ROWID;
CREATE INDEX ephemeral ON entries (session) WHERE session IS NOT NULL;
CREATE TABLE sessions (id INTEGER PRIMARY KEY, expires_ms INTEGER NOT NULL);
CREATE TABLE state (id INTEGER PRIMARY KEY CHECK (id = 1), revision INTEGER NOT NULL);
INSERT INTO state VALUES (1, 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {USER_VERSION};
COMMIT;
"""


def connect(path: Path, busy_seconds: float) -> sqlite3.Connection:
    """Open a connection. Never creates the file: only `open_or_create` does."""
    # Several threads use a connection, one at a time: its owner has a lock for that.
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",
        uri=True,
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=512,
    )
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def unavailable(path: Path, error: Exception) -> StoreUnavailable:
    if is_locked(error):
        return StoreUnavailable(f"metadata store {path}: {error} by {describe_holder(path, Path(f'{path}-shm'))}")
    return StoreUnavailable(
        f"metadata store {path}: {error}. Check that the file and its directory are writable, and that the disk is "
        "not full"
    )


def is_locked(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and "locked" in str(error)


def lock_timeout(path: Path) -> StoreUnavailable:
    return StoreUnavailable(
        f"metadata store {path} has been locked for {LOCK_SECONDS:g} seconds, and nothing was changed. The lock is "
        f"held by {describe_holder(lock_path(path))}"
    )


def lock_path(path: Path) -> Path:
    return Path(f"{path}.lock")


def open_lock(path: Path) -> int:
    """Open the file whose `flock` guards write transactions: unlike SQLite's busy handler, it queues waiters."""
    return os.open(lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


@contextmanager
def hold_lock(lock: int) -> Iterator[None]:
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


def open_or_create(path: Path) -> OpenedFile:
    """Create the file durably unless it exists, and check it.

    Raises `WrongStore` if the file is not llog's or has a newer schema, and `StoreUnavailable` if it cannot be opened.
    """
    try:
        make_directory(path.parent)
        with suppress(FileExistsError):
            path.touch(FILE_MODE, exist_ok=False)  # SQLite gives its other files the mode of this one
        with closing(connect(path, BUSY_SECONDS)) as connection:
            if _is_new(path, connection):
                _create_schema(path, connection)
            return OpenedFile(path)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise WrongStore(f"{path} is not a SQLite database, or is damaged: name another file") from error
        raise unavailable(path, error) from error
    except OSError as error:
        raise unavailable(path, error) from error


def _is_new(path: Path, connection: sqlite3.Connection) -> bool:
    """Return whether the database is empty; raise `WrongStore` if it is not llog's or has a newer schema."""
    application, version, tables = connection.execute(
        "SELECT (SELECT application_id FROM pragma_application_id), (SELECT user_version FROM pragma_user_version), "
        "(SELECT count(*) FROM sqlite_schema)"
    ).fetchone()
    if application == 0 and version == 0 and tables == 0:
        return True
    if application != APPLICATION_ID:
        raise WrongStore(f"{path} is a SQLite database of another program: name another file")
    if version > USER_VERSION:
        raise WrongStore(
            f"{path} has schema {version}, written by a newer llog; this one knows {USER_VERSION}: upgrade llog"
        )
    return False


def _create_schema(path: Path, connection: sqlite3.Connection) -> None:
    lock = open_lock(path)
    try:
        _acquire_lock(path, lock)
        if _is_new(path, connection):
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StoreUnavailable(
                    f"metadata store {path}: its file system does not support a write-ahead log (the journal mode is "
                    f"{mode}): put the file on a local disk"
                )
            connection.executescript(_SCHEMA)
    finally:
        os.close(lock)


def _acquire_lock(path: Path, lock: int) -> None:
    """Take the lock, or raise `StoreUnavailable` after LOCK_SECONDS: `hold_lock` would wait without a limit."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise lock_timeout(path) from None
        time.sleep(0.01)
