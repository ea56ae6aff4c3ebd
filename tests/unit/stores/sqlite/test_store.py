"""What is particular to the SQLite metadata store: group commit, several processes, and whose file it is."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from llog.errors import InvalidArgument, OutcomeUnknown, StoreUnavailable, VersionMismatch, WrongStore
from llog.stores.meta import ABSENT, MetaEntry, Put
from llog.stores.sqlite import writer as sqlite_writer
from llog.stores.sqlite.file import APPLICATION_ID, USER_VERSION, hold_lock, open_lock
from llog.stores.sqlite.store import SqliteMetaStore
from llog.stores.sqlite.writer import GROUP_JOBS_MAX


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "meta.db"


# --- group commit


@pytest.mark.parametrize(
    ("puts", "commits"), [(64, 1), (GROUP_JOBS_MAX, 1), (2 * GROUP_JOBS_MAX, 2), (2 * GROUP_JOBS_MAX + 1, 3)]
)
async def test_the_puts_of_one_turn_share_commits_of_a_bounded_size(path: Path, puts: int, commits: int) -> None:
    store = SqliteMetaStore.open(path)
    versions = await asyncio.gather(*(store.put(f"k/{number}", b"") for number in range(puts)))
    assert versions == sorted(set(versions)), "they are applied in their order"
    assert store.commits == commits
    assert store.counts.count["put"] == puts
    await store.close()


async def test_a_put_that_is_cancelled_fails_no_other_one_of_its_turn(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    puts = [asyncio.ensure_future(store.put(key, b"")) for key in "abc"]
    await asyncio.sleep(0)
    puts[1].cancel()
    first, cancelled, last = await asyncio.gather(*puts, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [first, last] == [entry.version for entry in await store.range("", "z", 10) if entry.key != "b"]
    assert store.counts.errors == {"put": 1}
    await store.close()


async def test_a_key_that_only_this_store_writes_is_looked_up_once(path: Path) -> None:
    store, other = SqliteMetaStore.open(path), SqliteMetaStore.open(path)
    version = await store.put("a", b"")
    assert store._writer is not None
    assert store._writer._connection is not None
    statements: list[str] = []
    store._writer._connection.set_trace_callback(statements.append)
    version = await store.put("a", b"", expected=version)
    with pytest.raises(VersionMismatch, match=f"has version {version}"):
        await store.put("a", b"", expected=version + 1)
    assert not [each for each in statements if "SELECT json" in each]
    await other.put("b", b"")
    await store.put("a", b"", expected=version)
    assert [each for each in statements if "SELECT json" in each]
    await store.close()
    await other.close()


async def _delete_range(store: SqliteMetaStore, path: Path) -> None:
    await store.delete_range("a", "b")


async def _delete_by_another_process(store: SqliteMetaStore, path: Path) -> None:
    other = SqliteMetaStore.open(path)
    await other.delete("a")
    await other.close()


async def _delete_by_another_program(store: SqliteMetaStore, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM entries WHERE key = 'a'")


async def _fail_to_commit(store: SqliteMetaStore, path: Path) -> None:
    await store.delete("a")
    writer = store._writer
    assert writer is not None
    assert writer._connection is not None
    writer._connection = _FailsAt(writer._connection, "COMMIT")  # type: ignore[assignment]
    with pytest.raises(OutcomeUnknown):
        await store.put("a", b"")


@pytest.mark.parametrize(
    "vanish",
    [_delete_range, _delete_by_another_process, _delete_by_another_program, _fail_to_commit],
)
async def test_a_key_that_vanished_is_known_to_be_absent(
    path: Path, vanish: Callable[[SqliteMetaStore, Path], Awaitable[None]]
) -> None:
    store = SqliteMetaStore.open(path)
    version = await store.put("a", b"")
    await vanish(store, path)
    with pytest.raises(VersionMismatch, match="does not exist"):
        await store.put("a", b"", expected=version)
    assert await store.put("a", b"", expected=ABSENT) > version
    await store.close()


async def test_a_key_that_vanished_with_its_session_is_known_to_be_absent(path: Path) -> None:
    store = SqliteMetaStore.open(path, session_timeout_ms=1)
    version = await store.put("a", b"", ephemeral=True)
    while await store.get("a") is not None:
        await asyncio.sleep(0.001)
    with pytest.raises(VersionMismatch, match="does not exist"):
        await store.put("a", b"", expected=version)
    await store.close()


async def test_versions_are_remembered_for_a_bounded_number_of_keys(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "KNOWN_VERSIONS_MAX", 10)
    store = SqliteMetaStore.open(path)
    for number in range(100):
        await store.put(f"k/{number}", b"")
        assert store._writer is not None
        assert len(store._writer._versions) <= 11
    assert await store.delete("k/0")
    await store.close()


async def test_a_put_many_is_one_commit_and_calls_that_change_nothing_are_none(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    await store.put_many([Put(f"k/{number:04}", b"") for number in range(1000)])
    assert store.commits == 1
    with pytest.raises(VersionMismatch):
        await store.put("k/0000", b"", expected=ABSENT)
    assert await store.delete("absent") is False
    await store.delete_range("x", "z")
    assert store.commits == 1
    await store.close()


async def test_one_mismatch_in_a_group_fails_only_its_own_call(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    results = await asyncio.gather(
        store.put("a", b""), store.put("a", b"", expected=ABSENT), store.put("b", b""), return_exceptions=True
    )
    assert [type(result) for result in results] == [int, VersionMismatch, int]
    await store.close()


async def test_a_commit_is_synced_to_disk(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    await store.put("a", b"")
    assert store._writer is not None
    assert store._writer._connection is not None
    assert store._writer._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._writer._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    await store.close()


async def test_two_event_loops_may_use_one_store(path: Path) -> None:
    store = SqliteMetaStore.open(path)

    async def fill(name: str) -> None:
        for number in range(50):
            await store.put(f"{name}/{number:02}", b"")
            assert await store.get(f"{name}/{number:02}") is not None

    def in_a_loop_of_its_own(name: str) -> None:
        asyncio.run(fill(name))

    await asyncio.gather(*(asyncio.to_thread(in_a_loop_of_its_own, name) for name in "ab"))
    assert len(await store.keys("", "z", 1000)) == 100
    await store.close()


# --- several processes

_INCREMENT = """
import asyncio, sys
from llog.errors import VersionMismatch
from llog.stores.sqlite.store import SqliteMetaStore
async def main():
    store = SqliteMetaStore.open(sys.argv[1])
    for _ in range(int(sys.argv[2])):
        while True:
            entry = await store.get("n")
            try:
                await store.put("n", b"%d" % (int(entry.value) + 1), expected=entry.version)
                break
            except VersionMismatch:
                pass
    await store.close()
