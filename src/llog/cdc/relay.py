"""The relay: moves the events of the outbox to topics of other engines, each exactly once and in order.

For one partition, a batch at a time:

1. The cut is put durably: which entries the batch is, its number, and the partition's next offset as it is now.
2. The batch is appended by the producer `outbox/<store>` (`outbox/<store>~2` … to a topic that was created again) with
   the number as sequence. Numbers are dense.
3. The batch's entries are dropped and the cut is closed, as one change.

At most one batch of a partition is under way, for the store has one owner, and a new cut is made only when the last one
is closed. Whoever finds an open cut, after a crash or an answer that was lost, does step 2 again with the same entries
under the same number: the partition appends them, or says that it has. If a power cut takes the closing back, the cut
is open again. Step 1 makes durable what was written before it, so no event is appended whose change could still be
lost.

A partition remembers a bounded number of producers. If it has forgotten this one while a cut was open, the batch's
message ids are looked for in the partition from the cut's offset on: found, the batch was appended; not found though
every record since is there, it was not, and is cut again from where the search ended. (An append that is still on its
way from a process that died cannot land any more: it was a CAS on a state that others have replaced since.) If records
since have been removed, nobody can tell: the partition is held, with an error in the log every time it is tried, until
ALTER TOPIC … SETTLE OUTBOX says which; no event of it is dropped or appended meanwhile.

Events of a topic that was deleted are dropped. A topic that is deleted and created again between the look at the
catalog and the append may get one batch that was meant for its predecessor.
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
from llog.cdc.events import event_in, messages_of
from llog.cdc.outbox import Cut, Entry, OutboxStore
from llog.engines.port import AppendResult, Batch, Group, Look
from llog.errors import (
    InconsistentReadState,
    LlogError,
    PartitionNotInitialized,
    TopicNotFound,
    UnknownProducer,
)
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
    """What is asked of the topics: an `EngineReader`."""

    async def look(self, tp: TopicPartition) -> Look: ...

    async def begin_reads(self) -> Reads: ...

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = ..., *, stop: int | None = None
    ) -> list[Batch]: ...


class Appender(Protocol):
    """The part of `LogAppender` that the relay uses."""

    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]: ...


_Partition = tuple[str, int]


class Relay:
    """One for each store, in the process that owns it."""

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
        self._under_way: dict[_Partition, asyncio.Lock] = {}
        self._moves = asyncio.Semaphore(self._options.partitions_at_once)
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.problems: dict[_Partition, LlogError] = {}
        """Why the events of a partition wait, until they have been moved."""

    def poke(self) -> None:
        """There are new events. Any thread may call."""
        loop = self._loop
        if loop is None:
            return  # nobody runs; whoever begins to looks first
        if loop is _running():
            self._wake.set()
            return
        try:
            loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop was closed just now
            return

    async def run(self) -> None:
        """Moves events as they come, until it is cancelled. What fails is tried again, later and later."""
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
                            # It may have found nothing just before something came.
                            tasks[partition].add_done_callback(lambda _: self._wake.set())
                    await self._wake.wait()
        finally:
            self._loop = None

    async def drain(self) -> None:
        """Moves all events that there are. Raises the first error, after all partitions were tried."""
        waiting = await self._store.partitions()
        results = await asyncio.gather(*(self._drained(each) for each in waiting), return_exceptions=True)
        for result in results:
            if result is not None:
                raise result

    async def decide(self, directory: str, partition: int, *, appended: bool) -> bool:
        """Says of a held partition whether its open batch is in the topic: it is dropped, or appended by a new
        producer.

        False, and nothing is done, if the partition is not held.
        """
        async with self._lock((directory, partition)):
            cut = await self._store.cut(directory, partition)
            problem = self.problems.get((directory, partition))
            if cut is None or not cut.open or not isinstance(problem, UnknownProducer | InconsistentReadState):
                return False
            if appended:
                await self._store.finish(directory, partition, cut)
            else:
                found = await self._target.look(TopicPartition(topic_of(directory), partition))
                new = f"{await self._producer(directory)}/{uuid7(self._runtime.now_ms(), self._runtime.random())}"
                again = msgspec.structs.replace(cut, producer=new, since=found.bounds.next_offset)
                await self._store.put_cut(directory, partition, again)
            del self.problems[directory, partition]
            return True

    def problem(self, directory: str) -> str | None:
        """Why events for a topic wait, if they do."""
        found = [str(error) for (each, _), error in sorted(self.problems.items()) if each == directory]
        return found[0] if found else None

    async def _serve(self, partition: _Partition) -> None:
        """Moves what a partition has, and ends."""
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

    async def _drained(self, partition: _Partition) -> None:
        while await self._move(partition):
            pass

    async def _move(self, partition: _Partition) -> bool:
        """Moves one batch; whether there may be another."""
        try:
            async with self._moves, self._lock(partition):
                moved = await self._moved(*partition)
        except LlogError as error:
            self.problems[partition] = error
            raise
        self.problems.pop(partition, None)
        return moved

    async def _moved(self, directory: str, partition: int) -> bool:
        tp = TopicPartition(topic_of(directory), partition)
        reads = await self._target.begin_reads()
        found = await self._look(tp, directory)
        if found is None:
            await reads.confirm()  # an old state may not show the topic yet
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
            # Nothing was ever appended under this number, so that the offset may be today's.
            since, through = found.bounds.next_offset, entries[-1].sequence
            cut = Cut(producer=producer, number=number, after=after, through=through, since=since, open=True)
            if not await self._store.put_cut(directory, partition, cut):
                return False
        try:
            await self._append(tp, cut, entries)
        except UnknownProducer as error:
            logger.error("%s: looking for the batch in the partition", error)
            search = await self._find(tp, cut, entries)
            if not search.whole and not search.there:
                raise UnknownProducer(
                    f"{tp} has forgotten the relay, and records from offset {cut.since} on were removed: whether "
                    "events "
                    f"{cut.after + 1} to {cut.through} of the outbox were appended cannot be told. They wait for "
                    f"{_settling(tp)}"
                ) from error
            if not search.there:
                again = msgspec.structs.replace(cut, since=search.searched_to)
                return await self._store.put_cut(directory, partition, again)
        await self._store.finish(directory, partition, cut)
        return True

    async def _append(self, tp: TopicPartition, cut: Cut, entries: Sequence[Entry]) -> None:
        producer = Producer(id=cut.producer, sequence=cut.number, since=cut.since)
        group = Group(topic=tp.topic, partition=tp.partition, records=_columns(entries), producer=producer)
        [result] = await self._appender.append([group])
        if isinstance(result, LlogError):
            raise result
        count = result.end_offset - result.start_offset + 1
        if count != len(entries):
            raise InconsistentReadState(
                f"{tp} has {count} records as batch {cut.number} of {producer.id}, and the outbox has "
                f"{len(entries)}: was an older copy of "
                f"the RocksDB directory brought back? Look at both, then say {_settling(tp)}"
            )

    async def _producer(self, directory: str) -> str:
        """Another one for each incarnation of a topic: a deleted one remembers its producers."""
        return "~".join((f"outbox/{await self._store.name()}", *directory.split("~")[1:]))

    async def _look(self, tp: TopicPartition, directory: str) -> Look | None:
        """Where the partition is; None if its topic was deleted, or created again since.

        A partition that is missing though its topic is there is an error: its events wait.
        """
        try:
            try:
                found = await self._target.look(tp)
            except PartitionNotInitialized:
                if (await self._target.look(TopicPartition(tp.topic, 0))).directory == directory:
                    raise
                return None  # the topic that has the name now has fewer partitions
        except TopicNotFound:
            return None
        return found if found.directory == directory else None

    async def _find(self, tp: TopicPartition, cut: Cut, entries: Sequence[Entry]) -> _Search:
        """Whether the batch is in the partition at or above the offset of its cut. It was appended as a whole, or not
        at all.
        """
        event = event_in(entries[0].headers)
        if event is None:
            raise InconsistentReadState(f"outbox entry {entries[0].sequence} for {tp} has no message id")
        wanted = pa.scalar(event.message_id, pa.int64())
        bounds = (await self._target.look(tp)).bounds
        position = max(cut.since, bounds.log_start_offset)
        whole = position == cut.since
        while position < bounds.next_offset:
            batches = await self._target.read(tp, position, stop=bounds.next_offset)
            if not batches:
                whole = False
                break
            for batch in batches:
                whole &= batch.start_offset <= position
                if pc.any(pc.equal(messages_of(batch)["message_id"], wanted)).as_py():
                    return _Search(there=True, whole=whole, searched_to=batch.end_offset + 1)
                position = batch.end_offset + 1
        return _Search(there=False, whole=whole, searched_to=position)

    async def _back_off(self, attempt: int) -> None:
        options = self._options
        ceiling = min(options.retry_delay_ms_max, options.retry_delay_ms_min << min(attempt, 20))
        await self._runtime.sleep(self._runtime.random().uniform(ceiling / 2, ceiling) / 1000)

    def _lock(self, partition: _Partition) -> asyncio.Lock:
        return self._under_way.setdefault(partition, asyncio.Lock())


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class _Search(NamedTuple):
    there: bool
    whole: bool
    """Whether no record was missing where it was looked."""
    searched_to: int


def topic_of(directory: str) -> str:
    """The name of the topic whose directory this is: names have no `~`."""
    return directory.partition("~")[0]


def _columns(entries: Sequence[Entry]) -> Columns:
    def binary(values: list[bytes]) -> Any:
        return pa.array(values, pa.binary())

    return Columns(
        values=binary([entry.payload for entry in entries]),
        keys=binary([entry.key for entry in entries]),
        timestamps=pa.array([entry.timestamp_ms for entry in entries], pa.int64()),
        headers=binary([entry.headers for entry in entries]),
        append_runs=(),
    )


def _settling(tp: TopicPartition) -> str:
    return f'ALTER TOPIC "{tp.topic}" SETTLE OUTBOX PARTITION {tp.partition} AS APPENDED (or AS MISSING)'
