"""Every error that llog raises on purpose: one class each, with its code, HTTP status, exit code and PEP 249 exception.

A message names what was wrong, with which value, and what to do; it never contains a secret. To add an error, add its
class here and run `make docs`, which writes the docstring into `docs/errors.md`.
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
    """Base of all errors that llog raises on purpose."""

    # A subclass inherits every attribute but `code` unless it sets its own.

    code = "error"
    """Stable and unique: programs may compare it."""
    http_status = HTTPStatus.INTERNAL_SERVER_ERROR
    """The status of a request that fails with this error as a whole."""
    exit_code = EXIT_FAILURE
    """The exit code of an `llog` command that fails with this error."""
    dbapi_exception: DbapiException = "OperationalError"
    """The exception of PEP 249 that this error becomes in `llog.client`."""

    def fields(self) -> dict[str, Any]:
        """Return the values that a program would otherwise parse out of the message. HTTP answers carry them."""
        return {}


class ConfigurationError(LlogError):
    """A setting, an option or an address is missing, unknown or malformed. Correct the one that the message names."""

    code = "configuration"
    http_status = HTTPStatus.NOT_IMPLEMENTED
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class InvalidArgument(LlogError):
    """A value passed to a call is malformed or outside its bounds, which the message names. Nothing was changed."""

    code = "invalid_argument"
    http_status = HTTPStatus.BAD_REQUEST
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


# --- stores


class StoreUnavailable(LlogError):
    """A store cannot be reached, or is closed, and the call changed nothing.

    Try again; if it persists, check the store that the message names.
    """

    code = "store_unavailable"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class StoreUnreachable(StoreUnavailable):
    """No usable server answers at the address in the settings. Nothing was changed.

    Check the address, and that the server runs.
    """

    code = "store_unreachable"
    exit_code = EXIT_BAD_INPUT


class StaleReads(StoreUnavailable):
    """Some reads may come from a server that is no longer in charge: what they did not show may exist. Read again."""

    code = "stale_reads"


class OutcomeUnknown(LlogError):
    """The answer to a write was lost: the write may have happened, or may still happen. Read to find out.

    An append with a producer id can be repeated with the same sequence: it takes effect once.
    """

    code = "outcome_unknown"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class VersionMismatch(LlogError):
    """A conditional write found another version of the key than it expected, and changed nothing.

    Read the key again and decide anew.
    """

    code = "version_mismatch"


class BlobExists(LlogError):
    """A blob of that name already exists. Blobs are immutable: put the bytes under another name."""

    code = "blob_exists"


class BlobNotFound(LlogError):
    """The blob store has no blob of that name: it was never put, or was deleted.

    If metadata refers to it, run `llog verify`.
    """

    code = "blob_not_found"
    dbapi_exception = "InternalError"


class WrongStore(LlogError):
    """A store is not llog's, was written by a newer llog, or does not belong to the other store.

    Correct the address, or upgrade llog.
    """

    code = "wrong_store"
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "InternalError"


# --- batches


class CorruptBatch(LlogError):
    """Bytes are not the batch that they should be: they are damaged, cut short, or in an unknown encoding.

    Run `llog verify`.
    """

    code = "corrupt_batch"
    dbapi_exception = "InternalError"


class OldMessageFormat(CorruptBatch):
    """A Kafka client sent messages in the format that Kafka 0.11 replaced. Use a newer client."""

    code = "old_message_format"


class UnsupportedCompression(CorruptBatch):
    """A Kafka batch is compressed in a way that llog does not know. Use one that the message names."""

    code = "unsupported_compression"


class InvalidRecord(CorruptBatch):
    """The checksum of a Kafka batch is right, but its records are not: the client that wrote it has a fault."""

    code = "invalid_record"


class RecordTooLarge(LlogError):
    """A record, an append or a query's input is larger than the limit that the message names.

    Send or read less at a time.
    """

    code = "record_too_large"
    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "DataError"


# --- topics and partitions


class TopicExists(LlogError):
    """A topic of that name is already in the catalog. Choose another name, or use the topic that exists."""

    code = "topic_exists"
    http_status = HTTPStatus.CONFLICT
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class PartitionNotInitialized(LlogError):
    """The topic has no such partition. Create it, or use a lower partition number."""

    code = "partition_not_initialized"
    http_status = HTTPStatus.NOT_FOUND
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class TopicNotFound(PartitionNotInitialized):
    """No topic of that name is in the catalog. Create it, or correct the name."""

    code = "topic_not_found"


class WrongEngine(LlogError):
    """The topic's engine does not support this operation. The message names the engine, and the way that works."""

    code = "wrong_engine"
    http_status = HTTPStatus.CONFLICT
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "NotSupportedError"


