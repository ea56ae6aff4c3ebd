"""Records and bytes by topic, producer or consumer group, for a bounded number of names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

NAMES_MAX: Final = 500
OTHERS: Final = "(others)"
"""The name under which everything beyond the bound counts together. No topic or group can have it."""


class Traffic:
    """What one name produced and consumed."""

    __slots__ = (
        "batch_shares",
        "consumed_bytes",
        "consumed_records",
        "fetched_bytes",
        "produced_bytes",
        "produced_records",
    )

    def __init__(self) -> None:
        self.produced_records = 0
        self.produced_bytes = 0
        self.batch_shares = 0.0
        """The name's share, by bytes, of the batches that went into blobs: 1 for a batch of its own."""
        self.consumed_records = 0
        self.consumed_bytes = 0
        self.fetched_bytes = 0
        """Bytes of batches that were read from the blob store, not from the tail."""

    def add_produced(self, records: int, size: int) -> None:
        self.produced_records += records
        self.produced_bytes += size

    def add_consumed(self, records: int, size: int) -> None:
        self.consumed_records += records
        self.consumed_bytes += size

    def add(self, other: Traffic) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class TrafficByName:
    """The traffic of the names that were seen last; that of all others counts together, so that no sum shrinks."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        self._by_name: OrderedDict[str, Traffic] = OrderedDict()
        self._others: Traffic | None = None
        self._newest: tuple[str | None, Traffic] = None, Traffic()
        """The name that was asked for last, which is often asked for again."""

    def of(self, name: str) -> Traffic:
        """Return the traffic of a name. A new name beyond the bound takes the place of the one seen longest ago."""
        newest, found = self._newest
        if name == newest:
            return found
        kept = self._by_name.get(name)
        if kept is not None:
            self._by_name.move_to_end(name)
            self._newest = name, kept
            return kept
        if len(self._by_name) >= self._names_max:
            _, oldest = self._by_name.popitem(last=False)
            if self._others is None:
                self._others = Traffic()
            self._others.add(oldest)
        found = self._by_name[name] = Traffic()
        self._newest = name, found
        return found

    def __iter__(self) -> Iterator[tuple[str, Traffic]]:
        """Yield the names in their order with their traffic, and the others last."""
        yield from sorted(self._by_name.items())
        if self._others is not None:
            yield OTHERS, self._others
