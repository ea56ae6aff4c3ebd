"""The rules of requests to a broker and of their answers, without any I/O, so that an async client could share them.

A broker refuses a request with a status and a problem document, which names the error. An answered request is repeated
only if its status is a transient one and the request may be sent twice.
"""

from __future__ import annotations

from http.client import HTTPMessage
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from llog.base.decoders import json_decoder
from llog.errors import BY_CODE, ConfigurationError, LlogError, OffsetOutOfRange, SqlError, StoreUnavailable

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.stream"
OK: Final = 200
_OVERLOADED: Final = 429
"""The broker refused the request before it did any of it."""
_TRANSIENT: Final = (_OVERLOADED, 502, 503, 504)
_RETRY_DELAY_S: Final = 0.2


class Answer(NamedTuple):
    status: int
    headers: HTTPMessage
    body: bytes


class Address(NamedTuple):
    is_secure: bool
    host: str
    port: int | None
    path: str


class _Problem(msgspec.Struct):
    code: str
    detail: str
    log_start_offset: int = 0
    next_offset: int = 0
    message: str = ""
    line: int = 0
    column: int = 0
    hint: str = ""
    shown: str = ""


def parse_url(url: str) -> Address:
    """Return the parts of a broker's address; raise `ConfigurationError`, without its secrets, if it is not one."""
    parts = urlsplit(url)
    try:
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.hostname is None or "@" in parts.netloc or parts.query or parts.fragment:
        shown = url.rpartition("@")[2].partition("?")[0][:200]
        raise ConfigurationError(f"the broker's address is {shown!r}: it must look like http://host:port")
    return Address(parts.scheme == "https", parts.hostname, parts.port, parts.path.rstrip("/"))


def check_url(url: str) -> str:
    """Return a broker's address without a '/' at its end; raise as `parse_url` does."""
    parse_url(url)
    return url.rstrip("/")


def may_retry(status: int, *, repeatable: bool) -> bool:
    """Return whether a request that was answered with this status may be sent again."""
    return status in _TRANSIENT if repeatable else status == _OVERLOADED


def retry_delay_s(retry: int) -> float:
    """Return how long to wait before a retry, counted from 1."""
    return _RETRY_DELAY_S * 2.0 ** (retry - 1)


def refusal(where: str, status: int, body: bytes) -> LlogError:
    """Return the error that a broker's problem names, or `StoreUnavailable` if the body is not a problem."""
    try:
        problem = json_decoder(_Problem).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return StoreUnavailable(f"{where} answered with status {status}, and not as a broker does")
    kind = BY_CODE.get(problem.code, StoreUnavailable)
    if kind is OffsetOutOfRange:
        error = OffsetOutOfRange(where, -1, problem.log_start_offset, problem.next_offset)
        error.args = (problem.detail,)
        return error
    if issubclass(kind, SqlError):
        message = problem.message or problem.detail
        return kind(message, problem.line, problem.column, problem.hint, problem.shown)
    return kind(problem.detail)
