"""What only local files can get wrong: durability, left-overs, and a disk that refuses."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llog.errors import BlobExists, InvalidArgument, OutcomeUnknown, StoreUnavailable
from llog.stores.files import blobs as blobs_file
from llog.stores.files.blobs import FileBlobStore


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


class Steps:
    """Records what reaches the disk, in order: the kind of thing that was synced and its name, links, unlinks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        fsync, link = os.fsync, os.link

        def recorded_fsync(descriptor: int) -> None:
            kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
            self.seen.append((kind, os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
            fsync(descriptor)

        def recorded_link(source: Path, target: Path) -> None:
            self.seen.append(("link", target.name))
            link(source, target)

        patch.setattr(os, "fsync", recorded_fsync)
        patch.setattr(os, "link", recorded_link)

    def kinds(self) -> list[tuple[str, str]]:
        return [(kind, "temporary" if name.startswith(".tmp-") else name) for kind, name in self.seen]


def failing(error: int, when: Callable[[int], bool] = lambda _: True) -> Callable[..., int]:
    def fail(descriptor: int, *_: object) -> int:
        if when(descriptor):
            raise OSError(error, os.strerror(error))
        return 0

    return fail


async def test_a_put_syncs_the_file_before_the_link_and_the_directory_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileBlobStore(tmp_path / "root")
    await store.put("d/first", [b"x"])
    steps = Steps(monkeypatch)
    await store.put("d/blob", [b"x"])
    assert steps.kinds() == [("file", "temporary"), ("link", "blob"), ("directory", "d")]
    await store.close()


async def test_new_directories_are_durable_before_a_put_into_them_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    store = FileBlobStore(tmp_path / "new" / "root")
    await store.put("a/b/blob", [b"x"])
    assert steps.kinds() == [
        ("directory", tmp_path.name),
        ("directory", "new"),
        ("file", "temporary"),
        ("link", "blob"),
        ("directory", "b"),
        ("directory", "a"),
        ("directory", "root"),
        ("directory", "new"),
    ]
    await store.close()


async def test_directories_that_another_process_just_made_are_synced_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    steps = Steps(monkeypatch)
    store = FileBlobStore(tmp_path)
    await store.put("a/blob", [b"x"])
    assert ("directory", tmp_path.name) in steps.seen
    await store.close()


async def test_who_is_told_that_a_blob_exists_can_rely_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("d/blob", [b"x"])
    steps = Steps(monkeypatch)
    with pytest.raises(BlobExists):
        await store.put("d/blob", [b"y"])
    assert steps.seen[-1] == ("directory", "d")
    assert files(tmp_path) == ["d/blob"]
    await store.close()


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota"), (errno.EIO, "check the disk")]
)
@pytest.mark.parametrize("call", ["writev", "fsync", "link"])
async def test_a_disk_that_refuses_is_explained_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str, call: str
) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("d/before", [b"x"])
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        with pytest.raises(StoreUnavailable, match=remedy) as caught:
            await store.put("d/blob", [b"x" * 1000])
    assert str(tmp_path / "d/blob") in str(caught.value)
    assert files(tmp_path) == ["d/before"]
    assert store.counts.errors == {"put": 1}
    await store.put("d/blob", [b"x"])
    await store.close()


async def test_a_directory_that_cannot_be_synced_leaves_the_outcome_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("d/before", [b"x"])
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode)))
    with pytest.raises(OutcomeUnknown, match="check the disk"):
        await store.put("d/blob", [b"x"])
    await store.close()


async def test_a_disk_that_fills_up_in_the_middle_of_a_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def filling(descriptor: int, views: list[memoryview]) -> int:
        nonlocal written
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(descriptor, views[0][:3])
        return written

    store = FileBlobStore(tmp_path)
    monkeypatch.setattr(os, "writev", filling)
    with pytest.raises(StoreUnavailable, match="free some space"):
        await store.put("d/blob", [b"0123456789"])
    assert written == 3
    assert files(tmp_path) == []
    await store.close()


