"""Files that are deleted or unmounted under a running broker: it acknowledges nothing, says so, and makes no new log in
their place.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.broker.test_process import Running, running
from tests.conftest import unavailable


def _delete_metadata(data: Path) -> None:
    for file in data.glob("meta.sqlite*"):
        file.unlink()


def _delete_blobs(data: Path) -> None:
    shutil.rmtree(data / "blobs")


def _empty_blobs(data: Path) -> None:
    for path in (data / "blobs").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _delete_all(data: Path) -> None:
    shutil.rmtree(data)


def _produce(broker: Running, topic: str, *records: str) -> httpx.Response:
    item = {"topic": topic, "partition": 0, "records": records}
    return broker.client.post("/produce", json={"topic_partitions": [item]})


def _sql(broker: Running, statement: str) -> httpx.Response:
    return broker.client.post("/sql", json={"sql": statement})


def _check_refused(response: httpx.Response, *words: str) -> None:
    found: dict[str, Any] = response.json()
    assert (response.status_code, found.get("code")) == (503, "store_unavailable"), response.text
    for word in words:
        assert word in found["detail"]


def _places(data: Path) -> set[Path]:
    """What is there of a log, and of its marks; a blob of an append that failed may be anywhere below."""
    return {*data.glob("*"), *data.glob("blobs/*")}


@pytest.mark.parametrize("delete", [_delete_metadata, _delete_blobs, _empty_blobs, _delete_all])
def test_a_broker_whose_files_were_deleted_acknowledges_nothing(tmp_path: Path, delete: Callable[[Path], None]) -> None:
    data = tmp_path / "llog-data"
    with running(tmp_path, "serve") as broker:
        broker.produce("before")
        assert broker.client.get("/health").status_code == 200
        delete(data)
        before = _places(data)
        _check_refused(_produce(broker, "t", "after"), str(data), "deleted")
        _check_refused(_produce(broker, "new", "after"), str(data), "deleted")
        _check_refused(broker.client.get("/health"), str(data), "deleted")
        assert _places(data) == before, "nothing is made in place of what is gone"
        assert broker.end() == 0
        assert _places(data) <= before


def test_a_file_that_is_moved_away_and_back_is_used_again(tmp_path: Path) -> None:
    data = tmp_path / "llog-data"
    with running(tmp_path, "serve") as broker:
        broker.produce("before")
        data.rename(tmp_path / "elsewhere")
        _check_refused(_produce(broker, "t", "meanwhile"), str(data))
        (tmp_path / "elsewhere").rename(data)
        broker.produce("after")
        assert broker.client.get("/health").status_code == 200
        assert [record["payload"] for record in broker.consume()] == ["before", "after"]


def test_another_log_in_place_of_the_deleted_one_is_left_alone(tmp_path: Path) -> None:
    """A broker that ends must not even remove the write-ahead log that the new one has under the old one's name."""
    data = tmp_path / "llog-data"
    with running(tmp_path, "serve") as old:
        old.produce("old")
        shutil.rmtree(data)
        with running(tmp_path, "serve") as new:
            new.produce("new")
            _check_refused(_produce(old, "t", "lost"), "deleted")
            assert old.end() == 0
            assert (data / "meta.sqlite-wal").exists()
            assert [record["payload"] for record in new.consume()] == ["new"]


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system, to be unmounted by the test."""
    directory = tmp_path / "llog-data"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        unavailable(f"a volume cannot be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], capture_output=True, check=False)


def test_a_broker_whose_volume_was_unmounted_acknowledges_nothing(tmp_path: Path, volume: Path) -> None:
    with running(tmp_path, "serve") as broker:
        broker.produce("before")
        subprocess.run(["umount", "-l", str(volume)], check=True)
        _check_refused(_produce(broker, "t", "after"), str(volume), "unmounted")
        _check_refused(broker.client.get("/health"), str(volume), "unmounted")
        assert _places(volume) == set()


def test_tables_whose_files_were_deleted_take_no_changes(tmp_path: Path) -> None:
    data = tmp_path / "llog-data"
    with running(tmp_path, "serve") as broker:
        assert _sql(broker, "CREATE TABLE t (a INTEGER PRIMARY KEY)").status_code == 200
        assert _sql(broker, "INSERT INTO t VALUES (1)").status_code == 200
        shutil.rmtree(data / "rocksdb")
        _check_refused(_sql(broker, "INSERT INTO t VALUES (2)"), str(data / "rocksdb"), "deleted")
        _check_refused(broker.client.get("/health"), str(data / "rocksdb"), "deleted")
        assert not (data / "rocksdb").exists()
        broker.produce("other topics go on")


def test_disk_topics_whose_files_were_deleted_take_no_records(tmp_path: Path) -> None:
    data = tmp_path / "llog-data"
    with running(tmp_path, "serve") as broker:
        broker.client.post("/topics", json={"name": "d", "partitions": 1, "engine": "disk"})
        assert _produce(broker, "d", "before").status_code == 200
        shutil.rmtree(data / "segments")
        (answer,) = _produce(broker, "d", "after").json()["topic_partitions"]
        assert (answer["error"]["code"], str(data / "segments") in answer["error"]["detail"]) == (
            "topic_elsewhere",
            True,
        )
        _check_refused(broker.client.get("/health"), str(data / "segments"), "deleted")
        assert not (data / "segments").exists()
        broker.produce("other topics go on")


def test_a_keyed_log_whose_files_were_deleted_takes_no_records(tmp_path: Path) -> None:
    keyed = tmp_path / "keyed"
    (tmp_path / "llog.toml").write_text(f'keyed = "{keyed.as_uri()}"\n')
    with running(tmp_path, "serve") as broker:
        record = {"records": [{"key": "k", "value": "v"}]}
        assert broker.client.post("/keyed/append", json=record).status_code == 200
        shutil.rmtree(keyed)
        for _ in range(2):
            _check_refused(broker.client.post("/keyed/append", json=record), str(keyed), "deleted")
        _check_refused(broker.client.get("/health"), str(keyed), "deleted")
        assert not keyed.exists()
        broker.produce("other topics go on")