asyncio.run(main())
"""


async def test_four_processes_incrementing_one_key_lose_nothing(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    await store.put("n", b"0")
    processes = [subprocess.Popen([sys.executable, "-c", _INCREMENT, str(path), "200"]) for _ in range(4)]  # noqa: ASYNC220
    codes = [await asyncio.to_thread(process.wait) for process in processes]
    assert codes == [0, 0, 0, 0]
    entry = await store.get("n")
    assert entry is not None
    assert entry.value == b"800"
    await store.close()


_CREATE = """
import asyncio, sys
from llog.stores.sqlite.store import SqliteMetaStore
async def main():
    store = SqliteMetaStore.open(sys.argv[1])
    await store.put(sys.argv[2], b"")
    await store.close()
asyncio.run(main())
"""


async def test_several_processes_may_create_the_file_at_once(path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", _CREATE, str(path), name]) for name in "abcd"]  # noqa: ASYNC220
    codes = [await asyncio.to_thread(process.wait) for process in processes]
    assert codes == [0, 0, 0, 0]
    store = SqliteMetaStore.open(path)
    assert await store.keys("", "z", 10) == ["a", "b", "c", "d"]
    await store.close()


def in_fork(run: Callable[[], None]) -> int:
    """The exit code of a forked child that did `run`."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def test_a_store_in_use_works_on_both_sides_of_a_fork(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    await store.put("parent", b"1")
    await store.put("claim", b"", ephemeral=True)
    await store.get("parent")

    async def child() -> None:
        entry = await store.get("parent")
        assert entry is not None
        await store.put("child", b"2")
        await store.put("childs-claim", b"", ephemeral=True)
        await store.close()

    # A thread of its own: an event loop runs in this one, and the child needs another.
    assert await asyncio.to_thread(in_fork, lambda: asyncio.run(child())) == 0
    await store.put("parent", b"3")
    assert await store.keys("", "z", 10) == ["child", "claim", "parent"]
    await store.close()
    again = SqliteMetaStore.open(path)
    assert [entry[:2] for entry in await again.range("", "z", 10)] == [("child", b"2"), ("parent", b"3")]
    await again.close()


