"""Divides the rows of a DataFrame by partition: whole batches at a time, without a loop over rows."""

from __future__ import annotations

from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import Columns, byte_size, concat, headers_from_arrow
from llog.batch.partitioning import partitions_for_keys
from llog.errors import InvalidArgument, WrongEngine
from llog.log.catalog import OBJECT, Catalog
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.spark.options import WriteOptions

_RECORD_OVERHEAD_BYTES = 8


class RowGroups:
    """The rows that wait to be uploaded, by partition and in the order of their arrival."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._topics: dict[str, Topic] = {}
        self._waiting: dict[TopicPartition, list[Columns]] = {}
        self.size = 0
        """The approximate number of waiting bytes."""

    async def add(self, log: Log, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        columns = {name.lower(): batch.column(index) for index, name in enumerate(batch.schema.names)}
        rows, named = _columns(columns), columns.get("partition")
        if self._options.topic is not None:
            await self._add_topic(log, self._options.topic, rows, named)
            return
        names = columns["topic"]
        if names.null_count:
            raise InvalidArgument("a row has no topic: its column 'topic' is null, and the option topic is not set")
        for name in pc.unique(names).to_pylist():
            chosen = pa.array(np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False)))
            await self._add_topic(log, name, _take(rows, chosen), None if named is None else named.take(chosen))

    def take(self) -> list[tuple[TopicPartition, Columns]]:
        """Remove and return all waiting rows."""
        groups = [(tp, concat(parts)) for tp, parts in sorted(self._waiting.items())]
        self._waiting, self.size = {}, 0
        return groups

    async def _add_topic(self, log: Log, name: str, rows: Columns, named: pa.Array | None) -> None:
        topic = await self._topic(log, name)
        partitions = _partitions(topic, rows, named, log.runtime.random())
        order = np.argsort(partitions, kind="stable")
        bounds = np.searchsorted(partitions[order], np.arange(topic.partitions + 1))
        for partition in np.unique(partitions):
            chosen = pa.array(order[bounds[partition] : bounds[partition + 1]])
            part = rows if len(chosen) == rows.count else _take(rows, chosen)
            self._waiting.setdefault(TopicPartition(name, int(partition)), []).append(part)
            self.size += byte_size(part) + _RECORD_OVERHEAD_BYTES * part.count

    async def _topic(self, log: Log, name: str) -> Topic:
        if name not in self._topics:
            self._topics[name] = await get_or_create_topic(log, name, self._options.create_topic_partitions)
        return self._topics[name]


def _partitions(
    topic: Topic, rows: Columns, named: pa.Array | None, chance: Random
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the partition of each row: that of its column `partition`, else one by its key.

    All rows without either go to one random partition.
    """
    chosen = np.full(rows.count, -1, dtype=np.int64)
    if rows.keys is not None:
        chosen = partitions_for_keys(rows.keys, topic.partitions)
    chosen[chosen < 0] = chance.randrange(topic.partitions)
    if named is None:
        return chosen
    wanted = named.fill_null(-1).to_numpy(zero_copy_only=False)
    beyond = wanted[(wanted >= topic.partitions) | (wanted < -1)]
    if len(beyond):
        raise InvalidArgument(
            f"a row names partition {beyond[0]} of topic {topic.name!r}, which has {topic.partitions}"
        )
    return np.where(wanted >= 0, wanted, chosen).astype(np.int64)


async def get_or_create_topic(log: Log, name: str, partitions: int | None) -> Topic:
    """Return the topic; create it with this many partitions if it does not exist. With None, raise `TopicNotFound`."""
    catalog = Catalog(log)
    topic = await (catalog.get(name) if partitions is None else catalog.get_or_create(name, partitions))
    if topic.engine != OBJECT:
        raise WrongEngine(
            f"topic {name!r} is of engine {topic.engine!r}, which Spark can read but not write: write to a topic "
            f"of engine {OBJECT!r}, or "
            "produce to this one over HTTP"
        )
    return topic


def _columns(columns: dict[str, pa.Array]) -> Columns:
    key, timestamp, headers = columns.get("key"), columns.get("timestamp"), columns.get("headers")
    times = None
    if timestamp is not None and timestamp.null_count < len(timestamp):
        # In UTC: Spark hands over times in the session's zone, where the hour that a clock is set back by is ambiguous.
        times = pc.floor_temporal(timestamp.cast(pa.timestamp("us", tz="UTC")), unit="millisecond")
        times = times.cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())
    keys = None if key is None or key.null_count == len(key) else key.cast(pa.binary())
    return Columns(
        values=columns["value"].cast(pa.binary()),
        keys=keys,
        timestamps=times,
        headers=None if headers is None else headers_from_arrow(headers),
        append_runs=(),
    )


def _take(rows: Columns, indexes: pa.Array) -> Columns:
    return Columns(
        values=rows.values.take(indexes),
        keys=None if rows.keys is None else rows.keys.take(indexes),
        timestamps=None if rows.timestamps is None else rows.timestamps.take(indexes),
        headers=None if rows.headers is None else rows.headers.take(indexes),
        append_runs=(),
    )
