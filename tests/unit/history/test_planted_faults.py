"""Real runs of the shipped code, recorded: the honest one is accepted, and a fault that is planted into it is found.

Two brokers on one SQLite file and one directory of blobs, writers in process and over HTTP whose answers get lost,
consumers through both brokers, and a compactor.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from llog.batch.columns import slice_columns
from llog.batch.multi_batch import encode_run
from llog.broker.app import Broker
from llog.config import Settings
from llog.config.loading import load_settings
from llog.engines.object import reader, writer
from llog.engines.object.append import Append
from llog.engines.object.compaction import job as compaction
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.reader import Reader
from llog.engines.object.writer import Writer
from llog.engines.reading import apply_timestamp_type
from llog.errors import InconsistentReadState, LlogError, OutcomeUnknown, StoreUnavailable
from llog.history.checker import check_history
from llog.history.recorded import RecordedAppender, RecordedReader
from llog.history.recorded_http import RecordedAsyncBroker
from llog.history.recorder import HistoryRecorder
from llog.history.report import HistoryReport
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult, Batch
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.log.producers import Producer, RememberedAppend
from llog.log.records import Control, Topic
from llog.model import Record, TopicPartition
from llog.sim.mutations import MUTATIONS
from llog.sim.mutations.patch import Patch
from llog.stores.meta import ABSENT, Put
from tests.unit.history.histories import broken

T = TopicPartition("t", 0)
APPENDS = 25
"""Of each writer."""
LIMIT_S = 300


class Lossy:
    """A writer whose answers sometimes do not arrive."""

    def __init__(self, log: Log, chance: random.Random) -> None:
        self._writer = Writer(log)
        self._chance = chance
        self.trim, self.retain = self._writer.trim, self._writer.retain

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]:
        results = await self._writer.append(groups)
        if self._chance.random() < 0.3:
            raise OutcomeUnknown("the answer was lost")
        return results


class LossyTransport(httpx.ASGITransport):
    def __init__(self, app: Any, chance: random.Random) -> None:
        super().__init__(app=app)
        self._chance = chance

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if self._chance.random() < 0.1:
            raise httpx.ReadError("the connection broke", request=request)
        return response


class Machine:
    """A broker, a writer and a reader on stores that it opened itself, with a history of its own."""

    def __init__(
        self, name: str, log: Log, settings: Settings, recorder: HistoryRecorder, chance: random.Random
    ) -> None:
        self.log = log
        self.recorder = recorder
        self.broker = Broker(log, settings)
        self.client = httpx.AsyncClient(
            transport=LossyTransport(self.broker.app(), chance), base_url="http://localhost"
        )
        self.http = RecordedAsyncBroker(recorder, self.client, via=name)
        self.appender = RecordedAppender(recorder, Lossy(log, chance))
        self.reader = RecordedReader(recorder, Reader(log))

    async def close(self) -> None:
        await self.broker.close()
        await self.client.aclose()


@asynccontextmanager
async def machines(directory: Path, chance: random.Random) -> AsyncIterator[list[Machine]]:
    settings = load_settings({"data_dir": str(directory / "log")})
    async with AsyncExitStack() as stack:
        found = []
        for name in ("broker-0", "broker-1"):
            log = await stack.enter_async_context(opened_log(settings))
            recorder = stack.enter_context(HistoryRecorder(directory / f"{name}.jsonl", process=name))
            machine = Machine(name, log, settings, recorder, chance)
            stack.push_async_callback(machine.close)
            found.append(machine)
        yield found


async def write_in_process(name: str, both: Sequence[Machine]) -> None:
    """An idempotent producer: an append whose answer was lost is repeated, on the other machine."""
    for number in range(APPENDS):
        group = AppendGroup(
            topic="t",
            partition=0,
            records=[Record(payload=b"%s %d %d" % (name.encode(), number, each)) for each in range(1 + number % 3)],
            producer=Producer(id=name, sequence=number, since=1),
        )
        for attempt in range(20):
            try:
                [result] = await both[(number + attempt) % 2].appender.append([group])
            except OutcomeUnknown:
                continue
            if not isinstance(result, StoreUnavailable):
                break


async def write_over_http(name: str, machine: Machine) -> None:
    for number in range(APPENDS):
        item = {"topic": "t", "partition": 0, "records": [f"{name} {number} {each}" for each in range(1 + number % 2)]}
        try:
            await machine.http.produce([item])
        except httpx.ReadError:
            pass  # it may have been appended: nobody knows


async def consume(machine: Machine, is_over: asyncio.Event) -> None:
    offset = 1
    while not is_over.is_set():
        item = {"topic": "t", "partition": 0, "fetch_offset": offset}
        try:
            response = await machine.http.consume([item], max_wait_ms=20)
        except httpx.ReadError:
            continue
        offset = response.json()["topic_partitions"][0].get("next_fetch_offset", offset)
        await machine.reader.bounds(T)


async def compact(log: Log, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        with suppress(InconsistentReadState):  # it refuses what a planted fault made
            await Compactor(log).compact_once(T)
        await asyncio.sleep(0.05)


async def read_all(machine: Machine) -> None:
    """Reads to the end, whatever is on the way."""
    offset, end = 1, (await machine.reader.bounds(T)).next_offset
    while offset < end:
        try:
            batches = await machine.reader.read(T, offset)
        except LlogError:
            offset += 1
            continue
        offset = max([offset + 1, *(batch.end_offset + 1 for batch in batches)])


async def run(directory: Path, seed: int = 1) -> HistoryReport:
    async with asyncio.timeout(LIMIT_S), machines(directory, random.Random(seed)) as both:
        await Catalog(both[0].log).create("t", 1)
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as side:
            for machine in both:
                side.create_task(consume(machine, is_over))
            side.create_task(compact(both[1].log, is_over))
            async with asyncio.TaskGroup() as writers:
                for number, machine in enumerate(both):
                    writers.create_task(write_in_process(f"producer-{number}", both))
                    writers.create_task(write_over_http(f"client-{number}", machine))
            is_over.set()
        with suppress(InconsistentReadState):
            await Compactor(both[0].log).compact_once(T, force=True)
        for machine in both:
            await read_all(machine)
    return check_history(sorted(directory.glob("*.jsonl")))


@pytest.mark.parametrize("seed", range(3))
async def test_a_run_of_the_shipped_code_is_accepted(tmp_path: Path, seed: int) -> None:
    report = await run(tmp_path, seed)
    assert report.clean, report
    [partition] = report.partitions
    assert partition.acknowledged > 4 * APPENDS
    assert partition.unknown > 0


# --- the faults


def every(turns: int) -> Callable[[], bool]:
    """True each time that it was called this often."""
    calls = 0

    def is_due() -> bool:
        nonlocal calls
        calls += 1
        return calls % turns == 0

    return is_due


def acknowledge_without_a_commit(patch: Patch) -> None:
    """A lost acknowledged append."""
    shipped, is_due = writer.Writer._commit, every(10)

    async def commit(self: Writer, appends: Sequence[Append]) -> None:
        for append in appends:
            if is_due():
                append.control = append.lane.last
                append.outcome = writer._result(append.lane, self._advance(append)[1])
        await shipped(self, [append for append in appends if append.outcome is None])

    patch.setattr(writer.Writer, "_commit", commit)


def say_that_nothing_was_appended(patch: Patch) -> None:
    """An append that failed, and is there."""
    shipped, is_due = writer.Writer._commit, every(10)

    async def commit(self: Writer, appends: Sequence[Append]) -> None:
        await shipped(self, appends)
        for append in appends:
            if append.producer is None and is_due():
                append.outcome = StoreUnavailable("nothing was appended")

    patch.setattr(writer.Writer, "_commit", commit)


def serve_an_old_tail(patch: Patch) -> None:
    """A stale read: most looks at a control record are answered with what an earlier one found."""
    shipped, is_due = reader.Reader._look_up, every(7)
    known: dict[int, Any] = {}

    async def looked_up(self: Reader, tp: TopicPartition, directory: str | None = None) -> Any:
        if id(self) not in known or is_due():
            known[id(self)] = await shipped(self, tp, directory)
        return known[id(self)]

    patch.setattr(reader.Reader, "_look_up", looked_up)


def commit_unconditionally(patch: Patch) -> None:
    """Two records at one offset: who commits last wins."""

    def put(key: str, value: bytes, expected: int | None = None) -> Put:
        return Put(key, value, expected if expected == ABSENT else None)

    patch.setattr(writer, "Put", put)


def compact_in_the_wrong_order(patch: Patch) -> None:
    """Changed bytes: each record is what another one was before."""
    patch.setattr(compaction, "encode_run", lambda joined, codec: encode_run(list(reversed(joined)), codec))


def read_past_a_record(patch: Patch) -> None:
    """A gap: the first record of a batch is left out."""
    is_due = every(5)

    def without_first(topic: Topic, batch: Batch) -> Batch:
        found = apply_timestamp_type(topic, batch)
        if found.columns.count < 2 or not is_due():
            return found
        columns = slice_columns(found.columns, 1, found.columns.count)
        return found._replace(start_offset=found.start_offset + 1, columns=columns)

    patch.setattr(reader, "apply_timestamp_type", without_first)


def leave_out_an_offset(patch: Patch) -> None:
    """A gap: the counter jumps over an offset that no record has."""
    shipped, is_due = writer.Writer._advance, every(10)

    def advanced(self: Writer, append: Append) -> tuple[Control, RememberedAppend]:
        if is_due():
            skipped = append.control.next_offset + 1
            append.control = msgspec.structs.replace(append.control, next_offset=skipped)
        return shipped(self, append)

    patch.setattr(writer.Writer, "_advance", advanced)


class Fault(NamedTuple):
    plant: Callable[[Patch], None]
    invariants: set[str]
    """One of them at least must be among the findings."""


FAULTS = {
    "lost acknowledged append": Fault(acknowledge_without_a_commit, {"I1", "I2", "I3"}),
    "answer before the commit": Fault(MUTATIONS["answer-before-the-commit"].change, {"I1", "I2", "I3", "I9"}),
    "failed append that happened": Fault(say_that_nothing_was_appended, {"I3"}),
    "doubled retry": Fault(MUTATIONS["append-without-looking-for-a-repeated-one"].change, {"I8"}),
    "stale read": Fault(serve_an_old_tail, {"I9"}),
    "two records at one offset": Fault(commit_unconditionally, {"I2"}),
    "changed bytes": Fault(compact_in_the_wrong_order, {"I1"}),
    "record left out of an answer": Fault(read_past_a_record, {"I2"}),
    "offset left out": Fault(leave_out_an_offset, {"I1", "I2"}),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_planted_fault_is_found(tmp_path: Path, name: str) -> None:
    fault, patch = FAULTS[name], Patch()
    fault.plant(patch)
    try:
        report = await run(tmp_path)
    finally:
        patch.undo()
    assert broken(report) & fault.invariants, report
