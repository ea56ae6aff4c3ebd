"""Every engine, by its name."""

from __future__ import annotations

from llog.engines.disk.engine import DiskEngine
from llog.engines.disk.segment_pool import SegmentPool
from llog.engines.object.engine import ObjectEngine
from llog.engines.rocksdb.engine import RocksEngine
from llog.engines.rocksdb.handle import RocksHandle
from llog.log.catalog import DISK, OBJECT, ROCKSDB
from llog.log.engine import Engine


def all_engines(segments: SegmentPool | None = None, rocks: RocksHandle | None = None) -> dict[str, Engine]:
    """Return the engines of a new `Log`. An engine without its directory raises errors that name the setting."""
    return {OBJECT: ObjectEngine(), DISK: DiskEngine(segments), ROCKSDB: RocksEngine(rocks)}
