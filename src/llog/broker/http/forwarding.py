"""Requests for what another broker owns: sent on to the owner, over one hop, and its answer passed through.

An engine that refuses a request because another process owns the records (`LogOwned`) names the owner's address. The
refused request did nothing on this broker, so all of it may be done by the owner. A request with many items is split:
each owner answers its own items. SQL runs statement by statement, so the owner of the tables is looked up before the
first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llog.base.logs import current_request
from llog.broker.http.answers import OWNER_HEADER, Handler, item_error
from llog.broker.http.bodies import BODY, Bodies
from llog.broker.http.disconnects import unless_gone
from llog.broker.http.events import EVENTS
from llog.broker.http.requests import JSON
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import LlogError, LogOwned, OutcomeUnknown, Overloaded, OwnerUnavailable, StoreUnavailable

if TYPE_CHECKING:
    import httpx

FORWARDED: Final = "llog-forwarded"
"""The header of a request that another broker sent on. It is not sent on once more, except from one worker to another:
brokers elsewhere know only the address that the workers share.
"""
_BY_BROKER: Final = "1"
_BY_SIBLING: Final = "2"
_CONNECT_S: Final = 5.0
_CONNECTIONS_MAX: Final = 1024
_IDLE_S: Final = 30.0
"""A connection that was idle for this long is not used again: the owner may be closing it."""
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_SENT: Final = _HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect", "user-agent"}
_NOT_PASSED: Final = _HOP_BY_HOP | {"date", "server", "vary"}
_READS: Final = ("GET", "HEAD")

FindOwner = Callable[[], Awaitable[str | None]]
"""Returns the address of the broker that owns what a request needs; None if it is this one, or there is none."""
ItemAnswers = list[dict[str, Any]]
T = TypeVar("T")


class _Stopping(Exception):
    """This broker stops before the owner has answered."""


class Item(Protocol):
    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int | None: ...


class ItemsRequest(Protocol):
    """A request with one item for each of many partitions, each of which is answered on its own."""

    @property
    def topic_partitions(self) -> Sequence[Item]: ...


class Forwarding:
    """Sends requests on to other brokers, if LLOG_BROKER_FORWARD_TIMEOUT_MS allows it, and to the `siblings`, the
    addresses of the workers of the same broker.
    """

    def __init__(
        self,
        settings: Settings,
        bodies: Bodies,
        metrics: Metrics,
        stopping: asyncio.Event,
        siblings: Collection[str] = (),
    ) -> None:
        self._timeout_s = settings.broker_forward_timeout_ms / 1000
        self._user_agent = settings.client_name
        self._bodies = bodies
        self._metrics = metrics
        self._stopping = stopping
        self._siblings = frozenset(siblings)
        self._http: httpx.AsyncClient | None = None

    def may_forward(self, request: Request, owner: str | None = None) -> bool:
        """Return whether the request may be sent on to this owner, or to any owner at all."""
        if not self._timeout_s:
            return False
        came_by = request.headers.get(FORWARDED)
        if came_by == _BY_BROKER:
            return bool(self._siblings) if owner is None else owner in self._siblings
        return came_by is None

    def on_refusal(self, handler: Handler, wait_ms: int = 0) -> Handler:
        """Return the handler with the requests that it refuses sent on to the owner that the refusal names.

        `wait_ms` is how long an answer may take besides.
        """

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except LogOwned as error:
                if error.address is None or not self.may_forward(request, error.address):
                    raise
                body = request.scope.get(BODY, b"")
                with self._bodies.held(len(body)):
                    return await self._forward(request, error.address, body, wait_ms)

        return answer

    def to_owner(self, find_owner: FindOwner, handler: Handler, wait_ms: int = 0, *, may_stay: bool = False) -> Handler:
        """Return the handler with its requests sent on to the owner, if `find_owner` finds one.

        With `may_stay`, the handler answers after all if the owner cannot be reached.
        """

        async def answer(request: Request) -> Response:
            owner = await find_owner() if self.may_forward(request) else None
            if owner is None or not self.may_forward(request, owner):
                return await handler(request)
            async with self._bodies.read(request, None) as body:
                try:
                    return await self._forward(request, owner, body, wait_ms)
                except OwnerUnavailable:
                    if not may_stay:
                        raise
            return await handler(request)

        return answer

    def owned_items(self, request: Request, answers: ItemAnswers) -> dict[str, list[int]]:
        """Return the indexes of the items that other brokers own, by their addresses; none if they may not be asked.

        The refusals of these items no longer count as errors.
        """
        owned: dict[str, list[int]] = {}
        for index, answer in enumerate(answers):
            owner = answer["error"].get("owner") if "error" in answer else None
            if owner is not None and self.may_forward(request, owner):
                owned.setdefault(owner, []).append(index)
                self._metrics.errors[LogOwned.code] -= 1
        return owned

    async def ask_owner(self, owner: str, path: str, items: ItemsRequest, wait_ms: int = 0) -> ItemAnswers:
        """Return the owner's answers to these items. If it cannot be asked, each item is answered with the error."""
        content = msgspec.json.encode(items)
        try:
            with self._bodies.held(len(content)):
                response = await self._send("POST", owner, path, [("content-type", JSON)], content, wait_ms)
                try:
                    body = msgspec.json.decode(await response.aread())
                finally:
                    await response.aclose()
            answers: ItemAnswers = body.get("topic_partitions") or [
                {"error": {"code": body["code"], "detail": body["detail"]}} for _ in items.topic_partitions
            ]
            if len(answers) == len(items.topic_partitions):
                return [_item_name(item) | answer for item, answer in zip(items.topic_partitions, answers, strict=True)]
            error: LlogError = _unexpected_answer(owner)
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
            error = _unexpected_answer(owner)
        except LlogError as failure:
            error = failure
        self._metrics.errors[error.code] += 1
        return [_item_name(item) | {"error": item_error(error)} for item in items.topic_partitions]

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def _forward(self, request: Request, owner: str, body: bytes | bytearray, wait_ms: int) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in _NOT_SENT]
        headers.append(("user-agent", f"{self._user_agent} {request.headers.get('user-agent', '')}".rstrip()))
        query = request.scope["query_string"].decode("latin-1")
        path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        sending = self._send(request.method, owner, f"{path}?{query}" if query else path, headers, bytes(body), wait_ms)
        answer = await unless_gone(request, sending)
        passed = {
            name: value
            for name, value in answer.headers.items()
            if name not in _NOT_PASSED and not name.startswith("access-control-")
        }
        if owner not in self._siblings:
            passed[OWNER_HEADER] = owner
        return StreamingResponse(self._chunks(answer), answer.status_code, passed)

    async def _send(
        self, method: str, owner: str, path: str, headers: list[tuple[str, str]], content: bytes, wait_ms: int
    ) -> httpx.Response:
        """Return the beginning of the owner's answer.

        Raises `OwnerUnavailable` or `StoreUnavailable` if the request changed nothing, `OutcomeUnknown` if it may have.
        """
        import httpx

        timeout = httpx.Timeout(
            self._timeout_s, connect=min(_CONNECT_S, self._timeout_s), read=self._timeout_s + wait_ms / 1000
        )
        if (context := current_request.get()) is not None:
            own = context.headers()
            headers = [(name, value) for name, value in headers if name not in own] + [*own.items()]
        came_by = _BY_SIBLING if owner in self._siblings else _BY_BROKER
        headers = [(name, value) for name, value in headers if name != FORWARDED]
        sent = self._client().build_request(
            method, owner + path, headers=[*headers, (FORWARDED, came_by)], content=content or None, timeout=timeout
        )
        self._metrics.forwarded += 1
        try:
            sending = self._client().send(sent, stream=True)
            return await (self._unless_stopping(sending) if wait_ms else sending)
        except _Stopping:
            if method in _READS:
                raise StoreUnavailable("the broker is stopping: ask another one, or come again") from None
            raise OutcomeUnknown(
                f"the broker stops, and the broker at {owner}, which owns what was asked for, had not answered: what "
                "was asked for may have been done"
            ) from None
        except httpx.PoolTimeout:
            raise Overloaded(f"{_CONNECTIONS_MAX} requests are on their way to owners: try again later") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._metrics.forward_errors += 1
            raise OwnerUnavailable(
                f"what was asked for is owned by the broker at {owner}, which cannot be reached ({_reason(error)}): "
                "try again later"
            ) from error
        except httpx.TransportError as error:
            self._metrics.forward_errors += 1
            what = f"the broker at {owner}, which owns what was asked for, did not answer ({_reason(error)})"
            if method in _READS:
                raise OwnerUnavailable(f"{what}: try again later") from error
            raise OutcomeUnknown(f"{what}: what was asked for may have been done") from error

    async def _chunks(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """Yield the answer's body. A stream of events, which has no end, ends when this broker stops."""
        import httpx

        chunks = answer.aiter_raw()
        try:
            if not answer.headers.get("content-type", "").startswith(EVENTS):
                async for chunk in chunks:
                    yield chunk
                return
            while True:
                try:
                    chunk = await self._unless_stopping(anext(chunks))  # type: ignore[arg-type]
                except (StopAsyncIteration, _Stopping, httpx.TransportError):
                    return
                yield chunk
        finally:
            await answer.aclose()

    async def _unless_stopping(self, call: Coroutine[Any, Any, T]) -> T:
        calling, stopping = asyncio.ensure_future(call), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((calling, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise _Stopping
            return calling.result()
        finally:
            for task in (calling, stopping):
                task.cancel()
            await asyncio.gather(calling, stopping, return_exceptions=True)

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            import httpx

            limits = httpx.Limits(
                max_connections=_CONNECTIONS_MAX, max_keepalive_connections=64, keepalive_expiry=_IDLE_S
            )
            self._http = httpx.AsyncClient(
                headers={"user-agent": self._user_agent}, limits=limits, trust_env=False, follow_redirects=False
            )
        return self._http


def _item_name(item: Item) -> dict[str, Any]:
    return {"topic": item.topic, "partition": item.partition}


def _unexpected_answer(owner: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"{owner} did not answer as a broker does: what was asked for may have been done")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
