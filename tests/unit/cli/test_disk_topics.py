"""The commands of `llog` on topics of engine `disk`: the same as on others, or a clear refusal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llog.cli.main import main

Llog = Callable[..., Result]


@pytest.fixture
def llog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Llog:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLOG_SEGMENT_BYTES", "1KiB")

    def run(*arguments: str, stdin: str | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(main, arguments, input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


@pytest.fixture
def lines(llog: Llog) -> list[str]:
    """A disk topic `t` of two partitions, with 100 lines in its first one, over several segments."""
    llog("topics", "create", "t", "--engine", "disk", "--partitions", "2")
    lines = [f"{number:03} {'x' * 40}" for number in range(100)]
    for first in range(0, 100, 10):
        llog("produce", "t", "--partition", "0", stdin="\n".join(lines[first : first + 10]))
    return lines


def _json(result: Result) -> Any:
    return json.loads(result.stdout)


def test_lines_are_produced_and_consumed_from_anywhere(llog: Llog, lines: list[str]) -> None:
    assert llog("consume", "t").stdout.splitlines() == lines
    assert llog("consume", "t", "--partition", "0", "--from", "91").stdout.splitlines() == lines[90:]
    assert llog("consume", "t", "--from", "latest").stdout == ""
    assert llog("consume", "t", "--from", "1999-01-01", "--max", "2").stdout.splitlines() == lines[:2]


def test_keys_choose_the_partition_as_on_any_engine(llog: Llog) -> None:
    text = "\n".join(f"k{number % 7}={number}" for number in range(50))
    for engine in ("disk", "object"):
        llog("topics", "create", engine, "--engine", engine, "--partitions", "4")
        llog("produce", engine, "--key-separator", "=", stdin=text)
    found = {}
    for engine in ("disk", "object"):
        records = [json.loads(line) for line in llog("consume", engine, "--format", "json").stdout.splitlines()]
        found[engine] = [(each["partition"], each["offset"], each["key"], each["value"]) for each in records]
    assert found["disk"] == found["object"]


def test_a_topic_says_what_its_engine_is(llog: Llog) -> None:
    llog("topics", "create", "t", "--engine", "disk", "--cleanup", "compact", "--delete-retention", "2h")
    assert "disk, compact" in llog("topics", "list").stdout
    assert "engine disk, compact" in llog("topics", "describe", "t").stdout
    described = _json(llog("topics", "describe", "t", "--json"))
    assert (described["engine"], described["cleanup"], described["delete_retention_ms"]) == (
        "disk",
        "compact",
        7_200_000,
    )
    assert described["bounds"] == [{"partition": 0, "log_start_offset": 1, "next_offset": 1}]


def test_what_an_engine_cannot_do_is_refused(llog: Llog) -> None:
    assert "needs engine 'disk'" in llog("topics", "create", "t", "--cleanup", "compact", code=2).stderr
    refused = llog("topics", "create", "t", "--engine", "disk", "--delete-retention", "1h", code=2)
    assert "--cleanup compact" in refused.stderr
    assert llog("topics", "list", "--json").stdout.strip() == "[]"


def test_a_disk_topic_needs_a_directory(llog: Llog) -> None:
    stores = ("--meta", "memory://disk", "--blobs", "memory://disk")
    assert "set LLOG_SEGMENTS_DIR" in llog(*stores, "topics", "create", "t", "--engine", "disk", code=2).stderr


def test_a_topic_whose_directory_is_elsewhere_is_not_an_empty_one(
    llog: Llog, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLOG_SEGMENTS_DIR", str(tmp_path / "other"))
    for command in (["consume", "t"], ["topics", "describe", "t"], ["verify", "t"], ["inspect", "t"]):
        error = llog(*command, code=3 if command[0] == "verify" else 2).stderr
        assert f"LLOG_SEGMENTS_DIR is {tmp_path / 'other'}" in error
    assert "LLOG_SEGMENTS_DIR" in llog("produce", "t", stdin="x", code=2).stderr
    assert not (tmp_path / "other").exists()


def test_groups_go_on_where_they_were(llog: Llog, lines: list[str]) -> None:
    assert llog("consume", "t", "--group", "g", "--max", "30").stdout.splitlines() == lines[:30]
    assert llog("consume", "t", "--group", "g", "--max", "30").stdout.splitlines() == lines[30:60]
    assert [(each["group"], each["lag"]) for each in _json(llog("groups", "list", "--json"))] == [("g", 40)]
    llog("groups", "reset", "g", "t", "--partition", "0", "--to", "100")
    assert [(each["offset"], each["lag"]) for each in _json(llog("groups", "describe", "g", "--json"))] == [
        (100, 1),
        (1, 0),
    ]
    assert llog("consume", "t", "--group", "g").stdout.splitlines() == lines[99:]


def test_a_partition_is_trimmed_exactly_on_either_engine(llog: Llog, lines: list[str]) -> None:
    llog("produce", "o", stdin="a\nb\nc\n")
    assert "starts at offset 42; 41 offsets are gone" in llog("topics", "trim", "t", "--before", "42").stdout
    assert llog("consume", "t").stdout.splitlines() == lines[41:]
    llog("topics", "trim", "o", "--before", "3")
    assert llog("consume", "o").stdout == "c\n"
    assert "outside its bounds" in llog("topics", "trim", "t", "--before", "102", code=2).stderr


def test_retention_removes_segments(llog: Llog, lines: list[str], tmp_path: Path) -> None:
    before = sorted((tmp_path / "llog-data" / "segments" / "t" / "0").glob("*.log"))
    llog("topics", "set-retention", "t", "--retention-bytes", "2KiB")
    [first, second] = _json(llog("retain", "--json"))
    assert first["records"] > 0
    assert second["records"] == 0
    assert len(sorted((tmp_path / "llog-data" / "segments" / "t" / "0").glob("*.log"))) < len(before)
    assert llog("consume", "t").stdout.splitlines() == lines[first["new_start"] - 1 :]


def test_partitions_are_added(llog: Llog, lines: list[str]) -> None:
    llog("topics", "add-partitions", "t", "5")
    llog("produce", "t", "--partition", "4", stdin="new\n")
    assert llog("consume", "t", "--partition", "4").stdout == "new\n"


def test_verify_reads_every_frame_and_finds_damage(llog: Llog, lines: list[str], tmp_path: Path) -> None:
    report = _json(llog("verify", "t", "--json"))
    assert report["healthy"]
    assert [each["records"] for each in report["partitions"]] == [100, 0]
    file = sorted((tmp_path / "llog-data" / "segments" / "t" / "0").glob("*.log"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    damaged = _json(llog("verify", "t", "--json", code=1))
    [problem] = damaged["partitions"][0]["problems"]
    assert problem["kind"] == "corrupt"
    assert str(file) in problem["detail"]
    assert damaged["partitions"][0]["records"] == 100 - (problem["end_offset"] - problem["start_offset"] + 1)


def test_inspect_shows_segments_and_frames(llog: Llog, lines: list[str], tmp_path: Path) -> None:
    shown = llog("inspect", "t", "--partition", "0", "--entries", "3").stdout
    assert "00000000000000000001.log" in shown
    assert "more frames from offset 31 on" in shown
    [described] = _json(llog("inspect", "t", "--partition", "0", "--from-offset", "95", "--json"))
    assert [(each["start_offset"], each["end_offset"]) for each in described["frames"]] == [(91, 100)]
    assert described["owner"]["pid"] == os.getpid()
    assert described["segments"][-1]["sealed"] is False


def test_an_index_has_entries_by_records_if_that_is_set(
    llog: Llog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLOG_SEGMENT_BYTES", "4GiB")
    for topic, every in (("t", "0"), ("u", "3")):
        monkeypatch.setenv("LLOG_SEGMENT_INDEX_RECORDS", every)
        llog("topics", "create", topic, "--engine", "disk")
        for line in ("a", "b", "c", "d", "e"):
            llog("produce", topic, stdin=line)
    files = [tmp_path / f"llog-data/segments/{topic}/0/00000000000000000001.index" for topic in ("t", "u")]
    assert [file.stat().st_size for file in files] == [0, 8]


def test_upkeep_of_all_topics_passes_disk_topics_by(llog: Llog, lines: list[str]) -> None:
    for line in ("a\n", "b\n", "c\n"):
        llog("produce", "o", stdin=line)
    assert {each["topic"] for each in _json(llog("compact", "--json"))} == {"o"}
    assert _json(llog("collect", "--grace", "0ms", "--json"))["deleted"] > 0
    assert llog("consume", "t").stdout.splitlines() == lines
    assert llog("consume", "o").stdout == "a\nb\nc\n"
    assert "nothing to compact" in llog("compact", "t", code=2).stderr


def test_of_each_key_the_newest_record_is_kept(llog: Llog) -> None:
    llog("topics", "create", "t", "--engine", "disk", "--cleanup", "compact")
    for turn in range(20):
        llog("produce", "t", "--key-separator", "=", stdin="\n".join(f"k{key}={turn} {'x' * 40}" for key in range(5)))
    [done] = _json(llog("compact", "t", "--json"))
    assert done["removed"] > 80
    records = [json.loads(line) for line in llog("consume", "t", "--format", "json").stdout.splitlines()]
    assert len(records) == 100 - done["removed"]
    newest = {record["key"]: (record["offset"], record["value"].split()[0]) for record in records}
    assert newest == {f"k{key}": (96 + key, "19") for key in range(5)}
    assert llog("consume", "t", "--from", "2", "--format", "json").stdout.splitlines()[0] == json.dumps(
        records[0], separators=(",", ":")
    )
    assert llog("consume", "t", "--group", "g", "--max", "3").stdout.splitlines() == [r["value"] for r in records[:3]]
    assert _json(llog("groups", "describe", "g", "--json"))[0]["offset"] == records[2]["offset"] + 1
    assert _json(llog("verify", "t", "--json"))["partitions"][0]["records"] == len(records)
    llog("produce", "t", "--key-separator", "=", stdin="k0=after")
    assert llog("consume", "t", "--from", "101").stdout == "after\n"
    assert _json(llog("compact", "t", "--json"))[0]["removed"] == 1
    assert llog("compact", "t").stdout == ""


def test_a_topic_that_keeps_the_newest_of_each_key_refuses_records_without_one(llog: Llog) -> None:
    llog("topics", "create", "t", "--engine", "disk", "--cleanup", "compact")
    assert "give every record a key" in llog("produce", "t", stdin="x\n", code=2).stderr
    assert llog("consume", "t").stdout == ""


def test_a_partition_that_lost_its_directory_is_not_taken_for_an_empty_one(
    llog: Llog, lines: list[str], tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "llog-data" / "segments" / "t" / "0")
    assert "has lost its directory" in llog("consume", "t", code=2).stderr
    assert "t/0: unreadable: partition t/0 has lost its directory" in llog("verify", "t", code=1).stderr


def test_a_deleted_topic_leaves_no_files_and_its_name_can_be_used_again(
    llog: Llog, lines: list[str], tmp_path: Path
) -> None:
    llog("topics", "delete", "t", "--yes")
    assert [each.name for each in (tmp_path / "llog-data" / "segments").iterdir()] == ["~id"]
    assert "there is no topic" in llog("consume", "t", code=2).stderr
    llog("topics", "create", "t", "--engine", "disk")
    llog("produce", "t", stdin="new\n")
    assert llog("consume", "t").stdout == "new\n"
    assert {each.name for each in (tmp_path / "llog-data" / "segments").iterdir()} == {"~id", "t~2"}


def test_files_of_another_log_are_not_taken_for_a_new_topics(llog: Llog, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "llog-data" / "meta.sqlite").rename(tmp_path / "llog-data" / "old")
    for leftover in (tmp_path / "llog-data").glob("meta.sqlite-*"):
        leftover.unlink()
    (tmp_path / "llog-data" / "blobs").rename(tmp_path / "llog-data" / "old-blobs")
    assert "is not empty" in llog("topics", "create", "t", "--engine", "disk", code=2).stderr


_OWNER = """
import sys
from llog import LeaderlessLogWriter, SharedAppendGroup
with LeaderlessLogWriter.from_env() as writer:
    writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=["owned"])])
    print("owned", flush=True)
    sys.stdin.readline()
