"""What failures look like over HTTP: problem JSON (RFC 9457) with the error's stable code."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from llog.errors import (
    ConstraintViolation,
    Contention,
    GroupConflict,
    HeaderTooLarge,
    InvalidArgument,
    KeyedLogNotConfigured,
    KeyedLogNotFound,
    LlogError,
    LogNotFound,
    LogOwned,
    MissingExtra,
    NotSeenYet,
    OffsetOutOfRange,
    OutcomeUnknown,
    Overloaded,
    OwnerUnavailable,
    PartitionFenced,
    PartitionNotInitialized,
    RecordTooLarge,
    RequestTimeout,
    RequestTooLarge,
    ResultTooLarge,
    SqlError,
    SqlMemoryExceeded,
    SqlWorkerEnded,
    StaleMember,
    StaleReads,
    StatementTimeout,
    StoreUnavailable,
    StoreUnreachable,
    TableExists,
    TableNotFound,
    TooManyClaims,
    TooManyConnections,
    TopicElsewhere,
    TopicExists,
    TopicNotFound,
    TransactionConflict,
    TransactionFailed,
    WriterFenced,
    WrongEngine,
    WrongHost,
    WrongRole,
)

RETRY_AFTER_S: Final = 1
OWNER_HEADER: Final = "llog-owner"
_STATUS: Final[dict[type[LlogError], HTTPStatus]] = {
    InvalidArgument: HTTPStatus.BAD_REQUEST,
    SqlError: HTTPStatus.BAD_REQUEST,
    SqlMemoryExceeded: HTTPStatus.UNPROCESSABLE_ENTITY,
    SqlWorkerEnded: HTTPStatus.SERVICE_UNAVAILABLE,
    TopicNotFound: HTTPStatus.NOT_FOUND,
    PartitionNotInitialized: HTTPStatus.NOT_FOUND,
    KeyedLogNotConfigured: HTTPStatus.NOT_FOUND,
    KeyedLogNotFound: HTTPStatus.NOT_FOUND,
    LogNotFound: HTTPStatus.NOT_FOUND,
    TopicExists: HTTPStatus.CONFLICT,
    TableNotFound: HTTPStatus.NOT_FOUND,
    TableExists: HTTPStatus.CONFLICT,
    ConstraintViolation: HTTPStatus.CONFLICT,
    TransactionFailed: HTTPStatus.CONFLICT,
    TransactionConflict: HTTPStatus.SERVICE_UNAVAILABLE,
    ResultTooLarge: HTTPStatus.UNPROCESSABLE_ENTITY,
    StatementTimeout: HTTPStatus.UNPROCESSABLE_ENTITY,
    PartitionFenced: HTTPStatus.CONFLICT,
    LogOwned: HTTPStatus.CONFLICT,
    WrongEngine: HTTPStatus.CONFLICT,
    WriterFenced: HTTPStatus.CONFLICT,
    GroupConflict: HTTPStatus.CONFLICT,
    StaleMember: HTTPStatus.CONFLICT,
    TopicElsewhere: HTTPStatus.MISDIRECTED_REQUEST,
    OwnerUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    WrongRole: HTTPStatus.MISDIRECTED_REQUEST,
    WrongHost: HTTPStatus.MISDIRECTED_REQUEST,
    OffsetOutOfRange: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    HeaderTooLarge: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    RequestTimeout: HTTPStatus.REQUEST_TIMEOUT,
    RecordTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    RequestTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    MissingExtra: HTTPStatus.NOT_IMPLEMENTED,
    Overloaded: HTTPStatus.TOO_MANY_REQUESTS,
    TooManyClaims: HTTPStatus.TOO_MANY_REQUESTS,
    TooManyConnections: HTTPStatus.SERVICE_UNAVAILABLE,
    Contention: HTTPStatus.SERVICE_UNAVAILABLE,
    OutcomeUnknown: HTTPStatus.SERVICE_UNAVAILABLE,
    NotSeenYet: HTTPStatus.SERVICE_UNAVAILABLE,
    StoreUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    StoreUnreachable: HTTPStatus.SERVICE_UNAVAILABLE,
    StaleReads: HTTPStatus.SERVICE_UNAVAILABLE,
}

_PASSING: Final = {error.code for error, status in _STATUS.items() if status is HTTPStatus.SERVICE_UNAVAILABLE}


def problem(
    status: HTTPStatus,
    code: str,
    detail: str,
    headers: dict[str, str] | None = None,
    more: dict[str, Any] | None = None,
) -> Response:
    body = {"type": "about:blank", "title": status.phrase, "status": status.value, "code": code, "detail": detail}
    return Response(msgspec.json.encode(body | (more or {})), status.value, headers, "application/problem+json")


def problem_of(error: LlogError) -> Response:
    """The answer to a request that failed as a whole."""
    status = _STATUS.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    again = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    headers = {"retry-after": str(RETRY_AFTER_S)} if again else None
    if isinstance(error, LogOwned) and error.address is not None:
        status, headers = HTTPStatus.MISDIRECTED_REQUEST, {OWNER_HEADER: error.address}
    return problem(status, error.code, str(error), headers, _more(error))


def items_answer(items: list[dict[str, Any]]) -> Response:
    """The answer to a request whose items go well or fail one by one: 503 if all of them failed and may go well later,
    else 200.
    """
    body = {"topic_partitions": items}
    errors = [item["error"] for item in items if "error" in item]
    if len(errors) < len(items) or not all(error["code"] in _PASSING for error in errors):
        return Response(msgspec.json.encode(body), media_type="application/json")
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, errors[0]["code"], errors[0]["detail"], headers, body)


def error_of(error: LlogError) -> dict[str, Any]:
    """The error of one item in an answer whose other items may have gone well."""
    return {"code": error.code, "detail": str(error)} | _more(error)


def _more(error: LlogError) -> dict[str, Any]:
    """The fields that a program would otherwise have to read out of the text."""
    if isinstance(error, OffsetOutOfRange):
        return {"log_start_offset": error.log_start_offset, "next_offset": error.next_offset}
    if isinstance(error, LogOwned) and error.address is not None:
        return {"owner": error.address}
    if isinstance(error, SqlError):
        return {
            name: getattr(error, name)
            for name in ("message", "line", "column", "hint", "shown")
            if getattr(error, name)
        }
    return {}
