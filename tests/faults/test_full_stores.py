"""Stores on a disk that is full or read-only: what needs them is refused with 503, all else is served, and they go on
by themselves.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from llog.engines.rocksdb.keys import LOGS
from llog.engines.rocksdb.store import RocksStore
from llog.errors import StoreUnavailable
from tests.broker.test_process import Running, running
from tests.conftest import unavailable

MIB = 1 << 20


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        left = os.statvfs(self.path)
        with self._ballast.open("ab") as file:
            file.write(bytes(left.f_bavail * left.f_bsize))

    def free(self) -> None:
        self._ballast.unlink()

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)

    def make_writable(self) -> None:
        subprocess.run(["mount", "-o", "remount,rw", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        unavailable(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield Disk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


def _put(store: RocksStore, number: int, size: int = 100_000) -> None:
    changes = store.changes()
    changes.put(LOGS, b"%08d" % number, b"%08d" % number + bytes(size))
    store.write(changes, sync=True)


def _failure(store: RocksStore) -> StoreUnavailable:
    """How writes fail that go on until they do."""
    for number in range(100, 1000):
        try:
            _put(store, number)
        except StoreUnavailable as error:
            return error
    raise AssertionError("the disk is not full")


def _numbers(store: RocksStore) -> list[int]:
    return [int(value[:8]) for _, value in store.items(LOGS, b"", b"\xff")]


def test_a_rocksdb_goes_on_once_a_full_disk_has_space_again(disk: Disk) -> None:
    store = RocksStore.open(disk.path / "rocksdb")
    _put(store, 0)
    disk.fill()
    assert "No space left" in str(_failure(store))
    acknowledged = _numbers(store)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="free some space"):
            _put(store, 2000)
        with pytest.raises(StoreUnavailable, match="free some space"):
            store.check()
        assert _numbers(store) == acknowledged, "what is there can be read all the same"
    disk.free()
    _put(store, 2000)
    store.check()
    assert _numbers(store) == [*acknowledged, 2000]
    store.close()
    store = RocksStore.open(disk.path / "rocksdb")
    assert _numbers(store) == [*acknowledged, 2000]
    store.close()


def test_a_rocksdb_that_could_not_be_written_can_be_closed_and_opened_again(disk: Disk) -> None:
    store = RocksStore.open(disk.path / "rocksdb")
    _put(store, 0)
    disk.fill()
    _failure(store)
    acknowledged = _numbers(store)
    store.close()
    disk.free()
    store = RocksStore.open(disk.path / "rocksdb")
    assert _numbers(store) == acknowledged
    store.close()


def test_reads_go_on_while_a_rocksdb_recovers(disk: Disk) -> None:
    store = RocksStore.open(disk.path / "rocksdb")
    for number in range(20):
        _put(store, number, 1000)
    failures: list[object] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            try:
                if _numbers(store)[:20] != list(range(20)):
                    failures.append(_numbers(store))
            except Exception as error:
                failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(3):
            disk.fill()
            _failure(store)
            disk.free()
            _put(store, 2000 + turn, 1000)
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    assert failures == []
    store.close()


def _sql(broker: Running, statement: str) -> httpx.Response:
    return broker.client.post("/sql", json={"sql": statement})


def _check_unavailable(response: httpx.Response, *words: str) -> None:
    found = response.json()
    assert (response.status_code, found.get("code")) == (503, "store_unavailable"), response.text
    for word in words:
        assert word in found["detail"]


def _with_tables_on(disk: Disk, directory: Path) -> None:
    """Settings of a broker whose tables are on that disk, and tables in them."""
    (directory / "llog.toml").write_text(f'rocksdb_dir = "{disk.path / "rocksdb"}"\n')
    with running(directory, "serve") as broker:
        assert _sql(broker, "CREATE TABLE t (a INTEGER PRIMARY KEY)").status_code == 200
        assert _sql(broker, "INSERT INTO t VALUES (1)").status_code == 200
        assert broker.end() == 0


@pytest.mark.parametrize("read_only", [False, True], ids=["full", "read-only"])
def test_a_broker_whose_tables_cannot_be_opened_serves_the_rest_and_recovers(
    tmp_path: Path, disk: Disk, read_only: bool
) -> None:
    _with_tables_on(disk, tmp_path)
    (disk.make_read_only if read_only else disk.fill)()
    with running(tmp_path, "serve") as broker:
        broker.produce("served")
        assert [record["payload"] for record in broker.consume()] == ["served"]
        _check_unavailable(_sql(broker, "SELECT a FROM t"), str(disk.path))
        words = "Read-only file system" if read_only else "No space left"
        _check_unavailable(broker.client.get("/health"), str(disk.path), words)
        assert broker.client.get("/ready").status_code == 200, "a balancer need not take it out"
        (disk.make_writable if read_only else disk.free)()
        broker.wait_for("are open now")  # nobody has to ask: their outbox may hold events
        assert _sql(broker, "INSERT INTO t VALUES (2)").status_code == 200
        assert _sql(broker, "SELECT a FROM t ORDER BY a").json()["results"][0]["rows"] == [[1], [2]]
        assert broker.client.get("/health").status_code == 200
        assert broker.end() == 0


def test_tables_on_a_disk_that_fills_up_take_changes_again_once_it_has_space(tmp_path: Path, disk: Disk) -> None:
    _with_tables_on(disk, tmp_path)
    with running(tmp_path, "serve") as broker:
        assert _sql(broker, "CREATE TABLE texts (a INTEGER PRIMARY KEY, b TEXT)").status_code == 200
        broker.client.post("/topics", json={"name": "r", "partitions": 1, "engine": "rocksdb"})
        disk.fill()
        answers = [_sql(broker, f"INSERT INTO texts VALUES ({number}, '{'x' * 100_000}')") for number in range(30)]
        stored = [number for number, answer in enumerate(answers) if answer.status_code == 200]
        _check_unavailable(answers[-1], str(disk.path))
        record = {"topic": "r", "partition": 0, "records": ["x" * 100_000]}
        _check_unavailable(broker.client.post("/produce", json={"topic_partitions": [record]}), str(disk.path))
        assert _sql(broker, "SELECT a FROM t").json()["results"][0]["rows"] == [[1]]
        broker.produce("other topics go on")
        disk.free()
        assert _sql(broker, "INSERT INTO texts VALUES (100, 'after')").status_code == 200
        rows = _sql(broker, "SELECT a FROM texts ORDER BY a").json()["results"][0]["rows"]
        assert rows == [[number] for number in [*stored, 100]]
        (produced,) = broker.client.post("/produce", json={"topic_partitions": [record]}).json()["topic_partitions"]
        assert produced["start_offset"] == 1
        assert broker.end() == 0


def test_a_keyed_log_on_a_disk_that_fills_up_takes_records_again_once_it_has_space(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "llog.toml").write_text(f'keyed = "{(disk.path / "keyed").as_uri()}"\n')
    with running(tmp_path, "serve") as broker:
        small, large = ({"records": [{"key": "k", "value": value}]} for value in ("before", "x" * MIB))
        assert broker.client.post("/keyed/append", json=small).status_code == 200
        disk.fill()
        stalled = broker.client.post("/keyed/append", json=large)
        assert (stalled.status_code, stalled.json()["code"]) == (503, "outcome_unknown"), "SlateDB goes on trying"
        assert "No space left" in stalled.json()["detail"]
        _check_unavailable(broker.client.post("/keyed/append", json=small), str(disk.path), "No space left")
        _check_unavailable(broker.client.get("/health"), "keyed log", "No space left")
        broker.produce("other topics go on")
        disk.free()
        assert broker.client.post("/keyed/append", json=small).status_code == 200
        assert broker.client.get("/health").status_code == 200
        found = broker.client.get("/keyed/scan", params={"key": "k"}).json()["records"]
        assert [found[0]["value"], found[-1]["value"]] == ["before", "before"]


def test_health_tells_of_a_log_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "llog.toml").write_text(f'data_dir = "{disk.path / "data"}"\n')
    with running(tmp_path, "serve") as broker:
        broker.produce("before")
        disk.fill()
        _check_unavailable(broker.client.get("/health"), "metadata store", "blob store", "No space left")
        assert broker.client.get("/ready").status_code == 200, "it still answers reads"
        large = {"topic": "t", "partition": 0, "records": ["x" * MIB]}
        _check_unavailable(broker.client.post("/produce", json={"topic_partitions": [large]}), str(disk.path))
        assert [record["payload"] for record in broker.consume()] == ["before"]
        disk.free()
        assert broker.client.get("/health").status_code == 200
        broker.produce("after")
        assert [record["payload"] for record in broker.consume()] == ["before", "after"]
