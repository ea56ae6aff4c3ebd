"""The outbox in memory: what a process that dies leaves to the next one."""

from __future__ import annotations

import msgspec

from llog.cdc.outbox import Cut, OutboxEntry

_Partition = tuple[str, int]


class MemoryOutbox:
    """An `OutboxStore`."""

    def __init__(self) -> None:
        self._last: dict[_Partition, int] = {}
        self._cuts: dict[_Partition, Cut] = {}
        self.waiting: dict[_Partition, list[OutboxEntry]] = {}

    def add(
        self, directory: str, partition: int, *, timestamp_ms: int, key: bytes, headers: bytes, payload: bytes
    ) -> None:
        sequence = self._last[directory, partition] = self._last.get((directory, partition), 0) + 1
        entry = OutboxEntry(sequence, timestamp_ms, key, headers, payload)
        self.waiting.setdefault((directory, partition), []).append(entry)

    async def name(self) -> str:
        return "memory"

    async def partitions(self) -> list[_Partition]:
        return sorted(self.waiting)

    async def entries(
        self, directory: str, partition: int, after: int, limit: int, max_bytes: int
    ) -> list[OutboxEntry]:
        waiting = self.waiting.get((directory, partition), [])
        return [entry for entry in waiting if entry.sequence > after][:limit]

    async def batch(self, directory: str, partition: int, cut: Cut) -> list[OutboxEntry]:
        waiting = self.waiting.get((directory, partition), [])
        return [entry for entry in waiting if cut.after < entry.sequence <= cut.through]

    async def cut(self, directory: str, partition: int) -> Cut | None:
        return self._cuts.get((directory, partition))

    async def put_cut(self, directory: str, partition: int, cut: Cut) -> bool:
        if all(entry.sequence != cut.through for entry in self.waiting.get((directory, partition), [])):
            return False
        self._cuts[directory, partition] = cut
        return True

    async def finish(self, directory: str, partition: int, cut: Cut) -> None:
        if not await self.put_cut(directory, partition, msgspec.structs.replace(cut, open=False)):
            return
        left = [entry for entry in self.waiting.pop((directory, partition)) if entry.sequence > cut.through]
        if left:
            self.waiting[directory, partition] = left

    async def drop(self, directory: str, partition: int) -> None:
        for kept in (self.waiting, self._cuts, self._last):
            kept.pop((directory, partition), None)
