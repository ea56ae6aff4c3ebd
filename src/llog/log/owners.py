"""Owners of what only one process may hold: the RocksDB, the disk topics of a directory, a keyed log.

An owner puts a *lease*, an ephemeral key with its address, so that other brokers know where to forward requests. A
process that was paused for longer than its session does not know that its lease is gone, so something stronger decides
who may own:

- In a *directory*: the lock on the directory, which ends exactly when its process ends. `homes/{what}` holds the id of
  the one directory that holds `what` for this log, and the same id lies in the directory, so that a broker with another
  directory, on this machine or another, never creates a second copy. The process with the lock on that directory is the
  owner, and replaces a lease that a dead process left behind.
- In a *bucket*: the lease itself, which one process puts and the others find. SlateDB refuses the writes of a paused
  owner, because its manifest names the newer writer.

These decisions rest on confirmed reads: a stale read could show this process its own former lease, or no home, after
another process has taken over.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from pathlib import Path
from typing import Final, Protocol

import msgspec

from llog.base.durable import boot_id
from llog.base.lockfile import DIRECTORY_ID, Owner, WorkerAddress, directory_id, make_directory_id
from llog.errors import (
    Contention,
    LlogError,
    LogOwned,
    OutcomeUnknown,
    OwnerUnavailable,
    StoreUnavailable,
    VersionMismatch,
)
from llog.log.cas import Backoff
from llog.log.keys import LOG_ID, home_key, owner_key
from llog.log.records import decode, encode
from llog.runtime import Runtime, uuid7
from llog.stores.meta import ABSENT, MetaEntry, MetaStore, read_confirmed

ROCKSDB_OWNERSHIP: Final = "rocksdb"
"""The name under which the RocksDB is owned."""
ROCKSDB_LABEL: Final = "the RocksDB of tables and topics"
"""How errors call the RocksDB."""


def disk_ownership(directory_id: str) -> str:
    """Return the name under which the disk topics of one directory are owned."""
    return f"disk/{directory_id}"


def keyed_ownership(url: str) -> str:
    """Return the name under which the keyed log at this address is owned."""
    return f"keyed/{hashlib.sha256(url.encode()).hexdigest()[:32]}"


class Lease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that owns something, as it describes itself."""

    holder: str
    """A random id of the holder."""
    process: Owner
    host: str
    machine: str
    """The machine's boot id: locks on directories exclude only processes of the same boot."""
    worker: WorkerAddress | None = None
    """Where the other workers of the holder's group reach it."""

    @property
    def address(self) -> str | None:
        return self.process.address

    def __str__(self) -> str:
        if self.address is not None:
            return f"the broker at {self.address}"
        return f"{self.process} on {self.host}"


class DirectoryIds(Protocol):
    """Reads and creates the ids that are stored in directories."""

    async def find(self, directory: Path) -> str | None: ...

    async def make(self, directory: Path, new_id: str) -> str:
        """Return the id of the directory, which becomes `new_id` if it has none."""
        ...


class FileIds:
    """The ids in the directories of this machine."""

    async def find(self, directory: Path) -> str | None:
        return await asyncio.to_thread(directory_id, directory)

    async def make(self, directory: Path, new_id: str) -> str:
        return await asyncio.to_thread(make_directory_id, directory, new_id)


