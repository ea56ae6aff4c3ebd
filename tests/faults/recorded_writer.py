"""`python -m tests.faults.recorded_writer DIRECTORY NAME`: idempotent producers that record what they do until they are
killed.

They write to the log that the settings name, and read beside it. Started again under the same name, each producer first
repeats the append that was under way when it was killed. `NAME.jsonl` in the directory is the history.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from llog.config.loading import load_settings
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import LlogError
from llog.history.recorded import RecordedAppender, RecordedReader
from llog.history.recorder import HistoryRecorder
from llog.log.engine import AppendGroup, AppendResult
from llog.log.opening import opened_log
from llog.log.producers import Producer
from llog.model import Record, TopicPartition

TOPIC = "t"
PARTITIONS = 2
PRODUCERS = 2
"""Of each process and partition."""


class Sequence:
    """The number of a producer's next append, kept in a file that is never cut short."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.number = int(os.pread(self._file, 10, 0) or 0)

    def advance(self) -> None:
        self.number += 1
        os.pwrite(self._file, b"%010d" % self.number, 0)


async def produce(appender: RecordedAppender, tp: TopicPartition, directory: Path, name: str) -> None:
    sequence = Sequence(directory / f"{name}.sequence")
    while True:
        payloads = [f"{name} {sequence.number} {place}".encode() for place in range(1 + sequence.number % 3)]
        group = AppendGroup(
            topic=tp.topic,
            partition=tp.partition,
            records=[Record(payload=payload) for payload in payloads],
            producer=Producer(id=name, sequence=sequence.number, since=1),
        )
        try:
            [result] = await appender.append([group])
        except LlogError as error:
            result = error
        if isinstance(result, AppendResult):
            sequence.advance()
        else:
            await asyncio.sleep(0.05)


async def follow(reader: RecordedReader, tp: TopicPartition) -> None:
    offset = 1
    while True:
        try:
            for batch in await reader.read(tp, offset):
                offset = batch.end_offset + 1
            await reader.wait(tp, offset, 0.1)
        except LlogError:
            await asyncio.sleep(0.05)


async def main(directory: Path, name: str) -> None:
    async with opened_log(load_settings()) as log:
        with HistoryRecorder(directory / f"{name}.jsonl", process=name) as recorder:
            appender, reader = (
                RecordedAppender(recorder, EngineAppender(log)),
                RecordedReader(recorder, EngineReader(log)),
            )
            async with asyncio.TaskGroup() as tasks:
                for partition in range(PARTITIONS):
                    tp = TopicPartition(TOPIC, partition)
                    tasks.create_task(follow(reader, tp))
                    for number in range(PRODUCERS):
                        tasks.create_task(produce(appender, tp, directory, f"{name}-{partition}-{number}"))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
