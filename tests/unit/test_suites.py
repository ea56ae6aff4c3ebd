"""The suite runner: nothing is skipped after a failure, nothing hangs, nothing is left running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from devtools.servers.leash import leashed
from devtools.suites import ROOT, Suite, main, run_all, run_suite, suites


def test_suites_after_a_failed_one_still_run_and_the_result_is_a_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = [
        Suite("first", (("-c", "raise SystemExit(3)"), ("-c", "print('second command')"))),
        Suite("last", (("-c", "print('last suite')"),)),
    ]
    assert run_all(chosen, root=tmp_path) == 1
    output = capfd.readouterr().out
    assert "second command" in output
    assert "last suite" in output
    assert "first: `python -c raise SystemExit(3)` exited with 3" in output
    assert [line.endswith("FAILED") for line in output.splitlines() if line.startswith("-- ")] == [True, False] * 2


def test_suites_that_all_pass_are_a_success(tmp_path: Path) -> None:
    assert run_all([Suite("only", (("-c", "pass"),))], root=tmp_path) == 0


def test_a_hanging_suite_prints_its_stacks_and_fails_with_its_children_gone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('child', 'w').write(str(child.pid))\n"
        "def stuck_here(): time.sleep(600)\n"
        "stuck_here()\n"
    )
    failures = run_suite(Suite("hanging", ((str(script),),)), root=tmp_path, limit_s=5)
    assert len(failures) == 1
    assert "time limit" in failures[0]
    assert "in stuck_here" in capfd.readouterr().err
    assert _gone(int((tmp_path / "child").read_text()))


def test_only_suites_with_tests_in_them_are_listed_and_the_check_comes_first(tmp_path: Path) -> None:
    for name in ("pipeline", "unit"):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / "test_it.py").touch()
    (tmp_path / "tests" / "spark").mkdir()
    (tmp_path / "spec").mkdir()
    assert [suite.name for suite in suites(tmp_path)] == ["check", "unit", "pipeline"]
    (tmp_path / "spec" / "__main__.py").touch()
    assert [suite.name for suite in suites(tmp_path)] == ["check", "unit", "specification", "pipeline"]


def test_tests_that_empty_a_server_of_somebody_elses_run_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests" / "conformance").mkdir(parents=True)
    (tmp_path / "tests" / "conformance" / "test_it.py").touch()

    def processes_max() -> int:
        arguments = suites(tmp_path)[1].commands[0]
        return int(arguments[arguments.index("--maxprocesses") + 1])

    monkeypatch.delenv("LLOG_TEST_OXIA_ADDRESS", raising=False)
    assert processes_max() > 1
    monkeypatch.setenv("LLOG_TEST_OXIA_ADDRESS", "oxia://127.0.0.1:6648/default")
    assert processes_max() == 1


def test_an_unknown_suite_is_refused_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unti"]) == 2
    assert "no suite called unti; there are: check, unit" in capsys.readouterr().err


def test_a_leashed_process_dies_with_its_starter(tmp_path: Path) -> None:
    starter = (
        "import os, pathlib, signal, sys, time\n"
        "from devtools.servers.leash import leashed\n"
        "here = pathlib.Path(sys.argv[1])\n"
        'command = [sys.executable, \'-c\', \'import os, time; open("pid", "w").write(str(os.getpid()) + chr(10));'
        " time.sleep(600)']\n"
        "with leashed(command, log=here / 'log', cwd=here):\n"
        "    while not (here / 'pid').exists() or not (here / 'pid').read_text().endswith(chr(10)):\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", starter, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert _gone(int((tmp_path / "pid").read_text()))


def test_a_leash_is_let_go_of_though_its_process_has_ended(tmp_path: Path) -> None:
    with leashed([sys.executable, "-c", "raise SystemExit(3)"], log=tmp_path / "log", cwd=tmp_path) as watcher:
        assert watcher.wait(60) == 3


def _gone(pid: int) -> bool:
    """Whether the process ends within a generous while; a zombie nobody reaps counts as gone."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_contributing_lists_every_suite_in_the_order_in_which_they_run() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Suites", 1)[1].split("`make test` runs", 1)[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [suite.name for suite in suites()]
