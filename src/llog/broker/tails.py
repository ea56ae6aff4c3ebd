"""Tails: clients that follow a partition, or all partitions of a topic, as server-sent events.

A client holds one round of records at a time: the next round is fetched when the client has taken the one before it.
The id of an event names the last offset that the client has of each partition, so that a client that reconnects with it
loses nothing and sees nothing twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from llog.broker.fetcher import Fetch, Fetcher
from llog.broker.http.events import HEARTBEAT, TAILS_MAX, event, opening_event, problem_event
from llog.broker.http.json_records import JSON_RECORD_OVERHEAD, ValueForm, values_to_json
from llog.broker.metrics import Metrics
from llog.errors import LlogError, OffsetOutOfRange, Overloaded, TopicNotFound
from llog.model import FIRST_OFFSET, TopicPartition

_ROUND_BYTES: Final = 256 << 10
"""The bytes of a round, or one larger record."""
_PARTITION_BYTES: Final = 64 << 10


class Followed:
    """What one client follows, and how far it has got in each partition."""

    def __init__(self, topic: str, partitions: Sequence[int], positions: Sequence[int], *, grows: bool) -> None:
        """Begin with the next offset that the client wants of each partition.

        With `grows`, partitions that are added to the topic are followed, too.
        """
        self.topic = topic
        self._positions = dict(zip(partitions, positions, strict=True))
        self._grows = grows
        self._directory = ""
        self._turn = 0

    @property
    def id(self) -> str:
        return ",".join(str(position - 1) for position in self._positions.values())

    def fetches(self) -> list[Fetch]:
        """Return what to fetch next. Each partition is the first in turn: the first ones go first where not all fit."""
        partitions = list(self._positions)
        self._turn = (self._turn + 1) % len(partitions)
        return [
            Fetch(
                TopicPartition(self.topic, partition),
                self._positions[partition],
                _PARTITION_BYTES,
                record_overhead=JSON_RECORD_OVERHEAD,
            )
            for partition in partitions[self._turn :] + partitions[: self._turn]
        ]

    def take(self, fetch: Fetch, form: ValueForm) -> Iterator[bytes]:
        """Yield the events of what was fetched, and move on behind them. Raises the error of a fetch that failed."""
        partition = fetch.tp.partition
        if isinstance(fetch.error, OffsetOutOfRange) and fetch.position < fetch.error.log_start_offset:
            missed = {"partition": partition, "start_offset": fetch.position}
            self._positions[partition] = fetch.error.log_start_offset
            yield event(self.id, missed | {"end_offset": fetch.error.log_start_offset - 1}, "gap")
            return
        if fetch.error is not None:
            raise fetch.error
        self._check_directory(fetch.directory)
        for batch in fetch.batches:
            events = []
            for record in values_to_json(batch, form):
                self._positions[partition] = record["offset"] + 1
                events.append(event(self.id, {"partition": partition, **record}))
            yield b"".join(events)
        self._positions[partition] = fetch.position
        if self._grows and fetch.topic is not None:
            for added in range(len(self._positions), fetch.topic.partitions):
                self._positions[added] = FIRST_OFFSET

    def _check_directory(self, directory: str) -> None:
        if self._directory and directory and directory != self._directory:
            raise TopicNotFound(
                f"topic {self.topic!r} was deleted and created again while it was followed: follow it from its start"
            )
        self._directory = directory or self._directory


class Tails:
    """The streams of all clients that follow topics. `stopping` ends them."""

    def __init__(self, fetcher: Fetcher, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._fetcher = fetcher
        self._metrics = metrics
        self._stopping = stopping

    async def follow(self, followed: Followed, heartbeat_ms: int, form: ValueForm) -> AsyncIterator[bytes]:
        """Return the events, once the first round was fetched. Raises what keeps the client from following."""
        if self._metrics.tails >= TAILS_MAX:
            raise Overloaded(f"{TAILS_MAX} clients follow topics here already: come again later")
        first = await self._fetch(followed, 0)
        for fetch in first:
            is_gap = isinstance(fetch.error, OffsetOutOfRange) and fetch.position < fetch.error.log_start_offset
            if fetch.error is not None and not is_gap:
                raise fetch.error
        return self._events(followed, first, heartbeat_ms, form)

    async def _events(
        self, followed: Followed, fetches: list[Fetch], heartbeat_ms: int, form: ValueForm
    ) -> AsyncIterator[bytes]:
        self._metrics.tails += 1
        try:
            yield opening_event(followed.id)
            while True:
                for fetch in fetches:
                    for chunk in followed.take(fetch, form):
                        yield chunk
                fetches = await self._fetch(followed, heartbeat_ms)
                if self._stopping.is_set():
                    return
                if not any(fetch.batches or fetch.error for fetch in fetches):
                    yield HEARTBEAT
        except LlogError as error:
            self._metrics.errors[error.code] += 1
            yield problem_event(error)
        finally:
            self._metrics.tails -= 1

    async def _fetch(self, followed: Followed, max_wait_ms: int) -> list[Fetch]:
        fetches = followed.fetches()
        await self._fetcher.fetch(fetches, max_bytes=_ROUND_BYTES, min_bytes=1, max_wait_ms=max_wait_ms)
        return fetches
