"""The demo, small, as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from llog.cli.demo import Stage
from llog.cli.main import main
from llog.config import Settings
from llog.errors import StoreUnavailable

STAGES = ["produce", "consume", "latency", "stream", "compact", "export", "query"]


def test_every_stage_of_the_demo_has_all_records(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    ran = subprocess.run(
        [sys.executable, "-m", "llog.cli.main", "demo", "--events", "5000", "--dir", str(directory)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(STAGES)]] == STAGES
    for line in lines[1 : 1 + len(STAGES)]:
        assert line.split()[1] == ("100" if line.startswith("latency") else "5,000")
    assert "all counts agree" in lines[-1]
    assert {path.name for path in directory.iterdir()} == {"log", "checkpoint", "lake"}
    assert list(tmp_path.iterdir()) == [directory]  # nothing is left where the user stands


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path)])
    assert refused.exit_code == 2
    assert "not empty" in refused.stderr


def test_a_stage_with_fewer_or_more_records_does_not_agree() -> None:
    for records, agrees in ((9, False), (10, True), (11, False)):
        assert Stage(name="x", records=records, seconds=0.0, what="", expected=10).agrees is agrees


def test_a_stage_is_shown_when_it_ends_whatever_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: Settings, events: int) -> Stage:
        raise StoreUnavailable("the store is gone")

    monkeypatch.setattr("llog.cli.demo._consume", broken)
    ended = CliRunner().invoke(main, ["demo", "--events", "1000"])
    assert ended.exit_code == 1
    assert [line.split()[:2] for line in ended.stdout.splitlines()] == [["STAGE", "RECORDS"], ["produce", "1,000"]]
    assert ended.stderr == "llog: the store is gone\n"
