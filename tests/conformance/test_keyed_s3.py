"""A keyed log on a real S3 server."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import msgspec
import obstore
import pytest

from devtools.servers.weed import S3Server
from llog.config import Secret, Settings
from llog.errors import KeyedLogNotFound, StoreUnavailable, WriterFenced, WrongStore
from llog.keyed import Config, KeyedLog, KeyedLogReader, RetentionConfig, StorageConfig

FAST = Config(
    storage=StorageConfig(flush_interval=timedelta(milliseconds=5), refresh_interval=timedelta(milliseconds=50))
)


@pytest.fixture
def settings(s3_server: S3Server) -> Settings:
    s3_server.create_bucket("keyed")
    return Settings(
        s3_endpoint_url=s3_server.endpoint,
        s3_region_name=s3_server.region,
        s3_access_key_id=s3_server.access_key,
        s3_secret_access_key=Secret(s3_server.secret_key),
    )


async def test_records_in_a_bucket_are_read_by_another_opening(settings: Settings) -> None:
    url = "s3://keyed/read"
    with pytest.raises(KeyedLogNotFound):
        await KeyedLogReader.open(url, FAST, settings=settings)
    async with await KeyedLog.open(url, FAST, settings=settings, take_over=True) as log:
        await log.append([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")])
        await log.seal_segment(b"meta")
        await log.append([(b"a", b"4")])
        async with await KeyedLogReader.open(url, FAST, settings=settings) as reader:
            assert [entry.value async for entry in reader.scan(b"a")] == [b"1", b"3", b"4"]
            tail = reader.tail(b"a", after=2)
            assert (await anext(tail)).value == b"4"
            coming = asyncio.ensure_future(anext(tail))
            await log.append([(b"a", b"5")])
            assert (await coming).value == b"5"
    async with await KeyedLog.open(url, FAST, settings=settings, take_over=True) as log:
        assert await log.count(b"a") == 4
        assert [key async for key in log.keys(b"")] == [b"a", b"b"]
        assert await log.append([(b"a", b"6")]) == 5
        assert await log.retain(RetentionConfig(max_bytes=5)) == 1
        assert [entry.value async for entry in log.scan(b"a")] == [b"4", b"5", b"6"]


async def test_writers_in_a_bucket_fence_each_other_and_lose_nothing_acknowledged(settings: Settings) -> None:
    url = "s3://keyed/fencing"
    acknowledged: list[bytes] = []

    async def write(name: int, opened: list[int]) -> None:
        try:
            log = await KeyedLog.open(url, FAST, settings=settings, take_over=True)
        finally:
            opened.append(name)
        for number in range(100_000):
            value = b"%d %d" % (name, number)
            await log.append([(b"k", value)])
            acknowledged.append(value)

    racing: list[asyncio.Future[None]] = []
    for _ in range(10):
        # One race in fifty ends with all three fenced by each other, before any of them has appended.
        opened: list[int] = []
        race = [asyncio.ensure_future(write(len(racing) + number, opened)) for number in range(3)]
        racing += race
        while len(opened) < 3 or (len(acknowledged) < 5 and not all(writer.done() for writer in race)):
            await asyncio.sleep(0.01)
        if len(acknowledged) >= 5:
            break
    async with await KeyedLog.open(url, FAST, settings=settings, take_over=True) as last:
        for writer in racing:
            with pytest.raises(WriterFenced):
                await writer
        stored = [entry.value async for entry in last.scan(b"k")]
        assert len(acknowledged) >= 5
        assert set(acknowledged) <= set(stored)
        assert len(set(stored)) == len(stored) == await last.count(b"k")


async def test_a_prefix_with_something_else_in_it_is_refused(settings: Settings, s3_server: S3Server) -> None:
    obstore.put(s3_server.store("keyed"), "taken/letter.txt", b"dear diary")
    with pytest.raises(WrongStore, match=r"letter\.txt"):
        await KeyedLog.open("s3://keyed/taken", FAST, settings=settings)


async def test_a_missing_bucket_and_a_wrong_secret_are_told_in_one_line(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llog.keyed.slate.OPEN_LIMIT_S", 5.0)
    wrong = msgspec.structs.replace(settings, s3_secret_access_key=Secret("not-the-secret"))
    for url, each in (("s3://no-such-bucket/x", settings), ("s3://keyed/x", wrong)):
        with pytest.raises(StoreUnavailable) as caught:
            await KeyedLog.open(url, FAST, settings=each)
        assert "\n" not in str(caught.value)
        assert url in str(caught.value)
        assert "not-the-secret" not in str(caught.value)
