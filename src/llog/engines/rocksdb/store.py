"""One RocksDB, owned by one process: column families, atomic changes across them, and scans. Blocking; any thread may
call.

A read-modify-write holds `mutex`. Changes are applied as a whole or not at all, and survive a crash of this process;
those with `sync` a power cut, too.
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
    """What is to be written together. `StoreUnavailable` once the store is closed."""

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
        """Every key in [start, stop)."""
        self.batch.delete_range(start, stop, self._handle(family))

    def __len__(self) -> int:
        return int(self.batch.len())


class RocksStore:
    """Open until `close`. `LogOwned` from `open` if another process, or another instance here, has it."""

    def __init__(self, directory: Path, address: str | None = None) -> None:
        self.directory = directory
        self.mutex = threading.RLock()
        self.closed = False
        self._handles: dict[str, Any] = {}
        self._families: dict[str, Any] = {}
        self._failed_after: int | None = None
        """Since a write failed, the number of the last one that did not. RocksDB takes no more until it is opened
        again.
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
        """`address` is where others reach this process, if it is a broker: the refusal of those who come later has
        it.
        """
        return cls(directory.absolute(), address)

    def handle(self, family: str) -> Any:
        """What RocksDB calls it."""
        return self._now(self._handles, family)

    def _family(self, family: str) -> Any:
        return self._now(self._families, family)

    def _now(self, opened: dict[str, Any], family: str) -> Any:
        """There is none once it is closed, nor for a moment while RocksDB is opened again, or longer if that fails."""
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
        """The values of these keys, in their order."""
        with self.using("read"):
            return list(self._family(family).get(list(keys))) if keys else []

    def items(
        self, family: str, start: bytes, stop: bytes, limit: int | None = None, *, backwards: bool = False
    ) -> list[tuple[bytes, bytes]]:
        """Entries of [start, stop) in order, at most `limit`. Backwards: the last ones, the highest first."""
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
        """The values of [start, stop) in order, one by one, as they are when it begins. For use within `using`.

        Damage looks like the end: who gets fewer than there should be asks `check_none`.
        """
        options = rocksdict.ReadOptions()  # RocksDB reads the bound in it as long as the iterator is used
        options.set_iterate_upper_bound(stop)
        yield from self._family(family).values(False, start, options)

    def check_none(self, family: str, start: bytes, stop: bytes) -> None:
        """After `values` came to its end before `start`: `CorruptBatch` if that was damage."""
        options = rocksdict.ReadOptions()
        options.set_iterate_upper_bound(stop)
        with self.using("read"):
            iterator = self._family(family).iter(options)
            iterator.seek(start)
            iterator.status()

    def is_empty(self, family: str, first: bytes, last: bytes) -> bool:
        """Whether there is no key from `first` to `last`, both included. False, too, if what was deleted there makes it
        long to tell.
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
        """All entries whose keys start with `prefix`: for those that are few."""
        return self.items(family, prefix, after(prefix))

    def changes(self) -> Changes:
        return Changes(self)

    def write(self, changes: Changes, *, sync: bool) -> None:
        """All of it or nothing; `StoreUnavailable` if it cannot be."""
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
        """Opens RocksDB again after a write has failed. Not before there is space: until then, what is there can be
        read.
        """
        with self.mutex, self.using("open"):
            if self._failed_after is None:
                return
            self._file.check()
            check_writable(self.directory)
            self._let_go()
            for attempt in range(_REOPEN_ATTEMPTS):
                if attempt:
                    time.sleep(_REOPEN_PAUSE_S)
                try:
                    self._open()
                    break
                except Exception as error:  # readers that are on their way have the old one open
                    if "lock hold by current process" not in str(error) or attempt == _REOPEN_ATTEMPTS - 1:
                        raise
            if self._db.latest_sequence_number() != self._failed_after:
                raise StoreUnavailable(
                    f"the RocksDB in {self.directory} is not as it was when a write failed, which may have been "
                    "done after all: restart"
                )
            self._failed_after = None

    def check(self) -> None:
        """`StoreUnavailable` if a write would fail."""
        with self.using("write to"):
            self._file.check()
            check_writable(self.directory)

    def reclaim(self, family: str, start: bytes, stop: bytes) -> None:
        """Rewrites the files of [start, stop), so that what was deleted there takes no space, and no time to be passed
        over.
        """
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
                explained = _explained(error, "close", self.directory)
                if explained is None:
                    raise
                raise explained from error
            finally:
                self._let_go()
                os.close(self._lock)

    def _open(self) -> None:
        families = {name: _options() for name in FAMILIES}
        self._db = rocksdict.Rdict(str(self.directory / "db"), options=_options(), column_families=families)
        self._file = OpenedFile(self.directory / "db" / "IDENTITY")
        for name in FAMILIES:
            self._handles[name] = self._db.get_column_family_handle(name)
            self._families[name] = self._db.get_column_family(name)

    def _let_go(self) -> None:
        self._families.clear()
        self._handles.clear()
        with suppress(Exception):  # after a failed write it says so once more; what was acknowledged is synced
            self._db.close()

    def _check_end(self, family: str, last: bytes, *, backwards: bool = False) -> None:
        """Where an iterator came to its end: it does so, without a word, at damage, too."""
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
        """Explains what goes wrong; `StoreUnavailable` once it is closed."""
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
    """Not made of a generator: that costs as much as a look into RocksDB does."""

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
        explained = _explained(error, self._doing, self._store.directory)
        if explained is not None:
            raise explained from error


def _explained(error: BaseException, doing: str, directory: Path) -> LlogError | None:
    """What RocksDB and the operating system say, as an error that names the directory and what to do; None if it is not
    theirs.
    """
    if isinstance(error, OSError):
        return StoreUnavailable(f"cannot {doing} {directory} ({error.strerror or error}): check its file system")
    if type(error) is Exception and str(error).startswith("Corruption"):
        return CorruptBatch(f"the RocksDB in {directory} is damaged: {error}. Bring the directory back from a copy")
    if type(error) is Exception or isinstance(error, rocksdict.DbClosedError):
        return StoreUnavailable(
            f"cannot {doing} the RocksDB in {directory}: {error}. Check its disk, and that the directory is llog's"
        )
    return None
