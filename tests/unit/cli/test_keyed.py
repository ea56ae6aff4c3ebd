"""`llog keyed`, in this process on a log in a directory of its own, and as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llog.cli.main import main
from llog.errors import LogOwned
from llog.keyed import SyncKeyedLog, SyncKeyedLogReader

Llog = Callable[..., Result]
LIMIT_S = 120


@pytest.fixture
def llog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Llog:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLOG_KEYED", "file://./keyed")

    def run(*arguments: str, stdin: str | bytes | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["keyed", *arguments], input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


def _json(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("command", ["append", "scan", "count", "keys", "segments", "seal", "tail"])
def test_every_command_explains_itself(llog: Llog, command: str) -> None:
    text = llog(command, "--help").stdout
    assert "--url" in text
    assert len(text.splitlines()) > 6


def test_lines_are_appended_to_the_logs_of_their_keys_and_scanned(llog: Llog) -> None:
    appended = llog("append", stdin="a\t1\nb\t2\t3\na\t\n\tempty key")
    assert appended.stdout == ""
    assert "appended 4 records" in appended.stderr
    assert llog("scan", "a").stdout == "a\t1\na\t\n"
    assert llog("scan", "b", "--format", "value").stdout == "2\t3\n"
    assert llog("scan", "").stdout == "\tempty key\n"
    assert llog("scan", "--prefix", "").stdout == "\tempty key\na\t1\na\t\nb\t2\t3\n"
    assert llog("scan", "--prefix", "", "--limit", "2").stdout == "\tempty key\na\t1\n"
    assert llog("scan", "a", "--from", "1").stdout == "a\t\n"
    assert llog("scan", "a", "--to", "1").stdout == "a\t1\n"
    assert llog("scan", "a", "--to", "2001-01-01").stdout == ""
    assert llog("scan", "a", "--from", "2001-01-01T00:00:00Z", "--to", "2").stdout == "a\t1\n"
    assert llog("count", "a").stdout == "2\n"
    assert llog("count", "a", "--from", "1", "--approximate").stdout == "1\n"
    assert llog("keys").stdout == "\na\nb\n"
    assert llog("keys", "--limit", "2").stdout == "\na\n"
    assert llog("keys", "--prefix", "b").stdout == "b\n"


def test_arguments_are_records_like_lines(llog: Llog) -> None:
    llog("append", "--key-separator", "=", "k=v", "l=w=x")
    llog("append", "--format", "json", '{"key": "k", "value": "2"}')
    assert [each["value"] for each in _json(llog("scan", "--prefix", "", "--format", "json"))] == ["v", "2", "w=x"]


def test_bytes_that_are_no_text_pass_as_base64_and_raw(llog: Llog) -> None:
    raw = {"base64": "AP8r"}
    llog("append", "--format", "json", stdin=json.dumps({"key": raw, "value": raw}) + "\n")
    llog("append", stdin=b"\x00\xff+\traw\xfe\n")
    [first, second] = _json(llog("scan", "AP8r", "--base64", "--format", "json"))
    assert (first["key"], first["value"], first["sequence"]) == (raw, raw, 0)
    assert second["value"] == {"base64": "cmF3/g=="}
    assert first["append_time_ms"] <= second["append_time_ms"]
    assert llog("scan", "--base64", "--prefix", "AP8").stdout_bytes == b"\x00\xff+\t\x00\xff+\n\x00\xff+\traw\xfe\n"
    assert _json(llog("keys", "--json")) == [raw]
    assert llog("count", "--base64", "AP8r").stdout == "2\n"


def test_segments_are_sealed_and_shown(llog: Llog) -> None:
    llog("append", "a\t1")
    assert llog("seal", "--user-meta", "monday").stdout == "0\n"
    llog("append", "b\t2")
    table = llog("segments").stdout.splitlines()
    assert [column for column in ("segment", "sequences", "user meta") if column not in table[0]] == []
    assert "0 to 0" in table[1]
    assert "monday" in table[1]
    found = json.loads(llog("segments", "--json").stdout)
    assert [(each["segment_id"], each["records"], each["user_meta"]) for each in found] == [
        (0, 1, "monday"),
        (1, 1, None),
    ]
    assert len(json.loads(llog("segments", "--json", "--from", str(found[1]["start_seq"])).stdout)) == 1
    assert llog("keys", "--from-segment", "1").stdout == "b\n"


def test_a_tail_prints_what_there_is_behind_its_cursor(llog: Llog) -> None:
    llog("append", "a\t1", "b\t2", "a\t3")
    assert llog("tail", "a", "--after", "-1", "--max", "2").stdout == "a\t1\na\t3\n"
    found = _json(llog("tail", "--prefix", "", "--after", "0", "--max", "2", "--format", "json"))
    assert [each["sequence"] for each in found] == [1, 2]


def test_the_option_goes_before_the_variable(llog: Llog, tmp_path: Path) -> None:
    elsewhere = f"file://{tmp_path}/elsewhere"
    llog("append", "--url", elsewhere, "k\tthere")
    assert llog("scan", "k", "--url", elsewhere).stdout == "k\tthere\n"
    assert "there is no keyed log at" in llog("scan", "k", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["scan"], "either KEY or --prefix"),
        (["scan", "k", "--prefix", "k"], "either KEY or --prefix"),
        (["tail"], "either KEY or --prefix"),
        (["scan", "k", "--from", "noon"], "--from is 'noon'"),
        (["scan", "k/", "--base64"], "is not base64url"),
        (["append", "no separator"], "'no separator' has no key"),
        (["append", "--key-separator", "", "k"], "--key-separator is empty"),
        (["append", "--format", "json", '{"key": 1}'], "is not {"),
        (["scan", "k", "--url", "http://x"], "must start with file:// or s3:// or memory://"),
        (["scan", "k", "--url", "s3://user:secret@bucket/x"], "contains credentials"),
    ],
)
def test_mistakes_are_told_in_one_line_and_change_nothing(llog: Llog, arguments: list[str], named: str) -> None:
    failed = llog(*arguments, code=2)
    assert failed.stdout == ""
    [line] = failed.stderr.splitlines()
    assert line.startswith("llog: ")
    assert named in line
    assert "secret" not in line
    assert not Path("keyed").exists()


def test_without_an_address_it_says_what_to_give(llog: Llog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLOG_KEYED")
    assert "give --url" in llog("scan", "k", code=2).stderr


def test_what_was_durable_before_a_wrong_line_is_counted(llog: Llog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLOG_BATCH_MAX_BYTES", "1")
    failed = llog("append", stdin="wrong\n", code=2)
    assert "appended 0 records" in failed.stderr
    assert "'wrong' has no key" in failed.stderr


def _start(directory: Path, *arguments: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "llog.cli.main", "keyed", *arguments]
    return subprocess.Popen(command, cwd=directory, stdin=pipe, stdout=pipe, stderr=pipe)


def test_a_tail_prints_what_another_process_appends_until_it_is_interrupted(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/keyed"
    with SyncKeyedLog.open(url) as log:
        log.append([(b"k", b"first")])
        follower = _start(tmp_path, "tail", "k", "--after", "-1", "--url", url)
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"k\tfirst\n"
        log.append([(b"k", b"second")])
        assert follower.stdout.readline() == b"k\tsecond\n"
        follower.send_signal(signal.SIGINT)
        _, errors = follower.communicate(timeout=LIMIT_S)
    assert (follower.returncode, errors) == (130, b"")


def test_an_append_that_is_taken_over_from_fails_in_one_line(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/keyed"
    SyncKeyedLog.open(url).close()
    process = _start(tmp_path, "append", "--url", url)
    assert process.stdin is not None
    process.stdin.write(b"k\tfirst\n")
    process.stdin.flush()
    with SyncKeyedLogReader.open(url) as reader:
        while reader.count(b"k") == 0:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
    with pytest.raises(LogOwned, match=str(process.pid)):
        SyncKeyedLog.open(url)
    with SyncKeyedLog.open(url, take_over=True) as log:
        _, errors = process.communicate(b"k\tsecond\n", timeout=LIMIT_S)
        assert process.returncode == 1
        counted, told = errors.decode().splitlines()
        assert "appended 1 records" in counted
        assert told.startswith("llog: ")
        assert "taken over by another writer" in told
        assert [entry.value for entry in log.scan(b"k")] == [b"first"]
