"""Reads through a broker (option `broker`): tasks are ranges of offsets, fetched as Arrow over HTTP. So any engine's
topics can be read, those on the disk of another machine, too; `meta` and `blobs` are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from llog.batch.columns import HEADERS_TYPE
from llog.errors import DataLoss, OffsetOutOfRange, PartitionNotInitialized, StoreUnavailable, TopicNotFound
from llog.log.records import Topic
from llog.model import TimestampType
from llog.spark.broker_client import BrokerLog, get
from llog.spark.fetcher import ROWS_PER_BATCH_MAX
from llog.spark.offsets import Range, existing_topics, lose

FETCH_BYTES: Final = 16 << 20
"""The most that a broker hands out at a time."""
_ARROW: Final = "application/vnd.apache.arrow.stream"
_TIME: Final = pa.timestamp("us", tz="UTC")


class BrokerTask(InputPartition):  # type: ignore[misc]
    """What one Spark task reads through a broker."""

    def __init__(self, broker: str, ranges: Sequence[tuple[Topic, Range]]) -> None:
        super().__init__(None)
        self.broker = broker
        self.ranges = tuple(ranges)


async def plan_broker_tasks(
    log: BrokerLog, ranges: Sequence[Range], topics: Mapping[str, Topic], *, min_tasks: int
) -> list[BrokerTask]:
    """A task for each range, or more where more are wanted."""
    now = await existing_topics(log, sorted(topics))
    for name, topic in topics.items():
        if name not in now or now[name].incarnation != topic.incarnation:
            raise DataLoss(f"topic {name!r} was deleted while its read was planned: start the read again")
    wanted = [each for each in ranges if each.start < each.stop]
    while wanted and len(wanted) < min_tasks:
        tp, start, stop = longest = max(wanted, key=lambda each: each.stop - each.start)
        if stop - start < 2:
            break
        wanted.remove(longest)
        wanted += [Range(tp, start, (start + stop) // 2), Range(tp, (start + stop) // 2, stop)]
    tasks = [BrokerTask(log.broker, [(topics[each.tp.topic], each)]) for each in sorted(wanted)]
    # Where there is nothing to read, Spark would start a task of its own making.
    return tasks or [BrokerTask(log.broker, [])]


def read_broker_task(
    task: BrokerTask, columns: tuple[str, ...], *, client_name: str, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    for topic, wanted in task.ranges:
        for batch in _fetched(task.broker, client_name, topic, wanted, fail_on_data_loss):
            made = [_column(batch, name, topic, wanted.tp.partition) for name in columns]
            yield pa.RecordBatch.from_arrays(made, names=list(columns))


def _fetched(
    broker: str, client_name: str, topic: Topic, wanted: Range, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """The broker's batches of this range; what is gone is lost (`lose`)."""
    tp, position, stop = wanted
    path = f"/topics/{quote(tp.topic)}/partitions/{tp.partition}/records"
    while position < stop:
        query = {"offset": position, "stop": stop, "max_bytes": FETCH_BYTES}
        what = f"{stop - position} records of {tp}, offsets {position} to {stop - 1},"
        try:
            answer = get(broker, path, query, client_name=client_name, accept=_ARROW)
        except OffsetOutOfRange as error:
            lose(f"{what} are not all there: {error}", fail=fail_on_data_loss)
            position = max(position + 1, min(error.log_start_offset, stop)) if position < error.next_offset else stop
            continue
        except (TopicNotFound, PartitionNotInitialized) as error:
            lose(f"{what} are gone by deletion: {error}", fail=fail_on_data_loss)
            return
        if answer.headers["llog-topic-directory"] != topic.directory:
            lose(f"{what} are gone: the topic was deleted and created again", fail=fail_on_data_loss)
            return
        following = int(answer.headers["llog-next-fetch-offset"])
        if position >= int(answer.headers["llog-next-offset"]):
            lose(f"{what} are beyond its next offset: was it restored?", fail=fail_on_data_loss)
            return
        if following <= position:
            raise StoreUnavailable(f"the broker at {broker} has nothing of {tp} at offset {position}, below its end")
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
