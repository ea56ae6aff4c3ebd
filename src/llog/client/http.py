"""Requests to a broker over the standard library: one connection per thread, timeouts, and refusals as the errors that
they name.

A request that was answered is never repeated. One that was not is, if it says that it may be: `repeatable`.
"""

from __future__ import annotations

import http.client
import threading
import time
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from llog.base.decoders import json_decoder
from llog.errors import (
    BY_CODE,
    ConfigurationError,
    LlogError,
    OffsetOutOfRange,
    OutcomeUnknown,
    SqlError,
    StoreUnavailable,
)
from llog.loading import load_client_name

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.stream"
ATTEMPTS: Final = 4
_PAUSE_S: Final = 0.2
_IDLE_S: Final = 30.0
"""A connection that was unused for so long is not used again: the broker may be closing it just now."""
_AGAIN: Final = (429, 502, 503, 504)
_UNREAD: Final = (429,)
"""Nothing of the request was done."""


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


class Answer(NamedTuple):
    body: bytes
    headers: http.client.HTTPMessage


class Address(NamedTuple):
    is_secure: bool
    host: str
    port: int | None
    path: str


def parse_url(url: str) -> Address:
    """`ConfigurationError` if it is not the address of a broker; what may be secret in it is not shown."""
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.hostname is None or "@" in parts.netloc or parts.query or parts.fragment:
        shown = url.rpartition("@")[2].partition("?")[0][:200]
        raise ConfigurationError(f"the broker's address is {shown!r}: it must look like http://host:port")
    return Address(parts.scheme == "https", parts.hostname, parts.port, parts.path.rstrip("/"))


class Http:
    """Posts to one broker. Any thread may; `close` ends the connections of all of them."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._address = parse_url(url)
        self._timeout_s = timeout_s
        self._user_agent = load_client_name()
        self._local = threading.local()
        self._mutex = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = False

    def post(
        self, path: str, body: bytes, *, content: str, accept: str, repeatable: bool, wait_s: float = 0.0
    ) -> Answer:
        """`wait_s` is how long the broker may wait before it answers, besides the timeout.

        `StoreUnavailable` if the broker did not get the request, `OutcomeUnknown` if it may have and must not get it
        twice.
        """
        headers = {"content-type": content, "accept": accept, "user-agent": self._user_agent}
        said, refusal = "", None
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2 ** (attempt - 1))
            try:
                connection = self._connected(wait_s)
            except OSError as error:  # nothing was sent, so it may be tried again whatever it is
                said, refusal = str(error) or type(error).__name__, None
                continue
            try:
                connection.request("POST", self._address.path + path, body, headers)
                response = connection.getresponse()
                answer = Answer(response.read(), response.headers)
            except (OSError, http.client.HTTPException) as error:
                self._forget()
                said, refusal = str(error) or type(error).__name__, None
                if not repeatable:
                    raise OutcomeUnknown(
                        f"the broker at {self.url} did not answer ({said}): what was asked for may have been done"
                    ) from error
                continue
            except BaseException:
                self._forget()  # interrupted: what comes over this connection would answer another question
                raise
            if response.status == 200:
                return answer
            refusal = _refusal(f"{self.url}{path}", response.status, answer.body)
            if response.status not in (_AGAIN if repeatable else _UNREAD):
                raise refusal
        if refusal is not None:
            raise refusal
        raise StoreUnavailable(f"the broker at {self.url} does not answer: {said}. Check its address, and that it runs")

    def strange(self, error: Exception) -> StoreUnavailable:
        """For an answer that cannot be read."""
        return StoreUnavailable(f"{self.url} did not answer as a broker does: {str(error)[:200]}")

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            connections, self._open = self._open, set()
        for connection in connections:
            connection.close()

    def _connected(self, wait_s: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if self._closed:
            raise StoreUnavailable("this object is closed: make another one")
        if connection is not None and time.monotonic() - self._local.used_at > _IDLE_S:
            self._forget()
            connection = None
        if connection is None:
            kind = http.client.HTTPSConnection if self._address.is_secure else http.client.HTTPConnection
            connection = kind(self._address.host, self._address.port, timeout=self._timeout_s)
        connection.timeout = self._timeout_s + wait_s
        if connection.sock is None:
            connection.connect()
            with self._mutex:
                self._open.add(connection)
            self._local.connection = connection
        connection.sock.settimeout(connection.timeout)
        self._local.used_at = time.monotonic()
        return connection

    def _forget(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            self._local.connection = None
            with self._mutex:
                self._open.discard(connection)
            connection.close()


def _refusal(where: str, status: int, body: bytes) -> LlogError:
    """What a problem says, as the error that it was made of."""
    try:
        problem = json_decoder(_Problem).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return StoreUnavailable(f"{where} answered with status {status}, and not as a broker does")
    kind = BY_CODE.get(problem.code, StoreUnavailable)
    if kind is OffsetOutOfRange:
        made = OffsetOutOfRange(where, -1, problem.log_start_offset, problem.next_offset)
        made.args = (problem.detail,)
        return made
    if issubclass(kind, SqlError):
        said = problem.message or problem.detail
        return kind(said, problem.line, problem.column, problem.hint, problem.shown)
    return kind(problem.detail)
