"""Processes that write to a log without a broker are killed and started again: nothing is lost, doubled or out of
order.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import pytest

from llog.config import Settings
from llog.config.loading import load_settings
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.routing import EngineReader
from llog.history.checker import check_history
from llog.history.recorded import RecordedReader
from llog.history.recorder import HistoryRecorder
from llog.log.catalog import OBJECT, Catalog
from llog.log.opening import opened_log
from llog.model import TopicPartition
from tests.faults.recorded_writer import PARTITIONS, TOPIC

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 300
_KILLS = 5
_GROWTH_BYTES = 40_000
"""Of a writer's history between two kills: some hundred operations."""


@contextmanager
def writer(directory: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.recorded_writer", str(directory), name],
        cwd=_ROOT,
        env=os.environ | {"LLOG_DATA_DIR": str(directory / "log")},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def compacted(settings: Settings) -> AsyncIterator[None]:
    """Compacts all partitions, again and again, while the block runs."""

    async def compact() -> None:
        async with opened_log(settings) as log:
            while True:
                for partition in range(PARTITIONS):
                    await Compactor(log).compact_once(TopicPartition(TOPIC, partition))
                await asyncio.sleep(0.1)

    task = asyncio.create_task(compact())
    try:
        yield
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def grown(process: subprocess.Popen[bytes], history: Path) -> None:
    """Returns when the writer has recorded as much again."""
    size = history.stat().st_size if history.exists() else 0
    while not history.exists() or history.stat().st_size < size + _GROWTH_BYTES:
        assert process.poll() is None, f"the writer ended by itself: {process.returncode}"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(("engine", "writers"), [("object", 2), ("disk", 1)])
async def test_writers_that_are_killed_lose_nothing_and_double_nothing(
    tmp_path: Path, engine: str, writers: int
) -> None:
    settings = load_settings({"data_dir": str(tmp_path / "log")})
    chance = random.Random(5)
    async with asyncio.timeout(_LIMIT_S), opened_log(settings) as log:
        await Catalog(log).create(TOPIC, PARTITIONS, engine=engine)
        with ExitStack() as stack:
            names = [f"writer-{number}" for number in range(writers)]
            processes = {name: stack.enter_context(writer(tmp_path, name)) for name in names}
            async with compacted(settings) if engine == OBJECT else nullcontext():
                for kill in range(_KILLS):
                    name = names[kill % writers]
                    await grown(processes[name], tmp_path / f"{name}.jsonl")
                    await asyncio.sleep(chance.uniform(0, 0.05))
                    processes[name].kill()
                    assert processes[name].wait() == -signal.SIGKILL
                    processes[name] = stack.enter_context(writer(tmp_path, name))
                for name, process in processes.items():
                    await grown(process, tmp_path / f"{name}.jsonl")
        with HistoryRecorder(tmp_path / "reader.jsonl") as recorder:
            reader = RecordedReader(recorder, EngineReader(log))
            for partition in range(PARTITIONS):
                assert [batch async for batch in reader.iter_from(TopicPartition(TOPIC, partition), 1)]
    report = check_history(sorted(tmp_path.glob("*.jsonl")))
    assert report.clean, report
    assert all(each.acknowledged > 100 for each in report.partitions)