class TopicElsewhere(LlogError):
    """The topic's files are not on this machine, or not in the directory that the settings name.

    Run the command where they are, or go through the broker there.
    """

    code = "topic_elsewhere"
    http_status = HTTPStatus.MISDIRECTED_REQUEST
    exit_code = EXIT_BAD_INPUT


class OwnerUnavailable(TopicElsewhere):
    """The process that owns the requested topic, tables or keyed log does not run or does not answer.

    Nothing was changed; try again later.
    """

    code = "owner_unavailable"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class PartitionFenced(LlogError):
    """The partition is fenced and accepts no appends until it is unfenced (`llog topics unfence`). Reads continue."""

    code = "partition_fenced"
    http_status = HTTPStatus.CONFLICT


class OffsetOutOfRange(LlogError):
    """The offset is outside the partition's bounds, which the error carries.

    Continue at the log start, or at the next offset.
    """

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
    """Key compaction removed the record at this offset, because its key has a newer record.

    Continue at the offset after it.
    """

    code = "record_removed"
    http_status = HTTPStatus.GONE
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "DataError"


class InconsistentReadState(LlogError):
    """Metadata and stored records disagree: an index gap, a missing blob, or a record that cannot be decoded.

    Run `llog verify`.
    """

    code = "inconsistent_read_state"
    dbapi_exception = "InternalError"


class OutOfOrderSequence(LlogError):
    """A producer sent a sequence that is neither its next one nor one of its last ones. Nothing was appended.

    Send sequences in order, or begin again under a new producer id.
    """

    code = "out_of_order_sequence"
    http_status = HTTPStatus.CONFLICT


class UnknownProducer(LlogError):
    """The partition does not know this producer, or has forgotten it, so that llog cannot find out whether its append
    happened.

    Check the records, then begin again under a new producer id.
    """

    code = "unknown_producer"
    http_status = HTTPStatus.CONFLICT


class ProducerFenced(LlogError):
    """A producer sent an epoch below the highest that the partition has seen of it. Nothing was appended.

    Another process has taken over under a higher epoch: stop this one, or give it an epoch of its own.
    """

    code = "producer_fenced"
    http_status = HTTPStatus.CONFLICT


class IdempotenceUnsupported(LlogError):
    """The topic's engine does not keep the states of producers that number their records. Nothing was appended.

    Send the records without a producer id, or to a topic of engine `object`.
    """

    code = "idempotence_unsupported"
    http_status = HTTPStatus.BAD_REQUEST
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "NotSupportedError"


class PartlyAppended(LlogError):
    """Some append groups of one append were appended and others were not.

    `results` has the result or the error of each: repeat only those that failed. Over HTTP the status is 409 if the
    first of them was refused, and 500 if it failed.
    """

    code = "partly_appended"

    def __init__(self, appended: int, results: list[object], first: LlogError) -> None:
        super().__init__(
            f"{appended} of {len(results)} append groups were appended: repeat only the others. "
            f"The first failure: {first}"
        )
        self.appended = appended
        self.results = results
        self.first = first
        if first.http_status < HTTPStatus.INTERNAL_SERVER_ERROR:
            self.http_status = HTTPStatus.CONFLICT

    def __reduce__(self) -> tuple[type[PartlyAppended], tuple[int, list[object], LlogError]]:
        return type(self), (self.appended, self.results, self.first)


