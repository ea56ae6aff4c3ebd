"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords: where partitions begin and end, and where a time is in them."""

from __future__ import annotations

from typing import Final

from llog.base.concurrency import gather_bounded
from llog.batch.columns import TIMESTAMP_MS_MAX
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import LlogError, OffsetOutOfRange
from llog.kafka.bounds import BoundsFinder
from llog.kafka.error_codes import error_code
from llog.kafka.handlers import Caller, Handlers
from llog.kafka.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from llog.kafka.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from llog.kafka.messages.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)
from llog.kafka.offsets import from_kafka, to_kafka
from llog.log.engine import Bounds
from llog.model import TopicPartition

_LATEST: Final = -1
_EARLIEST: Final = -2
_MAX_TIMESTAMP: Final = -3
_EARLIEST_LOCAL: Final = -4
_LATEST_TIERED: Final = -5
_EARLIEST_PENDING_UPLOAD: Final = -6
_NOT_FOUND: Final = (-1, -1)
_CONCURRENCY: Final = 16

_Position = tuple[int, int]
"""An offset of llog, or -1, and the time of the record there, or -1."""


class PositionHandlers:
    def __init__(self, bounds: BoundsFinder, reader: EngineReader, appender: EngineAppender) -> None:
        self._bounds = bounds
        self._reader = reader
        self._appender = appender

    def handlers(self) -> Handlers:
        return {2: self.list_offsets, 21: self.delete_records, 23: self.offset_for_leader_epoch}

    async def list_offsets(self, request: ListOffsetsRequest, _: Caller) -> ListOffsetsResponse:
        wanted = [(topic.name, each) for topic in request.topics for each in topic.partitions]
        bounds = await self._bounds.find([TopicPartition(topic, each.partition_index) for topic, each in wanted])

        async def locate(item: tuple[str, ListOffsetsPartition]) -> ListOffsetsPartitionResponse:
            topic, each = item
            tp = TopicPartition(topic, each.partition_index)
            found = bounds[tp]
            try:
                if isinstance(found, LlogError):
                    raise found
                offset, timestamp = await self._locate(tp, each.timestamp, found)
            except LlogError as error:
                return ListOffsetsPartitionResponse(partition_index=each.partition_index, error_code=error_code(error))
            return ListOffsetsPartitionResponse(
                partition_index=each.partition_index,
                offset=-1 if offset < 0 else to_kafka(offset),
                timestamp=timestamp,
            )

        answers = iter(await gather_bounded(locate, wanted, _CONCURRENCY))
        return ListOffsetsResponse(
            topics=[
                ListOffsetsTopicResponse(name=topic.name, partitions=[next(answers) for _ in topic.partitions])
                for topic in request.topics
            ]
        )

    async def _locate(self, tp: TopicPartition, timestamp: int, bounds: Bounds) -> _Position:
        if timestamp == _LATEST:
            return bounds.next_offset, -1
        if timestamp in (_EARLIEST, _EARLIEST_LOCAL):
            return bounds.log_start_offset, -1
        if timestamp == _MAX_TIMESTAMP:
            return await self._find_newest(tp, bounds)
        if timestamp in (_LATEST_TIERED, _EARLIEST_PENDING_UPLOAD):
            return _NOT_FOUND  # nothing is tiered: all records are where they always are
        return await self._find_time(tp, timestamp, bounds)

    async def _find_time(self, tp: TopicPartition, timestamp: int, bounds: Bounds) -> _Position:
        """Return the first record of this time or later."""
        offset = await self._reader.offset_for_time(tp, min(timestamp, TIMESTAMP_MS_MAX))
        if offset >= bounds.next_offset:
            return _NOT_FOUND
        record = await self._reader.read_offset(tp, offset)
        assert record.offset is not None
        return record.offset, -1 if record.timestamp is None else record.timestamp

    async def _find_newest(self, tp: TopicPartition, bounds: Bounds) -> _Position:
        """Return the first record that has the highest timestamp, by bisection from that of the last record on."""
        if bounds.log_start_offset == bounds.next_offset:
            return _NOT_FOUND
        batches = await self._reader.read(tp, bounds.next_offset - 1)
        if not batches:
            return _NOT_FOUND
        last = await self._reader.read_offset(tp, batches[-1].end_offset)
        assert last.timestamp is not None
        low, step = last.timestamp, 1
        while (await self._find_time(tp, low + step, bounds)) != _NOT_FOUND:
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if await self._find_time(tp, middle, bounds) == _NOT_FOUND:
                high = middle
            else:
                low = middle
        return await self._find_time(tp, low, bounds)

    async def offset_for_leader_epoch(
        self, request: OffsetForLeaderEpochRequest, _: Caller
    ) -> OffsetForLeaderEpochResponse:
        """Answer that every epoch lasts to the end of the log: no record that was acknowledged is ever cut off."""
        wanted = [TopicPartition(topic.topic, each.partition) for topic in request.topics for each in topic.partitions]
        bounds = await self._bounds.find(wanted)
        results = []
        for topic in request.topics:
            ends = []
            for each in topic.partitions:
                found = bounds[TopicPartition(topic.topic, each.partition)]
                if isinstance(found, LlogError):
                    ends.append(EpochEndOffset(partition=each.partition, error_code=error_code(found)))
                else:
                    ends.append(
                        EpochEndOffset(
                            partition=each.partition,
                            leader_epoch=each.leader_epoch,
                            end_offset=to_kafka(found.next_offset),
                        )
                    )
            results.append(OffsetForLeaderTopicResult(topic=topic.topic, partitions=ends))
        return OffsetForLeaderEpochResponse(topics=results)

    async def delete_records(self, request: DeleteRecordsRequest, _: Caller) -> DeleteRecordsResponse:
        wanted = [(topic.name, each) for topic in request.topics for each in topic.partitions]
        bounds = await self._bounds.find([TopicPartition(topic, each.partition_index) for topic, each in wanted])

        async def trim(item: tuple[str, DeleteRecordsPartition]) -> DeleteRecordsPartitionResult:
            topic, each = item
            tp = TopicPartition(topic, each.partition_index)
            found = bounds[tp]
            try:
                if isinstance(found, LlogError):
                    raise found
                before = found.next_offset if each.offset == -1 else from_kafka(each.offset)
                if not from_kafka(0) <= before <= found.next_offset:
                    raise OffsetOutOfRange(str(tp), before, *found)
                start = (await self._appender.trim(tp, before)).new_start
            except LlogError as error:
                return DeleteRecordsPartitionResult(
                    partition_index=each.partition_index, low_watermark=-1, error_code=error_code(error)
                )
            return DeleteRecordsPartitionResult(partition_index=each.partition_index, low_watermark=to_kafka(start))

        answers = iter(await gather_bounded(trim, wanted, _CONCURRENCY))
        return DeleteRecordsResponse(
            topics=[
                DeleteRecordsTopicResult(name=topic.name, partitions=[next(answers) for _ in topic.partitions])
                for topic in request.topics
            ]
        )