async def test_what_a_forked_child_writes_survives_that_its_parent_closes(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    await store.put("parent", b"")
    await store.get("parent")
    opened, closed = os.pipe(), os.pipe()

    async def child() -> None:
        await store.put("before", b"")
        os.write(opened[1], b"x")
        await asyncio.to_thread(os.read, closed[0], 1)
        await store.put("after", b"")

    forked = asyncio.create_task(asyncio.to_thread(in_fork, lambda: asyncio.run(child())))
    await asyncio.to_thread(os.read, opened[0], 1)
    # The last to close a database folds its write-ahead log in and removes it: the child must count as one who has it
    # open.
    await store.close()
    os.write(closed[1], b"x")
    assert await forked == 0
    for descriptor in (*opened, *closed):
        os.close(descriptor)
    again = SqliteMetaStore.open(path)
    assert await again.keys("", "z", 10) == ["after", "before", "parent"]
    await again.close()


async def test_a_fork_in_the_middle_of_a_long_range_does_not_disturb_it(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    keys = [f"r/{number:05}" for number in range(3000)]
    await store.put_many([Put(key, b"") for key in keys])
    reading = asyncio.create_task(store.keys("r/", "r0", 5000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert store._busy
    assert in_fork(lambda: None) == 0
    assert await reading == keys
    await store.close()


# --- whose file it is


def test_opening_creates_the_directories_above(tmp_path: Path) -> None:
    SqliteMetaStore.open(tmp_path / "a" / "b" / "meta.db")
    assert (tmp_path / "a" / "b" / "meta.db").exists()


@pytest.mark.parametrize("content", [b"no database at all" * 1000, b"notes\n"])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(WrongStore, match=r"meta\.db"):
        SqliteMetaStore.open(path)
    assert path.read_bytes() == content
    assert [each.name for each in path.parent.iterdir()] == ["meta.db"]


def test_a_database_of_another_program_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE entries (key TEXT)")
    with pytest.raises(WrongStore, match="another program"):
        SqliteMetaStore.open(path)


def test_a_newer_schema_is_refused(path: Path) -> None:
    SqliteMetaStore.open(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        connection.execute(f"PRAGMA user_version = {USER_VERSION + 1}")
    with pytest.raises(WrongStore, match=rf"meta\.db has schema {USER_VERSION + 1}.*upgrade"):
        SqliteMetaStore.open(path)


def test_a_place_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match=r"file/below/meta\.db.*Check"):
        SqliteMetaStore.open(tmp_path / "file" / "below" / "meta.db")
    with pytest.raises(StoreUnavailable):
        SqliteMetaStore.open(tmp_path)


def test_a_session_timeout_of_nothing_is_refused(path: Path) -> None:
    with pytest.raises(InvalidArgument, match="session_timeout_ms"):
        SqliteMetaStore.open(path, session_timeout_ms=0)


# --- failures


async def test_a_locked_database_is_unavailable_and_usable_again_afterwards(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "BUSY_SECONDS", 0.01)
    store = SqliteMetaStore.open(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            await store.put("a", b"")
        assert await store.get("a") is None
        other.execute("ROLLBACK")
    version = await store.put("a", b"")
    assert await store.get("a") == MetaEntry("a", b"", version)
    assert store.counts.errors == {"put": 1}
    await store.close()


class _FailsAt:
    """A connection that fails at one statement."""

    def __init__(self, connection: sqlite3.Connection, statement: str) -> None:
        self.connection = connection
        self.statement = statement

    def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:
        if statement.startswith(self.statement):
            raise sqlite3.OperationalError("disk I/O error")
        return self.connection.execute(statement, *parameters)  # type: ignore[arg-type]

    def close(self) -> None:
        self.connection.close()


@pytest.mark.parametrize(("statement", "error"), [("INSERT", StoreUnavailable), ("COMMIT", OutcomeUnknown)])
async def test_only_a_failing_commit_leaves_the_outcome_unknown(
    path: Path, statement: str, error: type[Exception]
) -> None:
    store = SqliteMetaStore.open(path)
    await store.put("a", b"")
    writer = store._writer
    assert writer is not None
    assert writer._connection is not None
    writer._connection = _FailsAt(writer._connection, statement)  # type: ignore[assignment]
    with pytest.raises(error, match="disk I/O error"):
        await store.put("b", b"")
    assert await store.get("b") is None
    await store.put("c", b"")
    assert await store.keys("", "z", 10) == ["a", "c"]
    await store.close()


async def test_a_session_that_ended_while_its_process_slept_stays_ended(path: Path) -> None:
    store, other = SqliteMetaStore.open(path), SqliteMetaStore.open(path)
    await store.put("claim", b"", ephemeral=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as clock:
        clock.execute("UPDATE sessions SET expires_ms = 1")
    assert await other.get("claim") is None
    await store.put("again", b"", ephemeral=True)
    assert await other.keys("", "z", 10) == ["again"]
    await store.close()
    assert await other.keys("", "z", 10) == []
    await other.close()


# --- closing


async def test_close_does_not_wait_for_ever_on_a_lock_that_another_process_keeps(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "CLOSE_SECONDS_MAX", 0.1)
    store = SqliteMetaStore.open(path)
    lock = open_lock(path)
    with hold_lock(lock):
        pending = [asyncio.ensure_future(store.put(f"k/{number}", b"")) for number in range(3)]
        await asyncio.sleep(0.05)
        await store.close()
        results = await asyncio.gather(*pending, return_exceptions=True)
        assert [type(result) for result in results] == [StoreUnavailable] * 3
    assert store._writer is not None
    await asyncio.to_thread(store._writer._thread.join)
    os.close(lock)
    again = SqliteMetaStore.open(path)
    assert await again.keys("", "z", 10) == []
    await again.close()


async def test_calls_made_before_close_are_answered(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    pending = [asyncio.ensure_future(store.put(f"k/{number}", b"")) for number in range(10)]
    await asyncio.sleep(0)
    await store.close()
    assert len(set(await asyncio.gather(*pending))) == 10


async def test_a_store_that_was_never_used_can_be_closed(path: Path) -> None:
    store = SqliteMetaStore.open(path)
    await store.close()
    with pytest.raises(StoreUnavailable, match=r"meta\.db is closed"):
        await store.get("a")


# --- watches


async def test_only_changes_of_other_processes_make_watches_look_more_often(path: Path) -> None:
    store, other = SqliteMetaStore.open(path), SqliteMetaStore.open(path)
    await other.put("a", b"")
    poll = store._watches.poll()
    await poll.confirm()
    assert poll._has_foreign_change(None)

    async def is_foreign(*writers: SqliteMetaStore) -> bool:
        before = poll._stamp
        for number, writer in enumerate(writers):
            await writer.put(f"a/{number}", b"")
        await poll.confirm()
        return poll._has_foreign_change(before)

    assert not await is_foreign()
    assert not await is_foreign(store)
    assert not await is_foreign(store, store)
    assert await is_foreign(other)
    assert await is_foreign(store, other)
    assert await is_foreign(other, store), "the newest change does not hide the one before it"
    assert not await is_foreign(store)
    await asyncio.gather(store.close(), other.close())


async def test_a_watch_of_one_key_sleeps_through_changes_elsewhere(path: Path) -> None:
    store, other = SqliteMetaStore.open(path), SqliteMetaStore.open(path)
    for key in ("a/1", "a/2", "b/1"):
        await store.put(key, b"")
    watches = {prefix: store.watch(prefix) for prefix in ("a/1", "a/2", "missing", "a/")}
    for watch in watches.values():
        await anext(watch)
    waiting = {prefix: asyncio.ensure_future(anext(watch)) for prefix, watch in watches.items()}

    async def woken_by(change: Awaitable[object], *prefixes: str) -> None:
        await change
        async with asyncio.timeout(60):
            await asyncio.gather(*(waiting[prefix] for prefix in prefixes))
            looks = dict(store.counts.count)["watch"]
            while dict(store.counts.count)["watch"] < looks + 5:  # it has looked again, more than once
                await asyncio.sleep(0.001)
        assert {prefix for prefix, task in waiting.items() if task.done()} == set(prefixes)
        for prefix in prefixes:
            waiting[prefix] = asyncio.ensure_future(anext(watches[prefix]))

    # A prefix of several keys is woken by all changes: which of them it was would take a look at every key.
    await woken_by(other.put("b/1", b"x"), "a/")
    await woken_by(store.put("a/2", b"x"), "a/2", "a/")
    await woken_by(other.put("missing", b"x"), "missing", "a/")
    await woken_by(other.delete("missing"), "missing", "a/")
    await woken_by(other.put("a/1", b"x"), "a/1", "a/")
    for task in waiting.values():
        task.cancel()
    await store.close()
    await other.close()
