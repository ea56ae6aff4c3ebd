"""Following: everything once, in order, and from where one left off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llog.errors import InvalidArgument
from llog.keyed import KeyedLog, KeyedLogReader, LogEntry, follower
from tests.unit.keyed.conftest import Opener, ReaderOpener


async def take(found: AsyncIterator[LogEntry], count: int) -> list[LogEntry]:
    return [await asyncio.wait_for(anext(found), 30) for _ in range(count)]


async def fill(log: KeyedLog, appends: int) -> None:
    """Appends to keys in turns; a seal now and then, and not everything awaited."""
    for number in range(appends):
        records = [(b"a", b"%d" % number), (b"b%d" % (number % 3), b""), (b"a", b"%d again" % number)]
        await log.append(records, await_durable=number % 4 != 0)
        if number % 7 == 6:
            await log.seal_segment()
    await log.flush()


@pytest.mark.parametrize("from_reader", [False, True])
async def test_a_tail_yields_what_is_there_and_then_what_comes(
    opener: Opener, reader_opener: ReaderOpener, from_reader: bool
) -> None:
    log = await opener()
    await log.append([(b"k", b"1"), (b"other", b"x")])
    source: KeyedLogReader = await reader_opener() if from_reader else log
    tail = source.tail(b"k", after=-1)
    assert await take(tail, 1) == [LogEntry(b"k", 0, b"1")]
    coming = asyncio.ensure_future(take(tail, 2))
    await log.append([(b"k", b"2")])
    await log.seal_segment()
    await log.append([(b"k", b"3")])
    assert await coming == [LogEntry(b"k", 2, b"2"), LogEntry(b"k", 3, b"3")]


async def test_without_a_position_a_tail_begins_with_the_next_append(log: KeyedLog) -> None:
    await log.append([(b"k", b"old")])
    tail = log.tail(b"k")
    coming = asyncio.ensure_future(take(tail, 1))
    await asyncio.sleep(0)
    await log.append([(b"k", b"new")])
    assert [entry.value for entry in await coming] == [b"new"]


@pytest.mark.parametrize("held", [follower.HELD_BYTES_MAX, 200, 1])
@pytest.mark.parametrize("from_reader", [False, True])
@pytest.mark.parametrize("wanted", [{"key": b"a"}, {"prefix": b""}, {"prefix": b"b"}])
async def test_whoever_resumes_from_any_sequence_gets_the_rest_once_and_in_order(
    opener: Opener,
    reader_opener: ReaderOpener,
    monkeypatch: pytest.MonkeyPatch,
    held: int,
    from_reader: bool,
    wanted: dict[str, Any],
) -> None:
    monkeypatch.setattr(follower, "HELD_BYTES_MAX", held)
    log = await opener()
    await fill(log, 20)
    everything = sorted(
        [entry async for entry in log.scan_prefix(wanted.get("prefix", b"a"))], key=lambda e: e.sequence
    )
    source: KeyedLogReader = await reader_opener() if from_reader else log
    for cut in (0, 1, 17, len(everything) - 1):
        tail = source.tail(**wanted, after=everything[cut].sequence)
        assert await take(tail, len(everything) - cut - 1) == everything[cut + 1 :]


@pytest.mark.parametrize("from_reader", [False, True])
async def test_followers_lose_nothing_while_appends_and_seals_go_on(
    opener: Opener, reader_opener: ReaderOpener, from_reader: bool
) -> None:
    log = await opener()
    source: KeyedLogReader = await reader_opener() if from_reader else log
    whole = asyncio.ensure_future(take(source.tail(prefix=b"", after=-1), 300))
    one = asyncio.ensure_future(take(source.tail(b"a", after=-1), 200))
    await asyncio.gather(*(fill(log, 20) for _ in range(5)))
    stored = sorted([entry async for entry in log.scan_prefix(b"")], key=lambda entry: entry.sequence)
    assert await whole == stored
    assert await one == [entry for entry in stored if entry.key == b"a"]


async def test_several_followers_of_one_writer_are_all_woken(log: KeyedLog) -> None:
    tails = [asyncio.ensure_future(take(log.tail(b"k", after=-1), 5)) for _ in range(5)]
    for number in range(5):
        await log.append([(b"k", b"%d" % number)])
    assert len({tuple(found) for found in await asyncio.gather(*tails)}) == 1


@pytest.mark.parametrize(
    "wrong", [{}, {"key": b"a", "prefix": b"b"}, {"key": b"a", "after": -2}, {"key": b"a", "after": "1"}]
)
async def test_what_cannot_be_followed_is_refused_at_once(log: KeyedLog, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="tail"):
        log.tail_batches(**wrong)


async def test_a_flush_while_an_append_is_on_its_way_makes_no_follower_pass_over_it(
    log: KeyedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = log._database
    write, begun, go_on = database.write, asyncio.Event(), asyncio.Event()

    async def held_up(batch: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await write(batch)

    tail = log.tail(b"k", after=-1)
    coming = asyncio.ensure_future(take(tail, 2))
    with monkeypatch.context() as patched:
        patched.setattr(database, "write", held_up)
        append = asyncio.ensure_future(log.append([(b"k", b"0")]))
        await begun.wait()
        flush = asyncio.ensure_future(log.flush())
        await asyncio.wait([flush], timeout=0.2)
        visible = await log.next_sequence()
        go_on.set()
        await asyncio.gather(append, flush)
    assert visible == 0
    await log.append([(b"k", b"1")])
    assert [entry.value for entry in await coming] == [b"0", b"1"]
