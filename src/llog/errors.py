"""Every error a caller can meet, one class each, with a stable code.

A message names what was wrong, with which value, and what to do. None of them ever carries a secret.
"""

from __future__ import annotations


class LlogError(Exception):
    """Base of all errors that llog raises on purpose. `code` is stable: programs may compare it."""

    code = "error"


class ConfigurationError(LlogError):
    """A setting, an option or an address is missing, unknown or malformed."""

    code = "configuration"


class InvalidArgument(LlogError):
    """A value handed to a call is out of its bounds."""

    code = "invalid_argument"


# --- stores


class StoreUnavailable(LlogError):
    """A store cannot be reached or opened. Nothing was changed by the call."""

    code = "store_unavailable"


class StoreUnreachable(StoreUnavailable):
    """No server that can be used answers at the address that a setting names. Nothing was changed."""

    code = "store_unreachable"


class StaleReads(StoreUnavailable):
    """Some reads may have been answered by a server that was no longer in charge: what they did not show may exist."""

    code = "stale_reads"


class OutcomeUnknown(LlogError):
    """The answer of a write was lost: it may have happened."""

    code = "outcome_unknown"


class VersionMismatch(LlogError):
    """A conditional write found another version of the key than the one expected."""

    code = "version_mismatch"


class BlobExists(LlogError):
    """A blob of that name is already there; blobs are immutable."""

    code = "blob_exists"


class BlobNotFound(LlogError):
    """The blob is not in the store."""

    code = "blob_not_found"


class WrongStore(LlogError):
    """A store is not llog's, was written by a newer version, or does not belong to the other store."""

    code = "wrong_store"


# --- batches


class CorruptBatch(LlogError):
    """Bytes are not the batch they should be: damaged, cut short, or of an unknown encoding."""

    code = "corrupt_batch"


class RecordTooLarge(LlogError):
    """A record or an append is larger than the limit."""

    code = "record_too_large"


# --- topics and partitions


class TopicExists(LlogError):
    """A topic of that name is already in the catalog."""

    code = "topic_exists"


class PartitionNotInitialized(LlogError):
    """The topic has no such partition."""

    code = "partition_not_initialized"


class TopicNotFound(PartitionNotInitialized):
    """No topic of that name is in the catalog, so none of its partitions exists."""

    code = "topic_not_found"


class WrongEngine(LlogError):
    """The topic is kept by an engine that cannot do this."""

    code = "wrong_engine"


class TopicElsewhere(LlogError):
    """The topic's files are not on this machine, or not in the directory that the settings name."""

    code = "topic_elsewhere"


class OwnerUnavailable(TopicElsewhere):
    """What was asked for has one owner, which is not running or does not answer. Nothing was changed; try again
    later.
    """

    code = "owner_unavailable"


class PartitionFenced(LlogError):
    """The partition accepts no appends until it is unfenced."""

    code = "partition_fenced"


class OffsetOutOfRange(LlogError):
    """The offset is outside the partition's bounds, which the error carries."""

    code = "offset_out_of_range"

    def __init__(self, what: str, offset: int, log_start_offset: int, next_offset: int) -> None:
        super().__init__(
            f"offset {offset} of {what} is outside its bounds: "
            f"the log starts at {log_start_offset} and the next offset is {next_offset}"
        )
        self.what = what
        self.offset = offset
        self.log_start_offset = log_start_offset
        self.next_offset = next_offset

    def __reduce__(self) -> tuple[type[OffsetOutOfRange], tuple[str, int, int, int]]:
        return type(self), (self.what, self.offset, self.log_start_offset, self.next_offset)


class RecordRemoved(LlogError):
    """The record at this offset was removed by key compaction: a newer one of its key is there."""

    code = "record_removed"


class InconsistentReadState(LlogError):
    """Index and blobs do not agree: a gap, a missing blob, or a record count that differs."""

    code = "inconsistent_read_state"


class OutOfOrderSequence(LlogError):
    """A producer's sequence is neither its next one nor one of its last."""

    code = "out_of_order_sequence"


class UnknownProducer(LlogError):
    """The partition has forgotten this producer: whether its append happened cannot be told."""

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


class LogOwned(LlogError):
    """Another process owns what was asked for; the message names it. Nothing was changed."""

    code = "log_owned"

    address: str | None = None
    """Where that process answers requests, if it is a broker that others can reach."""


# --- consumer groups


class GroupConflict(LlogError):
    """A consumer group is used in two ways that exclude each other: claimed, assigned, or with plain positions."""

    code = "group_conflict"


class StaleMember(LlogError):
    """A member of an assigned group no longer has the partition, or was taken for dead. It must join again."""

    code = "stale_member"


