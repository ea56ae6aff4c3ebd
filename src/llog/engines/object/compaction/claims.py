"""Claims: ephemeral keys by which compactors leave each other's work alone.

A claim only saves double work. It ends with the session of its process, and no guarantee rests on it.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from llog.errors import LlogError, OutcomeUnknown, VersionMismatch
from llog.log.log import Log
from llog.log.records import CompactorClaim, decode, encode
from llog.stores.meta import ABSENT


class ClaimOutcome(StrEnum):
    TAKEN = "taken"
    REFUSED = "refused"
    """Another process has the claim."""
    RELEASED = "released"
    FAILED = "failed"
    """The store did not answer whether the claim was taken or released."""


class Claims:
    """The claims of one process under one name, `holder`, which people read.

    A process that lives long cannot wait for its session to end: a claim whose release, or whose taking, had no answer
    is remembered, and cleared before the next attempt to take it.
    """

    def __init__(self, log: Log, holder: str = "") -> None:
        self.counts: Counter[ClaimOutcome] = Counter()
        self._log = log
        self._holder = holder
        self._held: dict[str, int] = {}
        self._doubtful: set[str] = set()

    @property
    def held(self) -> int:
        """The number of claims that this process has now."""
        return len(self._held)

    async def take(self, key: str) -> bool:
        """Take the claim; return False if another process has it."""
        if key in self._doubtful:
            await self._clear(key)
        try:
            self._held[key] = await self._log.meta.put(
                key, encode(CompactorClaim(holder=self._holder)), expected=ABSENT, ephemeral=True
            )
        except VersionMismatch:
            self.counts[ClaimOutcome.REFUSED] += 1
            return False
        except OutcomeUnknown:
            self._doubtful.add(key)
            self.counts[ClaimOutcome.FAILED] += 1
            raise
        self.counts[ClaimOutcome.TAKEN] += 1
        return True

    async def keep(self, key: str) -> bool:
        """Return whether this process has the claim, which is taken if it is free, and kept until it is released."""
        version = self._held.get(key)
        if version is not None:
            found = await self._log.meta.get(key)
            if found is not None and found.version == version:
                return True
            del self._held[key]  # The session ended while this process was paused.
        return await self.take(key)

    async def release(self, key: str) -> None:
        """Release the claim. One that cannot be released now is cleared later, or ends with the session."""
        version = self._held.pop(key, None)
        if version is None:
            return
        try:
            await self._log.meta.delete(key, expected=version)
        except VersionMismatch:
            pass  # The session ended, and another process may have the claim.
        except LlogError:
            self._doubtful.add(key)
            self.counts[ClaimOutcome.FAILED] += 1
            return
        self.counts[ClaimOutcome.RELEASED] += 1

    async def release_all(self) -> None:
        for key in list(self._held):
            await self.release(key)

    async def _clear(self, key: str) -> None:
        """Delete a claim under this process's name of which the process does not know whether it has it.

        Another process of the same name loses its claim by this, which costs double work and nothing else.
        """
        found = await self._log.meta.get(key)
        if found is not None and decode(CompactorClaim, found.value, key).holder == self._holder:
            try:
                await self._log.meta.delete(key, expected=found.version)
            except VersionMismatch:
                pass
        self._doubtful.discard(key)
