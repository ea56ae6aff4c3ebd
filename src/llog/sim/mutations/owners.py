"""Ways to let two processes own the same thing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from llog.log import owners
from llog.log.keys import home_key, owner_key
from llog.log.owners import Owners
from llog.log.records import encode
from llog.sim.mutations.patch import Mutation, Patch
from llog.sim.plan import paused_owners
from llog.stores.meta import MetaStore

T = TypeVar("T")


def put_a_lease_over_another(patch: Patch) -> None:
    async def take(self: Owners, what: str, named: str) -> None:
        await self._meta.put(owner_key(what), encode(self._lease), ephemeral=True)
        self._hold(what, locked=False)

    patch.setattr(Owners, "take", take)


def own_on_when_the_lease_has_lapsed(patch: Patch) -> None:
    async def renew(self: Owners, what: str) -> None:
        pass

    patch.setattr(Owners, "_renew", renew)


def own_by_an_old_lease(patch: Patch) -> None:
    async def unconfirmed(store: MetaStore, read: Callable[[], Awaitable[T]]) -> T:
        return await read()

    patch.setattr(owners, "read_confirmed", unconfirmed)


def make_a_second_home(patch: Patch) -> None:
    async def settle_home(self: Owners, what: str, directory: Path) -> str:
        mine = await self.identity(directory)
        await self._meta.put(home_key(what), mine.encode())
        return mine

    patch.setattr(Owners, "_settle_home", settle_home)


OWNER_MUTATIONS: Final = (
    Mutation(put_a_lease_over_another, "W1", paused_owners),
    Mutation(own_on_when_the_lease_has_lapsed, "W1", paused_owners),
    Mutation(own_by_an_old_lease, "W[12]", paused_owners),
    Mutation(make_a_second_home, "W2", paused_owners),
)
