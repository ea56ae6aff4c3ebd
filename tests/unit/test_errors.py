"""What errors look like outside: statuses, exit codes and exceptions that programs rely on, and pickles for Spark."""

from __future__ import annotations

import pickle

import pytest

from devtools.docs import error_list
from llog import errors
from llog.broker.http.answers import error_answer
from llog.client.exceptions import to_dbapi_exception
from llog.errors import (
    LlogError,
    OffsetOutOfRange,
    PartitionFenced,
    PartlyAppended,
    SqlError,
    StaleReads,
    StoreUnavailable,
)

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, LlogError)]
WITH_FIELDS: dict[type[LlogError], LlogError] = {
    OffsetOutOfRange: OffsetOutOfRange("t/0", 5, 10, 20),
    SqlError: SqlError("x", 1, 2, "hint", "\n  x\n  ^"),
    PartlyAppended: PartlyAppended(1, [None, StoreUnavailable("x")], StoreUnavailable("x")),
}

OUTSIDE = {  # code, HTTP status, exit code, exception of PEP 249: changing any of them breaks programs
    "LlogError": ("error", 500, 1, "OperationalError"),
    "ConfigurationError": ("configuration", 501, 2, "ProgrammingError"),
    "InvalidArgument": ("invalid_argument", 400, 2, "ProgrammingError"),
    "StoreUnavailable": ("store_unavailable", 503, 1, "OperationalError"),
    "StoreUnreachable": ("store_unreachable", 503, 2, "OperationalError"),
    "StaleReads": ("stale_reads", 503, 1, "OperationalError"),
    "OutcomeUnknown": ("outcome_unknown", 503, 1, "OperationalError"),
    "VersionMismatch": ("version_mismatch", 500, 1, "OperationalError"),
    "BlobExists": ("blob_exists", 500, 1, "OperationalError"),
    "BlobNotFound": ("blob_not_found", 500, 1, "InternalError"),
    "WrongStore": ("wrong_store", 500, 2, "InternalError"),
    "CorruptBatch": ("corrupt_batch", 500, 1, "InternalError"),
    "OldMessageFormat": ("old_message_format", 500, 1, "InternalError"),
    "UnsupportedCompression": ("unsupported_compression", 500, 1, "InternalError"),
    "InvalidRecord": ("invalid_record", 500, 1, "InternalError"),
    "RecordTooLarge": ("record_too_large", 413, 2, "DataError"),
    "TopicExists": ("topic_exists", 409, 2, "ProgrammingError"),
    "PartitionNotInitialized": ("partition_not_initialized", 404, 2, "ProgrammingError"),
    "TopicNotFound": ("topic_not_found", 404, 2, "ProgrammingError"),
    "WrongEngine": ("wrong_engine", 409, 2, "NotSupportedError"),
    "TopicElsewhere": ("topic_elsewhere", 421, 2, "OperationalError"),
    "OwnerUnavailable": ("owner_unavailable", 503, 2, "OperationalError"),
    "PartitionFenced": ("partition_fenced", 409, 1, "OperationalError"),
    "OffsetOutOfRange": ("offset_out_of_range", 416, 2, "DataError"),
    "RecordRemoved": ("record_removed", 410, 2, "DataError"),
    "InconsistentReadState": ("inconsistent_read_state", 500, 1, "InternalError"),
    "OutOfOrderSequence": ("out_of_order_sequence", 409, 1, "OperationalError"),
    "UnknownProducer": ("unknown_producer", 409, 1, "OperationalError"),
    "ProducerFenced": ("producer_fenced", 409, 1, "OperationalError"),
    "IdempotenceUnsupported": ("idempotence_unsupported", 400, 2, "NotSupportedError"),
    "PartlyAppended": ("partly_appended", 500, 1, "OperationalError"),
    "Contention": ("contention", 503, 1, "OperationalError"),
    "LogOwned": ("log_owned", 409, 1, "OperationalError"),
    "GroupConflict": ("group_conflict", 409, 2, "ProgrammingError"),
    "StaleMember": ("stale_member", 409, 1, "OperationalError"),
    "TooManyClaims": ("too_many_claims", 429, 1, "OperationalError"),
    "WriterFenced": ("writer_fenced", 409, 1, "OperationalError"),
    "NotSeenYet": ("not_seen_yet", 503, 1, "OperationalError"),
    "LogNotFound": ("log_not_found", 404, 2, "OperationalError"),
    "KeyedLogNotFound": ("keyed_log_not_found", 404, 2, "OperationalError"),
    "KeyedLogNotConfigured": ("keyed_log_not_configured", 404, 1, "OperationalError"),
    "RequestTooLarge": ("request_too_large", 413, 1, "DataError"),
    "HeaderTooLarge": ("header_too_large", 431, 1, "OperationalError"),
    "RequestTimeout": ("request_timeout", 408, 1, "OperationalError"),
    "WrongRole": ("wrong_role", 421, 1, "NotSupportedError"),
    "TooManyConnections": ("too_many_connections", 503, 1, "OperationalError"),
    "ChildFailed": ("child_failed", 500, 1, "OperationalError"),
    "WrongHost": ("wrong_host", 421, 1, "OperationalError"),
    "Overloaded": ("overloaded", 429, 1, "OperationalError"),
    "StatementTimeout": ("statement_timeout", 422, 1, "OperationalError"),
    "TableNotFound": ("table_not_found", 404, 2, "ProgrammingError"),
    "TableExists": ("table_exists", 409, 2, "ProgrammingError"),
    "ConstraintViolation": ("constraint", 409, 2, "IntegrityError"),
    "TransactionConflict": ("transaction_conflict", 503, 1, "OperationalError"),
    "TransactionFailed": ("transaction_failed", 409, 1, "OperationalError"),
    "ResultTooLarge": ("result_too_large", 422, 1, "DataError"),
    "SqlError": ("sql", 400, 2, "ProgrammingError"),
    "SqlMemoryExceeded": ("sql_memory", 422, 2, "OperationalError"),
    "SqlWorkerEnded": ("sql_worker_ended", 503, 2, "OperationalError"),
    "StaleWrite": ("stale_write", 409, 1, "OperationalError"),
    "BlobCollected": ("blob_collected", 409, 1, "OperationalError"),
    "DataLoss": ("data_loss", 500, 1, "InternalError"),
    "JavaNotFound": ("java_not_found", 500, 1, "OperationalError"),
    "MissingExtra": ("missing_extra", 501, 2, "NotSupportedError"),
    "SparkFailed": ("spark_failed", 500, 1, "OperationalError"),
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_looks_outside_as_it_always_did(kind: type[LlogError]) -> None:
    error = WITH_FIELDS.get(kind) or kind("what was wrong")
    looks = error.code, error_answer(error).status_code, error.exit_code, type(to_dbapi_exception(error)).__name__
    assert looks == OUTSIDE[kind.__name__]


def test_every_error_with_fields_of_its_own_has_an_example() -> None:
    assert {each for each in CLASSES if "__init__" in vars(each)} == set(WITH_FIELDS)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_comes_out_of_a_pickle_as_it_was(kind: type[LlogError]) -> None:
    error = WITH_FIELDS.get(kind) or kind("what was wrong")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), repr(vars(copy))) == (str(error), repr(vars(error)))


def test_the_broker_answers_stale_reads_as_an_error_that_passes() -> None:
    answer = error_answer(StaleReads("a server that was paused has answered"))
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


def test_an_append_that_was_refused_in_part_is_not_a_failure_of_the_broker() -> None:
    refused, failed = PartitionFenced("fenced"), StoreUnavailable("closed")
    assert error_answer(PartlyAppended(1, [None, refused], refused)).status_code == 409
    answer = error_answer(PartlyAppended(1, [None, failed], failed))
    assert answer.status_code == 500  # not 503, which clients repeat as a whole
    assert "retry-after" not in answer.headers


def test_no_two_errors_have_one_code() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)


def test_every_error_has_its_entry_on_the_page() -> None:
    assert [line for line in error_list().splitlines() if line.startswith("### ")] == [
        f"### `{each.code}`" for each in CLASSES
    ]
