"""Every error that llog raises on purpose: one class each, which says what the error looks like on every surface.

A message names what was wrong, with which value, and what to do; it never contains a secret. To add an error, add its
class here and run `make docs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, Literal

EXIT_FAILURE: Final = 1
EXIT_BAD_INPUT: Final = 2

DbapiException = Literal[
    "DataError",
    "IntegrityError",
    "InternalError",
    "NotSupportedError",
    "OperationalError",
    "ProgrammingError",
]


class LlogError(Exception):
    """Base of all errors that llog raises on purpose.

    A subclass inherits every attribute but `code` unless it sets its own.
    """

    code = "error"
    """Stable and unique: programs may compare it."""
    http_status = HTTPStatus.INTERNAL_SERVER_ERROR
    """The status of a request that fails with this error as a whole."""
    exit_code = EXIT_FAILURE
    """The exit code of an `llog` command that fails with this error."""
    dbapi_exception: DbapiException = "OperationalError"
    """The exception of PEP 249 that this error becomes in `llog.client`."""

    def fields(self) -> dict[str, Any]:
        """The values that a program would otherwise have to parse out of the message; HTTP answers carry them."""
        return {}


class ConfigurationError(LlogError):
    """A setting, an option or an address is missing, unknown or malformed."""

    code = "configuration"
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class InvalidArgument(LlogError):
    """A value handed to a call is out of its bounds."""

    code = "invalid_argument"
    http_status = HTTPStatus.BAD_REQUEST
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


# --- stores


class StoreUnavailable(LlogError):
    """A store cannot be reached or opened. Nothing was changed by the call."""

    code = "store_unavailable"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class StoreUnreachable(StoreUnavailable):
    """No server that can be used answers at the address that a setting names. Nothing was changed."""

    code = "store_unreachable"
    exit_code = EXIT_BAD_INPUT


class StaleReads(StoreUnavailable):
    """Some reads may have been answered by a server that was no longer in charge: what they did not show may exist."""

    code = "stale_reads"


class OutcomeUnknown(LlogError):
    """The answer to a write was lost: the write may have happened."""

    code = "outcome_unknown"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class VersionMismatch(LlogError):
    """A conditional write found another version of the key than the one expected."""

    code = "version_mismatch"


class BlobExists(LlogError):
    """A blob of that name already exists; blobs are immutable."""

    code = "blob_exists"


class BlobNotFound(LlogError):
    """The blob is not in the store."""

    code = "blob_not_found"
    dbapi_exception = "InternalError"


class WrongStore(LlogError):
    """A store is not llog's, was written by a newer version, or does not belong to the other store."""

    code = "wrong_store"
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "InternalError"


# --- batches


class CorruptBatch(LlogError):
    """Bytes are not the batch they should be: damaged, cut short, or of an unknown encoding."""

    code = "corrupt_batch"
    dbapi_exception = "InternalError"


class RecordTooLarge(LlogError):
    """A record or an append is larger than the limit."""

    code = "record_too_large"
    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "DataError"


# --- topics and partitions


class TopicExists(LlogError):
    """A topic of that name is already in the catalog."""

    code = "topic_exists"
    http_status = HTTPStatus.CONFLICT
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class PartitionNotInitialized(LlogError):
    """The topic has no such partition."""

    code = "partition_not_initialized"
    http_status = HTTPStatus.NOT_FOUND
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class TopicNotFound(PartitionNotInitialized):
    """No topic of that name is in the catalog, so none of its partitions exists."""

    code = "topic_not_found"


class WrongEngine(LlogError):
    """The topic is kept by an engine that cannot do this."""

    code = "wrong_engine"
    http_status = HTTPStatus.CONFLICT
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "NotSupportedError"


class TopicElsewhere(LlogError):
    """The topic's files are not on this machine, or not in the directory that the settings name."""

    code = "topic_elsewhere"
    http_status = HTTPStatus.MISDIRECTED_REQUEST
    exit_code = EXIT_BAD_INPUT


class OwnerUnavailable(TopicElsewhere):
    """The owner of what was asked for is not running or does not answer. Nothing was changed; try again later."""

    code = "owner_unavailable"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class PartitionFenced(LlogError):
    """The partition accepts no appends until it is unfenced."""

    code = "partition_fenced"
    http_status = HTTPStatus.CONFLICT


class OffsetOutOfRange(LlogError):
    """The offset is outside the partition's bounds, which the error carries."""

    code = "offset_out_of_range"
    http_status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "DataError"

    def __init__(self, what: str, offset: int, log_start_offset: int, next_offset: int) -> None:
        super().__init__(
            f"offset {offset} of {what} is outside its bounds: "
            f"the log starts at {log_start_offset} and the next offset is {next_offset}"
        )
        self.what = what
        self.offset = offset
        self.log_start_offset = log_start_offset
        self.next_offset = next_offset

    def fields(self) -> dict[str, Any]:
        return {"log_start_offset": self.log_start_offset, "next_offset": self.next_offset}

    def __reduce__(self) -> tuple[type[OffsetOutOfRange], tuple[str, int, int, int]]:
        return type(self), (self.what, self.offset, self.log_start_offset, self.next_offset)


