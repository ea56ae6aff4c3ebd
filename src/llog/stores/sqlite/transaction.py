"""One write transaction of a SQLite metadata store.

A statement takes many rows, because every step of a statement releases the interpreter lock, which a busy event loop
returns late.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from llog.errors import VersionMismatch
from llog.stores.meta import ABSENT, Put, version_mismatch

ROWS_MAX: Final = 256
"""Rows in one statement."""

_STATE: Final = "SELECT revision, (SELECT min(expires_ms) FROM sessions) FROM state"
_UPSERT: Final = (
    "INSERT INTO entries VALUES {} "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value, version = excluded.version, session = excluded.session"
)


class Transaction:
    """Applies the jobs of a group in order to the versions of their keys in memory, and writes the rows at the end."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        session: int | None,
        timeout_ms: int,
        keys: Collection[Sequence[str]],
        versions: dict[str, int],
    ) -> None:
        """`keys` has the keys of each job, and `versions` the versions known already, ABSENT for a missing key.

        The transaction keeps `versions` up to date.
        """
        self.session = session
        self.has_changes = False
        self._connection = connection
        self._timeout_ms = timeout_ms
        self.is_renewed = False
        self._revision: int
        self._revision, session_ends_ms = connection.execute(_STATE).fetchone()
        self._first_revision = self._revision
        self._now_ms = time.time_ns() // 1_000_000
        self._keys = keys
        self._versions = versions
        self._writes: dict[str, tuple[bytes, int, int | None] | None] = {}
        if session_ends_ms is not None and session_ends_ms <= self._now_ms:
            self._end_expired_sessions()
        self._load_versions()

    @property
    def revisions(self) -> tuple[int, int]:
        """The store's revisions before and after this transaction."""
        return self._first_revision, self._revision

    def put(self, key: str, value: bytes, expected: int | None, ephemeral: bool = False) -> int:
        versions = self._versions
        if expected is not None and expected != versions[key]:
            raise version_mismatch(key, expected, versions[key])
        session = self._ensure_session() if ephemeral else None
        self.has_changes = True
        self._revision = version = versions[key] = self._revision + 1
        self._writes[key] = (value, version, session)
        return version

    def put_many(self, puts: Iterable[Put]) -> list[int | VersionMismatch]:
        results: list[int | VersionMismatch] = []
        for put in puts:
            try:
                results.append(self.put(put.key, put.value, put.expected))
            except VersionMismatch as error:
                results.append(error)
        return results

    def delete(self, key: str, expected: int | None) -> bool:
        found = self._versions[key]
        if found == ABSENT:
            return False
        if expected is not None and expected != found:
            raise version_mismatch(key, expected, found)
        self._next_revision()
        self._versions[key] = ABSENT
        self._writes[key] = None
        return True

    def delete_range(self, start: str, end: str) -> None:
        self._flush()
        if self._connection.execute("DELETE FROM entries WHERE key >= ? AND key < ?", (start, end)).rowcount:
            self._next_revision()
            self._versions.clear()
            self._load_versions()

    def renew(self) -> None:
        """Extend the session. One that has ended stays ended: other processes may have seen that its keys are gone."""
        if self.session is not None and not self.is_renewed:
            cursor = self._connection.execute(
                "UPDATE sessions SET expires_ms = ? WHERE id = ?", (self._now_ms + self._timeout_ms, self.session)
            )
            self.is_renewed = cursor.rowcount == 1
            if self.is_renewed:
                self.has_changes = True
            else:
                self.session = None

    def end_session(self) -> None:
        self._flush()
        self._connection.execute("DELETE FROM entries WHERE session = ?", (self.session,))
        self._connection.execute("DELETE FROM sessions WHERE id = ?", (self.session,))
        self._next_revision()
        self._versions.clear()
        self.session = None

    def finish(self) -> None:
        self._flush()
        if self.has_changes:
            self._connection.execute("UPDATE state SET revision = ?", (self._revision,))

    def _next_revision(self) -> int:
        self.has_changes = True
        self._revision += 1
        return self._revision

    def _ensure_session(self) -> int:
        """Return the session of this process, which is created if there is none."""
        self.renew()
        if self.session is None:
            self.session = self._next_revision()
            self.is_renewed = True
            self._connection.execute(
                "INSERT INTO sessions VALUES (?, ?)", (self.session, self._now_ms + self._timeout_ms)
            )
        return self.session

    def _end_expired_sessions(self) -> None:
        """Delete the sessions that have ended, with their keys."""
        ended = self._connection.execute("SELECT id FROM sessions WHERE expires_ms <= ?", (self._now_ms,)).fetchall()
        for row in ended:
            self._connection.execute("DELETE FROM entries WHERE session = ?", row)
            self._connection.execute("DELETE FROM sessions WHERE id = ?", row)
            self._next_revision()
            self._versions.clear()

    def _load_versions(self) -> None:
        """Look up the versions of all keys of the jobs that are not known yet."""
        versions = self._versions
        unknown = list({key for keys in self._keys for key in keys if key not in versions})
        for at in range(0, len(unknown), ROWS_MAX):
            keys = unknown[at : at + ROWS_MAX]
            marks = ",".join(["(?)"] * len(keys))
            (found,) = self._connection.execute(
                f"SELECT json_group_object(key, version) FROM (VALUES {marks}) CROSS JOIN entries ON key = column1",
                keys,
            ).fetchone()
            self._versions.update(dict.fromkeys(keys, ABSENT) | json.loads(found))

    def _flush(self) -> None:
        """Write the rows of all jobs so far."""
        deleted: list[str] = []
        plain: list[Any] = []
        ephemeral: list[Any] = []
        for key, write in self._writes.items():
            if write is None:
                deleted.append(key)
                continue
            value, version, session = write
            if session is None:
                plain += (key, value, version)
            else:
                ephemeral += (key, value, version, session)
        self._writes.clear()
        self._write_rows("DELETE FROM entries WHERE key IN ({})", "?", deleted)
        self._write_rows(_UPSERT, "(?,?,?,NULL)", plain)
        self._write_rows(_UPSERT, "(?,?,?,?)", ephemeral)

    def _write_rows(self, statement: str, row: str, values: list[Any]) -> None:
        width = row.count("?")
        for at in range(0, len(values), ROWS_MAX * width):
            page = values[at : at + ROWS_MAX * width]
            self._connection.execute(statement.format(",".join([row] * (len(page) // width))), page)
