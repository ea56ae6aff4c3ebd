"""The order of commits: appends to one partition commit in the order of their calls.

A turn needs no future and no callback of its own: a call wakes its waiters once for all the turns that it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from llog.model import TopicPartition


class CommitOrder:
    """The newest turn of every partition."""

    def __init__(self) -> None:
        self._last: dict[TopicPartition, CommitTurn] = {}

    def take_turns(self, tps: Sequence[TopicPartition]) -> list[CommitTurn]:
        """Return the turns of one call on these partitions, each after all turns taken before it."""
        call, last = _Call(), self._last
        turns = []
        for tp in tps:
            turn = last[tp] = CommitTurn(call, last.get(tp))
            turns.append(turn)
        return turns


class CommitTurn:
    """The turn of one call on one partition."""

    __slots__ = ("before", "call", "is_over")

    def __init__(self, call: _Call, before: CommitTurn | None) -> None:
        self.call = call
        self.before = before
        self.is_over = False

    @property
    def has_come(self) -> bool:
        """Whether every turn before this one is over."""
        while self.before is not None and self.before.is_over:
            self.before = self.before.before
        return self.before is None


class _Call:
    """The turns of one call, for other calls that wait for some of them."""

    __slots__ = ("_progress",)

    def __init__(self) -> None:
        self._progress: asyncio.Future[None] | None = None

    def progress(self) -> asyncio.Future[None]:
        """Return a future that is done when turns of this call end."""
        if self._progress is None:
            self._progress = asyncio.get_running_loop().create_future()
        return self._progress

    def wake(self) -> None:
        if self._progress is not None:
            self._progress.set_result(None)
            self._progress = None


def end_turns(turns: Iterable[CommitTurn]) -> None:
    """End these turns and wake the calls that wait for them. A turn may end before it has come."""
    ended = [turn for turn in turns if not turn.is_over]
    for turn in ended:
        turn.is_over = True
    for call in {turn.call: None for turn in ended}:
        call.wake()


async def wait_for_turn(turns: Iterable[CommitTurn]) -> None:
    """Wait until a call that these turns wait for has ended some of its own turns."""
    calls = {turn.before.call: None for turn in turns if not turn.has_come and turn.before is not None}
    await asyncio.wait([call.progress() for call in calls], return_when=asyncio.FIRST_COMPLETED)
