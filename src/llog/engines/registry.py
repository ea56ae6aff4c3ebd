"""Every engine that there is, by its name."""

from __future__ import annotations

from llog.engines.disk.engine import DiskEngine
from llog.engines.disk.open_segments import OpenSegments
from llog.engines.object.engine import ObjectEngine
from llog.engines.rocksdb.engine import RocksEngine
from llog.engines.rocksdb.open_rocks import OpenRocks
from llog.log.catalog import DISK, OBJECT, ROCKSDB
from llog.log.engine import Engine


def all_engines(segments: OpenSegments | None = None, rocks: OpenRocks | None = None) -> dict[str, Engine]:
    """For a new `Log`. Without a directory of its own, an engine names the setting that is missing."""
    return {OBJECT: ObjectEngine(), DISK: DiskEngine(segments), ROCKSDB: RocksEngine(rocks)}
