"""`llog consume --group`: a member of a consumer group that prints what it is given, and acknowledges what was
printed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from llog.batch.columns import headers_in
from llog.cli.common import note, partitions_of
from llog.cli.consume.command import Format, start_offset, write_out
from llog.client.consumer import renamed
from llog.engines.routing import EngineReader
from llog.errors import LlogError, StaleMember
from llog.groups.acks import warnings_of
from llog.groups.consumption import Consuming
from llog.groups.groups import Groups
from llog.groups.records import GroupMode
from llog.groups.requests import ConsumeCall
from llog.model import Record, TopicPartition

if TYPE_CHECKING:
    from llog.log.log import Log

Mode = Literal["claimed", "assigned"]

_WAIT_MS: Final = 30_000
_BATCH_RECORDS: Final = 1_000
_BATCH_BYTES: Final = 4 << 20


class GroupPrinter:
    """One member. What it was given and did not print goes back to the group when it ends, however it ends."""

    def __init__(self, log: Log, topic: str, group: str, mode: Mode, partition: int | None, write: Format) -> None:
        self._log = log
        self._reader = EngineReader(log)
        self._groups = Groups(log, self._reader)
        self._consuming = Consuming(log, self._reader)
        self._topic, self._group, self._mode, self._partition = topic, group, mode, partition
        self._member = renamed(f"consume-{os.getpid()}")
        self._write = write

    async def begin(self, where: str) -> dict[int, int]:
        """Gives the group a position where it has none; returns the next offset of each partition."""
        ends: dict[int, int] = {}
        # Partition 0 comes last: see `Delivering`.
        for tp in reversed(await partitions_of(self._log, self._topic, self._partition)):
            bounds = await self._reader.bounds(tp)
            ends[tp.partition] = bounds.next_offset
            position = await self._groups.position(self._group, tp)
            if position is None:
                position = await start_offset(self._reader, tp, where)
                await self._groups.begin(self._group, tp, position, mode=GroupMode(self._mode))
            elif position < bounds.log_start_offset:
                note(f"llog: {tp}: offsets {position} to {bounds.log_start_offset - 1} are gone, by retention")
        return ends

    async def print_all(self, where: str, max_records: int | None, *, follow: bool) -> None:
        """Prints what there is, up to the end that there was, or goes on until it is cancelled, or has printed
        enough.
        """
        ends = await self.begin(where)
        left = max_records
        try:
            while left != 0:
                found = await self._consuming.consume(
                    ConsumeCall(
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
                    offset >= ends.get(partition, offset + 1) for partition, offset in _places(found)
                ):
                    return
        finally:
            if self._mode == "assigned":
                await self._consuming.leave(self._topic, self._group, self._member)

    async def _print(self, messages: pa.Table) -> None:
        places: dict[int, list[int]] = {}
        for partition, offset in _places(messages):
            places.setdefault(partition, []).append(offset)
        try:
            write_out([self._write(tp, record) for tp, record in _records(messages)])
            for partition, offsets in places.items():
                await self._acknowledge(partition, max(offsets))
        except BaseException:
            for partition, offsets in places.items():
                await self._give_back(partition, min(offsets), max(offsets))
            raise

    async def _acknowledge(self, partition: int, upto: int) -> None:
        try:
            acked = await self._consuming.ack(self._topic, self._group, {partition: upto}, self._member)
        except StaleMember:
            note(
                f"llog: {TopicPartition(self._topic, partition)} went to another member before offsets up to "
                f"{upto} were acknowledged: "
                "they are delivered again, there"
            )
            return
        for warning in warnings_of(self._topic, acked):
            note(f"llog: {warning}")

    async def _give_back(self, partition: int, start: int, end: int) -> None:
        tp = TopicPartition(self._topic, partition)
        try:
            await self._groups.give_back(self._group, tp, self._member, [(start, end)])
        except LlogError:
            pass  # delivered again when its time is over


def _places(messages: pa.Table) -> Iterator[tuple[int, int]]:
    """Partition and offset of each."""
    return zip(messages.column("partition").to_pylist(), messages.column("offset").to_pylist(), strict=True)


def _records(messages: pa.Table) -> Iterator[tuple[TopicPartition, Record]]:
    names = ("topic", "partition", "offset", "key", "payload")
    columns = [messages.column(name).to_pylist() for name in names]
    times = messages.column("ts").cast(pa.int64()).to_pylist()
    headers = headers_in(messages.column("headers"))
    for topic, partition, offset, key, payload, ms, pairs in zip(*columns, times, headers, strict=True):
        record = Record(payload=payload, key=key, timestamp=ms, headers=pairs, offset=offset)
        yield TopicPartition(topic, partition), record


async def known_mode(log: Log, topic: str, group: str) -> Mode:
    """How the group shares the topic out; by claims, if it does not yet."""
    return "assigned" if await Groups(log).mode(group, topic) is GroupMode.ASSIGNED else "claimed"
