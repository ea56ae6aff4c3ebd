"""The bloom filter on the log key: a scan of a key reads only the tables that hold it."""

from __future__ import annotations

import pytest

from llog.keyed import Config, StorageConfig, fast_bytes, fast_filter, slate
from llog.keyed.encoding import filter_length
from llog.keyed.reader import KeyedLogReader
from tests.unit.keyed.conftest import Opener

TABLES = 6


def grown(before: dict[str, int], after: dict[str, int], *parts: str) -> int:
    """By how much the counters have grown whose names have all these parts."""
    return sum(value - before.get(name, 0) for name, value in after.items() if all(part in name for part in parts))


@pytest.mark.parametrize("key_filter", [True, False])
async def test_a_scan_of_a_sparse_key_skips_the_tables_without_it_only_where_there_is_a_filter(
    opener: Opener, key_filter: bool
) -> None:
    log = await opener(Config(storage=StorageConfig(key_filter=key_filter)))
    for number in range(TABLES):
        await log.append([(b"a", b"%d" % number), (b"z", b"%d" % number)])  # so that every table spans the key
        if number == 2:
            await log.append([(b"m", b"found")])
        await log.settle()
    before = log.metrics()
    assert [entry.value async for entry in log.scan(b"m")] == [b"found"]
    assert await log.count(b"m") == 1
    after = log.metrics()
    skipped = grown(before, after, "filter_negative_count", "prefix")
    blocks = grown(before, after, "db_cache.access_count", "data_block")
    if key_filter:
        assert skipped >= 2 * (TABLES - 1)
        assert blocks == 2
    else:
        assert skipped == 0
        assert blocks == 2 * TABLES


async def test_a_reader_that_looks_again_reads_one_row_while_no_segment_is_new(opener: Opener, url: str) -> None:
    log = await opener()
    for _ in range(20):
        await log.append([(b"k", b"x")])
        await log.seal_segment()
    async with await KeyedLogReader.open(url) as reader:
        before = reader.metrics()
        assert len(await reader.segments()) == 21
        after = reader.metrics()
        assert grown(before, after, "db.request_count", "op=get") == 1
        assert grown(before, after, "db.request_count", "op=scan") == 0


async def test_a_log_may_be_opened_with_and_without_the_filter_in_turns(opener: Opener) -> None:
    for number in range(4):
        log = await opener(Config(storage=StorageConfig(key_filter=number % 2 == 0)))
        await log.append([(b"a", b"%d" % number), (b"m", b"%d" % number), (b"z", b"")])
        await log.settle()
        assert [entry.value async for entry in log.scan(b"m")] == [b"%d" % each for each in range(number + 1)]
        assert await log.count(b"m") == number + 1
        await log.close()


def test_questions_about_keys_are_answered_directly_with_the_locked_version() -> None:
    assert fast_filter.install(slate._LogKeyExtractor(), filter_length)


def test_the_direct_answers_are_left_out_where_they_differ_or_the_version_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast_filter, "_installed", None)
    assert not fast_filter.install(slate._LogKeyExtractor(), lambda key: filter_length(key) + 1)
    monkeypatch.setattr(fast_filter, "_installed", None)
    monkeypatch.setattr(fast_bytes, "install", lambda: False)
    assert not fast_filter.install(slate._LogKeyExtractor(), filter_length)


async def test_the_filter_works_with_the_stock_callback_as_well(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_class = type("Other", (slate._LogKeyExtractor,), {})  # which is not answered for directly
    monkeypatch.setattr(slate, "_LogKeyExtractor", other_class)
    await test_a_scan_of_a_sparse_key_skips_the_tables_without_it_only_where_there_is_a_filter(opener, True)
