"""Who owns what only one process may hold: tables, the disk topics of a directory, a keyed log.

An owner puts a *lease*, an ephemeral key with its address, so that other brokers know where to send what is the owner's
to answer. What decides who may own is stronger than the lease, for a process that was paused for longer than its
session does not know that its lease is gone:

- In a *directory*, the lock on it, which ends with its process and not before. `homes/{what}` has the id of the one
  directory that holds `what` for this log, and the id lies in the directory: a broker with another directory, on this
  machine or the next, never makes a second copy. Whoever has the lock of that directory is the owner, and puts its
  lease over one that a dead process left.
- In a *bucket*, the lease itself: one process puts it, the others find it. What a paused owner still writes is refused
  by SlateDB, whose manifest names the newer writer.

What decides rests on reads that were confirmed: by an old one, a process would find its own lease, or no home, where
others are by now.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from pathlib import Path
from typing import Final, Protocol

import msgspec

from llog.base.durable import boot_id
from llog.base.lockfile import DIRECTORY_ID, Owner, directory_id, make_directory_id
from llog.errors import (
    Contention,
    LlogError,
    LogOwned,
    OutcomeUnknown,
    OwnerUnavailable,
    StoreUnavailable,
    VersionMismatch,
)
from llog.log.keys import LOG_ID, home_key, owner_key
from llog.log.records import decode, encode
from llog.runtime import Runtime, uuid7
from llog.stores.meta import ABSENT, Entry, MetaStore, confirmed

ROCKSDB: Final = "rocksdb"
ROCKSDB_NAMED: Final = "the RocksDB of tables and topics"
_ATTEMPTS_MAX: Final = 5


def disk_of(directory_id: str) -> str:
    """The disk topics of one directory."""
    return f"disk/{directory_id}"


def keyed_of(url: str) -> str:
    """The keyed log at this address."""
    return f"keyed/{hashlib.sha256(url.encode()).hexdigest()[:32]}"


class Lease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The process that owns something, in its own words."""

    holder: str
    """A random id: whose lease it is."""
    process: Owner
    host: str
    machine: str
    """Of which boot of which machine: locks on directories hold among the processes of one."""

    @property
    def address(self) -> str | None:
        return self.process.address

    def __str__(self) -> str:
        if self.address is not None:
            return f"the broker at {self.address}"
        return f"{self.process} on {self.host}"


class DirectoryIds(Protocol):
    """The ids that lie in directories."""

    async def find(self, directory: Path) -> str | None: ...

    async def make(self, directory: Path, new_id: str) -> str:
        """The id of the directory: this one, if it has none."""
        ...


class FileIds:
    """In the directories of this machine."""

    async def find(self, directory: Path) -> str | None:
        return await asyncio.to_thread(directory_id, directory)

    async def make(self, directory: Path, new_id: str) -> str:
        return await asyncio.to_thread(make_directory_id, directory, new_id)


