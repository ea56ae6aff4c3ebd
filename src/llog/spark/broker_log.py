"""Reads through a broker (option `broker`): tasks fetch ranges of offsets as Arrow over HTTP.

A broker serves topics of every engine, including those on its own disk; `meta` and `blobs` are not needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from llog.batch.columns import HEADERS_TYPE
from llog.errors import (
    ConfigurationError,
    OffsetOutOfRange,
    PartitionNotInitialized,
    StoreUnavailable,
    TopicNotFound,
)
from llog.log.engine import Bounds
from llog.log.records import Topic
from llog.model import TimestampType, TopicPartition
from llog.runtime import SystemRuntime
from llog.spark.fetcher import ROWS_PER_BATCH_MAX
from llog.spark.offsets import check_unchanged, lose
from llog.spark.options import ReadOptions
from llog.spark.source_log import Range
from llog.transport import ARROW, BrokerClient

T = TypeVar("T")

FETCH_BYTES: Final = 16 << 20
"""The most bytes that a broker returns in one answer."""
_ATTEMPTS: Final = 6
_TIME: Final = pa.timestamp("us", tz="UTC")
_clients: dict[tuple[str, str], BrokerClient] = {}


class _PartitionBounds(msgspec.Struct):
    partition: int
    log_start_offset: int
    next_offset: int


class _TopicDescription(msgspec.Struct):
    bounds: list[_PartitionBounds]


class _Topics(msgspec.Struct):
    topics: list[Topic]


class _Offset(msgspec.Struct):
    offset: int


class BrokerTask(InputPartition):  # type: ignore[misc]
    """See `SourceTask`."""

    def __init__(self, broker: str, ranges: Sequence[tuple[Topic, Range]]) -> None:
        super().__init__(None)
        self.broker = broker
        self.ranges = tuple(ranges)

    def read(self, options: ReadOptions, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        client = broker_client(self.broker, options.settings.client_name)
        for topic, wanted in self.ranges:
            for batch in _fetch(client, topic, wanted, fail_on_data_loss=options.fail_on_data_loss):
                arrays = [_column(batch, name, topic, wanted.tp.partition) for name in columns]
                yield pa.RecordBatch.from_arrays(arrays, names=list(columns))


class BrokerLog:
    """See `SourceLog`. Nothing is pinned: a broker finds a record wherever it is stored at the time of the read."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    async def topic(self, name: str) -> Topic:
        return await self._get(Topic, f"/topics/{quote(name)}")

    async def topics(self) -> list[Topic]:
        return (await self._get(_Topics, "/topics")).topics

    def check_readable(self, topic: Topic) -> None:
        """A broker reads topics of every engine."""

    async def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        found: dict[TopicPartition, Bounds] = {}
        for name in sorted({tp.topic for tp in partitions}):
            description = await self._get(_TopicDescription, f"/topics/{quote(name)}")
            found |= {
                TopicPartition(name, each.partition): Bounds(each.log_start_offset, each.next_offset)
                for each in description.bounds
            }
        missing = [tp for tp in partitions if tp not in found]
        if missing:
            raise PartitionNotInitialized(f"topic {missing[0].topic!r} has no partition {missing[0].partition}")
        return {tp: found[tp] for tp in partitions}

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int) -> int:
        path = f"/topics/{quote(tp.topic)}/partitions/{tp.partition}/offset"
        return (await self._get(_Offset, path, timestamp_ms=timestamp_ms)).offset

    def now_ms(self) -> int:
        return SystemRuntime().now_ms()

    async def pin(self, owner: str) -> str | None:
        return None

    async def release(self, pin: str | None) -> None:
        pass

    async def plan(
        self, ranges: Sequence[Range], topics: Mapping[str, Topic], options: ReadOptions, *, pin: str | None
    ) -> list[BrokerTask]:
        """Return a task for each range, or more if `minPartitions` is higher."""
        await check_unchanged(self.topic, topics)
        wanted = [each for each in ranges if each.start < each.stop]
        while wanted and len(wanted) < options.min_partitions:
            tp, start, stop = longest = max(wanted, key=lambda each: each.stop - each.start)
            if stop - start < 2:
                break
            wanted.remove(longest)
            wanted += [Range(tp, start, (start + stop) // 2), Range(tp, (start + stop) // 2, stop)]
        tasks = [BrokerTask(self._client.url, [(topics[each.tp.topic], each)]) for each in sorted(wanted)]
        return tasks or [BrokerTask(self._client.url, [])]

    async def cut_by_bytes(
        self,
        starts: Mapping[TopicPartition, int],
        ends: dict[TopicPartition, int],
        bytes_max: int,
        *,
        fail_on_data_loss: bool,
    ) -> dict[TopicPartition, int]:
        _refuse("maxBytesPerTrigger")

    async def commit(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        _refuse("groupIdForCommit")

    async def _get(self, kind: type[T], path: str, **query: int) -> T:
        return await asyncio.to_thread(self._client.get_json, kind, path, query)


def broker_client(broker: str, client_name: str) -> BrokerClient:
    """Return the client that this process keeps for a broker: Spark reuses its processes."""
    client = BrokerClient(broker, client_name=client_name, attempts=_ATTEMPTS)
    return _clients.setdefault((broker, client_name), client)


def _fetch(client: BrokerClient, topic: Topic, wanted: Range, *, fail_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
    """Yield the broker's batches of this range. Missing records are reported by `lose`."""
    tp, position, stop = wanted
    path = f"/topics/{quote(tp.topic)}/partitions/{tp.partition}/records"
    while position < stop:
        query = {"offset": position, "stop": stop, "max_bytes": FETCH_BYTES}
        records = f"{stop - position} records of {tp}, offsets {position} to {stop - 1},"
        try:
            answer = client.get(path, query, accept=ARROW)
        except OffsetOutOfRange as error:
            lose(f"{records} are not all there: {error}", fail=fail_on_data_loss)
            position = max(position + 1, min(error.log_start_offset, stop)) if position < error.next_offset else stop
            continue
        except (TopicNotFound, PartitionNotInitialized) as error:
            lose(f"{records} are gone by deletion: {error}", fail=fail_on_data_loss)
            return
        if answer.headers["llog-topic-directory"] != topic.directory:
            lose(f"{records} are gone: the topic was deleted and created again", fail=fail_on_data_loss)
            return
        if position >= int(answer.headers["llog-next-offset"]):
            lose(
                f"{records} are beyond its next offset: was the metadata restored from a backup?",
                fail=fail_on_data_loss,
            )
            return
        following = int(answer.headers["llog-next-fetch-offset"])
        if following <= position:
            raise StoreUnavailable(
                f"the broker at {client.url} returned nothing of {tp} at offset {position}, which is below its end"
            )
        with pa.ipc.open_stream(answer.body) as stream:
            for batch in stream:
                for first in range(0, batch.num_rows, ROWS_PER_BATCH_MAX):
                    yield batch.slice(first, ROWS_PER_BATCH_MAX)
        position = following


def _column(batch: pa.RecordBatch, name: str, topic: Topic, partition: int) -> Any:
    count = batch.num_rows
    match name:
        case "topic":
            return pa.repeat(pa.scalar(topic.name, pa.string()), count)
        case "partition":
            return pa.array(np.full(count, partition, dtype=np.int32))
        case "timestamp":
            return batch.column(name).cast(_TIME)
        case "timestampType":
            is_append = topic.timestamp_type is TimestampType.APPEND
            return pa.array(np.full(count, int(is_append), dtype=np.int32))
        case "headers":
            return batch.column(name).cast(HEADERS_TYPE)
        case _:
            return batch.column(name)


def _refuse(option: str) -> NoReturn:
    raise ConfigurationError(f"option {option} is not for a read through a broker: leave it or broker out")
