"""The two stores of one log and the world around them: what every part of this room works on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from llog.errors import BlobExists, VersionMismatch, WrongStore
from llog.partition.keys import LOG_ID, TOPICS
from llog.partition.records import Topic
from llog.runtime import Runtime, uuid7
from llog.stores.blobs import BlobStore
from llog.stores.meta import ABSENT, MetaStore, after


class Segments(Protocol):
    """Where the files of disk topics lie on this machine. `engines/` opens them; they are closed with the log."""

    @property
    def directory(self) -> Path: ...

    async def check(self) -> None:
        """`StoreUnavailable` if the files that are open can take no records."""
        ...

    async def close(self) -> None: ...


class Rocks(Protocol):
    """The RocksDB of tables and of topics of engine `rocksdb`. `engines/` opens it at its first use; it is closed with the log."""

    @property
    def directory(self) -> Path: ...

    async def hold(self) -> None:
        """Opens it; `LogOwned` if another process has it."""
        ...

    async def check(self) -> None:
        """`StoreUnavailable` if it is there, open or not, and would take no changes."""
        ...

    async def create(self, topic: Topic, partitions: range) -> None:
        """Makes these partitions of a topic; `WrongStore` if it is new and something is there already."""
        ...

    async def remove(self, topic: Topic) -> None:
        """Removes the topic and all its records. Idempotent."""
        ...

    async def close(self) -> None: ...


class Log(NamedTuple):
    meta: MetaStore
    blobs: BlobStore
    runtime: Runtime
    segments: Segments | None = None
    rocks: Rocks | None = None

    def data_uri(self, blob: str) -> str:
        """How metadata names a blob: in full for remote stores; relative for local files, so that a log can be moved."""
        return f"{self.blobs.uri}/{blob}" if is_remote(self.blobs.uri) else blob

    def blob_name(self, data_uri: str) -> str:
        """The blob's name in this log's blob store."""
        if "://" not in data_uri:
            return data_uri
        root = self.blobs.uri + "/"
        if not data_uri.startswith(root):
            raise WrongStore(f"the metadata names {data_uri}, which is not below the blob store {self.blobs.uri}")
        return data_uri.removeprefix(root)


def is_remote(uri: str) -> bool:
    return not uri.startswith(("file:", "memory:"))


async def tie_together(log: Log) -> None:
    """Gives both stores one id at first use, and refuses two stores that do not belong together afterwards.

    Without it, metadata with the wrong blob store (an unmounted directory, say) would look like a log whose blobs are all lost;
    and new metadata with the blobs of another log would have them collected.
    """
    entry = await log.meta.get(LOG_ID)
    if entry is None:
        try:
            value = uuid7(log.runtime.now_ms(), log.runtime.random()).encode()
            await log.meta.put(LOG_ID, value, expected=ABSENT)
        except VersionMismatch:
            entry = await log.meta.get(LOG_ID)
            assert entry is not None
            value = entry.value
    else:
        value = entry.value
    # A name of its own per id: two logs that were opened at once on one blob store must not take each other's mark.
    mark = f"{LOG_ID}-{value.decode()}"
    if await log.blobs.head(mark) is None:
        await _put_mark(log, mark, value, is_new=entry is None)
    log.blobs.require(mark)


async def _put_mark(log: Log, mark: str, value: bytes, *, is_new: bool) -> None:
    """Marks the blobs of a new log."""
    if not is_new and await log.meta.keys(TOPICS, after(TOPICS), 1):
        raise WrongStore(
            f"the blob store {log.blobs.uri} does not belong to this metadata store: its mark {mark} is missing. "
            "Check LLOG_META and LLOG_BLOBS, and that the directory or bucket is the right one"
        )
    # To a collector with new metadata, every blob of the log that was here before would be garbage.
    async for page in log.blobs.list(f"{LOG_ID}-"):
        others = [info.name for info in page if info.name != mark]
        if others:
            raise WrongStore(
                f"the blob store {log.blobs.uri} belongs to a log with other metadata: it has the mark {others[0]}. "
                "Check LLOG_META and LLOG_BLOBS; for a new log, name an empty directory, bucket or prefix"
            )
    try:
        await log.blobs.put(mark, [value])
    except BlobExists:
        pass