class Contention(LlogError):
    """Other processes won every race for the same key within the attempts allowed. Nothing was changed; try again."""

    code = "contention"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class LogOwned(LlogError):
    """Another process owns what this call would change, and the message names that process. Nothing was changed.

    Go through that process, or stop it.
    """

    code = "log_owned"
    http_status = HTTPStatus.CONFLICT

    address: str | None = None
    """The address of that process, if it is a broker that others can reach."""

    def fields(self) -> dict[str, Any]:
        return {} if self.address is None else {"owner": self.address}


# --- consumer groups


class GroupConflict(LlogError):
    """A consumer group is in use, or is of another kind than the call needs: plain, claimed or assigned.

    Use another group, or delete this one once its members have left.
    """

    code = "group_conflict"
    http_status = HTTPStatus.CONFLICT
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class StaleMember(LlogError):
    """A member of an assigned group does not have the partition any more, or was silent for too long.

    Join again, and continue with the partitions of the new assignment.
    """

    code = "stale_member"
    http_status = HTTPStatus.CONFLICT


class TooManyClaims(LlogError):
    """A group has as many claims in a partition as llog keeps. Nothing was delivered.

    Acknowledge records first, or consume more records per request.
    """

    code = "too_many_claims"
    http_status = HTTPStatus.TOO_MANY_REQUESTS


# --- keyed logs


class WriterFenced(LlogError):
    """Another writer has taken over the keyed log. Open the log again to continue.

    Records of this writer that were not reported as durable are lost.
    """

    code = "writer_fenced"
    http_status = HTTPStatus.CONFLICT


class NotSeenYet(LlogError):
    """A reader of a keyed log has not reached the given position in time.

    Try again, and check that the position belongs to this log.
    """

    code = "not_seen_yet"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class LogNotFound(LlogError):
    """No log exists where the settings say, and a command that only reads does not create one.

    Check LLOG_META and LLOG_DATA_DIR.
    """

    code = "log_not_found"
    http_status = HTTPStatus.NOT_FOUND
    exit_code = EXIT_BAD_INPUT


class KeyedLogNotFound(LlogError):
    """No keyed log exists at this address, or its writer has not created it yet.

    Check the address, or start the writer.
    """

    code = "keyed_log_not_found"
    http_status = HTTPStatus.NOT_FOUND
    exit_code = EXIT_BAD_INPUT


class KeyedLogNotConfigured(LlogError):
    """The broker serves no keyed log. Start it with LLOG_KEYED."""

    code = "keyed_log_not_configured"
    http_status = HTTPStatus.NOT_FOUND


# --- the broker


class RequestTooLarge(LlogError):
    """The body of a request is larger than the broker reads (LLOG_REQUEST_MAX_BYTES for most requests).

    Nothing of the request was done; send less at a time.
    """

    code = "request_too_large"
    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    dbapi_exception = "DataError"


class HeaderTooLarge(LlogError):
    """The header of a request is larger than LLOG_REQUEST_HEADER_MAX_BYTES.

    Nothing of the request was done; send large values in the body.
    """

    code = "header_too_large"
    http_status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


class RequestTimeout(LlogError):
    """A request arrived more slowly than LLOG_REQUEST_MIN_BYTES_PER_SECOND.

    Nothing of the request was done; send smaller requests.
    """

    code = "request_timeout"
    http_status = HTTPStatus.REQUEST_TIMEOUT


class WrongRole(LlogError):
    """This broker's role excludes the request (LLOG_ROLE).

    Nothing of the request was done; send it to a broker with the role that the message names.
    """

    code = "wrong_role"
    http_status = HTTPStatus.MISDIRECTED_REQUEST
    dbapi_exception = "NotSupportedError"


class TooManyConnections(LlogError):
    """The broker has reached its limit of open connections. Nothing of the request was done; try again later."""

    code = "too_many_connections"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE


class ChildFailed(LlogError):
    """A process that this one started, such as a worker of a broker, ended again and again soon after its start.

    What it logged before says why. Nothing that was acknowledged is lost.
    """

    code = "child_failed"


