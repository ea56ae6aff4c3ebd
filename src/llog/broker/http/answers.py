"""Answers: JSON, and for failures problem JSON (RFC 9457) with the error's stable code. Every answer is counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from llog.base.logs import current_request
from llog.broker.http.request_log import context_of
from llog.broker.http.requests import JSON
from llog.broker.metrics import Metrics
from llog.errors import BY_CODE, InvalidArgument, LlogError, LogOwned, RequestTimeout, RequestTooLarge

OWNER_HEADER: Final = "llog-owner"
RETRY_AFTER_S: Final = 1
_JSON_TYPE: Final = (b"content-type", JSON.encode())
_TRANSIENT_CODES: Final = {
    code for code, error in BY_CODE.items() if error.http_status is HTTPStatus.SERVICE_UNAVAILABLE
}

logger: Final = logging.getLogger("llog.broker")

Handler = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """An answer in JSON, which has no other headers: Starlette's own class takes as long to be made as its body."""

    media_type = JSON

    def __init__(self, body: bytes, status: HTTPStatus) -> None:
        self.status_code = status.value
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), _JSON_TYPE]


def json_answer(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return JsonResponse(msgspec.json.encode(value), status)


def problem(
    status: HTTPStatus,
    code: str,
    detail: str,
    headers: dict[str, str] | None = None,
    more: dict[str, Any] | None = None,
) -> Response:
    """Return the answer to a request that failed; `more` are further members of its body."""
    body = {"type": "about:blank", "title": status.phrase, "status": status.value, "code": code, "detail": detail}
    return Response(msgspec.json.encode(body | (more or {})), status.value, headers, "application/problem+json")


def error_answer(error: LlogError) -> Response:
    """Return the answer to a request that failed as a whole."""
    status = error.http_status
    may_retry = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    headers = {"retry-after": str(RETRY_AFTER_S)} if may_retry else None
    if isinstance(error, LogOwned) and error.address is not None:
        status, headers = HTTPStatus.MISDIRECTED_REQUEST, {OWNER_HEADER: error.address}
    return problem(status, error.code, str(error), headers, error.fields())


def items_answer(items: list[dict[str, Any]]) -> Response:
    """Return the answer to a request whose items succeed or fail one by one.

    It is 503 if all of them failed with an error that may pass, else 200.
    """
    body = {"topic_partitions": items}
    errors = [item["error"] for item in items if "error" in item and not item.get("records")]
    if len(errors) < len(items) or not all(error["code"] in _TRANSIENT_CODES for error in errors):
        return json_answer(body)
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, errors[0]["code"], errors[0]["detail"], headers, body)


def item_error(error: LlogError) -> dict[str, Any]:
    """Return the error of one item, for an answer whose other items may have succeeded."""
    return {"code": error.code, "detail": str(error)} | error.fields()


def item_problem(error: dict[str, Any]) -> Response:
    """Return the answer to a request that failed as a whole, from the error of its only item."""
    more = {name: value for name, value in error.items() if name not in ("code", "detail")}
    status, headers = BY_CODE[error["code"]].http_status, {}
    if "owner" in error:
        status, headers = HTTPStatus.MISDIRECTED_REQUEST, {OWNER_HEADER: error["owner"]}
    elif status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers = {"retry-after": str(RETRY_AFTER_S)}
    return problem(status, error["code"], error["detail"], headers, more)


def with_error_answers(handler: Handler, path: str, metrics: Metrics) -> Handler:
    """Return the handler with its errors turned into answers, and all of its answers counted under `path`."""

    async def answer(request: Request) -> Response:
        start = time.perf_counter()
        route = f"{request.method} {path}"
        try:
            response = await handler(request)
        except Exception as error:
            response = _failure_answer(error, request, route, metrics)
        metrics.count_request(route, response.status_code, time.perf_counter() - start)
        return response

    return answer


def no_route_answers(metrics: Metrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of requests for which there is no route."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        metrics.requests["other", status.value] += 1
        code = "method_not_allowed" if status is HTTPStatus.METHOD_NOT_ALLOWED else "not_found"
        detail = f"there is no {request.method} {request.url.path[:200]} here"
        return problem(status, code, detail, dict(error.headers or {}))

    return answer


def _failure_answer(error: Exception, request: Request, route: str, metrics: Metrics) -> Response:
    """Return the answer to a request whose handler raised this error, and count the error."""
    if isinstance(error, LlogError):
        metrics.errors[error.code] += 1
        if isinstance(error, InvalidArgument | RequestTooLarge):
            metrics.validation_failures[route] += 1
        response = error_answer(error)
        if isinstance(error, RequestTooLarge | RequestTimeout):
            response.headers["connection"] = "close"  # the rest of the body is not wanted
        return response
    if isinstance(error, ClientDisconnect):
        return problem(HTTPStatus.BAD_REQUEST, "disconnected", "the client went away before its request was whole")
    context = context_of(request)
    current_request.set(context)
    logger.error("%s failed because of a bug in the broker", route, exc_info=error)
    metrics.errors["internal"] += 1
    return problem(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal",
        "a bug in the broker; its log has the details under the request's id",
        more={"request_id": context.request_id},
    )
