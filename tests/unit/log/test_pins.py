from __future__ import annotations

import asyncio

import pytest

from llog.errors import InvalidArgument
from llog.log.keys import pin_key
from llog.log.pins import LEASE_MS, SLACK_MS, alive_pins, pin, release, renew
from tests.unit.world import Stall, World


async def alive(world: World) -> list[str]:
    return [pin_id for pin_id, _ in await alive_pins(world.log)]


async def test_a_pin_is_alive_until_it_is_released(world: World) -> None:
    first, second = await pin(world.log, "a"), await pin(world.log, "b")
    assert sorted(await alive(world)) == sorted([first, second])
    await release(world.log, first)
    await release(world.log, first)
    assert await alive(world) == [second]


async def test_an_expired_pin_counts_for_the_slack_and_is_then_deleted(world: World) -> None:
    pin_id = await pin(world.log, "a", 1000)
    world.runtime.now += 1000 + SLACK_MS - 1
    assert await alive(world) == [pin_id]
    world.runtime.now += 1
    assert await alive(world) == []
    assert await world.meta.get(pin_key(pin_id)) is None


async def test_renewing_keeps_a_pin_alive_and_its_start(world: World) -> None:
    pin_id = await pin(world.log, "a")
    [(_, before)] = await alive_pins(world.log)
    for _ in range(5):
        world.runtime.now += LEASE_MS - 1
        assert await renew(world.log, pin_id)
    [(_, after)] = await alive_pins(world.log)
    assert (after.started_ms, after.owner) == (before.started_ms, "a")
    assert after.expires_ms == world.runtime.now + LEASE_MS


async def test_a_shorter_renewal_takes_nothing_from_other_holders(world: World) -> None:
    pin_id = await pin(world.log, "a", 60_000)
    assert await renew(world.log, pin_id, 1)
    world.runtime.now += 59_999
    assert await renew(world.log, pin_id)


async def test_renewing_brings_no_pin_back(world: World) -> None:
    expired, released = await pin(world.log, "a", 1000), await pin(world.log, "b")
    await release(world.log, released)
    world.runtime.now += 1000
    assert not await renew(world.log, expired)
    assert not await renew(world.log, released)
    assert await world.meta.get(pin_key(released)) is None


async def test_a_pin_renewed_while_it_is_being_deleted_stays(world: World) -> None:
    pin_id = await pin(world.log, "a", 1000)
    stall = Stall(lambda operation, key: operation == "delete")
    world.runtime.now += 1000 + SLACK_MS
    looking = asyncio.create_task(alive_pins(world.process(stall)))
    await stall.stalled.wait()
    world.runtime.now -= 1000 + SLACK_MS  # the holder's clock
    assert await renew(world.log, pin_id)
    stall.go.set()
    assert [found for found, _ in await looking] == [pin_id]
    assert await alive(world) == [pin_id]


async def test_a_lease_of_nothing_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument):
        await pin(world.log, "a", 0)