class WrongHost(LlogError):
    """The request names a host that the broker does not serve.

    Nothing of the request was done; use the broker's address, or add the name to LLOG_BROKER_HOSTS.
    """

    code = "wrong_host"
    http_status = HTTPStatus.MISDIRECTED_REQUEST


class Overloaded(LlogError):
    """The broker has reached its limit of buffered bytes, clients or forwarded requests.

    Nothing of the request was done; try again later.
    """

    code = "overloaded"
    http_status = HTTPStatus.TOO_MANY_REQUESTS


class StatementTimeout(LlogError):
    """Statements ran longer than LLOG_SQL_TIMEOUT_MS and were cancelled.

    Those before the last one may have taken effect.
    """

    code = "statement_timeout"
    http_status = HTTPStatus.UNPROCESSABLE_ENTITY


# --- tables and SQL


class TableNotFound(LlogError):
    """No table of that name exists. Create it, or correct the name."""

    code = "table_not_found"
    http_status = HTTPStatus.NOT_FOUND
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "ProgrammingError"


class TableExists(LlogError):
    """A table of that name already exists. Choose another name, or use the table that exists."""

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
    """A statement of this transaction failed, so the transaction cannot be committed. Roll it back."""

    code = "transaction_failed"
    http_status = HTTPStatus.CONFLICT


class ResultTooLarge(LlogError):
    """A query returned, or a transaction changed, more rows or bytes than the settings allow.

    Add LIMIT, or change fewer rows at a time.
    """

    code = "result_too_large"
    http_status = HTTPStatus.UNPROCESSABLE_ENTITY
    dbapi_exception = "DataError"


class SqlError(LlogError):
    """SQL text cannot be run: `line` and `column` say where, `hint` says what to do. Nothing was run.

    Lines and columns count from 1; 0 means that the place is unknown.
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
        """Return an error that shows the line of this position, at most 100 characters of it, with a caret below."""
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
    """A statement needs more memory than LLOG_SQL_MEMORY_MAX_BYTES. Nothing was changed.

    Ask for less, or raise the setting.
    """

    code = "sql_memory"
    http_status = HTTPStatus.UNPROCESSABLE_ENTITY
    dbapi_exception = "OperationalError"


class SqlWorkerEnded(SqlError):
    """The process that ran the statement died, or was stopped to end another statement.

    Nothing was changed; try again.
    """

    code = "sql_worker_ended"
    http_status = HTTPStatus.SERVICE_UNAVAILABLE
    dbapi_exception = "OperationalError"


# --- sinks and the pipeline


class StaleWrite(LlogError):
    """This writer belongs to an older attempt: the sink has moved on. The writer wrote nothing; stop it."""

    code = "stale_write"
    http_status = HTTPStatus.CONFLICT


class BlobCollected(LlogError):
    """An upload waited longer than the grace period, so that the collector may have deleted its blob.

    Run the batch again.
    """

    code = "blob_collected"
    http_status = HTTPStatus.CONFLICT


class DataLoss(LlogError):
    """Requested records are gone, by retention, deletion or damage.

    The message says how to continue without them.
    """

    code = "data_loss"
    dbapi_exception = "InternalError"


class JavaNotFound(LlogError):
    """Spark needs Java 17 or newer, and llog found none. Install it, or set JAVA_HOME."""

    code = "java_not_found"


class MissingExtra(LlogError):
    """A feature needs packages that are not installed. The message has the command that installs them."""

    code = "missing_extra"
    http_status = HTTPStatus.NOT_IMPLEMENTED
    exit_code = EXIT_BAD_INPUT
    dbapi_exception = "NotSupportedError"


class SparkFailed(LlogError):
    """Spark did not start, or its session ended while llog needed it. The message has Spark's reason."""

    code = "spark_failed"


BY_CODE: Final[Mapping[str, type[LlogError]]] = {
    each.code: each
    for each in tuple(globals().values())
    if isinstance(each, type) and issubclass(each, LlogError) and each is not PartlyAppended
}
"""The errors that can be rebuilt from an HTTP answer, by code. `PartlyAppended` cannot: an answer lacks its results."""