class RecordRemoved(LlogError):
    """Key compaction removed the record at this offset, because its key has a newer record."""

    code = "record_removed"
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "DataError"


class InconsistentReadState(LlogError):
    """Index and blobs do not agree: a gap, a missing blob, or a record count that differs."""

    code = "inconsistent_read_state"
    dbapi_exception = "InternalError"


class OutOfOrderSequence(LlogError):
    """A producer's sequence is neither its next one nor one of its last."""

    code = "out_of_order_sequence"


class UnknownProducer(LlogError):
    """The partition has forgotten this producer, so nobody knows whether its append happened."""

    code = "unknown_producer"


class PartlyAppended(LlogError):
    """Some groups of one append were appended and others were not; `results` has the result or the error of each."""

    code = "partly_appended"

    def __init__(self, appended: int, results: list[object], first: LlogError) -> None:
        super().__init__(
            f"{appended} of {len(results)} groups were appended; do not append those again. The first failure: {first}"
        )
        self.appended = appended
        self.results = results
        self.first = first

    def __reduce__(self) -> tuple[type[PartlyAppended], tuple[int, list[object], LlogError]]:
        return type(self), (self.appended, self.results, self.first)


class Contention(LlogError):
    """Other writers won every race within the attempts allowed. Nothing was appended; try again."""

    code = "contention"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class LogOwned(LlogError):
    """Another process owns what was asked for; the message names it. Nothing was changed."""

    code = "log_owned"
    http_status = HTTPStatus.CONFLICT

    address: str | None = None
    """Where that process answers requests, if it is a broker that others can reach."""

    def fields(self) -> dict[str, Any]:
        return {} if self.address is None else {"owner": self.address}


# --- consumer groups


class GroupConflict(LlogError):
    """A consumer group is used in two ways that exclude each other: claimed, assigned, or with plain positions."""

    code = "group_conflict"
    http_status = HTTPStatus.CONFLICT
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class StaleMember(LlogError):
    """A member of an assigned group lost its partition or was considered dead. It must join again."""

    code = "stale_member"
    http_status = HTTPStatus.CONFLICT


class TooManyClaims(LlogError):
    """A group has the most claims that a partition keeps. Nothing was delivered: acknowledge first."""

    code = "too_many_claims"
    http_status = HTTPStatus.TOO_MANY_REQUESTS


# --- keyed logs


class WriterFenced(LlogError):
    """Another writer has taken over the keyed log; open the log again to go on.

    Records of this writer that were not reported as durable are lost.
    """

    code = "writer_fenced"
    http_status = HTTPStatus.CONFLICT


class NotSeenYet(LlogError):
    """A keyed log does not reach the given position: its reader lags, or the cursor belongs to another log."""

    code = "not_seen_yet"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class LogNotFound(LlogError):
    """No log exists where the settings say, and a command that only reads does not create one."""

    code = "log_not_found"
    http_status = HTTPStatus.NOT_FOUND
    exit_code = EXIT_BAD_INPUT


class KeyedLogNotFound(LlogError):
    """No keyed log exists at this address, or its writer has not created it yet."""

    code = "keyed_log_not_found"
    http_status = HTTPStatus.NOT_FOUND
    exit_code = EXIT_BAD_INPUT


class KeyedLogNotConfigured(LlogError):
    """No setting names a keyed log, so the broker serves none."""

    code = "keyed_log_not_configured"
    http_status = HTTPStatus.NOT_FOUND


# --- the broker


class RequestTooLarge(LlogError):
    """The body of a request is larger than the broker reads."""

    code = "request_too_large"
    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    dbapi_exception = "DataError"


class HeaderTooLarge(LlogError):
    """The header of a request is larger than the broker reads. Nothing of the request was done."""

    code = "header_too_large"
    http_status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class RequestTimeout(LlogError):
    """A request arrived too slowly. Nothing of it was done."""

    code = "request_timeout"
    http_status = HTTPStatus.REQUEST_TIMEOUT


class WrongRole(LlogError):
    """A broker of another role answers this request. Nothing of it was done."""

    code = "wrong_role"
    http_status = HTTPStatus.MISDIRECTED_REQUEST
    dbapi_exception = "NotSupportedError"


class TooManyConnections(LlogError):
    """The broker has reached its limit of open connections. Nothing of the request was done; try again later."""

    code = "too_many_connections"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class WrongHost(LlogError):
    """A request named a host that the broker does not serve. Nothing of it was done."""

    code = "wrong_host"
    http_status = HTTPStatus.MISDIRECTED_REQUEST


class Overloaded(LlogError):
    """The broker has reached its limit of buffered bytes. Nothing of the request was done; try again later."""

    code = "overloaded"
    http_status = HTTPStatus.TOO_MANY_REQUESTS


