"""`llog consume --group`: a member of a consumer group that prints records and then acknowledges them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from llog.batch.columns import decode_arrow_headers
from llog.cli.common import note, partitions_of
from llog.cli.consume.command import Format, start_offset, write_out
from llog.client.consumer import new_member_name
from llog.engines.routing import EngineReader
from llog.errors import LlogError, StaleMember
from llog.groups.acks import ack_warnings
from llog.groups.dispatcher import Dispatcher
from llog.groups.groups import Groups
from llog.groups.options import ConsumeOptions
from llog.groups.records import GroupMode
from llog.model import Record, TopicPartition

if TYPE_CHECKING:
    from llog.log.log import Log

Mode = Literal["claimed", "assigned"]

_WAIT_MS: Final = 30_000
_BATCH_RECORDS: Final = 1_000
_BATCH_BYTES: Final = 4 << 20


class GroupPrinter:
    """One member of a group. However it ends, it gives the records that it has not printed back to the group."""

    def __init__(self, log: Log, topic: str, group: str, mode: Mode, partition: int | None, write: Format) -> None:
        self._log = log
        self._reader = EngineReader(log)
        self._groups = Groups(log, self._reader)
        self._dispatcher = Dispatcher(log, self._reader)
        self._topic, self._group, self._mode, self._partition = topic, group, mode, partition
        self._member = new_member_name(f"consume-{os.getpid()}")
        self._write = write

    async def begin(self, where: str) -> dict[int, int]:
        """Give the group a position in partitions where it has none, and return the next offset of each partition."""
        ends: dict[int, int] = {}
        # Partition 0 comes last: see `Groups.begin`.
        for tp in reversed(await partitions_of(self._log, self._topic, self._partition)):
            bounds = await self._reader.bounds(tp)
            ends[tp.partition] = bounds.next_offset
            partition = await self._groups.partition(self._group, tp)
            position = await partition.position()
            if position is None:
                position = await start_offset(self._reader, tp, where)
                await partition.begin(position, mode=GroupMode(self._mode))
            elif position < bounds.log_start_offset:
                note(f"llog: {tp}: offsets {position} to {bounds.log_start_offset - 1} are gone, by retention")
        return ends

    async def print_all(self, where: str, max_records: int | None, *, follow: bool) -> None:
        """Print records up to the end at the time of the call, or with `follow` until cancelled.

        Stops after `max_records` in either case.
        """
        ends = await self.begin(where)
        left = max_records
        try:
            while left != 0:
                found = await self._dispatcher.consume(
                    ConsumeOptions(
                        topic=self._topic,
                        group=self._group,
                        member=self._member,
                        partition=self._partition,
                        limit=_BATCH_RECORDS if left is None else min(left, _BATCH_RECORDS),
                        wait_ms=_WAIT_MS if follow else 0,
                        mode=self._mode,
                        max_bytes=_BATCH_BYTES,
                    )
                )
                await self._print(found)
                if left is not None:
                    left -= found.num_rows
                if not follow and all(
                    offset >= ends.get(partition, offset + 1) for partition, offset in _offsets(found)
                ):
                    return
        finally:
            if self._mode == "assigned":
                await self._dispatcher.leave(self._topic, self._group, self._member)

    async def _print(self, messages: pa.Table) -> None:
        offsets_of: dict[int, list[int]] = {}
        for partition, offset in _offsets(messages):
            offsets_of.setdefault(partition, []).append(offset)
        try:
            write_out([self._write(tp, record) for tp, record in _records(messages)])
            for partition, offsets in offsets_of.items():
                await self._acknowledge(partition, max(offsets))
        except BaseException:
            for partition, offsets in offsets_of.items():
                await self._give_back(partition, min(offsets), max(offsets))
            raise

    async def _acknowledge(self, partition: int, upto: int) -> None:
        try:
            acked = await self._dispatcher.ack(self._topic, self._group, {partition: upto}, self._member)
        except StaleMember:
            note(
                f"llog: {TopicPartition(self._topic, partition)} went to another member before offsets up to {upto} "
                "were acknowledged: that member gets them again"
            )
            return
        for warning in ack_warnings(self._topic, acked):
            note(f"llog: {warning}")

    async def _give_back(self, partition: int, start: int, end: int) -> None:
        tp = TopicPartition(self._topic, partition)
        try:
            await (await self._groups.partition(self._group, tp)).give_back(self._member, [(start, end)])
        except LlogError:
            pass  # the records are delivered again after the deadline of their claim


def _offsets(messages: pa.Table) -> Iterator[tuple[int, int]]:
    """Return the partition and offset of each record."""
    return zip(messages.column("partition").to_pylist(), messages.column("offset").to_pylist(), strict=True)


def _records(messages: pa.Table) -> Iterator[tuple[TopicPartition, Record]]:
    names = ("topic", "partition", "offset", "key", "payload")
    columns = [messages.column(name).to_pylist() for name in names]
    times = messages.column("ts").cast(pa.int64()).to_pylist()
    headers = decode_arrow_headers(messages.column("headers"))
    for topic, partition, offset, key, payload, ms, pairs in zip(*columns, times, headers, strict=True):
        record = Record(payload=payload, key=key, timestamp=ms, headers=pairs, offset=offset)
        yield TopicPartition(topic, partition), record


async def current_mode(log: Log, topic: str, group: str) -> Mode:
    """Return how the group divides the topic; "claimed" if it has not consumed the topic yet."""
    return "assigned" if await Groups(log).mode(group, topic) is GroupMode.ASSIGNED else "claimed"
