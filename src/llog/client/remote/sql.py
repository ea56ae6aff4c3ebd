"""SQL through a broker: `POST /sql`, rows as Arrow. A transaction is one call of `execute`, from BEGIN to COMMIT."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import msgspec
import pyarrow as pa

from llog.errors import InvalidArgument
from llog.sql.result import Names, Result
from llog.sql.wire import ALL_RESULTS, params_out, results_from
from llog.transport import ARROW, JSON, BrokerClient

if TYPE_CHECKING:
    from llog.client.backend import Backend

TIMEOUT_S: Final = 330.0
"""Longer than a broker lets statements run by default (LLOG_SQL_TIMEOUT_MS)."""


class _Names(msgspec.Struct):
    """`Names` in the JSON of an answer: an object."""

    tables: dict[str, tuple[str, ...]]
    topics: tuple[str, ...]
    groups: tuple[str, ...]


class RemoteSession:
    """See `SqlSession`. All calls use one member, so that a statement can acknowledge what an earlier one consumed."""

    is_remote = True

    def __init__(self, url: str, *, member: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._client = BrokerClient(url, timeout_s=timeout_s)
        self._member = member or f"sql-{uuid.uuid4().hex}"
        self._statement = threading.Lock()
        self._mutex = threading.Lock()
        self._backend: Backend | None = None

    @property
    def in_transaction(self) -> bool:
        return False

    @property
    def backend(self) -> Backend:
        from llog.client.remote.backend import RemoteBackend

        with self._mutex:
            if self._backend is None:
                self._backend = RemoteBackend(self._client.url)
            return self._backend

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Result]:
        return self._execute({"sql": sql, "params": params_out(params), "member": self._member})

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> Result:
        return self._execute({"sql": sql, "rows": [params_out(row) for row in rows], "member": self._member})[-1]

    def insert(self, table: str, data: pa.Table) -> Result:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, data.schema) as writer:
            writer.write_table(data)
        return self._post(f"/sql/insert?{urlencode({'table': table})}", sink.getvalue().to_pybytes(), ARROW)[-1]

    def names(self) -> Names:
        names = self._client.post_json(_Names, "/sql/names", {}, repeatable=True)
        return Names(names.tables, names.topics, names.groups)

    def close(self) -> None:
        self._client.close()
        if self._backend is not None:
            self._backend.close()

    def _execute(self, request: dict[str, Any]) -> list[Result]:
        try:
            body = msgspec.json.encode(request)
        except (UnicodeEncodeError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidArgument(f"the statement or a parameter cannot be sent: {error}") from error
        return self._post("/sql", body, JSON)

    def _post(self, path: str, body: bytes, content_type: str) -> list[Result]:
        accept = f"{ARROW}; {ALL_RESULTS}"
        with self._statement:
            answer = self._client.post(path, body, content_type=content_type, accept=accept, repeatable=False)
        try:
            return results_from(answer.body)
        except InvalidArgument as error:
            raise self._client.unreadable(error) from error
