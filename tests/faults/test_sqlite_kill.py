"""A process that is killed while it writes to the SQLite metadata store loses nothing that it was told is durable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llog.stores.meta import scan
from llog.stores.sqlite.store import SqliteMetaStore

_PUTS = 10_000

_WRITER = """
import asyncio, os, sys
from llog.stores.meta import ABSENT
from llog.stores.sqlite.store import SqliteMetaStore
async def main():
    store = SqliteMetaStore.open(sys.argv[1])
    numbers = iter(range(int(sys.argv[2])))
    async def put():
        for number in numbers:
            version = await store.put(f"k/{number:06}", b"%d" % number, expected=ABSENT)
            os.write(1, b"%d %d\\n" % (number, version))
    await asyncio.gather(*(put() for _ in range(32)))
asyncio.run(main())
"""


@pytest.mark.parametrize("acknowledged_before_kill", [1, 1500, 5000])
async def test_a_killed_process_loses_no_acknowledged_put(tmp_path: Path, acknowledged_before_kill: int) -> None:
    path = tmp_path / "meta.db"
    command = [sys.executable, "-c", _WRITER, str(path), str(_PUTS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(acknowledged_before_kill)]
    os.kill(process.pid, signal.SIGKILL)
    lines += process.stdout.readlines()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    acknowledged = {int(number): int(version) for number, version in (line.split() for line in lines)}
    assert acknowledged_before_kill <= len(acknowledged) < _PUTS

    store = SqliteMetaStore.open(path)
    stored = {int(entry.value): entry.version async for entry in scan(store, "k/")}
    assert acknowledged.items() <= stored.items()
    highest = max(stored.values())
    assert await store.put("after", b"") > highest
    await store.close()
