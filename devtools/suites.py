"""Runs the check and the test suites: `python -m devtools.suites [NAME …]`; without a name, all of them.

Every suite runs even if one before it failed; the exit code is 1 if any of them did. A suite has a time limit, after
which the stacks of its threads are printed and it counts as failed, so that a hang never blocks the caller for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

ROOT = Path(__file__).resolve().parent.parent
SUITE_LIMIT_S = 40 * 60.0
"""More than three times the duration of the longest suite on an idle machine."""
STUCK_TEST_S = 900
"""A test that takes longer fails by name, after the stacks of its threads were printed; the suite goes on."""
STACKS_GRACE_S = 5.0
SLOWEST = ("--durations=8", "--durations-min=5")
PROCESSES_MAX = 8
"""The tests of a suite run in one process per core, but in no more than this many."""
SPARK_PROCESSES_MAX = 1
"""The same limit for suites in which every process starts a JVM, which uses several cores by itself."""


class Suite(msgspec.Struct, frozen=True):
    """Commands that run in order within one time limit; each is a list of arguments for this Python."""

    name: str
    commands: tuple[tuple[str, ...], ...]


def suites(root: Path = ROOT) -> list[Suite]:
    """Return the check, then the suites that exist in this tree, fast ones first."""
    found = [_check(), *_tests(root, "unit", "sim", "conformance", "spec")]
    if (root / "spec" / "__main__.py").exists():
        found.append(Suite("specification", (("-m", "spec"),)))
    return [*found, *_tests(root, "faults", "broker", "kafka", "spark", "pipeline")]


def _check() -> Suite:
    return Suite(
        "check",
        (
            ("-m", "ruff", "format", "--check", "."),
            ("-m", "ruff", "check", "."),
            ("-m", "mypy"),
            (str(Path(sysconfig.get_path("scripts")) / "lint-imports"), "--no-logo"),  # cannot be run with -m
            ("-m", "devtools.docs", "--check"),
            ("-m", "devtools.markdown"),
        ),
    )


def _tests(root: Path, *names: str) -> Iterator[Suite]:
    for name in names:
        if any((root / "tests" / name).rglob("test_*.py")):
            limit = ("-o", f"faulthandler_timeout={STUCK_TEST_S}", "-o", "faulthandler_exit_on_timeout=true")
            command = ("-m", "pytest", f"tests/{name}", *limit, *SLOWEST)
            parallel = ("-n", "auto", "--maxprocesses", str(_processes_max(name)), "--dist", "worksteal")
            yield Suite(name, ((*command, *parallel),))


def _processes_max(suite: str) -> int:
    if suite == "conformance" and "LLOG_TEST_OXIA_ADDRESS" in os.environ:
        return 1  # the tests empty that server, which all processes would share
    return SPARK_PROCESSES_MAX if suite in ("spark", "pipeline") else PROCESSES_MAX


def run_suite(suite: Suite, *, root: Path = ROOT, limit_s: float = SUITE_LIMIT_S) -> list[str]:
    """Run a suite and return what failed, one line each; empty if everything passed."""
    deadline = time.monotonic() + limit_s
    failures = []
    for arguments in suite.commands:
        failure = _run([sys.executable, "-X", "faulthandler", *arguments], root, deadline)
        if failure is not None:
            failures.append(f"{suite.name}: `python {' '.join(arguments)}` {failure}")
    return failures


def _run(command: Sequence[str], root: Path, deadline: float) -> str | None:
    process = subprocess.Popen(command, cwd=root, start_new_session=True)
    try:
        code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler answers it with the stacks of all threads
        _kill(process, STACKS_GRACE_S)
        return "was stopped at the suite's time limit (its stacks are above)"
    except BaseException:
        process.send_signal(signal.SIGINT)  # it has its own session, so the terminal's interrupt did not reach it
        _kill(process, STACKS_GRACE_S)
        raise
    return None if code == 0 else f"exited with {code}"


def _kill(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGKILL to the process group, after its leader had time to end by itself."""
    end = time.monotonic() + grace_s
    while time.monotonic() < end and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # the leader is not reaped yet, so the id still belongs to this group
    process.wait()


def run_all(chosen: Sequence[Suite], *, root: Path = ROOT, limit_s: float = SUITE_LIMIT_S) -> int:
    failures: list[str] = []
    lines: list[str] = []
    for suite in chosen:
        print(f"== {suite.name}", flush=True)
        start = time.monotonic()
        failed = run_suite(suite, root=root, limit_s=limit_s)
        lines.append(f"-- {suite.name}: {time.monotonic() - start:.0f} s{', FAILED' if failed else ''}")
        print(lines[-1], flush=True)
        failures += failed
    print("\n== summary", *lines, *failures, "FAILED" if failures else "all passed", sep="\n", flush=True)
    return 1 if failures else 0


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Make SIGTERM unwind as Ctrl-C does, so that the running suite is ended, too."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(names: Sequence[str]) -> int:
    known = {suite.name: suite for suite in suites()}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no suite called {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    try:
        with _terminated_like_interrupted():
            return run_all([known[name] for name in names] or list(known.values()))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
