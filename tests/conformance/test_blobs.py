"""What every blob store guarantees: each test runs on each adapter, S3 on a real server."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from llog.errors import BlobExists, BlobNotFound, CorruptBatch, InvalidArgument, StoreUnavailable
from llog.stores.blobs import BlobStore
from llog.stores.counting import OperationCounts
from llog.stores.files.blobs import FileBlobStore
from llog.stores.memory.blobs import MemoryBlobStore
from llog.stores.object import blobs as blobs_object
from llog.stores.object.blobs import ObjectBlobStore


class Counted(BlobStore, Protocol):
    counts: OperationCounts


BUCKET = "conformance-blobs"


@pytest.fixture(params=["memory", "file", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Counted]:
    match request.param:
        case "memory":
            yield MemoryBlobStore()
        case "file":
            yield FileBlobStore(tmp_path / "made" / "when needed")
        case _:
            server = request.getfixturevalue("s3_server")
            server.create_bucket(BUCKET)
            yield ObjectBlobStore.s3(
                BUCKET,
                f"run/{uuid.uuid4().hex}",
                endpoint=server.endpoint,
                region=server.region,
                access_key_id=server.access_key,
                secret_access_key=server.secret_key,
            )


@pytest.fixture
async def store(opened: Counted) -> AsyncIterator[Counted]:
    yield opened
    await opened.close()


async def names(store: BlobStore, prefix: str = "", start_after: str = "") -> list[str]:
    return [info.name async for page in store.list(prefix, start_after=start_after) for info in page]


async def test_a_blob_is_the_concatenation_of_its_parts(store: Counted) -> None:
    await store.put("a/b", [b"one", bytearray(b" two "), b"", memoryview(b"xthreex")[1:-1]])
    assert bytes(await store.get("a/b")) == b"one two three"


async def test_one_of_sixteen_racing_creates_wins_and_its_bytes_stay(store: Counted) -> None:
    async def create(number: int) -> bool:
        try:
            await store.put("raced", [bytes([number]) * 1000])
        except BlobExists:
            return False
        return True

    won = await asyncio.gather(*(create(number) for number in range(16)))
    assert won.count(True) == 1
    assert bytes(await store.get("raced")) == bytes([won.index(True)]) * 1000


async def test_a_put_never_replaces_a_blob_not_even_with_the_same_bytes(store: Counted) -> None:
    await store.put("taken", [b"first"])
    for content in (b"other", b"first"):
        with pytest.raises(BlobExists, match="taken"):
            await store.put("taken", [content])
    assert bytes(await store.get("taken")) == b"first"


@pytest.mark.parametrize(("offset", "length"), [(0, 10), (0, 1), (9, 1), (3, 4), (0, 0), (10, 0)])
async def test_a_range_is_exactly_what_was_asked_for(store: Counted, offset: int, length: int) -> None:
    await store.put("ten", [b"0123456789"])
    assert bytes(await store.get_range("ten", offset, length)) == b"0123456789"[offset : offset + length]


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (9, 2), (10, 1), (11, 0), (500, 20)])
async def test_a_range_beyond_the_end_is_corruption_and_not_a_short_answer(
    store: Counted, offset: int, length: int
) -> None:
    await store.put("ten", [b"0123456789"])
    with pytest.raises(CorruptBatch, match="ten"):
        await store.get_range("ten", offset, length)
    with pytest.raises(CorruptBatch, match="ten"):
        await store.get_ranges("ten", [(0, 2), (offset, length)])


async def test_negative_ranges_are_refused(store: Counted) -> None:
    await store.put("ten", [b"0123456789"])
    for offset, length in ((-1, 2), (0, -1)):
        with pytest.raises(InvalidArgument):
            await store.get_range("ten", offset, length)


async def test_an_empty_blob_is_a_blob(store: Counted) -> None:
    await store.put("empty", [])
    await store.put("also empty", [b"", b""])
    for name in ("empty", "also empty"):
        assert bytes(await store.get(name)) == b""
        assert bytes(await store.get_range(name, 0, 0)) == b""
        info = await store.head(name)
        assert info is not None
        assert info.size == 0
    with pytest.raises(BlobExists):
        await store.put("empty", [])


async def test_eight_mebibytes_in_many_parts_come_back_whole_and_in_ranges(store: Counted) -> None:
    content = random.Random(1).randbytes(8 * 1024 * 1024)
    cuts = [0, 1, 4096, 4096, 70_000, *range(100_000, len(content), 5_000), len(content)]
    await store.put("big", [memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)])
    assert bytes(await store.get("big")) == content
    start, length = 1_234_567, 3 * 1024 * 1024
    assert bytes(await store.get_range("big", start, length)) == content[start : start + length]
    info = await store.head("big")
    assert info is not None
    assert info.size == len(content)


async def test_many_ranges_come_in_the_order_asked_for_whether_near_far_or_overlapping(store: Counted) -> None:
    content = random.Random(2).randbytes(3_000_000)
    await store.put("many", [content])
    source = random.Random(3)
    ranges = [(source.randrange(2_990_000), source.randrange(5_000)) for _ in range(60)]
    ranges += [(0, 100), (50, 100), (0, 2_000_000), (2_999_999, 1), (0, 100)]
    found = await store.get_ranges("many", ranges)
    assert [bytes(data) for data in found] == [content[offset : offset + length] for offset, length in ranges]
    assert await store.get_ranges("many", []) == []


async def test_what_is_not_there_is_told_so(store: Counted) -> None:
    await store.put("there/blob", [b"x"])
    for missing in ("missing", "there", "there/other", "not/there"):
        assert await store.head(missing) is None
        with pytest.raises(BlobNotFound, match=missing):
            await store.get(missing)
        with pytest.raises(BlobNotFound, match=missing):
            await store.get_range(missing, 0, 1)
        with pytest.raises(BlobNotFound, match=missing):
            await store.get_ranges(missing, [(0, 1), (5, 0)])


async def test_head_and_list_agree_on_size_and_time(store: Counted) -> None:
    await store.put("d/one", [b"12345"])
    info = await store.head("d/one")
    assert info is not None
    assert info.size == 5
    assert info.modified_ms > 1_600_000_000_000
    [[listed]] = [page async for page in store.list("d/")]
    # An object store may tell whole seconds in one place and milliseconds in the other.
    assert (listed.name, listed.size, listed.modified_ms // 1000) == ("d/one", 5, info.modified_ms // 1000)


async def test_a_blob_that_was_just_put_tells_the_stores_present_time(store: Counted) -> None:
    """Whole seconds are enough; this machine's clock and that of a server which the tests start are the same."""
    await store.put("t/first", [b"x"])
    await store.put("t/second", [b"x"])
    first, second = await store.head("t/first"), await store.head("t/second")
    assert first is not None
    assert second is not None
    assert first.modified_ms // 1000 <= second.modified_ms // 1000
    assert abs(second.modified_ms - time.time() * 1000) < 3_600_000


