"""A broker as Spark's processes see it: what topics there are, their bounds, and their records as Arrow, over HTTP.

Requests only look, so one that was not answered is asked again; what the broker refuses is raised as the error that it
names.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from llog.api import portal
from llog.base.decoders import json_decoder
from llog.engines.port import Bounds
from llog.errors import (
    BY_CODE,
    ConfigurationError,
    LlogError,
    OffsetOutOfRange,
    PartitionNotInitialized,
    StoreUnavailable,
)
from llog.log.records import Topic
from llog.model import TimestampType, TopicPartition
from llog.runtime import SystemRuntime

T = TypeVar("T")

_ATTEMPTS: Final = 6
_TIMEOUT_S: Final = 60.0
_AGAIN: Final = (429, 502, 503, 504)
_local = threading.local()


class _Problem(msgspec.Struct):
    code: str
    detail: str
    log_start_offset: int = 0
    next_offset: int = 0


class _PartitionBounds(msgspec.Struct):
    partition: int
    log_start_offset: int
    next_offset: int


class _Described(msgspec.Struct):
    bounds: list[_PartitionBounds]


class _Topics(msgspec.Struct):
    topics: list[Topic]


class _Offset(msgspec.Struct):
    offset: int


class Answer(NamedTuple):
    body: bytes
    headers: http.client.HTTPMessage


def check_broker(url: str) -> str:
    """The address of a broker, without a '/' at its end; `ConfigurationError` if it is none."""
    parts = urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known or "@" in parts.netloc or parts.query or parts.fragment:
        shown = url.rpartition("@")[2][:200]
        raise ConfigurationError(f"option broker is {shown!r}: it must look like http://host:port")
    return url.rstrip("/")


class BrokerLog:
    """What the driver asks of a log, answered by a broker."""

    def __init__(self, broker: str, client_name: str) -> None:
        self.broker = broker
        self._client_name = client_name
        self.runtime = SystemRuntime()

    async def get(self, name: str) -> Topic:
        return await self._asked(Topic, f"/topics/{quote(name)}")

    async def topics(self) -> list[Topic]:
        return (await self._asked(_Topics, "/topics")).topics

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.all_bounds([tp]))[tp]

    async def all_bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        """One request for each topic."""
        found: dict[TopicPartition, Bounds] = {}
        for name in sorted({tp.topic for tp in partitions}):
            described = await self._asked(_Described, f"/topics/{quote(name)}")
            found |= {
                TopicPartition(name, each.partition): Bounds(each.log_start_offset, each.next_offset)
                for each in described.bounds
            }
        missing = [tp for tp in partitions if tp not in found]
        if missing:
            raise PartitionNotInitialized(f"topic {missing[0].topic!r} has no partition {missing[0].partition}")
        return {tp: found[tp] for tp in partitions}

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        assert by is None  # of the topic's own kind
        path = f"/topics/{quote(tp.topic)}/partitions/{tp.partition}/offset"
        return (await self._asked(_Offset, path, timestamp_ms=timestamp_ms)).offset

    async def _asked(self, kind: type[T], path: str, **query: int) -> T:
        answer = await asyncio.to_thread(get, self.broker, path, query, client_name=self._client_name)
        try:
            return json_decoder(kind).decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreUnavailable(f"{self.broker}{path} did not answer as a broker does: {error}") from error


def run(broker: str, client_name: str, use: Callable[[BrokerLog], Awaitable[T]]) -> T:
    """The result of `use` on the log behind this broker, to which this process has the name `client_name`."""

    async def used() -> T:
        return await use(BrokerLog(broker, client_name))

    return portal.run(used())


def get(broker: str, path: str, query: dict[str, int], *, client_name: str, accept: str = "application/json") -> Answer:
    """The answer to a GET; raises what the broker refuses it with, or `StoreUnavailable` if it does not answer for some
    seconds.
    """
    said, headers = "", {"accept": accept, "user-agent": client_name}
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(0.2 * 2 ** (attempt - 1))
        try:
            status, answer = _request(broker, path + (f"?{urlencode(query)}" if query else ""), headers)
        except (OSError, http.client.HTTPException) as error:
            _forget(broker)
            said = str(error) or type(error).__name__
            continue
        if status == 200:
            return answer
        refusal = _error(broker, path, status, answer.body)
        if status not in _AGAIN:
            raise refusal
        said = str(refusal)
    raise StoreUnavailable(f"the broker at {broker} does not answer: {said}")


def _request(broker: str, target: str, headers: dict[str, str]) -> tuple[int, Answer]:
    connection = _connection(broker)
    connection.request("GET", urlsplit(broker).path + target, headers=headers)
    response = connection.getresponse()
    return response.status, Answer(response.read(), response.headers)


def _connection(broker: str) -> http.client.HTTPConnection:
    """One connection for each thread and broker: Spark reuses its processes."""
    kept: dict[str, http.client.HTTPConnection] = _local.__dict__.setdefault("connections", {})
    if broker not in kept:
        parts = urlsplit(broker)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        kept[broker] = kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    return kept[broker]


def _forget(broker: str) -> None:
    connection = _local.__dict__.get("connections", {}).pop(broker, None)
    if connection is not None:
        connection.close()


def _error(broker: str, path: str, status: int, body: bytes) -> LlogError:
    """What a problem says, as the error it was made of."""
    try:
        problem = json_decoder(_Problem).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return StoreUnavailable(f"{broker}{path} answered with status {status}, and not as a broker does")
    if problem.code == OffsetOutOfRange.code:
        return OffsetOutOfRange(path, -1, problem.log_start_offset, problem.next_offset)
    kind = BY_CODE.get(problem.code, StoreUnavailable)
    return kind(f"{problem.detail} (said by the broker at {broker})")