class StatementTimeout(LlogError):
    """Statements ran longer than LLOG_SQL_TIMEOUT_MS and were cancelled."""

    code = "statement_timeout"
    http_status = HTTPStatus.UNPROCESSABLE_ENTITY


# --- tables and SQL


class TableNotFound(LlogError):
    """No table of that name exists."""

    code = "table_not_found"
    http_status = HTTPStatus.NOT_FOUND
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class TableExists(LlogError):
    """A table of that name already exists."""

    code = "table_exists"
    http_status = HTTPStatus.CONFLICT
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class ConstraintViolation(LlogError):
    """Rows violate their table's PRIMARY KEY, NOT NULL, UNIQUE or CHECK. Nothing was changed."""

    code = "constraint"
    http_status = HTTPStatus.CONFLICT
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "IntegrityError"


class TransactionConflict(LlogError):
    """Another transaction that changes tables did not end in time. Nothing was changed; try again."""

    code = "transaction_conflict"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class TransactionFailed(LlogError):
    """A statement of this transaction failed, so the transaction cannot be committed: roll it back."""

    code = "transaction_failed"
    http_status = HTTPStatus.CONFLICT


class ResultTooLarge(LlogError):
    """A query returned, or a transaction changed, more rows or bytes than the settings allow."""

    code = "result_too_large"
    http_status = HTTPStatus.UNPROCESSABLE_ENTITY
    dbapi_exception = "DataError"


class SqlError(LlogError):
    """SQL text cannot be run: `line` and `column` say where, `hint` says what to do. Nothing was run.

    Lines and columns count from 1; 0 stands for an unknown place.
    """

    code = "sql"
    http_status = HTTPStatus.BAD_REQUEST
    exit_code = EXIT_BAD_INPUT
    dbapi_exception: DbapiException = "ProgrammingError"

    def __init__(self, message: str, line: int = 0, column: int = 0, hint: str = "", shown: str = "") -> None:
        where = f"line {line}, column {column}: " if line else ""
        super().__init__(f"{where}{message}{shown}{f'{chr(10)}hint: {hint}' if hint else ''}")
        self.message = message
        self.line = line
        self.column = column
        self.hint = hint
        self.shown = shown

    def fields(self) -> dict[str, Any]:
        names = ("message", "line", "column", "hint", "shown")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @classmethod
    def at(cls, sql: str, position: int, message: str, hint: str = "") -> SqlError:
        """An error that shows the line of this position, cut to 100 characters around it, with a caret below."""
        begin = sql.rfind("\n", 0, position) + 1
        end = sql.find("\n", position)
        first = max(begin, position - 60)
        text = sql[first : min(end if end >= 0 else len(sql), first + 100)]
        shown = "".join(c if c.isprintable() else " " for c in text)
        caret = " " * (position - first) + "^"
        line = sql.count("\n", 0, position) + 1
        return cls(message, line, position - begin + 1, hint, f"\n  {shown}\n  {caret}")

    def __reduce__(self) -> tuple[type[SqlError], tuple[str, int, int, str, str]]:
        return type(self), (self.message, self.line, self.column, self.hint, self.shown)


class SqlMemoryExceeded(SqlError):
    """A statement needs more memory than LLOG_SQL_MEMORY_MAX_BYTES allows. Nothing was changed."""

    code = "sql_memory"
    http_status = HTTPStatus.UNPROCESSABLE_ENTITY
    dbapi_exception = "OperationalError"


class SqlWorkerEnded(SqlError):
    """The process that ran the statement died, or was ended to stop another. Nothing was changed; try again."""

    code = "sql_worker_ended"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE
    dbapi_exception = "OperationalError"


# --- sinks and the pipeline


class StaleWrite(LlogError):
    """The sink has moved on: this writer belongs to an older attempt and wrote nothing."""

    code = "stale_write"


class BlobCollected(LlogError):
    """An upload waited longer than the grace period, so its blob may be collected: write it again."""

    code = "blob_collected"


class DataLoss(LlogError):
    """Requested records are gone, by retention, deletion or damage."""

    code = "data_loss"
    dbapi_exception = "InternalError"


class JavaNotFound(LlogError):
    """Spark needs Java 17 or newer, and none was found."""

    code = "java_not_found"


class MissingExtra(LlogError):
    """A feature needs packages that are not installed."""

    code = "missing_extra"
    http_status = HTTPStatus.NOT_IMPLEMENTED
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "NotSupportedError"


class SparkFailed(LlogError):
    """Spark did not start, or its session ended while it was needed."""

    code = "spark_failed"


BY_CODE: Final[Mapping[str, type[LlogError]]] = {
    each.code: each
    for each in tuple(globals().values())
    if isinstance(each, type) and issubclass(each, LlogError) and each is not PartlyAppended
}
"""The errors that can be rebuilt from an HTTP answer, by code. `PartlyAppended` cannot: an answer lacks its results."""