TREE = ["A/b", "a!b", "a-b", "a-b/c", "a.b/c/d", "a/b", "a/b c", "a/c/d", "a0", "p%20q", "p+q", "z=1/y", "é/x"]


async def test_a_listing_is_in_the_order_of_names_across_directories(store: Counted) -> None:
    tree = [name for name in TREE if name != "a-b"]  # a local directory cannot be a blob as well
    for name in random.Random(4).sample(tree, len(tree)):
        await store.put(name, [name.encode()])
    assert await names(store) == sorted(tree)


async def test_a_prefix_is_any_beginning_of_a_name(store: Counted) -> None:
    tree = [name for name in TREE if name != "a-b"]
    for name in tree:
        await store.put(name, [b"x"])
    for prefix in (
        "a",
        "a-",
        "a/",
        "a/b",
        "a/c/",
        "a/c/d",
        "a/c/d/",
        "a.b",
        "p%",
        "z=1/y",
        "nothing",
        "no/thing/",
        "é",
    ):
        assert await names(store, prefix) == sorted(name for name in tree if name.startswith(prefix)), prefix


async def test_a_listing_starts_after_any_text_there_or_not(store: Counted) -> None:
    tree = [name for name in TREE if name != "a-b"]
    for name in tree:
        await store.put(name, [b"x"])
    for after in (*tree, "", "a", "a-", "a/", "a/bb", "a/c", "a/c/", "a-b/c/d", "zz", "é", "é/x/y"):
        assert await names(store, start_after=after) == sorted(name for name in tree if name > after), after
        below = sorted(name for name in tree if name > after and name.startswith("a/"))
        assert await names(store, "a/", after) == below, after


