"""What runs beside a broker: maintenance in its process, and a child that is started again and never outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from llog.broker.child import ChildOptions, supervise
from llog.broker.maintenance import Maintenance, MaintenanceOptions
from llog.config import Settings
from llog.engines.object.description import describe_partition
from llog.engines.object.reader import Reader
from llog.errors import StoreUnavailable
from llog.log.catalog import Catalog
from llog.log.opening import compactor_options
from llog.log.records import Kind
from llog.model import TopicPartition
from llog.runtime import SystemRuntime
from tests.broker.serving import Served

LIMIT_S = 60
QUICK = MaintenanceOptions(compact_ms=1, compact_error_ms=1, retain_ms=1, collect_ms=1, look_again_ms=0)


async def _until(served: Served, done: object) -> None:
    assert callable(done)
    async with asyncio.timeout(LIMIT_S):
        while not await done():
            await asyncio.sleep(0.01)


async def test_maintenance_compacts_retains_and_collects(served: Served) -> None:
    await served.produce("t", "first")
    await served.produce("old", "a", "b")
    await Catalog(served.log).set_retention("old", retention_ms=0, retention_bytes=None)
    settings = msgspec.structs.replace(served.settings, collect_grace_ms=0)
    reports: list[str] = []
    for n in range(20):
        await served.produce("t", f"{n}")
    running = asyncio.ensure_future(Maintenance(served.log, settings, reports.append, QUICK).run())

    async def tidy() -> bool:
        entries = (await describe_partition(served.log, TopicPartition("t", 0))).entries
        start = (await Reader(served.log).bounds(TopicPartition("old", 0))).log_start_offset
        return len(entries) < 10 and start == 3 and len(served.blobs.server.blobs) < 10

    await _until(served, tidy)
    running.cancel()
    assert reports == []
    payloads = [each["payload"] for each in (await served.consume("t", 1))["records"]]
    assert payloads == ["first", *(f"{n}" for n in range(20))]


class _Hurried(SystemRuntime):
    """Time that passes in sleeps only."""

    def __init__(self) -> None:
        super().__init__()
        self.ms = 0

    def now_ms(self) -> int:
        return self.ms

    async def sleep(self, seconds: float) -> None:
        self.ms += max(1, round(seconds * 1000))
        await asyncio.sleep(0)


async def test_compaction_pauses_as_the_settings_say_longer_after_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = _Hurried()
    settings = Settings(
        compactor_idle_sleep_ms=1000,
        compactor_idle_jitter_ms=500,
        compactor_error_sleep_ms=10_000,
        compactor_error_jitter_ms=0,
    )
    times: list[int] = []
    reports: list[str] = []
    maintenance = Maintenance(served.log._replace(runtime=runtime), settings, reports.append)

    async def compact() -> None:
        times.append(runtime.ms)
        if len(times) == 10:
            raise StoreUnavailable("out of order")

    monkeypatch.setattr(maintenance, "compact", compact)
    running = asyncio.ensure_future(maintenance.run())
    async with asyncio.timeout(LIMIT_S):
        while len(times) < 20:
            await asyncio.sleep(0)
    running.cancel()
    pauses = [late - early for early, late in pairwise(times[:20])]
    assert 10_000 <= pauses.pop(9) < 11_000  # sleeps are no longer than the shortest pause
    assert all(1000 <= pause < 2500 for pause in pauses)
    assert len(set(pauses)) > 1
    assert [report for report in reports if "compaction failed" in report]


async def test_the_compactors_claims_have_its_name() -> None:
    assert compactor_options(Settings(compactor_id="c-1", client_identifier="b-1")).holder == "c-1"
    assert compactor_options(Settings(client_identifier="b-1")).holder == "b-1"
    assert compactor_options(Settings()).holder == Settings().client_name


async def test_maintenance_reports_a_failing_store_and_goes_on_once_it_is_back(served: Served) -> None:
    for n in range(3):
        await served.produce("t", f"{n}")
    served.blobs.broken = True
    reports: list[str] = []
    running = asyncio.ensure_future(Maintenance(served.log, served.settings, reports.append, QUICK).run())

    async def reported() -> bool:
        return any("out of order" in report for report in reports)

    async def compacted() -> bool:
        return await _is_compacted(served)

    await _until(served, reported)
    served.blobs.broken = False
    await _until(served, compacted)
    running.cancel()


async def test_a_partition_with_nothing_to_compact_is_left_alone_until_it_grows(served: Served) -> None:
    await served.produce("t", "only")
    settings = served.settings
    maintenance = Maintenance(served.log, settings, _unexpected, MaintenanceOptions())
    await maintenance.compact()
    puts = _puts(served)
    await maintenance.compact()
    assert _puts(served) == puts, "it was claimed again for nothing"
    await served.produce("t", "one more")
    await served.produce("t", "and one")
    await maintenance.compact()
    assert _puts(served) > puts
    assert await _is_compacted(served)


async def _is_compacted(served: Served) -> bool:
    described = await describe_partition(served.log, TopicPartition("t", 0))
    return any(each.entry.kind is Kind.COMPACTED for each in described.entries)


def _puts(served: Served) -> int:
    counts = served.log.meta.counts.count  # type: ignore[attr-defined]
    return int(counts.get("put", 0))


def _unexpected(report: str) -> None:
    raise AssertionError(report)


async def test_a_child_that_dies_is_started_again_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    script = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a'), flush=True); time.sleep(600)"
    reports: list[str] = []
    options = ChildOptions(restart_s=0.01, restart_s_max=0.02)
    command = [sys.executable, "-c", script, str(starts)]
    running = asyncio.ensure_future(supervise("the child", command, dict(os.environ), reports.append, options))
    pids: list[int] = []
    async with asyncio.timeout(LIMIT_S):
        for times in (1, 2, 3):
            while len(pids := _pids(starts)) < times:
                await asyncio.sleep(0.01)
            if times < 3:
                os.kill(pids[-1], signal.SIGKILL)
    running.cancel()
    await asyncio.wait([running])
    assert all(_gone(pid) for pid in pids)
    assert len(reports) == 2
    assert "ended with code 137" in reports[0]


async def test_a_child_that_says_it_cannot_run_is_not_started_again() -> None:
    command = [sys.executable, "-c", "raise SystemExit(2)"]
    await asyncio.wait_for(supervise("the child", command, dict(os.environ), _unexpected), LIMIT_S)


async def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), child.pid, sep='\\n', file=open(sys.argv[1], 'w'), flush=True)\n"
        "time.sleep(600)\n"
    )
    options = ChildOptions(grace_s=0.2)
    command = [sys.executable, "-c", script, str(pids)]
    running = asyncio.ensure_future(supervise("the child", command, dict(os.environ), _unexpected, options))
    async with asyncio.timeout(LIMIT_S):
        while len(_pids(pids)) < 2:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert all(_gone(pid) for pid in _pids(pids))


def test_a_child_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
    starter = (
        "import asyncio, os, sys\n"
        "from llog.broker.child import supervise\n"
        "command = [sys.executable, '-c', sys.argv[1], sys.argv[2]]\n"
        "asyncio.run(supervise('the child', command, dict(os.environ), print))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter, child, str(pids)])
    deadline = time.monotonic() + LIMIT_S
    while not _pids(pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert _gone(_pids(pids)[0])


async def test_the_collector_is_not_run_before_its_time(served: Served) -> None:
    options = MaintenanceOptions(compact_ms=1)
    running = asyncio.ensure_future(Maintenance(served.log, Settings(), _unexpected, options).run())
    await served.produce("t", "a")
    await asyncio.sleep(0.1)
    assert "list" not in served.blobs.counts.count
    running.cancel()


def _pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # ended, and not yet looked at by whoever is its parent now
            return True
        time.sleep(0.02)
    return False
