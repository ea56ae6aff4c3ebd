"""Compare-and-swap on keys that many processes change: one bounded retry with jittered back-off, for every caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import msgspec

from llog.errors import Contention, OutcomeUnknown, VersionMismatch
from llog.log.records import decode, encode
from llog.runtime import Runtime
from llog.stores.meta import Put

if TYPE_CHECKING:
    from llog.log.log import Log

R = TypeVar("R", bound=msgspec.Struct)

ATTEMPTS_MAX: Final = 100
_STEP_S: Final = 0.002
_PAUSE_S_MAX: Final = 0.05


class Backoff:
    """The retry budget of one compare-and-swap: growing, jittered pauses, and an error at the end."""

    def __init__(self, runtime: Runtime, what: object) -> None:
        self._runtime = runtime
        self._what = what
        self._losses = 0
        self._unknown: OutcomeUnknown | None = None

    async def wait(self, error: VersionMismatch | OutcomeUnknown | None = None) -> None:
        """Pause after a lost attempt; the first retry follows at once.

        The next attempt has to read the key again: after `OutcomeUnknown`, only a read shows whether the write took
        effect. After the last attempt, raises `Contention`; or `OutcomeUnknown` if the answer to any attempt was lost.
        """
        self._losses += 1
        if isinstance(error, OutcomeUnknown):
            self._unknown = error
        if self._losses >= ATTEMPTS_MAX:
            raise self._unknown or Contention(
                f"{self._what} was changed by others {self._losses} times in a row: try again"
            )
        if self._losses > 1:
            await self._runtime.sleep(self._runtime.random().random() * min(self._losses * _STEP_S, _PAUSE_S_MAX))


class Change(NamedTuple, Generic[R]):
    """A record before and after an update; the same record twice if nothing was to be changed."""

    old: R
    new: R


async def update(
    log: Log,
    key: str,
    kind: type[R],
    decide: Callable[[R], R],
    *,
    puts_before: Callable[[R, R], Sequence[Put]] | None = None,
    confirm: bool = False,
) -> Change[R] | None:
    """Replace the record under `key` with what `decide` makes of it; return None if the key does not exist.

    `decide` may be called many times, and again on its own result if the answer to a write was lost. It returns its
    argument to change nothing, and may raise. `puts_before` returns, of the record before and after, the puts to the
    same partition that are there whenever the change is. With `confirm`, raises `StaleReads` if nothing was changed, or
    no key was found, on the strength of a stale read.
    """
    backoff = Backoff(log.runtime, key)
    while True:
        reads = await log.meta.begin_reads() if confirm else None
        found = await log.meta.get(key)
        if found is None:
            if reads is not None:
                await reads.confirm()
            return None
        old = decode(kind, found.value, key)
        new = decide(old)
        if new == old:
            if reads is not None:
                await reads.confirm()
            return Change(old, old)
        try:
            await _put_after(log, puts_before(old, new) if puts_before else (), Put(key, encode(new), found.version))
        except (VersionMismatch, OutcomeUnknown) as error:
            await backoff.wait(error)
            continue
        return Change(old, new)


async def _put_after(log: Log, before: Sequence[Put], put: Put) -> None:
    if not before:
        await log.meta.put(put.key, put.value, expected=put.expected)
        return
    *_, result = await log.meta.put_many([*before, put])
    if isinstance(result, VersionMismatch):
        raise result
