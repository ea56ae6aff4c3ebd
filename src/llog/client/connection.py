"""`llog.connect()`: SQL and consumers as a connection of PEP 249.

Every statement is committed when it has run, unless a transaction was begun: by `begin`, by `with
connection.transaction()`, or by BEGIN. The implicit transactions of PEP 249 would hide events from their consumers, and
block other writers, until the program commits. Through a broker, a transaction is one `execute` with all its
statements, from BEGIN to COMMIT.
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
from llog.client.exceptions import InterfaceError, NotSupportedError, translate_errors
from llog.client.sessions import SqlSession, open_session
from llog.config import Settings
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.client.consumer import Consumer


def connect(target: str | Settings | None = None, *, member: str | None = None, **settings: Any) -> Connection:
    """Return a connection to the broker at `http://host:port`, or to the log of this process's settings, which
    `settings` override.

    One process at a time may have a log's tables open: others go through it, if it is a broker. `member` is the name
    under which this connection consumes; by default one that no other member has. Nothing is opened before the first
    statement.
    """
    with translate_errors():
        return Connection(open_session(target, member=member, **settings))


class Connection:
    """Threads may share a connection: their statements run one after the other. They may not share its cursors."""

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
        self._require_open()
        return Cursor(self, self._require_open)

    def execute(self, operation: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Cursor:
        """Execute on a new cursor, and return that."""
        return self.cursor().execute(operation, parameters)

    def executemany(self, operation: str, seq_of_parameters: Iterable[Sequence[Any]]) -> Cursor:
        return self.cursor().executemany(operation, seq_of_parameters)

    def insert(self, table: str, data: Any) -> int:
        """Insert all rows of an Arrow table or batch, a DataFrame or a list of dictionaries, or none of them; return
        their number.
        """
        session = self._require_open()
        with translate_errors():
            return session.insert(table, _arrow_table(data)).changed

    def consumer(self, topic: str, *, group: str, **options: Any) -> Consumer:
        """Return an iterator over the messages of a topic for a consumer group; `options` are those of
        `llog.client.consumer.Consumer`.
        """
        from llog.client.consumer import Consumer

        with translate_errors():
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
        """Acknowledge messages up to an offset, or up to one in each partition; return the next offset that the group
        wants in each.

        A partition must be named if the topic has several. Logs a warning if other members hold the messages, and
        `member` none of them.
        """
        offsets: Mapping[int | None, int] = {partition: upto} if isinstance(upto, int) else upto
        with translate_errors():
            return acknowledge(self.backend, topic, group, offsets, member)

    @property
    def backend(self) -> Backend:
        """The backend of consumers and agents."""
        session = self._require_open()
        with translate_errors():
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
        return self._require_open().in_transaction

    def begin(self) -> None:
        self.execute("BEGIN")

    def commit(self) -> None:
        """Commit the open transaction, if there is one."""
        if self.in_transaction:
            self.execute("COMMIT")

    def rollback(self) -> None:
        """Roll the open transaction back, if there is one."""
        if self.in_transaction:
            self.execute("ROLLBACK")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Begin a transaction, and commit it at the end of the block; roll it back if the block raises."""
        self.begin()
        try:
            yield self
        except BaseException:
            self.rollback()
            raise
        self.commit()

    def close(self) -> None:
        """Roll back an open transaction and close the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            with translate_errors():
                self._session.close()

    def __enter__(self) -> Connection:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit an open transaction, unless the block raised, and close the connection."""
        try:
            if not self._closed and error is None:
                self.commit()
        finally:
            self.close()

    def _require_open(self) -> SqlSession:
        if self._closed:
            raise InterfaceError("this connection is closed: make another one with llog.connect()")
        return self._session


def _arrow_table(data: Any) -> pa.Table:
    """Return the rows as a table; raise `InvalidArgument` if the data has no columns to insert."""
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
        raise InvalidArgument(f"the rows cannot be converted to an Arrow table: {error}") from error
    raise InvalidArgument(
        f"rows must be an Arrow table, a DataFrame or a list of dictionaries, not a {type(data).__name__}"
    )
