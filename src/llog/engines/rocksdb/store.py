"""One RocksDB, owned by one process: column families, atomic changes across them, and scans. All calls block, and any
thread may make them.

A read-modify-write holds `mutex`. Changes are applied as a whole or not at all, and survive a crash of this process;
with `sync`, also a power cut.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from llog.base.durable import OpenedFile, check_writable, make_directory, make_library_directory
from llog.base.lockfile import take_lock
from llog.engines.rocksdb.keys import FAMILIES, after
from llog.errors import CorruptBatch, LlogError, MissingExtra, StoreUnavailable

try:
    import rocksdict
except ImportError as error:  # pragma: no cover
    raise MissingExtra("tables and topics of engine 'rocksdb' need: pip install 'leaderless-log[sql]'") from error


_SKIPPED_MAX: Final = 256
_REOPEN_ATTEMPTS: Final = 100
_REOPEN_PAUSE_S: Final = 0.05


class Changes:
    """Changes to be written together. Methods raise `StoreUnavailable` once the store is closed."""

    def __init__(self, store: RocksStore) -> None:
        self._handle = store.handle
        self.batch = rocksdict.WriteBatch(raw_mode=True)

    def put(self, family: str, key: bytes, value: bytes) -> None:
        self.batch.put(key, value, self._handle(family))

    def put_all(self, family: str, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        put, handle = self.batch.put, self._handle(family)
        for key, value in zip(keys, values, strict=True):
            put(key, value, handle)

    def delete(self, family: str, key: bytes) -> None:
        self.batch.delete(key, self._handle(family))

    def delete_range(self, family: str, start: bytes, stop: bytes) -> None:
        """Delete every key in [start, stop)."""
        self.batch.delete_range(start, stop, self._handle(family))

    def __len__(self) -> int:
        return int(self.batch.len())


class RocksStore:
    """Open until `close`; `open` raises `LogOwned` if another process, or another instance here, has it open."""

    def __init__(self, directory: Path, address: str | None = None) -> None:
        self.directory = directory
        self.mutex = threading.RLock()
        self.closed = False
        self._handles: dict[str, Any] = {}
        self._families: dict[str, Any] = {}
        self._failed_after: int | None = None
        """After a failed write, the sequence number of the last write that succeeded. RocksDB takes no more writes
        until it is reopened.
        """
        with self.using("open"):
            make_directory(directory)
            self._lock = take_lock(directory, "the tables and the topics of engine 'rocksdb'", address=address)
            try:
                make_library_directory(directory / "db")
                self._open()
            except BaseException:
                os.close(self._lock)
                raise
        self._durable = rocksdict.WriteOptions()
        self._durable.sync = True

    @classmethod
    def open(cls, directory: Path, *, address: str | None = None) -> RocksStore:
        """Open or create the RocksDB. `address` is where others reach this process, if it is a broker: their `LogOwned`
        errors name it.
        """
        return cls(directory.absolute(), address)

    def handle(self, family: str) -> Any:
        """Return RocksDB's handle of a column family."""
        return self._get_open(self._handles, family)

    def _family(self, family: str) -> Any:
        return self._get_open(self._families, family)

    def _get_open(self, opened: dict[str, Any], family: str) -> Any:
        """Return the open family or handle. There is none after `close`, nor while RocksDB is being reopened, or if
        that failed.
        """
        found = opened.get(family)
        if found is None:
            self._recover()
            found = opened.get(family)
            if found is None:
                raise self.closed_error()
        return found

    def get(self, family: str, key: bytes) -> bytes | None:
        with self.using("read"):
            found: bytes | None = self._family(family).get(key)
            return found

    def get_all(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of these keys, in their order."""
        with self.using("read"):
            return list(self._family(family).get(list(keys))) if keys else []

    def items(
        self, family: str, start: bytes, stop: bytes, limit: int | None = None, *, backwards: bool = False
    ) -> list[tuple[bytes, bytes]]:
        """Return the entries of [start, stop) in order, at most `limit`; with `backwards`, the last ones, highest
        first.
        """
        found: list[tuple[bytes, bytes]] = []
        if limit is not None and limit <= 0:
            return found
        with self.using("read"):
            if backwards:
                for key, value in self._family(family).items(backwards=True, from_key=stop):
                    if key < start:
                        break
                    if key < stop:
                        found.append((key, value))
                        if len(found) == limit:
                            break
                else:
                    self._check_end(family, found[-1][0] if found else stop, backwards=True)
                return found
            for key, value in self._family(family).items(from_key=start):
                if key >= stop:
                    break
                found.append((key, value))
                if len(found) == limit:
                    break
            else:
                self._check_end(family, found[-1][0] if found else start)
            return found

    def values(self, family: str, start: bytes, stop: bytes) -> Iterator[bytes]:
        """Yield the values of [start, stop) in order, as of the first one. Call it within `using`.

        Damage looks like the end: a caller that gets fewer than it expects must call `check_none`.
        """
        options = rocksdict.ReadOptions()  # RocksDB reads the bound in it as long as the iterator is used
        options.set_iterate_upper_bound(stop)
        yield from self._family(family).values(False, start, options)

    def check_none(self, family: str, start: bytes, stop: bytes) -> None:
        """Raise `CorruptBatch` if `values` ended before `start` because of damage."""
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(stop)
        with self.using("read"):
            iterator = self._family(family).iter(options)
            iterator.seek(start)
            iterator.status()

    def is_empty(self, family: str, first: bytes, last: bytes) -> bool:
        """Whether no key lies between `first` and `last`, both included. Also False if many deleted keys there would
        make the answer slow.
        """
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(last + b"\0")
        options.set_max_skippable_internal_keys(_SKIPPED_MAX)
        with self.using("read"):
            iterator = self._family(family).iter(options)
            iterator.seek(first)
            if iterator.valid():
                return False
            try:
                iterator.status()
            except Exception as error:
                if str(error).startswith("Result incomplete"):
                    return False
                raise
            return True

    def below(self, family: str, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Return all entries whose keys start with `prefix`, which should be few."""
        return self.items(family, prefix, after(prefix))

    def changes(self) -> Changes:
        return Changes(self)

    def write(self, changes: Changes, *, sync: bool) -> None:
        """Write all of the changes or, raising `StoreUnavailable`, none."""
        with self.mutex, self.using("write to"):
            self._file.check()
            if self._failed_after is not None:
                self._recover()
            try:
                if sync:
                    self._db.write(changes.batch, self._durable)
                else:
                    self._db.write(changes.batch)
            except Exception:
                self._failed_after = self._db.latest_sequence_number()
                raise

    def _recover(self) -> None:
        """Reopen RocksDB after a failed write, once the disk has space. Until then, it can still be read."""
        with self.mutex, self.using("open"):
            if self._failed_after is None:
                return
            self._file.check()
            check_writable(self.directory)
            self._close_db()
            for attempt in range(_REOPEN_ATTEMPTS):
                if attempt:
                    time.sleep(_REOPEN_PAUSE_S)
                try:
                    self._open()
                    break
                except Exception as error:  # reads under way still have the old instance open
                    if "lock hold by current process" not in str(error) or attempt == _REOPEN_ATTEMPTS - 1:
                        raise
            if self._db.latest_sequence_number() != self._failed_after:
                raise StoreUnavailable(
                    f"the RocksDB in {self.directory} has changed since a write failed, which may have succeeded "
                    "after all: restart this process"
                )
            self._failed_after = None

    def check(self) -> None:
        """Raise `StoreUnavailable` if a write would fail."""
        with self.using("write to"):
            self._file.check()
            check_writable(self.directory)

    def reclaim(self, family: str, start: bytes, stop: bytes) -> None:
        """Rewrite the files of [start, stop), so that deleted keys take no space and slow down no scan."""
        with self.using("compact"):
            self._family(family).compact_range(start, stop)

    def close(self) -> None:
        with self.mutex:
            if self.closed:
                return
            self.closed = True
            try:
                if self._failed_after is None:
                    self._db.flush_wal(True)
            except Exception as error:
                translated = _to_llog_error(error, "close", self.directory)
                if translated is None:
                    raise
                raise translated from error
            finally:
                self._close_db()
                os.close(self._lock)

    def _open(self) -> None:
        families = {name: _options() for name in FAMILIES}
        self._db = rocksdict.Rdict(str(self.directory / "db"), options=_options(), column_families=families)
        self._file = OpenedFile(self.directory / "db" / "IDENTITY")
        for name in FAMILIES:
            self._handles[name] = self._db.get_column_family_handle(name)
            self._families[name] = self._db.get_column_family(name)

    def _close_db(self) -> None:
        self._families.clear()
        self._handles.clear()
        with suppress(Exception):  # after a failed write, it raises once more; acknowledged changes are synced
            self._db.close()

    def _check_end(self, family: str, last: bytes, *, backwards: bool = False) -> None:
        """Raise if an iterator ended at `last` because of damage, where it stops silently."""
        iterator = self._family(family).iter()
        if backwards:
            iterator.seek_for_prev(last)
            if iterator.valid():
                iterator.prev()
        else:
            iterator.seek(last)
            if iterator.valid():
                iterator.next()
        iterator.status()

    def using(self, doing: str) -> AbstractContextManager[None]:
        """Return a context that raises RocksDB's errors as llog's, and `StoreUnavailable` once the store is closed."""
        return _Use(self, doing)

    def closed_error(self) -> StoreUnavailable:
        return StoreUnavailable(f"the tables and topics in {self.directory} are closed: open them again")


def _options() -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_keep_log_file_num(2)
    return options


class _Use:
    """A class, because a generator's context manager would cost as much as a lookup in RocksDB."""

    __slots__ = ("_doing", "_store")

    def __init__(self, store: RocksStore, doing: str) -> None:
        self._store = store
        self._doing = doing

    def __enter__(self) -> None:
        if self._store.closed:
            raise self._store.closed_error()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        translated = _to_llog_error(error, self._doing, self._store.directory)
        if translated is not None:
            raise translated from error


def _to_llog_error(error: BaseException, doing: str, directory: Path) -> LlogError | None:
    """Return an error of RocksDB or the operating system as one that names the directory and the remedy; None for other
    errors.
    """
    if isinstance(error, OSError):
        return StoreUnavailable(f"cannot {doing} {directory} ({error.strerror or error}): check its file system")
    if type(error) is Exception and str(error).startswith("Corruption"):
        return CorruptBatch(f"the RocksDB in {directory} is damaged: {error}. Restore the directory from a copy")
    if type(error) is Exception or isinstance(error, rocksdict.DbClosedError):
        return StoreUnavailable(
            f"cannot {doing} the RocksDB in {directory}: {error}. Check its disk, and that the directory is llog's"
        )
    return None
