"""Processes that compete to own the same things, as brokers do: a keyed log in a bucket, and tables in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from llog.errors import Contention, LlogError, LogOwned, OwnerUnavailable, WriterFenced
from llog.log.log import Log
from llog.log.owners import ROCKSDB_LABEL, ROCKSDB_OWNERSHIP, Owners, keyed_ownership
from llog.sim.process import Process
from llog.sim.roles import raise_unexpected
from llog.sim.stores import Network

if TYPE_CHECKING:
    from llog.sim.world import World

_KEYED_LOG: Final = keyed_ownership("s3://sim/keyed")
_DIRECTORIES: Final = 2


class SimDatabase:
    """SlateDB's fencing rule: each opening begins an epoch, and writes of earlier epochs are refused."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._epoch = 0

    async def open(self, who: str) -> int:
        async def effect() -> int:
            self._epoch += 1
            return self._epoch

        return await self._network.call(who, "open the keyed log", effect, write=True)

    async def write(self, who: str, epoch: int) -> None:
        async def effect() -> None:
            if epoch != self._epoch:
                raise WriterFenced(f"simulated: epoch {epoch} was fenced by {self._epoch}")

        await self._network.call(who, f"write in epoch {epoch}", effect, write=True)


class SimDirectories:
    """Directories with ids, and with locks that end with the process that holds them."""

    def __init__(self) -> None:
        self._ids: dict[Path, str] = {}
        self._locks: dict[Path, Process] = {}

    async def find(self, directory: Path) -> str | None:
        return self._ids.get(directory)

    async def make(self, directory: Path, new_id: str) -> str:
        return self._ids.setdefault(directory, new_id)

    def lock(self, directory: Path, me: Process) -> bool:
        found = self._locks.get(directory)
        if found is not None and found.alive:
            return False
        self._locks[directory] = me
        return True

    def unlock(self, directory: Path) -> None:
        del self._locks[directory]


async def owner(world: World, me: Process, log: Log) -> None:
    """Take the lease, write for a while, and release it."""
    draw = me.runtime.random()
    owners = Owners(log.meta, me.runtime, renew_ms=draw.choice((500, 3000)))
    while True:
        await me.runtime.sleep(draw.expovariate(0.5))
        if await _take(world, me, owners):
            try:
                await _write(world, me, owners, await world.database.open(me.name))
            except LlogError as error:
                raise_unexpected(error)
            await owners.release(_KEYED_LOG)


async def _take(world: World, me: Process, owners: Owners) -> bool:
    leases = world.history.leases
    asked_at = leases.moment()
    try:
        await owners.take(_KEYED_LOG, "the keyed log")
    except LlogError as error:
        raise_unexpected(error, LogOwned, Contention)
        if isinstance(error, LogOwned):
            leases.check_answer(me.name, asked_at, holds=False)
            world.trace.count("refused owners")
        return False
    leases.check_answer(me.name, asked_at, holds=True)
    world.trace.count("owners")
    return True


async def _write(world: World, me: Process, owners: Owners, epoch: int) -> None:
    """Write for a while, or until another process has become the owner."""
    draw = me.runtime.random()
    for _ in range(draw.randint(1, 20)):
        await me.runtime.sleep(draw.expovariate(1.0))
        if not owners.holds(_KEYED_LOG):
            return
        try:
            await world.database.write(me.name, epoch)
        except WriterFenced:
            world.trace.count("fenced owners")
            if not await _confirm(world, me, owners):
                return
            # The other process was paused after it took the lease, and had lost it.
            epoch = await world.database.open(me.name)


async def _confirm(world: World, me: Process, owners: Owners) -> bool:
    asked_at = world.history.leases.moment()
    owns = await owners.confirm(_KEYED_LOG)
    world.history.leases.check_answer(me.name, asked_at, holds=owns)
    return owns


async def tenant(world: World, me: Process, log: Log) -> None:
    """Hold the tables in a directory of this machine, unless another directory is their home, and forget the home."""
    draw = me.runtime.random()
    directories, homes = world.directories, world.history.homes
    directory = Path(f"/sim/{int(me.role.rpartition('-')[2]) % _DIRECTORIES}")
    owners = Owners(log.meta, me.runtime, directory_ids=directories)
    while True:
        await me.runtime.sleep(draw.expovariate(1.0))
        asked_at = homes.moment()
        try:
            await owners.settle(ROCKSDB_OWNERSHIP, ROCKSDB_LABEL, directory, "LLOG_ROCKSDB_DIR")
            homes.check_answer(str(await directories.find(directory)), asked_at, holds=True)
            world.trace.count("tenants")
            if directories.lock(directory, me):
                await owners.publish(ROCKSDB_OWNERSHIP)
                await me.runtime.sleep(draw.expovariate(0.5))
                directories.unlock(directory)
            await owners.release(ROCKSDB_OWNERSHIP)
            await owners.forget(ROCKSDB_OWNERSHIP, ROCKSDB_LABEL)
        except LlogError as error:
            raise_unexpected(error, LogOwned, OwnerUnavailable, Contention)
