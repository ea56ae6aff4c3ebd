"""One write transaction of a SQLite metadata store.

Statements take many rows each: every step of a statement gives up the interpreter lock, which a busy event loop returns
late.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from typing import Any, Final

from llog.errors import VersionMismatch
from llog.stores.meta import ABSENT, Put, mismatch

ROWS_MAX: Final = 256
"""Rows per statement."""

_UPSERT: Final = (
    "INSERT INTO entries VALUES {} "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value, version = excluded.version, session = excluded.session"
)


class Transaction:
    """What a group of jobs does, applied in order to a picture of its keys, and written at the end."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        session: int | None,
        timeout_ms: int,
        keys: Iterable[str],
        versions: dict[str, int],
    ) -> None:
        """`versions` has those that are known already, ABSENT for keys that do not exist; it is brought up to date."""
        self.session = session
        self.changed = False
        self._connection = connection
        self._timeout_ms = timeout_ms
        self.renewed = False
        self._revision: int = connection.execute("SELECT revision FROM state").fetchone()[0]
        self._now_ms = time.time_ns() // 1_000_000
        self._keys = keys
        self._versions = versions
        self._writes: dict[str, tuple[bytes, int, int | None] | None] = {}
        self._purge()
        self._load()

    def put(self, key: str, value: bytes, expected: int | None, ephemeral: bool = False) -> int:
        if expected is not None and expected != self._versions[key]:
            raise mismatch(key, expected, self._versions[key])
        session = self._own_session() if ephemeral else None
        version = self._next()
        self._versions[key] = version
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
            raise mismatch(key, expected, found)
        self._next()
        self._versions[key] = ABSENT
        self._writes[key] = None
        return True

    def delete_range(self, start: str, end: str) -> None:
        self._flush()
        if self._connection.execute("DELETE FROM entries WHERE key >= ? AND key < ?", (start, end)).rowcount:
            self._next()
            self._versions.clear()
            self._load()

    def renew(self) -> None:
        """Keeps the session alive. One that has ended stays ended: others may have seen its keys gone."""
        if self.session is not None and not self.renewed:
            cursor = self._connection.execute(
                "UPDATE sessions SET expires_ms = ? WHERE id = ?", (self._now_ms + self._timeout_ms, self.session)
            )
            self.renewed = cursor.rowcount == 1
            if self.renewed:
                self.changed = True
            else:
                self.session = None

    def end_session(self) -> None:
        self._flush()
        self._connection.execute("DELETE FROM entries WHERE session = ?", (self.session,))
        self._connection.execute("DELETE FROM sessions WHERE id = ?", (self.session,))
        self._next()
        self._versions.clear()
        self.session = None

    def finish(self) -> None:
        self._flush()
        if self.changed:
            self._connection.execute("UPDATE state SET revision = ?", (self._revision,))

    def _next(self) -> int:
        self.changed = True
        self._revision += 1
        return self._revision

    def _own_session(self) -> int:
        self.renew()
        if self.session is None:
            self.session = self._next()
            self.renewed = True
            self._connection.execute(
                "INSERT INTO sessions VALUES (?, ?)", (self.session, self._now_ms + self._timeout_ms)
            )
        return self.session

    def _purge(self) -> None:
        ended = self._connection.execute("SELECT id FROM sessions WHERE expires_ms <= ?", (self._now_ms,)).fetchall()
        for row in ended:
            self._connection.execute("DELETE FROM entries WHERE session = ?", row)
            self._connection.execute("DELETE FROM sessions WHERE id = ?", row)
            self._next()
            self._versions.clear()

    def _load(self) -> None:
        unknown = [key for key in self._keys if key not in self._versions]
        for at in range(0, len(unknown), ROWS_MAX):
            keys = unknown[at : at + ROWS_MAX]
            marks = ",".join(["(?)"] * len(keys))
            (found,) = self._connection.execute(
                f"SELECT json_group_object(key, version) FROM (VALUES {marks}) CROSS JOIN entries ON key = column1",
                keys,
            ).fetchone()
            self._versions.update(dict.fromkeys(keys, ABSENT) | json.loads(found))

    def _flush(self) -> None:
        gone: list[str] = []
        plain: list[Any] = []
        ephemeral: list[Any] = []
        for key, write in self._writes.items():
            if write is None:
                gone.append(key)
                continue
            value, version, session = write
            if session is None:
                plain += (key, value, version)
            else:
                ephemeral += (key, value, version, session)
        self._writes.clear()
        self._write_rows("DELETE FROM entries WHERE key IN ({})", "?", gone)
        self._write_rows(_UPSERT, "(?,?,?,NULL)", plain)
        self._write_rows(_UPSERT, "(?,?,?,?)", ephemeral)

    def _write_rows(self, statement: str, row: str, values: list[Any]) -> None:
        width = row.count("?")
        for at in range(0, len(values), ROWS_MAX * width):
            some = values[at : at + ROWS_MAX * width]
            self._connection.execute(statement.format(",".join([row] * (len(some) // width))), some)