class Owners:
    """What this process owns, and the leases of other owners. Close it before the metadata store.

    A process with `is_broker` serves others, at `address` if they can reach it there; `worker` is set if several
    processes share that address. A lease that was lost with its
    session is put again within `renew_ms`, unless another process has taken it by then.
    """

    def __init__(
        self,
        meta: MetaStore,
        runtime: Runtime,
        *,
        address: str | None = None,
        is_broker: bool = False,
        worker: WorkerAddress | None = None,
        renew_ms: int = 3000,
        directory_ids: DirectoryIds | None = None,
    ) -> None:
        self.address = address
        self.local_address = address if worker is None else worker.address
        """Where the processes of this machine reach this one."""
        self.is_broker = is_broker
        self._worker = worker
        self._meta = meta
        self._runtime = runtime
        self._renew_ms = renew_ms
        self._directory_ids = directory_ids or FileIds()
        self._lease = Lease(
            holder=self._new_id(),
            process=Owner.this(address),
            host=socket.gethostname(),
            machine=boot_id() or socket.gethostname(),
            worker=worker,
        )
        self._held: dict[str, bool] = {}
        """What this process owns, and whether it holds the lock on a directory for it."""
        self._keeping: asyncio.Task[None] | None = None

    # --- in a directory

    async def settle(self, what: str, named: str, directory: Path, variable: str) -> None:
        """Check that `directory` holds `what`; if no directory does yet, make it the one that does.

        Afterwards the lock on the directory decides: the process that gets it calls `publish`, the others `release`.
        Raises `LogOwned` if another directory holds `what` and its owner runs, `OwnerUnavailable` if none does.
        """
        home = await read_confirmed(self._meta, lambda: self.home(what))
        if home is None:
            await self.take(what, named)  # before the home exists, so that the next process finds an owner to ask
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
        """Raise `LogOwned` if a process on another machine owns it: this machine then has a copy or a mount of its
        directory, on which locks do not work.
        """
        lease = await self._lease_now(what)
        if lease is not None and lease.machine != self._lease.machine:
            raise self.refusal(named, lease)

    async def elsewhere(self, what: str, named: str, home: str, here: Path | None, variable: str) -> LlogError:
        """Return the error for something in the directory with the id `home`, while `variable` names `here`."""
        lease = await self.find(what)
        if lease is not None:
            return self.refusal(named, lease)
        return OwnerUnavailable(
            f"{named} cannot be used now: its directory is the one whose file {DIRECTORY_ID} has the id {home}, "
            f"{variable} is {here or 'not set'}, and no process that has the right one runs. Start a broker with that "
            f"directory, or name it in {variable}"
        )

    async def home(self, what: str) -> str | None:
        """Return the id of the directory that holds it; None if no process has used it yet."""
        found = await self._meta.get(home_key(what))
        return None if found is None else found.value.decode()

    async def forget(self, what: str, named: str) -> None:
        """Forget its directory, so that the next process that uses it decides anew; raise `LogOwned` while a process
        has it open.
        """
        lease = await self._lease_now(what)
        if lease is not None:
            raise self.refusal(named, lease)
        await self._meta.delete(home_key(what))

    async def identity(self, directory: Path) -> str:
        """Return the id of the directory, and create one if it has none."""
        return await self._directory_ids.make(directory, self._new_id())

    async def publish(self, what: str) -> None:
        """Put the lease of this process, which holds the lock; later, if the store is out of reach now."""
        self._hold(what, locked=True)
        try:
            await self._renew(what)
        except (StoreUnavailable, OutcomeUnknown, Contention):
            pass

    # --- in a bucket

    async def take(self, what: str, named: str) -> None:
        """Become its owner; raise `LogOwned` if another process is, `OwnerUnavailable` if that process has just
        ended.
        """
        key = owner_key(what)
        backoff = Backoff(self._runtime, named)
        while True:
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
            await backoff.wait()

    async def release(self, what: str) -> None:
        """Give up ownership. If the lease cannot be deleted, it ends with the session. Idempotent."""
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
        """Return whether this process owns it, as far as it knows."""
        return what in self._held

    async def confirm(self, what: str) -> bool:
        """Return whether this process owns it, according to the store."""
        if self.holds(what):
            await self._renew(what)
        return self.holds(what)

    async def log_id(self) -> bytes | None:
        """Return the id of the log; None if it has none yet."""
        found = await self._meta.get(LOG_ID)
        return None if found is None else found.value

    async def find(self, what: str) -> Lease | None:
        """Return the lease of its owner, or None if no running process owns it. The read may be stale."""
        found = await self._entry(what)
        return None if found is None else found[1]

    def find_address(self, lease: Lease) -> str | None:
        """Return where this process reaches the holder of the lease; None if it cannot."""
        is_sibling = lease.worker and self._worker and lease.worker.group == self._worker.group
        return lease.worker.address if is_sibling and lease.worker else lease.address

    def refusal(self, named: str, lease: Lease) -> LlogError:
        """Return the error for a request that only the holder of the lease can serve."""
        address = self.find_address(lease)
        if address is not None and address in (self.address, self.local_address):
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
        refusal.address = address
        return refusal

    async def close(self) -> None:
        """Stop renewing. The leases end with the session of the store. Idempotent."""
        keeping, self._keeping = self._keeping, None
        self._held.clear()
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _settle_home(self, what: str, directory: Path) -> str:
        """Record `directory` as the one that holds it and return its id, or that of the directory that another process
        has recorded first.
        """
        mine = await self.identity(directory)
        try:
            await self._meta.put(home_key(what), mine.encode(), expected=ABSENT)
        except VersionMismatch:
            home = await read_confirmed(self._meta, lambda: self.home(what))
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
                    continue  # The store is out of reach; requests that need it report the error.

    async def _renew(self, what: str) -> None:
        """Put the lease again if it is gone; give up ownership in a bucket if another process has the lease by now."""
        backoff = Backoff(self._runtime, f"the lease of {what}")
        while True:
            found = await read_confirmed(self._meta, lambda: self._entry(what))
            if what not in self._held or (found is not None and found[1].holder == self._lease.holder):
                return
            if found is not None and not (self._held[what] and found[1].machine == self._lease.machine):
                del self._held[what]
                return
            expected = ABSENT if found is None else found[0].version
            try:
                await self._meta.put(owner_key(what), encode(self._lease), expected=expected, ephemeral=True)
                return
            except VersionMismatch as error:
                await backoff.wait(error)

    async def _lease_now(self, what: str) -> Lease | None:
        return await read_confirmed(self._meta, lambda: self.find(what))

    async def _entry(self, what: str) -> tuple[MetaEntry, Lease] | None:
        found = await self._meta.get(owner_key(what))
        return None if found is None else (found, decode(Lease, found.value, found.key))

    def _new_id(self) -> str:
        return uuid7(self._runtime.now_ms(), self._runtime.random())
