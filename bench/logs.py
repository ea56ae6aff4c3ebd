"""Logs on disk for benches, filled without a loop over records."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from llog.batch.columns import Columns
from llog.config.loading import load_settings
from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.writer import Writer
from llog.errors import LlogError
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.model import TopicPartition

T = TypeVar("T")


class BenchLog:
    """Metadata in SQLite and blobs in files, below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.blobs = directory / "blobs"
        self.options = {"meta": f"sqlite://{directory / 'meta.sqlite'}", "blobs": f"file://{self.blobs}"}
        self.settings = load_settings(self.options, environment={})

    def do(self, use: Callable[[Log], Awaitable[T]]) -> T:
        async def with_log() -> T:
            async with opened_log(self.settings) as log:
                return await use(log)

        return asyncio.run(with_log())

    def copy(self, directory: Path) -> BenchLog:
        """Copy the log to another directory. The copies share the files of blobs, which are immutable."""
        directory.mkdir()
        shutil.copytree(self.blobs, directory / "blobs", copy_function=os.link)
        for file in self.directory.glob("meta.sqlite*"):
            shutil.copy(file, directory)
        return BenchLog(directory)


def records(count: int, size: int) -> Columns:
    """Return `count` records of `size` random bytes, without keys."""
    offsets = np.arange(0, (count + 1) * size, size, dtype=np.int32)
    values = pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(os.urandom(count * size))]
    )
    return Columns(values, None, None, None, ())


def fill(target: BenchLog, topic: str, *, partitions: int, blobs: int, count: int, size: int) -> None:
    """Create a topic and append `blobs` shared blobs, each with `count` records of `size` bytes for every partition."""

    async def append(log: Log) -> None:
        await Catalog(log).create(topic, partitions)
        writer, each = Writer(log), records(count, size)
        for _ in range(blobs):
            groups = [AppendGroup(topic=topic, partition=partition, records=each) for partition in range(partitions)]
            for result in await writer.append(groups):
                if isinstance(result, LlogError):
                    raise result

    target.do(append)


def compact_all(target: BenchLog, topic: str, partitions: int) -> None:
    """Compact all records and delete the other blobs."""

    async def compact(log: Log) -> None:
        compactor = Compactor(log)
        for partition in range(partitions):
            while (await compactor.compact_once(TopicPartition(topic, partition), force=True)).end_offset is not None:
                pass
        await Collector(log, CollectorOptions(grace_ms=0)).collect_once()

    target.do(compact)
