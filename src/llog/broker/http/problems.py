"""What failures look like over HTTP: problem JSON (RFC 9457) with the error's stable code."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from llog.errors import BY_CODE, LlogError, LogOwned

RETRY_AFTER_S: Final = 1
OWNER_HEADER: Final = "llog-owner"
_TRANSIENT_CODES: Final = {
    code for code, error in BY_CODE.items() if error.http_status is HTTPStatus.SERVICE_UNAVAILABLE
}


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
    status = error.http_status
    again = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    headers = {"retry-after": str(RETRY_AFTER_S)} if again else None
    if isinstance(error, LogOwned) and error.address is not None:
        status, headers = HTTPStatus.MISDIRECTED_REQUEST, {OWNER_HEADER: error.address}
    return problem(status, error.code, str(error), headers, error.fields())


def items_answer(items: list[dict[str, Any]]) -> Response:
    """The answer to a request whose items go well or fail one by one: 503 if all of them failed and may go well later,
    else 200.
    """
    body = {"topic_partitions": items}
    errors = [item["error"] for item in items if "error" in item]
    if len(errors) < len(items) or not all(error["code"] in _TRANSIENT_CODES for error in errors):
        return Response(msgspec.json.encode(body), media_type="application/json")
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, errors[0]["code"], errors[0]["detail"], headers, body)


def error_of(error: LlogError) -> dict[str, Any]:
    """The error of one item in an answer whose other items may have gone well."""
    return {"code": error.code, "detail": str(error)} | error.fields()
