"""The right to write a keyed log: by the lock of its directory, or by a lease if it is in a bucket. In memory, the last
writer has it.

A lease means something only to those who look for it in the same metadata store, so a log in a bucket has the id of the
log whose metadata store that is. Whoever knows no metadata store, or another one, is refused.
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
from llog.keyed.slate import Place, make_log_directory
from llog.log.opening import opened_owners
from llog.log.owners import Owners, keyed_of
from llog.runtime import Runtime


class Ownership:
    """What a writer holds until it is closed."""

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
        """Of the log whose metadata store tells who owns it, if it is in a bucket and there is one."""
        self._what = what
        self._owners = owners
        self._lock = lock
        self._opened = opened or AsyncExitStack()

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
        async with self._opened:
            if self._owners is not None:
                await self._owners.release(self._what)


async def own(
    place: Place,
    owners: Owners | None,
    *,
    known_log_id: bytes | None,
    settings: Settings | None,
    runtime: Runtime,
    take_over: bool,
) -> Ownership:
    """The ownership of this log; `LogOwned` if another process has it, with its address if it is a broker.

    In a bucket, `owners` are those of the settings unless given, and `known_log_id` says whose they must be;
    `ConfigurationError` if there are none. `take_over` is for those who know better: SlateDB then fences the other
    writer.
    """
    what = keyed_of(parse_address("keyed", place.url).url)
    named = f"the keyed log at {place.url}"
    if place.directory is not None:
        return await _own_directory(place, place.directory, what, named, owners, take_over=take_over)
    if place.local or take_over:
        return Ownership(what)
    async with AsyncExitStack() as stack:
        if owners is None:
            settings = settings or load_settings()
            try:
                owners = await stack.enter_async_context(opened_owners(settings, runtime=runtime))
            except LogNotFound as error:
                raise ConfigurationError(
                    f"{named} is in a bucket, where only a metadata store tells who writes it, and LLOG_META is "
                    f"{settings.meta}, where there is no log: name the metadata store of its brokers, or open it with "
                    "take_over=True (`llog keyed append --take-over`), which fences whoever writes it"
                ) from error
        log_id = await owners.log_id()
        if known_log_id is not None and known_log_id != log_id:
            raise WrongStore(
                f"{named} belongs to the log with the id {known_log_id.decode()}, and LLOG_META names the metadata "
                "store of another: name that of its brokers. If it is lost, `llog keyed append --take-over` lets the "
                "log belong to whoever opens it next"
            )
        await owners.take(what, named)
        return Ownership(what, owners, log_id=log_id, opened=stack.pop_all())


async def _own_directory(
    place: Place, directory: Path, what: str, named: str, owners: Owners | None, *, take_over: bool
) -> Ownership:
    await asyncio.to_thread(make_log_directory, place.url, directory)
    if owners is not None:
        await owners.settle(what, named, directory, "LLOG_KEYED")
    address = None if owners is None else owners.address
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
