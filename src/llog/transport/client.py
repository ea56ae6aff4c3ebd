"""Blocking requests to a broker over the standard library: one connection for each thread, timeouts, bounded retries.

A request without an answer is sent again only if it is `repeatable`; otherwise its outcome is unknown to the caller.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec

from llog.base.decoders import json_decoder
from llog.config.loading import load_client_name
from llog.errors import OutcomeUnknown, StoreUnavailable
from llog.transport.protocol import JSON, OK, Answer, may_retry, parse_url, refusal, retry_delay_s

T = TypeVar("T")

ATTEMPTS: Final = 4
TIMEOUT_S: Final = 60.0
_IDLE_S: Final = 30.0
"""How long a connection may be idle before it is replaced: the broker may be closing it."""


class BrokerClient:
    """Sends requests to one broker, from any thread; `close` ends the connections of all threads.

    Every call raises the error that the broker's refusal names, `StoreUnavailable` if the broker did not get the
    request, and `OutcomeUnknown` if it may have got a request that must not be sent twice.
    """

    def __init__(
        self, url: str, *, client_name: str | None = None, timeout_s: float = TIMEOUT_S, attempts: int = ATTEMPTS
    ) -> None:
        """`client_name` is the one of this process's settings unless given."""
        self.url = url.rstrip("/")
        self._address = parse_url(url)
        self._user_agent = client_name or load_client_name()
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._local = threading.local()
        self._mutex = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._is_closed = False

    def get(self, path: str, query: Mapping[str, int] | None = None, *, accept: str = JSON) -> Answer:
        target = f"{path}?{urlencode(query)}" if query else path
        return self._send("GET", target, None, {"accept": accept}, repeatable=True)

    def post(
        self,
        path: str,
        body: bytes,
        *,
        repeatable: bool,
        content_type: str = JSON,
        accept: str = JSON,
        wait_s: float = 0.0,
    ) -> Answer:
        """`wait_s` is how long the broker may wait before it answers; it is added to the timeout."""
        headers = {"content-type": content_type, "accept": accept}
        return self._send("POST", path, body, headers, repeatable=repeatable, wait_s=wait_s)

    def get_json(self, kind: type[T], path: str, query: Mapping[str, int] | None = None) -> T:
        return self._decode(kind, self.get(path, query))

    def post_json(self, kind: type[T], path: str, message: Mapping[str, Any], *, repeatable: bool) -> T:
        return self._decode(kind, self.post(path, msgspec.json.encode(message), repeatable=repeatable))

    def unreadable(self, error: Exception) -> StoreUnavailable:
        """Return the error for an answer that a caller could not decode."""
        return StoreUnavailable(f"{self.url} did not answer as a broker does: {str(error)[:200]}")

    def close(self) -> None:
        """Close all connections and refuse further calls. Idempotent."""
        with self._mutex:
            self._is_closed = True
            connections, self._open = self._open, set()
        for connection in connections:
            connection.close()

    def _decode(self, kind: type[T], answer: Answer) -> T:
        try:
            return json_decoder(kind, strict=False).decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.unreadable(error) from error

    def _send(
        self,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        repeatable: bool,
        wait_s: float = 0.0,
    ) -> Answer:
        headers = {**headers, "user-agent": self._user_agent}
        failure: Exception | None = None
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(retry_delay_s(attempt))
            try:
                connection = self._connect(wait_s)
            except OSError as error:  # nothing was sent, so even what must not be repeated may be tried again
                failure = error
                continue
            try:
                connection.request(method, self._address.path + target, body, headers)
                response = connection.getresponse()
                answer = Answer(response.status, response.headers, response.read())
            except (OSError, http.client.HTTPException) as error:
                self._disconnect()
                failure = error
                if not repeatable:
                    raise OutcomeUnknown(
                        f"the broker at {self.url} did not answer ({_reason(error)}): it may have executed the request"
                    ) from error
                continue
            except BaseException:
                self._disconnect()  # interrupted: a late answer must not be taken for that of the next request
                raise
            if answer.status == OK:
                return answer
            failure = refusal(f"{self.url}{target}", answer.status, answer.body)
            if not may_retry(answer.status, repeatable=repeatable):
                raise failure
        assert failure is not None
        if isinstance(failure, OSError | http.client.HTTPException):
            raise StoreUnavailable(
                f"the broker at {self.url} does not answer: {_reason(failure)}. Check its address, and that it runs"
            ) from failure
        raise failure

    def _connect(self, wait_s: float) -> http.client.HTTPConnection:
        """Return this thread's connection; open a new one if it has none, or an idle one."""
        if self._is_closed:
            raise StoreUnavailable("this client is closed: make another one")
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None and time.monotonic() - self._local.used_at > _IDLE_S:
            self._disconnect()
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

    def _disconnect(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is not None:
            self._local.connection = None
            with self._mutex:
                self._open.discard(connection)
            connection.close()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
