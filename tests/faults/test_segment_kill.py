"""A process that is killed while it writes to a segment log loses nothing that it was told is there, and doubles
nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.reader import SegmentReader
from llog.errors import LogOwned
from tests.unit.engines.disk.tools import read_all

_APPENDS = 50_000

_WRITER = """
import asyncio, os, sys
from pathlib import Path
from llog.batch.columns import columns_of
from llog.model import Record
from llog.engines.disk.log.log import SegmentLog, SegmentOptions
async def main():
    log = SegmentLog.open(Path(sys.argv[1]), SegmentOptions(segment_bytes=300_000))
    numbers = iter(range(int(sys.argv[2])))
    async def append():
        for number in numbers:
            result = await log.append(columns_of([Record(payload=b"%d.%d" % (number, each)) for each in range(3)]))
            os.write(1, b"%d %d\\n" % (number, result.start_offset))
    await asyncio.gather(*(append() for _ in range(16)))
asyncio.run(main())
"""


@pytest.mark.parametrize("acknowledged_before_kill", [1, 700, 4000])
async def test_a_killed_writer_loses_no_acknowledged_record_and_doubles_none(
    tmp_path: Path, acknowledged_before_kill: int
) -> None:
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "log"), str(_APPENDS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(acknowledged_before_kill)]
    beside = SegmentReader.open(tmp_path / "log")
    seen = read_all(beside)
    with pytest.raises(LogOwned, match=f"process {process.pid}"):
        SegmentLog.open(tmp_path / "log")
    os.kill(process.pid, signal.SIGKILL)
    lines += process.stdout.readlines()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    acknowledged = {int(start): int(number) for number, start in (line.split() for line in lines)}
    assert acknowledged_before_kill <= len(acknowledged) < _APPENDS

    log = SegmentLog.open(tmp_path / "log")
    stored = read_all(SegmentReader.open(tmp_path / "log"))
    assert list(stored) == list(range(1, log.bounds().next_offset))
    assert seen.items() <= stored.items()
    assert len(set(stored.values())) == len(stored)
    for start, number in acknowledged.items():
        assert [stored[start + each] for each in range(3)] == [b"%d.%d" % (number, each) for each in range(3)]
    assert all(piece.problem is None for piece in beside.frames())
    await log.close()
