"""`llog.connect()`: SQL and consumers as a connection of PEP 249.

Every statement is committed when it has run, unless a transaction was begun: by `begin`, by `with
connection.transaction()`, or by BEGIN. The transactions that PEP 249 begins by itself would hide events from their
consumers, and keep others from writing, until somebody remembers to commit. Through a broker, a transaction is one
`execute` with all its statements, from BEGIN to COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from llog.client import exceptions
from llog.client.backend import Backend, acknowledge
from llog.client.cursor import Cursor
from llog.client.exceptions import InterfaceError, NotSupportedError, translated
from llog.client.sessions import SqlSession, open_session
from llog.config import Settings
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.client.consumer import Consumer


def connect(target: str | Settings | None = None, *, member: str | None = None, **settings: Any) -> Connection:
    """A connection to the broker at `http://host:port`, or to the log of this process's settings, which `settings` go
    before.

    One process at a time may have a log's tables open: others go through it, if it is a broker. `member` is who
    consumes here, as consumer groups know it; a name that nobody else has, unless one is given. Nothing is opened
    before the first statement.
    """
    with translated():
        return Connection(open_session(target, member=member, **settings))


class Connection:
    """May be shared by threads: their statements run one after the other. Its cursors may not."""

    Warning = exceptions.Warning
    Error = exceptions.Error
    InterfaceError = exceptions.InterfaceError
    DatabaseError = exceptions.DatabaseError
    DataError = exceptions.DataError
    OperationalError = exceptions.OperationalError
    IntegrityError = exceptions.IntegrityError
    InternalError = exceptions.InternalError
    ProgrammingError = exceptions.ProgrammingError
    NotSupportedError = exceptions.NotSupportedError

    def __init__(self, session: SqlSession) -> None:
        self._session = session
        self._closed = False

    def cursor(self) -> Cursor:
        self._open()
        return Cursor(self, self._open)

    def execute(self, operation: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Cursor:
        """A new cursor that has executed it."""
        return self.cursor().execute(operation, parameters)

    def executemany(self, operation: str, seq_of_parameters: Iterable[Sequence[Any]]) -> Cursor:
        return self.cursor().executemany(operation, seq_of_parameters)

    def insert(self, table: str, data: Any) -> int:
        """All rows of an Arrow table or batch, a DataFrame, or a list of dictionaries, or none of them; returns how
        many they were.
        """
        session = self._open()
        with translated():
            return session.insert(table, _arrow(data)).changed

    def consumer(self, topic: str, *, group: str, **options: Any) -> Consumer:
        """An iterator over the messages of a topic, for a consumer group. Its options are those of
        `llog.client.consumer.Consumer`.
        """
        from llog.client.consumer import Consumer

        with translated():
            return Consumer(self.backend, topic, group=group, **options)

    def ack(
        self,
        topic: str,
        group: str,
        upto: int | Mapping[int | None, int],
        *,
        partition: int | None = None,
        member: str = "",
    ) -> dict[int, int]:
        """Acknowledges messages up to an offset, or up to one in each partition; returns the next that the group wants
        in each.

        A partition must be named if the topic has several. Logs a warning if `member` holds nothing of it, but others
        do.
        """
        offsets: Mapping[int | None, int] = {partition: upto} if isinstance(upto, int) else upto
        with translated():
            return acknowledge(self.backend, topic, group, offsets, member)

    @property
    def backend(self) -> Backend:
        """What consumers and agents work through."""
        session = self._open()
        with translated():
            return session.backend

    @property
    def autocommit(self) -> bool:
        return True

    @autocommit.setter
    def autocommit(self, wanted: bool) -> None:
        if not wanted:
            raise NotSupportedError("transactions do not begin by themselves: use begin() or connection.transaction()")

    @property
    def in_transaction(self) -> bool:
        return self._open().in_transaction

    def begin(self) -> None:
        self.execute("BEGIN")

    def commit(self) -> None:
        """Nothing happens if no transaction is open."""
        if self.in_transaction:
            self.execute("COMMIT")

    def rollback(self) -> None:
        """Nothing happens if no transaction is open."""
        if self.in_transaction:
            self.execute("ROLLBACK")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Begun here and committed at the end of the block; rolled back if that raises."""
        self.begin()
        try:
            yield self
        except BaseException:
            self.rollback()
            raise
        self.commit()

    def close(self) -> None:
        """Idempotent. Rolls back what is open."""
        if not self._closed:
            self._closed = True
            with translated():
                self._session.close()

    def __enter__(self) -> Connection:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commits what is open, unless the block raised, and closes."""
        try:
            if not self._closed and error is None:
                self.commit()
        finally:
            self.close()

    def _open(self) -> SqlSession:
        if self._closed:
            raise InterfaceError("this connection is closed: make another one with llog.connect()")
        return self._session


def _arrow(data: Any) -> pa.Table:
    """`InvalidArgument` if it has no columns to insert."""
    try:
        if isinstance(data, pa.Table):
            return data
        if isinstance(data, pa.RecordBatch):
            return pa.Table.from_batches([data])
        if type(data).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(data, preserve_index=False).replace_schema_metadata(None)
        if hasattr(data, "__arrow_c_stream__"):
            return pa.table(data)
        if isinstance(data, list) and all(isinstance(row, dict) for row in data):
            return pa.Table.from_pylist(data)
    except (pa.ArrowException, TypeError) as error:
        raise InvalidArgument(f"the rows cannot be made an Arrow table: {error}") from error
    raise InvalidArgument(
        f"rows are an Arrow table, a DataFrame or a list of dictionaries, not a {type(data).__name__}"
    )