class Owners:
    """What this process owns, and who owns the rest. `close` before the store.

    `is_broker` processes answer for others, at `address` if they can be reached there. A lease that was lost with its
    session is put again within `renew_ms`, unless another process has it by then.
    """

    def __init__(
        self,
        meta: MetaStore,
        runtime: Runtime,
        *,
        address: str | None = None,
        is_broker: bool = False,
        renew_ms: int = 3000,
        directory_ids: DirectoryIds | None = None,
    ) -> None:
        self.address = address
        self.is_broker = is_broker
        self._meta = meta
        self._runtime = runtime
        self._renew_ms = renew_ms
        self._directory_ids = directory_ids or FileIds()
        self._lease = Lease(
            holder=self._new_id(),
            process=Owner.this(address),
            host=socket.gethostname(),
            machine=boot_id() or socket.gethostname(),
        )
        self._held: dict[str, bool] = {}
        """What this process owns, and whether it has the lock of a directory for it."""
        self._keeping: asyncio.Task[None] | None = None

    # --- in a directory

    async def settle(self, what: str, named: str, directory: Path, variable: str) -> None:
        """Make sure that this is the directory that holds `what`: of a new log, it becomes that. Then its lock decides,
        and who has it says so with `publish`; who does not get it calls `release`.

        `LogOwned` if another directory holds it, whose owner runs; `OwnerUnavailable` if that does not run.
        """
        home = await confirmed(self._meta, lambda: self.home(what))
        if home is None:
            await self.take(what, named)  # before there is a home, so that whoever comes second learns whom to ask
        try:
            home = home or await self._settle_home(what, directory)
            if await self._directory_ids.find(directory) != home:
                await self.release(what)
                raise await self.elsewhere(what, named, home, directory, variable)
            await self.check_machine(what, named)
        except BaseException:
            await self.release(what)
            raise

    async def check_machine(self, what: str, named: str) -> None:
        """`LogOwned` if a process of another machine owns it: this one has a copy of its directory, or a mount, where
        no lock tells.
        """
        lease = await self._lease_now(what)
        if lease is not None and lease.machine != self._lease.machine:
            raise self.refusal(named, lease)

    async def elsewhere(self, what: str, named: str, home: str, here: Path | None, variable: str) -> LlogError:
        """The error for what is in the directory with the id `home`, and not `here`, which is what the variable
        names.
        """
        lease = await self.find(what)
        if lease is not None:
            return self.refusal(named, lease)
        return OwnerUnavailable(
            f"{named} cannot be used now: its directory is the one whose file {DIRECTORY_ID} has the id {home}, "
            f"{variable} is "
            f"{here or 'not set'}, and no process that has the right one runs. Start a broker with that directory, "
            f"or name it in {variable}"
        )

    async def home(self, what: str) -> str | None:
        """The id of the directory that holds it; None if no process has used it yet."""
        found = await self._meta.get(home_key(what))
        return None if found is None else found.value.decode()

    async def forget(self, what: str, named: str) -> None:
        """Let the next process that uses it decide which directory holds it; `LogOwned` while one has it open."""
        lease = await self._lease_now(what)
        if lease is not None:
            raise self.refusal(named, lease)
        await self._meta.delete(home_key(what))

    async def identity(self, directory: Path) -> str:
        """The id of the directory, which it gets if it has none."""
        return await self._directory_ids.make(directory, self._new_id())

    async def publish(self, what: str) -> None:
        """Say that this process owns it, whose lock it has. While the store is out of reach, it is said later."""
        self._hold(what, locked=True)
        try:
            await self._renew(what)
        except (StoreUnavailable, OutcomeUnknown, Contention):
            pass

    # --- in a bucket

    async def take(self, what: str, named: str) -> None:
        """Own it; `LogOwned` if another process does, `OwnerUnavailable` if that ended a moment ago."""
        key = owner_key(what)
        for _ in range(_ATTEMPTS_MAX):
            try:
                await self._meta.put(key, encode(self._lease), expected=ABSENT, ephemeral=True)
                self._hold(what, locked=False)
                return
            except (VersionMismatch, OutcomeUnknown) as error:
                lease = await self._lease_now(what)
                if lease is not None and lease.holder == self._lease.holder:
                    self._hold(what, locked=False)
                    return
                if isinstance(error, OutcomeUnknown):
                    raise
            if lease is not None:
                raise self.refusal(named, lease)
        raise self._contention(named)

    async def release(self, what: str) -> None:
        """Let the next one own it. After a failure its lease goes with the session. Idempotent."""
        if self._held.pop(what, None) is None:
            return
        try:
            found = await self._entry(what)
            if found is not None and found[1].holder == self._lease.holder:
                await self._meta.delete(owner_key(what), expected=found[0].version)
        except LlogError:
            pass

    # --- for all of them

    def holds(self, what: str) -> bool:
        """Whether this process owns it, as far as it knows."""
        return what in self._held

    async def confirm(self, what: str) -> bool:
        """Whether this process owns it, as the store says now."""
        if self.holds(what):
            await self._renew(what)
        return self.holds(what)

    async def log_id(self) -> bytes | None:
        """The id of the log whose owners these are; None if it was not made yet."""
        found = await self._meta.get(LOG_ID)
        return None if found is None else found.value

    async def find(self, what: str) -> Lease | None:
        """The lease of the process that owns it, this or another; None if none that runs does. It may be an old one."""
        found = await self._entry(what)
        return None if found is None else found[1]

    def refusal(self, named: str, lease: Lease) -> LlogError:
        """The error for what the holder of the lease must be asked for."""
        if lease.address is not None and lease.address == self.address:
            return OwnerUnavailable(
                f"{named}: the lease of a process that ended at this broker's own address, {lease.address}, has "
                "not ended yet: try again"
            )
        hint = (
            ""
            if lease.address
            else ". If it is a broker, set LLOG_BROKER_ADVERTISED_ADDRESS there, so that others reach it"
        )
        refusal = LogOwned(f"{named} can only be used through {lease}, which owns it: ask there, or stop it{hint}")
        refusal.address = lease.address
        return refusal

    async def close(self) -> None:
        """Idempotent. The leases go with the session of the store."""
        keeping, self._keeping = self._keeping, None
        self._held.clear()
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _settle_home(self, what: str, directory: Path) -> str:
        """The id of the directory that holds it: of this one, unless another process was faster."""
        mine = await self.identity(directory)
        try:
            await self._meta.put(home_key(what), mine.encode(), expected=ABSENT)
        except VersionMismatch:
            home = await confirmed(self._meta, lambda: self.home(what))
            if home is None:
                raise Contention(f"{what}: its directory was forgotten while this process settled; try again") from None
            return home
        return mine

    def _hold(self, what: str, *, locked: bool) -> None:
        self._held[what] = locked
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while True:
            await self._runtime.sleep(self._renew_ms / 1000)
            for what in tuple(self._held):
                try:
                    await self._renew(what)
                except LlogError:
                    continue  # the store is out of reach: what is wrong with it is said to those who ask for something

    async def _renew(self, what: str) -> None:
        """Put the lease if it is gone. One in a bucket that another process has by now is lost."""
        for _ in range(_ATTEMPTS_MAX):
            found = await confirmed(self._meta, lambda: self._entry(what))
            if what not in self._held or (found is not None and found[1].holder == self._lease.holder):
                return
            if found is not None and not (self._held[what] and found[1].machine == self._lease.machine):
                del self._held[what]
                return
            expected = ABSENT if found is None else found[0].version
            try:
                await self._meta.put(owner_key(what), encode(self._lease), expected=expected, ephemeral=True)
                return
            except VersionMismatch:
                continue  # another process was faster
        raise self._contention(f"the lease of {what}")

    def _contention(self, named: str) -> Contention:
        return Contention(f"{named}: its owners changed {_ATTEMPTS_MAX} times while this process asked; try again")

    async def _lease_now(self, what: str) -> Lease | None:
        return await confirmed(self._meta, lambda: self.find(what))

    async def _entry(self, what: str) -> tuple[Entry, Lease] | None:
        found = await self._meta.get(owner_key(what))
        return None if found is None else (found, decode(Lease, found.value, found.key))

    def _new_id(self) -> str:
        return uuid7(self._runtime.now_ms(), self._runtime.random())
