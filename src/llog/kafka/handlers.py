"""What every handler of a Kafka request takes and returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple


class Caller(NamedTuple):
    """Who sent a request, and in which version of its API."""

    client_id: str
    """Empty if the client sends none."""
    host: str
    """The client's address, as Kafka's tools show it."""
    version: int


Handler = Callable[[Any, Caller], Awaitable[Any]]
"""Takes a decoded request and returns its response, both as structs of `llog.kafka.messages`; None answers nothing."""
Handlers = Mapping[int, Handler]
"""By API key."""
