"""Processes that want to own the same things, as brokers do: a keyed log in a bucket, and tables in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from llog.errors import Contention, LlogError, LogOwned, OwnerUnavailable, WriterFenced
from llog.log.log import Log
from llog.log.owners import ROCKSDB, ROCKSDB_NAMED, Owners, keyed_of
from llog.sim.process import Process
from llog.sim.roles import met
from llog.sim.stores import Network

if TYPE_CHECKING:
    from llog.sim.world import World

_KEYED_LOG: Final = keyed_of("s3://sim/keyed")
_DIRECTORIES: Final = 2


class SimDatabase:
    """SlateDB's rule, and no more: each opening begins an epoch, and the writes of all before are refused."""

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
    """Directories with their ids, and with locks that end with the process that has them."""

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
    """Takes the lease, writes for a while, and lets another one have it."""
    draw = me.runtime.random()
    owners = Owners(log.meta, me.runtime, renew_ms=draw.choice((500, 3000)))
    while True:
        await me.runtime.sleep(draw.expovariate(0.5))
        if await _take(world, me, owners):
            try:
                await _write(world, me, owners, await world.database.open(me.name))
            except LlogError as error:
                met(error)
            await owners.release(_KEYED_LOG)


async def _take(world: World, me: Process, owners: Owners) -> bool:
    leases = world.history.leases
    asked = leases.asks()
    try:
        await owners.take(_KEYED_LOG, "the keyed log")
    except LlogError as error:
        met(error, LogOwned, Contention)
        if isinstance(error, LogOwned):
            leases.is_told(me.name, asked, holds=False)
            world.trace.count("refused owners")
        return False
    leases.is_told(me.name, asked, holds=True)
    world.trace.count("owners")
    return True


async def _write(world: World, me: Process, owners: Owners, epoch: int) -> None:
    """Until it had its turn, or another process has become the owner."""
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
            epoch = await world.database.open(
                me.name
            )  # the other one was paused since it took the lease, and had lost it


async def _confirm(world: World, me: Process, owners: Owners) -> bool:
    asked = world.history.leases.asks()
    owns = await owners.confirm(_KEYED_LOG)
    world.history.leases.is_told(me.name, asked, holds=owns)
    return owns


async def tenant(world: World, me: Process, log: Log) -> None:
    """Has the tables in a directory of its machine, unless they are in another, and lets them be forgotten."""
    draw = me.runtime.random()
    directories, homes = world.directories, world.history.homes
    directory = Path(f"/sim/{int(me.role.rpartition('-')[2]) % _DIRECTORIES}")
    owners = Owners(log.meta, me.runtime, directory_ids=directories)
    while True:
        await me.runtime.sleep(draw.expovariate(1.0))
        asked = homes.asks()
        try:
            await owners.settle(ROCKSDB, ROCKSDB_NAMED, directory, "LLOG_ROCKSDB_DIR")
            homes.is_told(str(await directories.find(directory)), asked, holds=True)
            world.trace.count("tenants")
            if directories.lock(directory, me):
                await owners.publish(ROCKSDB)
                await me.runtime.sleep(draw.expovariate(0.5))
                directories.unlock(directory)
            await owners.release(ROCKSDB)
            await owners.forget(ROCKSDB, ROCKSDB_NAMED)
        except LlogError as error:
            met(error, LogOwned, OwnerUnavailable, Contention)
