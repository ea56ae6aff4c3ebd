"""The partitions that wait for a compactor's workers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from llog.model import TopicPartition


class PartitionQueue:
    """First come, first served; a partition waits once, and not while a worker has it. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[TopicPartition, None] = {}
        self._busy: set[TopicPartition] = set()
        self._changed = asyncio.Event()
        self._is_draining = False
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def add(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            if tp not in self._busy:
                self._waiting.setdefault(tp)
        self._changed.set()

    async def take(self, most: int) -> list[TopicPartition]:
        """Wait for partitions and return up to `most`, for `give_back`; return none when there will be no more."""
        while not self._is_stopped:
            if self._waiting:
                taken = [tp for tp, _ in zip(self._waiting, range(most), strict=False)]
                for tp in taken:
                    del self._waiting[tp]
                self._busy.update(taken)
                return taken
            if self._is_draining and not self._busy:
                return []
            self._changed.clear()
            await self._changed.wait()
        return []

    def give_back(self, tps: Iterable[TopicPartition], again: Collection[TopicPartition]) -> None:
        """Return partitions that were taken; those of `again` wait for their next turn."""
        self._busy.difference_update(tps)
        self.add(again)

    def drain(self) -> None:
        """Let `take` return none once no partition waits, and no worker has one."""
        self._is_draining = True
        self._changed.set()

    def stop(self) -> None:
        """Let `take` return none from now on."""
        self._is_stopped = True
        self._changed.set()