async def test_long_listings_come_in_pages_of_at_most_a_thousand(store: Counted) -> None:
    made = [f"d/{number:05}" for number in range(1003)] + ["d/00500x/y", "d/00500-z", "d/zz/1", "d-e", "e/1", "c"]
    for start in range(0, len(made), 100):
        await asyncio.gather(*(store.put(name, [b"x"]) for name in made[start : start + 100]))
    pages = [page async for page in store.list("")]
    assert all(0 < len(page) <= 1000 for page in pages)
    assert [info.name for page in pages for info in page] == sorted(made)
    assert await names(store, "d/") == sorted(name for name in made if name.startswith("d/"))
    assert await names(store, "d/009") == [f"d/{number:05}" for number in range(900, 1000)]
    assert await names(store, "d/", "d/00500-") == sorted(
        name for name in made if name.startswith("d/") and name > "d/00500-"
    )


async def test_a_put_blob_is_listed_and_a_deleted_one_is_not(store: Counted) -> None:
    assert await names(store) == []
    for number in range(5):
        await store.put(f"d/{number}", [b"x"])
        assert await names(store, "d/") == [f"d/{n}" for n in range(number + 1)]
    await store.delete_many(["d/1", "d/3"])
    assert await names(store) == ["d/0", "d/2", "d/4"]
    assert await store.head("d/1") is None


async def test_deleting_what_is_not_there_is_no_error_and_deletes_the_rest(store: Counted) -> None:
    await store.put("d/here", [b"x"])
    await store.delete_many(["missing", "d", "d/here", "d/here/below", "not/there"])
    await store.delete_many(["d/here"])
    await store.delete_many([])
    assert await names(store) == []
    await store.put("d/here", [b"again"])
    assert bytes(await store.get("d/here")) == b"again"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/../b",
        "a/./b",
        ".",
        "a\0b",
        "a\nb",
        "a\\b",
        "\ud800",
        "a/.tmp-b",
        "x" * 256,
        "/".join(["x" * 200] * 6),
    ],
)
async def test_bad_names_are_refused_everywhere(store: Counted, name: str) -> None:
    with pytest.raises(InvalidArgument):
        await store.put(name, [b"x"])
    with pytest.raises(InvalidArgument):
        await store.get(name)
    with pytest.raises(InvalidArgument):
        await store.get_ranges(name, [(0, 1)])
    with pytest.raises(InvalidArgument):
        await store.head(name)
    with pytest.raises(InvalidArgument):
        await store.delete_many(["good", name])
    assert await names(store) == []


@pytest.mark.parametrize("prefix", ["/a", "a//", "../", "a/../b", "a\0"])
async def test_bad_prefixes_are_refused_everywhere(store: Counted, prefix: str) -> None:
    with pytest.raises(InvalidArgument):
        await names(store, prefix)


async def test_long_names_are_taken(store: Counted) -> None:
    name = "/".join(["x" * 255] * 3 + ["é" * 50])
    await store.put(name, [b"x"])
    assert await names(store, name) == [name]


async def test_what_was_asked_is_counted(store: Counted) -> None:
    await store.put("d/a", [b"123", b"45"])
    await store.get("d/a")
    await store.get_range("d/a", 1, 2)
    await store.get_ranges("d/a", [(0, 1), (4, 1)])
    await store.head("d/a")
    with pytest.raises(BlobExists):
        await store.put("d/a", [b"123"])
    await names(store)
    await store.delete_many(["d/a", "d/b"])
    assert store.counts.count == {"put": 2, "get": 1, "range_get": 2, "head": 1, "list": 1, "delete": 1}
    assert store.counts.bytes["put"] == 8
    assert store.counts.bytes["get"] == 5
    assert store.counts.bytes["range_get"] >= 2 + 2
    assert store.counts.errors == {}


async def test_a_store_that_has_lost_the_blob_it_must_have_takes_no_others(
    store: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs_object, "REQUIRED_SECONDS", 0.0)
    await store.check()
    await store.put("mark", [b"x"])
    store.require("mark")
    await store.put("a", [b"x"])
    await store.check()
    await store.delete_many(["mark"])
    with pytest.raises(StoreUnavailable, match="has lost the blob 'mark'"):
        await store.put("b", [b"x"])
    with pytest.raises(StoreUnavailable, match="has lost the blob 'mark'"):
        await store.check()
    assert await names(store) == ["a"]
