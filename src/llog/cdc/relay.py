"""The relay: moves the events of the outbox to topics of other engines, each exactly once and in order.

For one partition, a batch at a time:

1. The relay stores the cut durably: the entries of the batch, its number, and the partition's present next offset.
2. It appends the batch as the producer `outbox/<store>` (`outbox/<store>~2` … for a topic that was created again), with
   the number as sequence. Numbers are dense.
3. It drops the batch's entries and closes the cut, as one change.

At most one batch of a partition is under way, since the store has one owner and the relay makes a new cut only when the
last one is closed. After a crash or a lost answer, the relay finds the cut open and repeats step 2 with the same
entries under the same number: the partition appends them, or reports that it has them. If a power cut undoes the
closing, the cut is open again. Step 1 makes everything written before it durable, so that no event is appended whose
change could still be lost.

A partition remembers a bounded number of producers. If it has forgotten this one while a cut was open, the relay looks
for the batch's message ids in the partition from the cut's offset on. If it finds them, the batch was appended. If it
does not, and no record since then is missing, the batch was not appended, and is cut again from where the search ended.
(An append that is still on its way from a process that died cannot commit any more: it is a CAS on a state that others
have replaced since.) If records since then were removed, the outcome cannot be known: the relay holds the partition,
with an error in the log at every attempt, until ALTER TOPIC … SETTLE OUTBOX states it; meanwhile no event of the
partition is dropped or appended.

Events of a deleted topic are dropped. A topic that is deleted and created again between the relay's read of the catalog
and its append may get one batch that was meant for its predecessor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import Columns
from llog.cdc.events import decode_event, messages_of
from llog.cdc.outbox import Cut, OutboxEntry, OutboxStore
from llog.errors import (
    InconsistentReadState,
    LlogError,
    PartitionNotInitialized,
    TopicNotFound,
    UnknownProducer,
)
from llog.log.engine import AppendGroup, AppendResult, Batch, PartitionView
from llog.log.producers import Producer
from llog.model import TopicPartition
from llog.runtime import Runtime, uuid7
from llog.stores.meta import Reads

logger: Final = logging.getLogger("llog.relay")


class RelayOptions(msgspec.Struct, frozen=True, kw_only=True):
    batch_records_max: int = 1_000
    batch_bytes_max: int = 1 << 20
    partitions_at_once: int = 8
    retry_delay_ms_min: int = 50
    retry_delay_ms_max: int = 10_000


class Target(Protocol):
    """The part of `EngineReader` that the relay uses."""

    async def view(self, tp: TopicPartition) -> PartitionView: ...

    async def begin_reads(self) -> Reads: ...

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = ..., *, stop: int | None = None
    ) -> list[Batch]: ...


class Appender(Protocol):
    """The part of `LogAppender` that the relay uses."""

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]: ...


_Partition = tuple[str, int]


class Relay:
    """Runs once for each store, in the process that owns it."""

    def __init__(
        self,
        store: OutboxStore,
        appender: Appender,
        target: Target,
        runtime: Runtime,
        options: RelayOptions | None = None,
    ) -> None:
        self._store = store
        self._appender = appender
        self._target = target
        self._runtime = runtime
        self._options = options or RelayOptions()
        self._locks: dict[_Partition, asyncio.Lock] = {}
        self._concurrency = asyncio.Semaphore(self._options.partitions_at_once)
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.problems: dict[_Partition, LlogError] = {}
        """By partition: why its events wait, until they have been moved."""

    def poke(self) -> None:
        """Report new events. Any thread may call this."""
        loop = self._loop
        if loop is None:
            return  # `run` looks for events when it begins
        if loop is _running_loop():
            self._wake.set()
            return
        try:
            loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop was closed just now
            return

    async def run(self) -> None:
        """Move events as they come, until cancelled. Retries failures with growing delays."""
        self._loop = asyncio.get_running_loop()
        tasks: dict[_Partition, asyncio.Task[None]] = {}
        attempt = 0
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._wake.clear()
                    try:
                        waiting = await self._store.partitions()
                    except LlogError as error:
                        logger.error("the outbox cannot be read: %s", error)
                        await self._back_off(attempt := attempt + 1)
                        continue
                    attempt = 0
                    tasks = {partition: task for partition, task in tasks.items() if not task.done()}
                    for partition in waiting:
                        if partition not in tasks:
                            tasks[partition] = group.create_task(self._serve(partition))
                            # The task may have found the partition empty just before an event came.
                            tasks[partition].add_done_callback(lambda _: self._wake.set())
                    await self._wake.wait()
        finally:
            self._loop = None

    async def drain(self) -> None:
        """Move all present events. Raises the first error after all partitions were tried."""
        waiting = await self._store.partitions()
        results = await asyncio.gather(*(self._drain_partition(each) for each in waiting), return_exceptions=True)
        for result in results:
            if result is not None:
                raise result

    async def decide(self, directory: str, partition: int, *, appended: bool) -> bool:
        """Decide whether the open batch of a held partition was appended: it is dropped, or else appended by a new
        producer.

        Returns False, and does nothing, if the partition is not held.
        """
        async with self._lock((directory, partition)):
            cut = await self._store.cut(directory, partition)
            problem = self.problems.get((directory, partition))
            if cut is None or not cut.open or not isinstance(problem, UnknownProducer | InconsistentReadState):
                return False
            if appended:
                await self._store.finish(directory, partition, cut)
            else:
                found = await self._target.view(TopicPartition(topic_of(directory), partition))
                new = f"{await self._producer(directory)}/{uuid7(self._runtime.now_ms(), self._runtime.random())}"
                again = msgspec.structs.replace(cut, producer=new, since=found.bounds.next_offset)
                await self._store.put_cut(directory, partition, again)
            del self.problems[directory, partition]
            return True

    def problem(self, directory: str) -> str | None:
        """Return why events for a topic wait; None if none do."""
        found = [str(error) for (each, _), error in sorted(self.problems.items()) if each == directory]
        return found[0] if found else None

    async def _serve(self, partition: _Partition) -> None:
        """Move all events of a partition, then return."""
        attempt = 0
        while True:
            try:
                if not await self._move(partition):
                    return
                attempt = 0
            except LlogError as error:
                attempt += 1
                logger.error(
                    "events for %s/%d wait in the outbox (attempt %d): [%s] %s", *partition, attempt, error.code, error
                )
                await self._back_off(attempt)

    async def _drain_partition(self, partition: _Partition) -> None:
        while await self._move(partition):
            pass

    async def _move(self, partition: _Partition) -> bool:
        """Move one batch; return whether another may follow."""
        try:
            async with self._concurrency, self._lock(partition):
                has_more = await self._move_batch(*partition)
        except LlogError as error:
            self.problems[partition] = error
            raise
        self.problems.pop(partition, None)
        return has_more

    async def _move_batch(self, directory: str, partition: int) -> bool:
        tp = TopicPartition(topic_of(directory), partition)
        reads = await self._target.begin_reads()
        found = await self._view_in(tp, directory)
        if found is None:
            await reads.confirm()  # a stale state may not show the topic yet
            logger.warning("topic %s was deleted: events for its partition %d are dropped", tp.topic, partition)
            await self._store.drop(directory, partition)
            return False
        cut = await self._store.cut(directory, partition)
        if cut is not None and cut.open:
            entries = await self._store.batch(directory, partition, cut)
        else:
            after, number = (0, 0) if cut is None else (cut.through, cut.number + 1)
            producer = await self._producer(directory) if cut is None else cut.producer
            options = self._options
            entries = await self._store.entries(
                directory, partition, after, options.batch_records_max, options.batch_bytes_max
            )
            if not entries:
                return False
            # Nothing was ever appended under this number, so the present next offset is right.
            since, through = found.bounds.next_offset, entries[-1].sequence
            cut = Cut(producer=producer, number=number, after=after, through=through, since=since, open=True)
            if not await self._store.put_cut(directory, partition, cut):
                return False
        try:
            await self._append(tp, cut, entries)
        except UnknownProducer as error:
            logger.error("%s: looking for the batch in the partition", error)
            search = await self._find(tp, cut, entries)
            if not search.is_complete and not search.is_found:
                raise UnknownProducer(
                    f"{tp} has forgotten the relay, and records from offset {cut.since} on were removed: it is unknown "
                    f"whether events {cut.after + 1} to {cut.through} of the outbox were appended. They wait for "
                    f"{_settle_statement(tp)}"
                ) from error
            if not search.is_found:
                again = msgspec.structs.replace(cut, since=search.searched_to)
                return await self._store.put_cut(directory, partition, again)
        await self._store.finish(directory, partition, cut)
        return True

    async def _append(self, tp: TopicPartition, cut: Cut, entries: Sequence[OutboxEntry]) -> None:
        producer = Producer(id=cut.producer, sequence=cut.number, since=cut.since)
        group = AppendGroup(topic=tp.topic, partition=tp.partition, records=_columns(entries), producer=producer)
        [result] = await self._appender.append([group])
        if isinstance(result, LlogError):
            raise result
        count = result.end_offset - result.start_offset + 1
        if count != len(entries):
            raise InconsistentReadState(
                f"{tp} has {count} records as batch {cut.number} of {producer.id}, and the outbox has "
                f"{len(entries)}: was an older copy of the RocksDB directory restored? Compare both, then run "
                f"{_settle_statement(tp)}"
            )

    async def _producer(self, directory: str) -> str:
        """Return the relay's producer id, which differs for each incarnation of a topic: a deleted incarnation may
        still remember its producers.
        """
        return "~".join((f"outbox/{await self._store.name()}", *directory.split("~")[1:]))

    async def _view_in(self, tp: TopicPartition, directory: str) -> PartitionView | None:
        """Return the partition's view; None if its topic was deleted, or created again since.

        A missing partition of an existing topic is an error, and its events wait.
        """
        try:
            try:
                found = await self._target.view(tp)
            except PartitionNotInitialized:
                if (await self._target.view(TopicPartition(tp.topic, 0))).directory == directory:
                    raise
                return None  # the topic that has the name now has fewer partitions
        except TopicNotFound:
            return None
        return found if found.directory == directory else None

    async def _find(self, tp: TopicPartition, cut: Cut, entries: Sequence[OutboxEntry]) -> _Search:
        """Look for the batch in the partition from the offset of its cut on. The batch was appended as a whole or not
        at all.
        """
        event = decode_event(entries[0].headers)
        if event is None:
            raise InconsistentReadState(f"outbox entry {entries[0].sequence} for {tp} has no message id")
        wanted = pa.scalar(event.message_id, pa.int64())
        bounds = (await self._target.view(tp)).bounds
        position = max(cut.since, bounds.log_start_offset)
        is_complete = position == cut.since
        while position < bounds.next_offset:
            batches = await self._target.read(tp, position, stop=bounds.next_offset)
            if not batches:
                is_complete = False
                break
            for batch in batches:
                is_complete &= batch.start_offset <= position
                if pc.any(pc.equal(messages_of(batch)["message_id"], wanted)).as_py():
                    return _Search(is_found=True, is_complete=is_complete, searched_to=batch.end_offset + 1)
                position = batch.end_offset + 1
        return _Search(is_found=False, is_complete=is_complete, searched_to=position)

    async def _back_off(self, attempt: int) -> None:
        options = self._options
        ceiling = min(options.retry_delay_ms_max, options.retry_delay_ms_min << min(attempt, 20))
        await self._runtime.sleep(self._runtime.random().uniform(ceiling / 2, ceiling) / 1000)

    def _lock(self, partition: _Partition) -> asyncio.Lock:
        return self._locks.setdefault(partition, asyncio.Lock())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Search(NamedTuple):
    is_found: bool
    is_complete: bool
    """Whether no record was missing in the searched range."""
    searched_to: int


def topic_of(directory: str) -> str:
    """Return the name of the topic whose directory this is: names have no `~`."""
    return directory.partition("~")[0]


def _columns(entries: Sequence[OutboxEntry]) -> Columns:
    def binary(values: list[bytes]) -> Any:
        return pa.array(values, pa.binary())

    return Columns(
        values=binary([entry.payload for entry in entries]),
        keys=binary([entry.key for entry in entries]),
        timestamps=pa.array([entry.timestamp_ms for entry in entries], pa.int64()),
        headers=binary([entry.headers for entry in entries]),
        append_runs=(),
    )


def _settle_statement(tp: TopicPartition) -> str:
    return f'ALTER TOPIC "{tp.topic}" SETTLE OUTBOX PARTITION {tp.partition} AS APPENDED (or AS MISSING)'