class TooManyClaims(LlogError):
    """A group holds as many claims in a partition as are kept. Nothing was delivered: acknowledge first."""

    code = "too_many_claims"


# --- keyed logs


class WriterFenced(LlogError):
    """Another writer has taken over the keyed log. What this one was not told is durable is lost; open the log again to
    go on.
    """

    code = "writer_fenced"


class NotSeenYet(LlogError):
    """A keyed log does not reach as far as somebody says to have seen it: a reader that lags, or a cursor of another
    log.
    """

    code = "not_seen_yet"


class LogNotFound(LlogError):
    """There is no log where the settings say, and what only reads makes none."""

    code = "log_not_found"


class KeyedLogNotFound(LlogError):
    """There is no keyed log at this address, or its writer has not begun it yet."""

    code = "keyed_log_not_found"


class KeyedLogNotConfigured(LlogError):
    """No setting names a keyed log, so there is none to serve."""

    code = "keyed_log_not_configured"


# --- the broker


class RequestTooLarge(LlogError):
    """The body of a request is larger than the broker reads."""

    code = "request_too_large"


class HeaderTooLarge(LlogError):
    """The header of a request is larger than the broker reads. Nothing of the request was done."""

    code = "header_too_large"


class RequestTimeout(LlogError):
    """A request arrived more slowly than the broker waits for. Nothing of it was done."""

    code = "request_timeout"


class WrongRole(LlogError):
    """A broker was asked for what another role answers; nothing of the request was done."""

    code = "wrong_role"


class TooManyConnections(LlogError):
    """The broker has as many connections open as it may. Nothing of the request was done; try again later."""

    code = "too_many_connections"


class WrongHost(LlogError):
    """A request named a host that the broker does not serve; nothing of the request was done."""

    code = "wrong_host"


class Overloaded(LlogError):
    """The broker holds as much as it may. Nothing of the request was done; try again later."""

    code = "overloaded"


class StatementTimeout(LlogError):
    """Statements ran longer than a broker lets them and were cancelled."""

    code = "statement_timeout"


# --- tables and SQL


class TableNotFound(LlogError):
    """There is no table of that name."""

    code = "table_not_found"


class TableExists(LlogError):
    """A table of that name is already there."""

    code = "table_exists"


class ConstraintViolation(LlogError):
    """Rows break a rule of their table: a primary key that is there already, NOT NULL, UNIQUE or CHECK. Nothing was
    changed.
    """

    code = "constraint"


class TransactionConflict(LlogError):
    """Another transaction changes tables and did not end in time. Nothing was changed; try again."""

    code = "transaction_conflict"


class TransactionFailed(LlogError):
    """A statement of this transaction has failed, so none of it can be committed: roll it back."""

    code = "transaction_failed"


class ResultTooLarge(LlogError):
    """A query gave, or a transaction changed, more rows or bytes than the settings allow."""

    code = "result_too_large"


# --- SQL


class SqlError(LlogError):
    """SQL text that cannot be run: `line` and `column` (from 1; 0: none) say where, `hint` what to do. Nothing was
    run.
    """

    code = "sql"

    def __init__(self, message: str, line: int = 0, column: int = 0, hint: str = "", shown: str = "") -> None:
        where = f"line {line}, column {column}: " if line else ""
        super().__init__(f"{where}{message}{shown}{f'{chr(10)}hint: {hint}' if hint else ''}")
        self.message = message
        self.line = line
        self.column = column
        self.hint = hint
        self.shown = shown

    @classmethod
    def at(cls, sql: str, position: int, message: str, hint: str = "") -> SqlError:
        """With the line of this position, cut to 100 characters around it, and a caret below."""
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


class SqlWorkerEnded(SqlError):
    """The process that ran the statement died, or another statement could not be ended otherwise. Nothing was changed;
    try again.
    """

    code = "sql_worker_ended"


# --- sinks and the pipeline


class StaleWrite(LlogError):
    """A sink has moved on: this writer is a leftover of an older attempt, and wrote nothing."""

    code = "stale_write"


class BlobCollected(LlogError):
    """An upload waited longer than the grace period and may be collected: write it again."""

    code = "blob_collected"


class DataLoss(LlogError):
    """Records that were asked for are gone, by retention, deletion or damage."""

    code = "data_loss"


class JavaNotFound(LlogError):
    """Spark needs Java 17 or newer, and none was found."""

    code = "java_not_found"


class MissingExtra(LlogError):
    """A feature needs packages that are not installed."""

    code = "missing_extra"


class SparkFailed(LlogError):
    """Spark did not start, or its session ended while it was needed."""

    code = "spark_failed"
