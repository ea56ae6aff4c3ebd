"""SQL through a broker: `POST /sql`, rows as Arrow. A transaction is one call of `execute`, from BEGIN to COMMIT."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import msgspec
import pyarrow as pa

from llog.base.decoders import json_decoder
from llog.client.http import ARROW, JSON, Http
from llog.errors import InvalidArgument
from llog.sql.result import Names, Result
from llog.sql.wire import ALL_RESULTS, params_out, results_from

if TYPE_CHECKING:
    from llog.client.backend import Backend

TIMEOUT_S: Final = 330.0
"""Longer than a broker lets statements run, unless it was told otherwise (LLOG_SQL_TIMEOUT_MS)."""


class _Names(msgspec.Struct):
    """`Names` as a broker answers them: an object."""

    tables: dict[str, tuple[str, ...]]
    topics: tuple[str, ...]
    groups: tuple[str, ...]


class RemoteSession:
    """See `SqlSession`. All calls have one member, so that what was consumed here can be acknowledged here."""

    is_remote = True

    def __init__(self, url: str, *, member: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._http = Http(url, timeout_s=timeout_s)
        self._member = member or f"sql-{uuid.uuid4().hex}"
        self._statement = threading.Lock()
        self._making = threading.Lock()
        self._backend: Backend | None = None

    @property
    def in_transaction(self) -> bool:
        return False

    @property
    def backend(self) -> Backend:
        from llog.client.remote import RemoteBackend

        with self._making:
            if self._backend is None:
                self._backend = RemoteBackend(self._http.url)
            return self._backend

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Result]:
        return self._asked({"sql": sql, "params": params_out(params), "member": self._member})

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> Result:
        return self._asked({"sql": sql, "rows": [params_out(row) for row in rows], "member": self._member})[-1]

    def insert(self, table: str, data: pa.Table) -> Result:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, data.schema) as writer:
            writer.write_table(data)
        return self._posted(f"/sql/insert?{urlencode({'table': table})}", sink.getvalue().to_pybytes(), ARROW)[-1]

    def names(self) -> Names:
        answer = self._http.post("/sql/names", b"", content=JSON, accept=JSON, repeatable=True)
        try:
            found = json_decoder(_Names).decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._http.strange(error) from error
        return Names(found.tables, found.topics, found.groups)

    def close(self) -> None:
        self._http.close()
        if self._backend is not None:
            self._backend.close()

    def _asked(self, asked: dict[str, Any]) -> list[Result]:
        try:
            body = msgspec.json.encode(asked)
        except (UnicodeEncodeError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidArgument(f"the statement or a parameter cannot be sent: {error}") from error
        return self._posted("/sql", body, JSON)

    def _posted(self, path: str, body: bytes, content: str) -> list[Result]:
        with self._statement:
            answer = self._http.post(path, body, content=content, accept=f"{ARROW}; {ALL_RESULTS}", repeatable=False)
        try:
            return results_from(answer.body)
        except InvalidArgument as error:
            raise self._http.strange(error) from error
