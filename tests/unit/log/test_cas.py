from __future__ import annotations

import asyncio

import pytest

from llog.errors import Contention, OutcomeUnknown, StaleReads
from llog.log.cas import ATTEMPTS_MAX, update
from llog.log.records import CompactionCursor, decode, encode
from tests.unit.world import Faults, World

KEY = "counters/one"


def increment(cursor: CompactionCursor) -> CompactionCursor:
    return CompactionCursor(cursor.offset + 1)


async def stored(world: World) -> int:
    found = await world.meta.get(KEY)
    assert found is not None
    return decode(CompactionCursor, found.value, found.key).offset


class Overtaken(Faults):
    """Another process changes the key before each put, `times` times."""

    def __init__(self, world: World, times: int) -> None:
        super().__init__()
        self.world, self.left = world, times

    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and self.left:
            self.left -= 1
            await self.world.meta.put(KEY, encode(CompactionCursor(await stored(self.world) + 100)))


class Unanswered(Faults):
    """The answer to each put is lost; the first `applied` puts took effect."""

    def __init__(self, applied: int) -> None:
        super().__init__()
        self.applied = applied

    async def before(self, operation: str, key: str) -> None:
        if operation == "put" and not self.applied:
            raise OutcomeUnknown("no answer")

    async def after(self, operation: str, key: str) -> None:
        if operation == "put":
            self.applied -= 1
            raise OutcomeUnknown("no answer")


async def test_a_missing_key_is_not_created(world: World) -> None:
    assert await update(world.log, KEY, CompactionCursor, increment) is None
    assert await world.meta.get(KEY) is None


async def test_updates_that_run_at_once_all_count(world: World) -> None:
    await world.meta.put(KEY, encode(CompactionCursor(0)))
    await asyncio.gather(*(update(world.log, KEY, CompactionCursor, increment) for _ in range(20)))
    assert await stored(world) == 20


async def test_an_update_decides_anew_on_what_others_have_stored(world: World) -> None:
    await world.meta.put(KEY, encode(CompactionCursor(0)))
    change = await update(world.process(Overtaken(world, 3)), KEY, CompactionCursor, increment)
    assert change is not None
    assert (change.old.offset, change.new.offset) == (300, 301)
    assert await stored(world) == 301


async def test_an_update_that_always_loses_ends_with_contention(world: World) -> None:
    await world.meta.put(KEY, encode(CompactionCursor(0)))
    with pytest.raises(Contention, match=f"{KEY} was changed by others {ATTEMPTS_MAX} times"):
        await update(world.process(Overtaken(world, ATTEMPTS_MAX)), KEY, CompactionCursor, increment)
    assert await stored(world) == 100 * ATTEMPTS_MAX


async def test_a_lost_answer_is_looked_up(world: World) -> None:
    await world.meta.put(KEY, encode(CompactionCursor(0)))

    def to_seven(cursor: CompactionCursor) -> CompactionCursor:
        return CompactionCursor(7)

    change = await update(world.process(Unanswered(applied=1)), KEY, CompactionCursor, to_seven)
    assert change is not None
    assert change.new.offset == await stored(world) == 7


async def test_answers_that_stay_lost_are_not_taken_for_a_loss(world: World) -> None:
    await world.meta.put(KEY, encode(CompactionCursor(0)))
    with pytest.raises(OutcomeUnknown):
        await update(world.process(Unanswered(applied=0)), KEY, CompactionCursor, increment)


async def test_a_stale_read_is_no_reason_to_change_nothing(world: World) -> None:
    await world.meta.put(KEY, encode(CompactionCursor(7)))
    log, meta = world.stale_process()
    meta.pause("counters/")
    await world.meta.put(KEY, encode(CompactionCursor(8)))
    with pytest.raises(StaleReads):
        await update(log, KEY, CompactionCursor, lambda cursor: CompactionCursor(7), confirm=True)
    meta.wake()
    await update(log, KEY, CompactionCursor, lambda cursor: CompactionCursor(7), confirm=True)
    assert await stored(world) == 7
