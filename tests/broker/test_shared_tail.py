"""The shared tail between processes: a broker that reads serves what one that writes just appended, and no failure of
it is anybody's.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llog.history.recorder import HistoryRecorder
from tests.broker.test_process import LIMIT_S, Load, Running, read_recorded, running


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "llog.toml").write_text('tail_cache_dir = "tail"\ntail_cache_max_bytes = "1MiB"\n')
    return tmp_path


def _counted(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/metrics").json()
    return found


def _blob_gets(server: Running) -> int:
    operations = _counted(server)["llog_store_operations_total"]
    return sum(each["value"] for each in operations if each["store"] == "blobs" and each["operation"].endswith("get"))


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _shared(server: Running, batches: int) -> None:
    _until(lambda: _counted(server)["llog_tail_shared_batches_total"] >= batches)


def _payloads(server: Running, offset: int = 1) -> list[str]:
    return [each["payload"] for each in server.consume(offset)]


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("tail/*/*/*.log"))


def test_a_reading_broker_serves_a_hot_record_without_the_blob_store(directory: Path) -> None:
    with (
        running(directory, "serve", "--role", "write") as writer,
        running(directory, "serve", "--role", "read") as reader,
    ):
        writer.produce("a", "b")
        _shared(writer, 1)
        assert _payloads(reader) == ["a", "b"]
        writer.produce("c")
        _shared(writer, 2)
        assert _payloads(reader, 3) == ["c"]
        assert _blob_gets(reader) == 0
        assert _counted(reader)["llog_tail_shared_hits_total"] == 2
        assert _counted(reader)["llog_tail_shared_errors_total"] == 0
        assert writer.end() == 0
        assert _files(directory) == [], "a writer takes its files with it"
        assert _payloads(reader) == ["a", "b", "c"]


def test_what_was_trimmed_deleted_or_created_again_is_never_taken_from_it(directory: Path) -> None:
    with (directory / "llog.toml").open("a") as settings:
        settings.write("tail_staleness_ms = 0\n")
    with (
        running(directory, "serve", "--role", "write") as writer,
        running(directory, "serve", "--role", "read") as reader,
    ):
        writer.produce("old 1", "old 2")
        _shared(writer, 1)
        assert _payloads(reader) == ["old 1", "old 2"]
        assert writer.client.delete("/topics/t").status_code == 204
        item = {"topic": "t", "partition": 0, "fetch_offset": 1}
        answer = reader.client.post("/consume", json={"topic_partitions": [item]}).json()["topic_partitions"][0]
        assert answer["error"]["code"] == "topic_not_found"
        writer.produce("new")
        _shared(writer, 2)
        assert _payloads(reader) == ["new"]
        assert _blob_gets(reader) == 0


def test_a_cap_of_nothing_keeps_and_shares_nothing(directory: Path) -> None:
    (directory / "llog.toml").write_text('tail_cache_dir = "tail"\ntail_cache_max_bytes = 0\n')
    with (
        running(directory, "serve", "--role", "write") as writer,
        running(directory, "serve", "--role", "both") as both,
    ):
        writer.produce("0")
        both.produce("1")
        for asked in (1, 2):
            assert _payloads(both) == ["0", "1"]
            assert _blob_gets(both) >= asked
        assert not (directory / "tail").exists()


def test_logs_that_share_a_directory_do_not_share_records(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "llog.toml").write_text(f'tail_cache_dir = "{tmp_path}/tail"\n')
    with running(tmp_path / "one", "serve") as one, running(tmp_path / "other", "serve", "--role", "write") as other:
        one.produce("of one")
        other.produce("of the other")
        _shared(one, 1)
        _shared(other, 1)
        with running(tmp_path / "other", "serve", "--role", "read") as reader:
            assert _payloads(reader) == ["of the other"]
            assert _blob_gets(reader) == 0


def test_two_writing_brokers_share_with_one_that_reads_within_the_bound(directory: Path) -> None:
    with (
        running(directory, "serve", "--role", "write") as one,
        running(directory, "serve", "--role", "write") as two,
        running(directory, "serve", "--role", "read") as reader,
    ):
        expected = []
        for n in range(100):
            payload = f"{n} " + "x" * 30_000
            (one if n % 2 else two).produce(payload)
            expected.append(payload)
        assert _payloads(reader) == expected
        assert sum(path.stat().st_size for path in _files(directory)) <= 1 << 20
        assert len({path.parent for path in _files(directory)}) == 2
        assert _counted(reader)["llog_tail_shared_errors_total"] == 0


def test_a_writer_killed_under_load_leaves_nothing_wrong_and_nothing_behind(directory: Path) -> None:
    with (
        HistoryRecorder(directory / "history.jsonl") as recorder,
        running(directory, "serve", "--role", "read") as reader,
    ):
        with running(directory, "serve", "--role", "write") as writer:
            load = Load(writer, recorder)
            load.wait_for(300)
            writer.end(signal.SIGKILL)
            load.join()
        left = _files(directory)
        assert left
        found = read_recorded(reader, recorder)
        assert _counted(reader)["llog_tail_shared_errors_total"] == 0
        with running(directory, "serve", "--role", "write") as writer:
            writer.produce("one more")
            _shared(writer, 1)
            assert not any(path.exists() for path in left)
            assert _payloads(reader, found + 1) == ["one more"]


def test_a_tail_that_cannot_be_is_one_line_and_no_error(directory: Path) -> None:
    (directory / "tail").write_text("not a directory")
    with running(directory, "serve") as server:
        for n in range(3):
            assert server.produce(f"{n}")["start_offset"] == n + 1
        _until(lambda: _counted(server)["llog_tail_shared_errors_total"] >= 4)
        assert _payloads(server) == ["0", "1", "2"]
        assert server.errors.count("the shared tail") == 1
        assert server.end() == 0


def test_damage_in_the_files_is_a_miss_and_no_error(directory: Path) -> None:
    with (
        running(directory, "serve", "--role", "write") as writer,
        running(directory, "serve", "--role", "read") as reader,
    ):
        writer.produce("a")
        writer.produce("b")
        _shared(writer, 2)
        path = _files(directory)[0]
        whole = bytearray(path.read_bytes())
        whole[-9] ^= 0xFF
        path.write_bytes(whole)
        assert _payloads(reader) == ["a", "b"]
        assert _blob_gets(reader) == 1
        assert _counted(reader)["llog_tail_shared_hits_total"] == 1
        assert _counted(reader)["llog_tail_shared_errors_total"] == 1
        assert reader.errors.count("the shared tail") == 1
