"""The memory for requests of Kafka clients, which they share with those over HTTP: when it is full, reading pauses."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from llog.broker.metrics import Metrics

_LOOK_AGAIN_S: Final = 0.01


class Pausable(Protocol):
    def check_pause(self) -> None:
        """Go on reading if there is room."""


class Intake:
    """The bytes of requests that the broker holds, from their arrival until they are answered."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._paused: set[Pausable] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        return self._metrics.buffered_bytes >= self._max_bytes

    def hold(self, size: int) -> None:
        self._metrics.buffered_bytes += size

    def release(self, size: int) -> None:
        self._metrics.buffered_bytes -= size

    def wait_for_room(self, connection: Pausable) -> None:
        """Call the connection again soon: requests over HTTP, too, may make room."""
        self._paused.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        paused, self._paused = self._paused, set()
        for connection in paused:
            connection.check_pause()