async def test_short_writes_are_continued_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(descriptor: int, views: list[memoryview]) -> int:
        return os.write(descriptor, b"".join(views)[:7])

    monkeypatch.setattr(os, "writev", short)
    store = FileBlobStore(tmp_path)
    parts = [bytes([number % 256]) * (number % 9) for number in range(3000)]
    await store.put("blob", parts)
    assert (tmp_path / "blob").read_bytes() == b"".join(parts)
    await store.close()


async def test_a_missing_permission_names_the_path_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("d/blob", [b"x"])

    def refused(path: Path, *_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refused)
    for call in (store.put("d/other", [b"x"]), store.get("d/blob")):
        with pytest.raises(StoreUnavailable, match="give this user read and write access") as caught:
            await call
        assert str(tmp_path / "d") in str(caught.value)
    await store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_read_only_directory_is_refused_by_the_real_file_system(tmp_path: Path) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("d/blob", [b"x"])
    (tmp_path / "d").chmod(0o500)
    with pytest.raises(StoreUnavailable, match="give this user"):
        await store.put("d/other", [b"x"])
    (tmp_path / "d").chmod(0o700)
    await store.close()


async def test_a_blob_cannot_be_a_directory(tmp_path: Path) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("a", [b"x"])
    with pytest.raises(InvalidArgument, match="not a directory"):
        await store.put("a/b", [b"x"])
    await store.close()


async def test_directories_removed_by_others_are_made_again(tmp_path: Path) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("d/e/one", [b"x"])
    (tmp_path / "d/e/one").unlink()
    (tmp_path / "d/e").rmdir()
    (tmp_path / "d").rmdir()
    await store.put("d/e/two", [b"x"])
    assert files(tmp_path) == ["d/e/two"]
    await store.close()


async def test_temporary_files_are_never_listed_and_only_old_ones_are_cleaned(tmp_path: Path) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("d/blob", [b"x"])
    day_ms, now_ms = 86_400_000, 1_800_000_000_000
    for name, age_ms in (("d/.tmp-old", day_ms + 1), ("d/.tmp-new", day_ms - 1), ("d/blob", 2 * day_ms)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, ns=(0, (now_ms - age_ms) * 1_000_000))
    assert [info.name async for page in store.list("") for info in page] == ["d/blob"]
    assert await store.remove_unfinished_puts(now_ms - day_ms) == 1
    assert files(tmp_path) == ["d/.tmp-new", "d/blob"]
    await store.close()


async def test_a_put_whose_temporary_file_was_removed_did_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileBlobStore(tmp_path)
    shipped = blobs_file._write

    def write_and_lose(descriptor: int, views: list[memoryview]) -> None:
        shipped(descriptor, views)
        assert blobs_file._remove_temporary_files(tmp_path, sys.maxsize) == 1

    monkeypatch.setattr(blobs_file, "_write", write_and_lose)
    with pytest.raises(StoreUnavailable):
        await store.put("d/blob", [b"x"])
    monkeypatch.undo()
    assert files(tmp_path) == []
    await store.put("d/blob", [b"x"])
    await store.close()


async def test_a_large_range_is_a_view_that_outlives_the_blob(tmp_path: Path) -> None:
    store = FileBlobStore(tmp_path)
    content = os.urandom(3 * blobs_file.MAP_BYTES_MIN)
    await store.put("big", [content])
    found = await store.get_range("big", 12_345, blobs_file.MAP_BYTES_MIN)
    await store.delete_many(["big"])
    await store.close()
    assert isinstance(found, memoryview)
    assert found.readonly
    assert found == content[12_345 : 12_345 + blobs_file.MAP_BYTES_MIN]


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = FileBlobStore(tmp_path)
    await store.put("blob", [b"x"])
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.get("blob")


def test_a_store_that_was_used_works_in_a_forked_process(tmp_path: Path) -> None:
    store = FileBlobStore(tmp_path)
    asyncio.run(store.put("blob", [b"x"]))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(store.put("from the child", [b"y"]))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert files(tmp_path) == ["blob", "from the child"]
