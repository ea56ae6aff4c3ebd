"""The ownership of a keyed log, which its writer holds: the lock of its directory, or a lease if it is in a bucket. A
log in memory belongs to its last writer.

A lease works only among processes that use the same metadata store, so a log in a bucket stores the id of the log whose
metadata store that is. A process with another metadata store, or without one, is refused.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

from llog.base.lockfile import LOCK_AMONG_OTHERS, take_lock
from llog.config import Settings
from llog.config.loading import load_settings
from llog.config.locations import parse_address
from llog.errors import ConfigurationError, LlogError, LogNotFound, LogOwned, StoreUnavailable, WrongStore
from llog.keyed.slate import DatabaseLocation, make_log_directory
from llog.log.opening import opened_owners
from llog.log.owners import Owners, keyed_ownership
from llog.runtime import Runtime


class Ownership:
    """The lock or lease that a writer holds until it is closed."""

    def __init__(
        self,
        what: str,
        owners: Owners | None = None,
        *,
        lock: int | None = None,
        log_id: bytes | None = None,
        opened: AsyncExitStack | None = None,
    ) -> None:
        self.log_id = log_id
        """The id of the log whose metadata store holds the lease; None if there is no lease."""
        self._what = what
        self._owners = owners
        self._lock = lock
        self._opened = opened or AsyncExitStack()

    async def is_lost(self) -> bool:
        """Whether another process has rightfully taken over, after this one's session ended. Reads the metadata
        store.
        """
        return self._owners is not None and not await self._owners.confirm(self._what)

    @property
    def is_known_lost(self) -> bool:
        """Whether this process has already noticed that it lost the ownership."""
        return self._owners is not None and not self._owners.holds(self._what)

    async def release(self) -> None:
        """Release the lock or lease. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        async with self._opened:
            if self._owners is not None:
                await self._owners.release(self._what)


async def take_ownership(
    location: DatabaseLocation,
    owners: Owners | None,
    *,
    known_log_id: bytes | None,
    settings: Settings | None,
    runtime: Runtime,
    take_over: bool,
) -> Ownership:
    """Make this process the owner of the log. Raises `LogOwned` if another process is, with its address if that is a
    broker.

    For a log in a bucket, `owners` are by default those of the settings, and must belong to `known_log_id`; raises
    `ConfigurationError` if there are none. `take_over` skips the lease: SlateDB then fences the other writer.
    """
    what = keyed_ownership(parse_address("keyed", location.url).url)
    named = f"the keyed log at {location.url}"
    if location.directory is not None:
        return await _own_directory(location, location.directory, what, named, owners, take_over=take_over)
    if location.local or take_over:
        return Ownership(what)
    async with AsyncExitStack() as stack:
        if owners is None:
            settings = settings or load_settings()
            try:
                owners = await stack.enter_async_context(opened_owners(settings, runtime=runtime))
            except LogNotFound as error:
                raise ConfigurationError(
                    f"{named} is in a bucket, where only a metadata store records its writer, and LLOG_META is "
                    f"{settings.meta}, where there is no log: name the metadata store of its brokers, or open it with "
                    "take_over=True (`llog keyed append --take-over`), which fences its present writer"
                ) from error
        log_id = await owners.log_id()
        if known_log_id is not None and known_log_id != log_id:
            raise WrongStore(
                f"{named} belongs to the log with the id {known_log_id.decode()}, and LLOG_META names the metadata "
                "store of another: name that of its brokers. If it is lost, `llog keyed append --take-over` lets the "
                "log belong to the next process that opens it"
            )
        await owners.take(what, named)
        return Ownership(what, owners, log_id=log_id, opened=stack.pop_all())


async def _own_directory(
    location: DatabaseLocation, directory: Path, what: str, named: str, owners: Owners | None, *, take_over: bool
) -> Ownership:
    await asyncio.to_thread(make_log_directory, location.url, directory)
    if owners is not None:
        await owners.settle(what, named, directory, "LLOG_KEYED")
    address = None if owners is None else owners.local_address
    try:
        lock = await asyncio.to_thread(_lock, directory, named, address)
    except LlogError as error:
        if owners is not None:
            await owners.release(what)
        if take_over and isinstance(error, LogOwned):
            return Ownership(what)
        raise
    if owners is not None:
        await owners.publish(what)
    return Ownership(what, owners, lock=lock)


def _lock(directory: Path, named: str, address: str | None) -> int:
    try:
        return take_lock(directory, named, address=address, name=LOCK_AMONG_OTHERS)
    except OSError as error:
        raise StoreUnavailable(f"cannot lock {directory} ({error.strerror}): check its file system") from error
