"""The brokers that Kafka clients are told of, and which of them coordinates a group."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Node(NamedTuple):
    """A live broker, at the address that clients connect to."""

    id: int
    host: str
    port: int
    rack: str | None = None


class Cluster(Protocol):
    """The view of the live brokers that this broker has. It may be older than that of another broker."""

    @property
    def me(self) -> Node: ...

    def coordinator_of(self, group: str) -> Node | None:
        """Return the broker that coordinates the group; None while no live broker is known."""
        ...
