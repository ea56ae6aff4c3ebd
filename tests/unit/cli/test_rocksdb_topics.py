"""The commands of `llog` on topics of engine `rocksdb`: the same as on others, or told who the owner is."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llog.cli.main import main
from llog.config import Settings
from llog.engines.routing import EngineReader
from llog.log.opening import opened_log
from llog.model import TopicPartition

Llog = Callable[..., Result]


@pytest.fixture
def llog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Llog:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(main, arguments, input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


def test_lines_are_produced_consumed_trimmed_verified_and_deleted(llog: Llog) -> None:
    llog("topics", "create", "t", "--engine", "rocksdb", "--partitions", "2")
    assert "rocksdb" in llog("topics", "list").stdout
    llog("produce", "t", "--partition", "1", stdin="a\nb\nc")
    assert llog("consume", "t").stdout.splitlines() == ["a", "b", "c"]
    llog("topics", "trim", "t", "--partition", "1", "--before", "2")
    described = json.loads(llog("topics", "describe", "t", "--json").stdout)
    assert described["bounds"][1] == {"partition": 1, "log_start_offset": 2, "next_offset": 4}
    assert "ok" in llog("verify", "t").stdout
    shown = llog("inspect", "t", "--partition", "1", "--entries", "1").stdout
    assert "RocksDB" in shown
    assert "--from-offset 3" in shown
    [inside] = json.loads(llog("inspect", "t", "--partition", "1", "--json").stdout)
    assert (inside["state"]["last_offset"], len(inside["records"])) == (3, 2)
    llog("topics", "delete", "t", "--yes")
    assert "there is no topic" in llog("consume", "t", code=2).stderr


def test_so_much_of_each_partition_is_kept(llog: Llog) -> None:
    llog("topics", "create", "t", "--engine", "rocksdb", "--retention-bytes", "1KiB")
    llog("produce", "t", stdin="\n".join(map(str, range(500))))
    assert "bytes kept 1 KiB" in llog("topics", "describe", "t").stdout
    llog("retain")
    kept = llog("consume", "t").stdout.splitlines()
    assert kept == [str(number) for number in range(500 - len(kept), 500)]
    assert 0 < len(kept) < 100


def test_the_newest_of_each_key_is_kept(llog: Llog) -> None:
    llog("topics", "create", "t", "--engine", "rocksdb", "--cleanup", "compact")
    llog("produce", "t", "--key-separator", "=", stdin="\n".join(f"k{number % 3}={number}" for number in range(30)))
    assert "27" in llog("compact", "t").stdout
    assert llog("consume", "t").stdout.splitlines() == ["27", "28", "29"]
    llog("topics", "create", "all", "--engine", "rocksdb")
    assert "nothing to compact" in llog("compact", "all", code=2).stderr


def test_verify_goes_on_past_what_another_process_owns_and_tells_that_from_damage(llog: Llog, tmp_path: Path) -> None:
    llog("topics", "create", "a-rocks", "--engine", "rocksdb")
    llog("produce", "b-object", stdin="something to damage\n")

    async def verified(code: int) -> str:
        async with opened_log(Settings(data_dir=str(tmp_path / "llog-data"))) as log:
            assert await EngineReader(log).bounds(TopicPartition("a-rocks", 0)) == (1, 1)
            report = json.loads((await asyncio.to_thread(llog, "verify", "--json", code=code)).stdout)
            assert (report["complete"], report["healthy"]) == (False, code == 3)
            assert [each["records"] for each in report["partitions"]] == [0, int(code == 3)]
            return str(report["partitions"][0]["unchecked"])

    assert f"process {os.getpid()}" in asyncio.run(verified(3))
    (blob,) = (tmp_path / "llog-data/blobs/llog/wal-shared").iterdir()
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-30])
    asyncio.run(verified(1))
    assert "a-rocks" in llog("verify", code=1).stdout


def test_while_another_process_owns_it_commands_say_so(llog: Llog, tmp_path: Path) -> None:
    llog("topics", "create", "t", "--engine", "rocksdb")

    async def refused() -> None:
        async with opened_log(Settings(data_dir=str(tmp_path / "llog-data"))) as log:
            assert await EngineReader(log).bounds(TopicPartition("t", 0)) == (1, 1)
            for command in (("consume", "t"), ("verify", "t"), ("inspect", "t"), ("topics", "delete", "t", "--yes")):
                result = await asyncio.to_thread(llog, *command, code=3 if command[0] == "verify" else 1)
                assert f"process {os.getpid()}" in result.stderr
                assert "POST /produce" in result.stderr

    asyncio.run(refused())
    llog("topics", "delete", "t", "--yes")


def test_a_lost_directory_is_not_taken_for_an_empty_one_until_it_is_forgotten(llog: Llog, tmp_path: Path) -> None:
    llog("topics", "create", "old", "--engine", "rocksdb")
    recorded = (tmp_path / "llog-data" / "rocksdb" / "~id").read_text()
    shutil.rmtree(tmp_path / "llog-data" / "rocksdb")
    assert recorded in llog("topics", "create", "t", "--engine", "rocksdb", code=2).stderr
    assert recorded in llog("repair", "home", "rocksdb").stdout
    assert recorded in llog("repair", "home", "rocksdb", "--apply").stdout
    llog("topics", "create", "t", "--engine", "rocksdb")
    llog("produce", "t", stdin="new")
    assert llog("consume", "t").stdout == "new\n"
    assert "LLOG_KEYED" in llog("repair", "home", "keyed", code=2).stderr
