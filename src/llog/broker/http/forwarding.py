"""Requests for what another broker owns: sent on to it, over one hop, and its answer passed through.

The refusal that the engines of this broker gave (`LogOwned`) has the owner's address: nothing was done here, so all may
be done there. Requests with many items are split: each owner answers its own. SQL runs statement by statement, so the
owner of the tables is looked up before the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llog.broker.http.bodies import BODY, JSON, Bodies
from llog.broker.http.disconnects import unless_gone
from llog.broker.http.messages import ConsumeRequest, ProduceRequest
from llog.broker.http.problems import OWNER_HEADER, error_of
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import LlogError, LogOwned, OutcomeUnknown, Overloaded, OwnerUnavailable, StoreUnavailable

if TYPE_CHECKING:
    import httpx

FORWARDED: Final = "llog-forwarded"
"""The header of a request that comes from another broker: it is not sent on once more."""
_CONNECT_S: Final = 5.0
_CONNECTIONS_MAX: Final = 1024
_IDLE_S: Final = 30.0
"""A connection that was unused for this long is not used again: the owner may be closing it just now."""
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
_EVENTS: Final = "text/event-stream"

Handler = Callable[[Request], Awaitable[Response]]
Items = list[dict[str, Any]]
A = TypeVar("A", ProduceRequest, ConsumeRequest)
T = TypeVar("T")


class Forwarding:
    def __init__(self, settings: Settings, bodies: Bodies, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._timeout_s = settings.broker_forward_timeout_ms / 1000
        self._user_agent = settings.client_name
        self._bodies = bodies
        self._metrics = metrics
        self._stopping = stopping
        self._opened: httpx.AsyncClient | None = None

    def may(self, request: Request) -> bool:
        return self._timeout_s > 0 and FORWARDED not in request.headers

    def or_owner(self, handler: Handler, wait_ms: int = 0) -> Handler:
        """The handler, whose request goes to the owner if this broker is not the one. `wait_ms` is how long an answer
        may wait.
        """

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except LogOwned as error:
                if error.address is None or not self.may(request):
                    raise
                body = request.scope.get(BODY, b"")
                with self._bodies.held(len(body)):
                    return await self._forward(request, error.address, body, wait_ms)

        return answered

    def to_owner(
        self, find: Callable[[], Awaitable[str | None]], handler: Handler, wait_ms: int = 0, *, or_here: bool = False
    ) -> Handler:
        """The handler, unless `find` finds the address of another broker, which is asked instead.

        `or_here`: if that broker cannot be reached, the handler answers after all.
        """

        async def answered(request: Request) -> Response:
            owner = await find() if self.may(request) else None
            if owner is None:
                return await handler(request)
            async with self._bodies.read(request, None) as body:
                try:
                    return await self._forward(request, owner, body, wait_ms)
                except OwnerUnavailable:
                    if not or_here:
                        raise
            return await handler(request)

        return answered

    async def produce(self, request: Request, asked: ProduceRequest, answers: Items) -> Items:
        """The answers, those of items that other brokers own replaced by theirs."""
        owned = self._owned(request, answers)
        found = await asyncio.gather(
            *(self._items(owner, "/produce", _part(asked, mine)) for owner, mine in owned.items())
        )
        return _replaced(answers, zip(owned.values(), found, strict=True))

    async def consume(
        self,
        request: Request,
        asked: ConsumeRequest,
        answers: Items,
        here: Callable[[ConsumeRequest], Coroutine[Any, Any, Items]],
    ) -> Items:
        """As `produce`. The first broker, this one included, that has something ends the wait of all."""
        owned = self._owned(request, answers)
        if not owned:
            return answers
        shares: dict[str | None, list[int]] = dict(owned.items())
        elsewhere = {place for places in owned.values() for place in places}
        mine = [place for place in range(len(answers)) if place not in elsewhere]
        if mine:
            shares[None] = mine
        if any("error" in answers[place] or answers[place]["records"] for place in mine):
            asked = replace(asked, max_wait_ms=0)

        def ask(owner: str | None, places: list[int], wait_ms: int) -> Coroutine[Any, Any, Items]:
            part = replace(_part(asked, places), max_wait_ms=wait_ms)
            return here(part) if owner is None else self._items(owner, "/consume", part, wait_ms)

        asking = {
            owner: asyncio.ensure_future(ask(owner, places, asked.max_wait_ms)) for owner, places in shares.items()
        }
        try:
            await unless_gone(request, _first_of(asking.values()))
            for owner, task in asking.items():
                if not task.done():
                    task.cancel()
                    asking[owner] = asyncio.ensure_future(ask(owner, shares[owner], 0))
            found = await asyncio.gather(*asking.values())
        finally:
            for task in asking.values():
                task.cancel()
        return _replaced(answers, zip(shares.values(), found, strict=True))

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()

    def _owned(self, request: Request, answers: Items) -> dict[str, list[int]]:
        """The places of the items that go to other brokers, by their addresses. They count as errors no longer."""
        owned: dict[str, list[int]] = {}
        for place, answer in enumerate(answers if self.may(request) else ()):
            owner = answer.get("error", {}).get("owner")
            if owner is not None:
                owned.setdefault(owner, []).append(place)
                self._metrics.errors[LogOwned.code] -= 1
        return owned

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
        return StreamingResponse(self._chunks(answer), answer.status_code, {**passed, OWNER_HEADER: owner})

    async def _items(self, owner: str, path: str, asked: ProduceRequest | ConsumeRequest, wait_ms: int = 0) -> Items:
        """The owner's answers to these items; its error, or that of the way there, is the answer to each."""
        content = msgspec.json.encode(asked)
        try:
            with self._bodies.held(len(content)):
                answer = await self._send("POST", owner, path, [("content-type", JSON)], content, wait_ms)
                try:
                    found = msgspec.json.decode(await answer.aread())
                finally:
                    await answer.aclose()
            items: Items = found.get("topic_partitions") or [
                {"error": {"code": found["code"], "detail": found["detail"]}} for _ in asked.topic_partitions
            ]
            if len(items) == len(asked.topic_partitions):
                return [_place(item) | found for item, found in zip(asked.topic_partitions, items, strict=True)]
            error: LlogError = _strange(owner)
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
            error = _strange(owner)
        except LlogError as failure:
            error = failure
        self._metrics.errors[error.code] += 1
        return [_place(item) | {"error": error_of(error)} for item in asked.topic_partitions]

    async def _send(
        self, method: str, owner: str, path: str, headers: list[tuple[str, str]], content: bytes, wait_ms: int
    ) -> httpx.Response:
        """The beginning of the owner's answer. `OwnerUnavailable` if it did not get the request, `OutcomeUnknown` if it
        may have.
        """
        import httpx

        timeout = httpx.Timeout(
            self._timeout_s, connect=min(_CONNECT_S, self._timeout_s), read=self._timeout_s + wait_ms / 1000
        )
        sent = self._client().build_request(
            method, owner + path, headers=[*headers, (FORWARDED, "1")], content=content or None, timeout=timeout
        )
        self._metrics.forwarded += 1
        try:
            sending = self._client().send(sent, stream=True)
            return await (self._unless_stopping(sending) if wait_ms else sending)
        except httpx.PoolTimeout:
            raise Overloaded(f"{_CONNECTIONS_MAX} requests are on their way to owners: try again later") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._metrics.forward_errors += 1
            raise OwnerUnavailable(
                f"what was asked for is owned by the broker at {owner}, which cannot be reached ({_said(error)}): "
                "try again later"
            ) from error
        except httpx.TransportError as error:
            self._metrics.forward_errors += 1
            said = f"the broker at {owner}, which owns what was asked for, did not answer ({_said(error)})"
            if method in ("GET", "HEAD"):
                raise OwnerUnavailable(f"{said}: try again later") from error
            raise OutcomeUnknown(f"{said}: what was asked for may have been done") from error

    async def _chunks(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """The answer's body. One that has no end, of events, ends when this broker stops."""
        import httpx

        chunks = answer.aiter_raw()
        try:
            if not answer.headers.get("content-type", "").startswith(_EVENTS):
                async for chunk in chunks:
                    yield chunk
                return
            while True:
                try:
                    chunk = await self._unless_stopping(anext(chunks))  # type: ignore[arg-type]
                except (StopAsyncIteration, StoreUnavailable, httpx.TransportError):
                    return
                yield chunk
        finally:
            await answer.aclose()

    async def _unless_stopping(self, call: Coroutine[Any, Any, T]) -> T:
        calling, stopping = asyncio.ensure_future(call), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((calling, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise StoreUnavailable("the broker is stopping: ask another one, or come again")
            return calling.result()
        finally:
            for task in (calling, stopping):
                task.cancel()
            await asyncio.gather(calling, stopping, return_exceptions=True)

    def _client(self) -> httpx.AsyncClient:
        if self._opened is None:
            import httpx

            limits = httpx.Limits(
                max_connections=_CONNECTIONS_MAX, max_keepalive_connections=64, keepalive_expiry=_IDLE_S
            )
            self._opened = httpx.AsyncClient(
                headers={"user-agent": self._user_agent}, limits=limits, trust_env=False, follow_redirects=False
            )
        return self._opened


async def _first_of(tasks: Any) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _part(asked: A, places: list[int]) -> A:
    return replace(asked, topic_partitions=[asked.topic_partitions[place] for place in places])


def _place(item: Any) -> dict[str, Any]:
    return {"topic": item.topic, "partition": item.partition}


def _replaced(answers: Items, found: Any) -> Items:
    answers = list(answers)
    for places, items in found:
        for place, item in zip(places, items, strict=True):
            answers[place] = item
    return answers


def _strange(owner: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"{owner} did not answer as a broker does: what was asked for may have been done")


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
