"""A store with a topic, and a clock that only tests move."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llog.engines.rocksdb.logs import RocksLogs
from llog.engines.rocksdb.store import RocksStore
from llog.log.producers import Producer
from llog.runtime import SystemRuntime

START_MS = 1_700_000_000_000


class Clock(SystemRuntime):
    def __init__(self) -> None:
        super().__init__()
        self.now = START_MS

    def now_ms(self) -> int:
        return self.now


class World:
    """A store with one topic, `t`, that can be closed and opened again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()
        self.open()
        self.logs.create("t", b"{}")

    def open(self) -> None:
        self.store = RocksStore.open(self.directory)
        self.logs = RocksLogs(self.store, self.clock)

    def reopen(self) -> None:
        self.close()
        self.open()

    def close(self) -> None:
        self.logs.close()
        self.store.close()

    def append(
        self,
        *values: bytes | None,
        partition: int = 0,
        keys: Sequence[bytes | None] | None = None,
        producer: Producer | None = None,
        timestamps: Sequence[int] | None = None,
    ) -> int:
        """The first offset."""
        with self.logs.stage() as staged:
            done = staged.append(
                "t",
                partition,
                values,
                keys=keys,
                now_ms=self.clock.now,
                producer=producer,
                timestamps=timestamps,
                what="t",
            )
            staged.commit(sync=False)
        return done.start

    def records(self, partition: int = 0) -> dict[int, bytes | None]:
        start, stop = self.logs.bounds("t", partition)
        found: dict[int, bytes | None] = {}
        while start < stop:
            runs = self.logs.read("t", partition, start, 100)
            for first, columns in runs:
                found.update(enumerate(columns.values.to_pylist(), first))
            start = runs[-1][0] + runs[-1][1].count
        return found


def damage(directory: Path) -> None:
    """Damages one block in the middle of the largest file of a RocksDB that is closed."""
    file = max((directory / "db").glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
