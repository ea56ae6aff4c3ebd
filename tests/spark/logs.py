"""A log in a directory: what Spark's processes open, filled and looked at by a test from outside Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from llog.batch.columns import records_of
from llog.config.loading import load_settings
from llog.engines.object.collector import CollectionResult, Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.reader import Reader
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.errors import LlogError
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.findings import Problem
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.model import Record, TimestampType, TopicPartition

T = TypeVar("T")


class LogOnDisk:
    """Every call opens the log, does one thing and closes it."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        self.blobs = directory / "blobs"
        self.environment = environment or {"LLOG_META": f"sqlite://{directory / 'meta.sqlite'}"}
        self.options = {"meta": self.environment["LLOG_META"], "blobs": f"file://{self.blobs}"}
        self.settings = load_settings(self.options, environment=self.environment)

    def do(self, use: Callable[[Log], Awaitable[T]]) -> T:
        async def with_log() -> T:
            async with opened_log(self.settings) as log:
                return await use(log)

        return asyncio.run(with_log())

    def create(self, topic: str, partitions: int = 1, *, time: TimestampType = TimestampType.CREATE) -> None:
        self.do(lambda log: Catalog(log).create(topic, partitions, timestamp_type=time))

    def delete(self, topic: str) -> None:
        self.do(lambda log: Catalog(log).delete(topic))

    def append(self, topic: str, partition: int, *records: Record | str) -> None:
        """One append, and so one extent."""
        made = [Record(payload=record.encode()) if isinstance(record, str) else record for record in records]

        async def append(log: Log) -> None:
            [result] = await Writer(log).append([AppendGroup(topic=topic, partition=partition, records=made)])
            if isinstance(result, LlogError):
                raise result

        self.do(append)

    def records(self, topic: str, partition: int = 0) -> list[Record]:
        async def read(log: Log) -> list[Record]:
            tp, found = TopicPartition(topic, partition), list[Record]()
            start, _ = await Reader(log).bounds(tp)
            async for batch in Reader(log).iter_from(tp, start):
                found += records_of(batch.columns, batch.start_offset)
            return found

        return self.do(read)

    def payloads(self, topic: str, partitions: int = 1) -> list[str]:
        """Of all partitions, one after the other."""
        found = [record.payload for partition in range(partitions) for record in self.records(topic, partition)]
        return [(payload or b"").decode() for payload in found]

    def compact(self, topic: str, partition: int = 0) -> None:
        self.do(lambda log: Compactor(log).compact_once(TopicPartition(topic, partition), force=True))

    def collect(self) -> CollectionResult:
        """With no grace: whatever nothing holds on to is gone at once."""
        return self.do(lambda log: Collector(log, CollectorOptions(grace_ms=0)).collect_once())

    def problems(self, topic: str, partitions: int = 1) -> Sequence[Problem]:
        """What `verify` has to say against these partitions."""

        async def check(log: Log) -> list[Problem]:
            found: list[Problem] = []
            for partition in range(partitions):
                found += (await verify(log, TopicPartition(topic, partition))).problems
            return found

        return self.do(check)

    def blob_files(self, prefix: str) -> list[Path]:
        """The files of the blobs whose names start so."""
        return sorted(path for path in self.blobs.rglob("*") if path.is_file() and prefix in str(path))
