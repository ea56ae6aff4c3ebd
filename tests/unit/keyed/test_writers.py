"""One writer at a time: whoever opens takes over, and a sequence is never given twice."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from llog.errors import StoreUnavailable, WriterFenced
from llog.keyed import Config, KeyedLog, LogEntry, StorageConfig
from llog.keyed.follower import wait_for_sequence
from tests.unit.keyed.conftest import Opener, ReaderOpener


async def values(found: Any) -> list[bytes]:
    return [entry.value async for entry in found]


async def test_a_second_writer_takes_over_and_the_first_acknowledges_nothing_more(opener: Opener) -> None:
    first = await opener()
    await first.append([(b"k", b"first")])
    second = await opener()
    for _ in range(3):
        with pytest.raises(WriterFenced, match="taken over"):
            await first.append([(b"k", b"lost")])
    with pytest.raises(WriterFenced):
        await first.seal_segment()
    with pytest.raises(WriterFenced):
        await first.delete_segments(0)
    assert await second.append([(b"k", b"second")]) > 0
    assert await values(second.scan(b"k")) == [b"first", b"second"]
    assert await second.count(b"k") == 2


async def test_a_fenced_writer_that_does_not_await_finds_out_at_the_latest_when_it_flushes(opener: Opener) -> None:
    first = await opener()
    await first.append([(b"k", b"1")])
    second = await opener()
    assert await first.append([(b"k", b"lost")], await_durable=False) == 1
    with pytest.raises(WriterFenced):
        await first.flush()
    with pytest.raises(WriterFenced):
        await first.append([(b"k", b"lost")], await_durable=False)
    assert await values(second.scan(b"k")) == [b"1"]


async def test_closing_a_fenced_writer_tells_of_losses_only(opener: Opener) -> None:
    careful, hasty = await opener(), await opener()
    await careful.close()
    await hasty.append([(b"k", b"1")])
    await hasty.append([(b"k", b"lost")], await_durable=False)
    third = await opener()
    if await third.count(b"k") == 1:  # else it was durable before the third took over
        with pytest.raises(WriterFenced):
            await hasty.close()


async def test_writers_that_race_lose_nothing_that_was_acknowledged_and_one_survives(opener: Opener) -> None:
    acknowledged: list[LogEntry] = []

    async def race(name: bytes) -> KeyedLog | None:
        try:
            log = await opener()
            for number in range(30):
                value = b"%s %d" % (name, number)
                acknowledged.append(LogEntry(b"k", await log.append([(b"k", value)]), value))
        except WriterFenced:
            return None
        return log

    found = await asyncio.gather(*(race(b"%d" % number) for number in range(4)))
    survivors = [log for log in found if log is not None]
    working = []
    for log in survivors:
        try:
            await log.append([(b"other", b"")])
            working.append(log)
        except WriterFenced:
            pass
    assert len(working) == 1
    stored = [entry async for entry in working[0].scan(b"k")]
    assert set(acknowledged) <= set(stored)
    assert len({entry.value for entry in stored}) == len(stored)
    sequences = [entry.sequence for entry in stored]
    assert sequences == sorted(set(sequences))
    assert await working[0].count(b"k") == len(stored)


async def test_sequences_go_on_without_a_gap_after_a_close_and_with_one_after_a_crash(opener: Opener) -> None:
    log = await opener()
    assert await log.append([(b"k", b"1")] * 10) == 0
    await log.close()
    log = await opener()
    assert await log.append([(b"k", b"2")]) == 10
    log = await opener()  # the other one did not close: as after a crash
    first = await log.append([(b"k", b"3")])
    assert first == 10 + 4096
    assert await log.count(b"k") == 12


async def test_a_sequence_that_was_given_without_waiting_is_never_given_again(opener: Opener) -> None:
    slow = Config(storage=StorageConfig(flush_interval=timedelta(milliseconds=200)))
    given: set[int] = set()
    for _ in range(3):
        log = await opener(slow)
        for size in (1, 3000, 3000, 5000, 1):
            first = await log.append([(b"k", b"")] * size, await_durable=False)
            numbers = set(range(first, first + size))
            assert not numbers & given
            given |= numbers


async def test_counts_go_on_after_a_takeover(opener: Opener, reader_opener: ReaderOpener) -> None:
    total = 0
    for number in range(4):
        log = await opener()
        await log.append([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")])
        total += 2
        assert await log.count(b"a") == total
        if number == 2:
            await log.seal_segment()
    assert await (await reader_opener()).count(b"a") == 8


async def test_a_write_that_fails_ends_the_writer_because_nobody_knows_what_is_stored(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opener()
    await log.append([(b"k", b"1")])

    async def fail(_: object) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as broken:
        broken.setattr(log._database, "write", fail)
        with pytest.raises(StoreUnavailable, match="away"):
            await log.append([(b"k", b"2")])
    with pytest.raises(StoreUnavailable, match="open it again"):
        await log.append([(b"k", b"3")])
    log = await opener()
    await log.append([(b"k", b"4")])
    assert await values(log.scan(b"k")) == [b"1", b"4"]


async def test_two_who_close_a_log_while_it_writes_both_find_it_closed(opener: Opener) -> None:
    log = await opener()
    await log.append([(b"k", b"0")])
    async with log._writing:
        closing = [asyncio.ensure_future(log.close()) for _ in range(2)]
        await asyncio.wait(closing, timeout=0.01)
    assert await asyncio.gather(*closing) == [None, None]


async def test_after_a_takeover_the_next_sequence_is_one_that_readers_reach(
    opener: Opener, reader_opener: ReaderOpener
) -> None:
    await (await opener()).append([(b"k", b"0")] * 3)
    log, reader = await opener(), await reader_opener()
    await log.flush()
    assert await log.next_sequence() == await reader.next_sequence() == 3
    assert await log.append([(b"k", b"1")]) > 3
    await wait_for_sequence(reader, await log.next_sequence())
