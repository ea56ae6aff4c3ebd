"""A log: its two stores, its engines and its owners, and the checks when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from llog.errors import BlobExists, OutcomeUnknown, StoreUnavailable, VersionMismatch, WrongStore
from llog.log.cas import update
from llog.log.engine import Engine
from llog.log.keys import LOG_FORMAT, LOG_ID, TOPICS
from llog.log.owners import Owners
from llog.log.records import LogFormat, decode, encode
from llog.runtime import Runtime, uuid7
from llog.stores.blobs import BlobStore
from llog.stores.meta import ABSENT, MetaStore, prefix_end

FORMAT: Final = LogFormat()
"""The format of a new log."""
NEWEST_FORMAT: Final = LogFormat(number=2, needs="0.1.0")
"""The format of a log with inline appends or producers that number their records, and the highest that this version
knows.
"""


class Log(NamedTuple):
    meta: MetaStore
    blobs: BlobStore
    runtime: Runtime
    engines: Mapping[str, Engine]
    """Engines by name; `close_log` closes them."""
    owners: Owners | None = None

    def data_uri(self, blob: str) -> str:
        """Return the blob's address for metadata: in full for remote stores, relative for local files, so that a log
        can be moved.
        """
        return f"{self.blobs.uri}/{blob}" if is_remote(self.blobs.uri) else blob

    def blob_name(self, data_uri: str) -> str:
        """Return the blob's name in this log's blob store: the whole address if the store has no root."""
        if "://" not in data_uri or not self.blobs.uri:
            return data_uri
        root = self.blobs.uri + "/"
        if not data_uri.startswith(root):
            raise WrongStore(f"the metadata names {data_uri}, which is not below the blob store {self.blobs.uri}")
        return data_uri.removeprefix(root)


def is_remote(uri: str) -> bool:
    return not uri.startswith(("file:", "memory:"))


async def check_format(log: Log) -> None:
    """Raise `WrongStore` if this version does not know the log's format. A log without a format number gets format 1.

    The number is put before the log's id, so that no process finds a new log without a number.
    """
    try:
        value, _ = await _get_or_put(log, LOG_FORMAT, encode(FORMAT))
    except (StoreUnavailable, OutcomeUnknown):
        if await log.meta.get(LOG_ID) is None or await log.meta.get(LOG_FORMAT) is not None:
            raise
        return  # A log of format 1 without a number can be read while its store takes no writes.
    stored = decode(LogFormat, value, LOG_FORMAT)
    if stored.number > NEWEST_FORMAT.number:
        raise WrongStore(
            f"the log has format {stored.number}, and this version of llog knows the formats up to "
            f"{NEWEST_FORMAT.number}: use llog {stored.needs} or later"
        )


async def raise_format(log: Log, needed: LogFormat) -> None:
    """Give the log at least this format, before anything is written that older versions do not know."""
    await _get_or_put(log, LOG_FORMAT, encode(needed))
    await update(log, LOG_FORMAT, LogFormat, lambda stored: needed if stored.number < needed.number else stored)


async def tie_together(log: Log) -> None:
    """Give both stores one id at first use; afterwards raise `WrongStore` for two stores that do not belong together.

    Without this check, metadata with the wrong blob store (an unmounted directory, say) would look like a log whose
    blobs are all lost, and a collector with new metadata would delete the blobs of another log.
    """
    new_id = uuid7(log.runtime.now_ms(), log.runtime.random()).encode()
    value, is_new = await _get_or_put(log, LOG_ID, new_id)
    # The mark's name contains the id: two logs opened at once on one blob store must not take each other's mark.
    mark = f"{LOG_ID}-{value.decode()}"
    if await log.blobs.head(mark) is None:
        await _put_mark(log, mark, value, is_new=is_new)
    log.blobs.require(mark)


async def _get_or_put(log: Log, key: str, value: bytes) -> tuple[bytes, bool]:
    """Return the value under `key`, which becomes `value` if the key is absent, and whether this call put it."""
    found = await log.meta.get(key)
    if found is not None:
        return found.value, False
    try:
        await log.meta.put(key, value, expected=ABSENT)
    except VersionMismatch:
        found = await log.meta.get(key)
        if found is None:
            raise StoreUnavailable(f"the metadata store has {key} and does not show it: open the log again") from None
        return found.value, False
    return value, True


async def _put_mark(log: Log, mark: str, value: bytes, *, is_new: bool) -> None:
    """Put the mark of a new log in its blob store; raise `WrongStore` if the store belongs to another log."""
    if not is_new and await log.meta.keys(TOPICS, prefix_end(TOPICS), 1):
        raise WrongStore(
            f"the blob store {log.blobs.uri} does not belong to this metadata store: its mark {mark} is missing. "
            "Check LLOG_META and LLOG_BLOBS, and that the directory or bucket is the right one"
        )
    # A collector with new metadata would take every blob of an earlier log for garbage.
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
