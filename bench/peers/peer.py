"""What every peer has: its address and its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bench.load import Address, Exchange


class Peer(NamedTuple):
    """A running server, and how it appends `records` of the same value to a partition in one durable request."""

    name: str
    address: Address
    append: Callable[[int, int], Exchange]
    """Takes the number of the partition and the number of records."""
