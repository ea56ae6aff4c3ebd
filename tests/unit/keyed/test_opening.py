"""Opening: what is there, what is not, and what is somebody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llog.errors import ConfigurationError, KeyedLogNotFound, StoreUnavailable, WrongStore
from llog.keyed import KeyedLog, KeyedLogReader
from llog.keyed.encoding import MARKER_KEY
from llog.keyed.model import StorageConfig
from llog.keyed.slate import locate, new_batch, open_database

KINDS = [KeyedLog, KeyedLogReader]


async def put(url: str, key: bytes, value: bytes) -> None:
    """Into the database as it is, past everything that a log would do."""
    database = await open_database(locate(url, None), StorageConfig())
    batch = new_batch()
    batch.put(key, value)
    await database.await_durable(await database.write(batch))
    await database.close()


@pytest.mark.parametrize("address", ["file://{}/deep/down", "file://{}/a directory with spaces", "file://{}/a/../b"])
async def test_a_log_in_files_is_there_after_a_restart(tmp_path: Path, address: str) -> None:
    url = address.format(tmp_path)
    async with await KeyedLog.open(url) as log:
        await log.append([(b"k", b"1")])
    assert (Path(url.removeprefix("file://")).resolve() / "wal").is_dir()
    async with await KeyedLog.open(url) as log, await KeyedLogReader.open(url) as reader:
        assert [entry.value async for entry in log.scan(b"k")] == [b"1"]
        assert [entry.value async for entry in reader.scan(b"k")] == [b"1"]


async def test_logs_in_memory_are_told_apart_by_name(url: str) -> None:
    async with await KeyedLog.open(url) as log, await KeyedLog.open(url + "-other") as other:
        await log.append([(b"k", b"1")])
        assert await other.count(b"k") == 0


async def test_a_reader_on_nothing_is_told_so_and_makes_nothing(tmp_path: Path, url: str) -> None:
    for nothing in (url, f"file://{tmp_path}/absent"):
        with pytest.raises(KeyedLogNotFound, match="no keyed log at"):
            await KeyedLogReader.open(nothing)
    assert list(tmp_path.iterdir()) == []


async def test_a_reader_on_a_database_whose_log_is_not_complete_is_told_so(url: str) -> None:
    database = await open_database(locate(url, None), StorageConfig())
    await database.close()
    with pytest.raises(KeyedLogNotFound, match="not complete yet"):
        await KeyedLogReader.open(url)
    async with await KeyedLog.open(url) as log:
        assert await log.append([(b"k", b"v")]) == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_directory_that_is_no_database_is_refused_and_left_alone(
    tmp_path: Path, kind: type[KeyedLogReader]
) -> None:
    (tmp_path / "letter.txt").write_text("dear diary")
    with pytest.raises(WrongStore, match=r"letter\.txt.*no database"):
        await kind.open(f"file://{tmp_path}")
    assert [each.name for each in tmp_path.iterdir()] == ["letter.txt"]
    with pytest.raises(WrongStore, match="is a file"):
        await kind.open(f"file://{tmp_path}/letter.txt")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("key", "value"), [(b"\x02\x01", b""), (b"\xff", b""), (MARKER_KEY, b"llog-keyed\x00\x00\x00\x09")]
)
async def test_a_log_of_a_newer_version_is_refused_and_its_writer_not_fenced(
    url: str, kind: type[KeyedLogReader], key: bytes, value: bytes
) -> None:
    await (await KeyedLog.open(url)).close()
    await put(url, key, value)
    writer = await open_database(locate(url, None), StorageConfig())
    with pytest.raises(WrongStore, match="newer version of llog"):
        await kind.open(url)
    await writer.await_durable(await writer.write(_one(b"\x01still", b"mine")))
    await writer.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_somebody_elses_database_is_refused(url: str, kind: type[KeyedLogReader]) -> None:
    await put(url, b"\x01\x01hello", b"world")
    with pytest.raises(WrongStore, match="not a keyed log"):
        await kind.open(url)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "address",
    ["", "/tmp/x", "http://x", "gs://bucket/x", "az://c/x", "file://", "s3://", "sqlite:///x", "s3://u:p@b/x"],
)
async def test_an_address_that_cannot_be_is_refused_without_naming_another_setting(
    kind: type[KeyedLogReader], address: str
) -> None:
    with pytest.raises(ConfigurationError, match="address of the keyed log") as caught:
        await kind.open(address)
    assert "LLOG_BLOBS" not in str(caught.value)
    assert "u:p" not in str(caught.value)


async def test_a_store_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from llog.config import Settings

    monkeypatch.setattr("llog.keyed.slate.OPEN_LIMIT_S", 0.5)
    settings = Settings(s3_endpoint_url="http://127.0.0.1:1", s3_region_name="us-east-1")
    with pytest.raises(StoreUnavailable, match="s3://bucket/log"):
        await KeyedLog.open("s3://bucket/log", settings=settings)


def _one(key: bytes, value: bytes) -> object:
    batch = new_batch()
    batch.put(key, value)
    return batch


async def test_a_reader_that_comes_while_the_log_is_made_finds_it_or_nothing(tmp_path: Path) -> None:
    for number in range(5):
        url = f"file://{tmp_path}/{number}"
        opening = asyncio.ensure_future(KeyedLog.open(url))
        while not opening.done():
            try:
                reader = await KeyedLogReader.open(url)
            except KeyedLogNotFound:
                continue
            await reader.close()
        await (await opening).close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ü", "a#b", "~a", "[a]", "a%25b", "a*b"])
async def test_a_directory_whose_name_slatedb_would_change_is_refused_and_none_is_made(
    tmp_path: Path, kind: type[KeyedLogReader], name: str
) -> None:
    with pytest.raises(ConfigurationError, match="SlateDB cannot store under a name with"):
        await kind.open(f"file://{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prefix", ["ü", "logs/../other", "logs/./a", "a~"])
def test_a_prefix_of_a_bucket_that_slatedb_would_change_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="SlateDB cannot store under a name with"):
        locate(f"s3://bucket/{prefix}", None)