"""


def test_producing_to_a_topic_that_another_process_owns_says_who_and_how(llog: Llog, lines: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        refused = llog("produce", "t", "--partition", "0", stdin="x\n", code=1)
        assert f"process {owner.pid} " in refused.stderr
        assert "POST /produce" in refused.stderr
        assert llog("consume", "t").stdout.splitlines() == [*lines, "owned"]
        llog("topics", "set-retention", "t", "--retention", "1d")
        assert f"process {owner.pid} " in llog("retain", code=1).stderr
        llog("produce", "t", "--partition", "1", stdin="free\n")
        owner.communicate("\n")
    llog("produce", "t", "--partition", "0", stdin="x\n")
    assert llog("consume", "t", "--partition", "0", "--from", "101").stdout == "owned\nx\n"


@pytest.mark.parametrize("command", ["verify", "inspect", "consume"])
@pytest.mark.parametrize("name", [f"{1:020}.log", "tail"])
def test_files_that_cannot_be_read_are_an_error_that_says_what_to_do(
    llog: Llog, tmp_path: Path, command: str, name: str
) -> None:
    llog("topics", "create", "t", "--engine", "disk")
    llog("produce", "t", stdin="a\nb\n")
    (path,) = tmp_path.rglob(f"t/0/{name}")
    path.unlink()
    path.mkdir()
    result = llog(command, "t", code=1)
    assert result.stderr.startswith("llog: t/0: unreadable: cannot " if command == "verify" else "llog: cannot ")
    assert "check its file system" in result.stderr
