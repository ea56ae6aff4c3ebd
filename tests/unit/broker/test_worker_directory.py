"""The private directory of a supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from stat import S_IMODE

import pytest

from llog.broker.workers.directory import PREFIX, SETTINGS_FILE, private_directory

NO_MEMORY_IS_THAT_LARGE = 1 << 60


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the directories are made that have no room in memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_this_users_alone_and_gone_afterwards(parent: Path) -> None:
    with private_directory(NO_MEMORY_IS_THAT_LARGE) as directory:
        assert directory.parent == parent
        assert S_IMODE(directory.stat().st_mode) == 0o700
        assert (directory / SETTINGS_FILE).read_bytes() == b""
        (directory / "0.json").write_text("{}")
    assert list(parent.iterdir()) == []


def test_what_a_killed_supervisor_left_is_removed_and_what_others_use_stays(parent: Path) -> None:
    being_made = parent / f"{PREFIX}new"
    being_made.mkdir()
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    script = (
        "import os, signal, sys, tempfile\n"
        "from llog.broker.workers.directory import private_directory\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "with private_directory(1 << 60) as directory:\n"
        "    print(directory, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(parent)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    with private_directory(NO_MEMORY_IS_THAT_LARGE) as one, private_directory(NO_MEMORY_IS_THAT_LARGE) as other:
        assert not left.exists()
        assert one.is_dir()
        assert other.is_dir()
        assert being_made.is_dir()
        assert elsewhere.is_dir()
        assert os.listdir(elsewhere) == ["lock"]
