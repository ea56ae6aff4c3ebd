"""The right to write a keyed log: by the lock of its directory, or by a lease if it is in a bucket. In memory, the last writer has it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from llog.errors import LlogError, LogOwned, StoreUnavailable
from llog.keyed.slate import Place, make_log_directory
from llog.locations import normal_url
from llog.owning import LOCK_AMONG_OTHERS, take_lock
from llog.partition.owners import Owners, keyed_of


class Ownership:
    """What a writer holds until it is closed."""

    def __init__(self, what: str, owners: Owners | None, lock: int | None) -> None:
        self._what = what
        self._owners = owners
        self._lock = lock

    async def is_lost(self) -> bool:
        """Whether another process has taken over, by right: this one's session had ended. Asks the metadata store."""
        return self._owners is not None and not await self._owners.confirm(self._what)

    @property
    def is_known_lost(self) -> bool:
        """As far as this process has noticed."""
        return self._owners is not None and not self._owners.holds(self._what)

    async def release(self) -> None:
        """Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        if self._owners is not None:
            await self._owners.release(self._what)


async def own(place: Place, owners: Owners | None, *, take_over: bool) -> Ownership:
    """The ownership of this log; `LogOwned` if another process has it, with its address if it is a broker.

    `take_over` is for those who know better: SlateDB then fences the other writer.
    """
    what = keyed_of(normal_url("keyed", place.url))
    named = f"the keyed log at {place.url}"
    if place.directory is None:
        if place.local or owners is None or take_over:
            return Ownership(what, None, None)
        await owners.take(what, named)
        return Ownership(what, owners, None)
    await asyncio.to_thread(make_log_directory, place.url, place.directory)
    if owners is not None:
        await owners.settle(what, named, place.directory, "LLOG_KEYED")
    address = None if owners is None else owners.address
    try:
        lock = await asyncio.to_thread(_lock, place.directory, named, address)
    except LlogError as error:
        if owners is not None:
            await owners.release(what)
        if take_over and isinstance(error, LogOwned):
            return Ownership(what, None, None)
        raise
    if owners is not None:
        await owners.publish(what)
    return Ownership(what, owners, lock)


def _lock(directory: Path, named: str, address: str | None) -> int:
    try:
        return take_lock(directory, named, address=address, name=LOCK_AMONG_OTHERS)
    except OSError as error:
        raise StoreUnavailable(f"cannot lock {directory} ({error.strerror}): check its file system") from error
