"""One append over many partitions: one blob, one request to the metadata store, and an outcome of its own for each of
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from llog.batch.columns import columns_of
from llog.engines.object import writer as writing
from llog.engines.object.clocks import AHEAD_MS
from llog.engines.object.sink import SinkUploader, publish
from llog.engines.object.writer import Writer
from llog.engines.registry import all_engines
from llog.errors import InvalidArgument, LlogError, OutcomeUnknown, PartitionFenced, StoreUnavailable, VersionMismatch
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult
from llog.log.log import Log
from llog.log.producers import ProducerState, RememberedAppend
from llog.log.records import LogState
from llog.model import Record, TopicPartition
from llog.stores.meta import VALUE_BYTES_MAX, Put
from tests.unit.world import START_MS, Faults, FaultyMeta, Stall, World

MANY = "many"


class Wire(FaultyMeta):
    """The metadata store of one process, whose `put_many` calls are seen, and done as `effect` says."""

    def __init__(self, world: World) -> None:
        inner = world.process().meta
        assert isinstance(inner, FaultyMeta)
        super().__init__(inner.inner, Faults())
        self.requests: list[list[int]] = []
        """The partitions of each, in order."""
        self.effect: Callable[[Sequence[Put]], Sequence[Put]] = lambda puts: puts
        """Which of the puts are applied; the answer gets lost if they are not all of them."""

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        self.requests.append([*dict.fromkeys(map(partition_of, puts))])
        applied = self.effect(puts)
        results = await super().put_many(applied)
        if len(applied) < len(puts):
            raise OutcomeUnknown("lost")
        return results


def partition_of(put: Put) -> int:
    return int(put.key.split("/partitions/")[1][:10])


def tp(partition: int) -> TopicPartition:
    return TopicPartition(MANY, partition)


def groups(count: int, payload: str = "x") -> list[AppendGroup]:
    records = [Record(payload=payload.encode())]
    return [AppendGroup(topic=MANY, partition=number, records=records) for number in range(count)]


def starts(results: Sequence[AppendResult | LlogError]) -> list[int | type[LlogError]]:
    return [type(result) if isinstance(result, LlogError) else result.start_offset for result in results]


def wired(world: World) -> tuple[Wire, Writer]:
    wire = Wire(world)
    return wire, Writer(Log(wire, world.process().blobs, world.runtime, all_engines()))


async def test_an_append_over_a_thousand_partitions_is_one_blob_and_one_metadata_request(world: World) -> None:
    await Catalog(world.log).create(MANY, 1000)
    for reads in ({"get_many": 2}, {}):  # the catalog and the control records, once
        world.meta.counts.count.clear()
        world.blobs.counts.count.clear()
        results = await world.writer.append(groups(1000))
        assert len({result.start_offset for result in results if isinstance(result, AppendResult)}) == 1
        assert world.meta.counts.count == {**reads, "put_many": 1}
        assert world.blobs.counts.count == {"put": 1}
    assert await world.payloads(tp(999)) == ["x", "x"]


async def test_ten_thousand_partitions_are_initialised_by_one_request(world: World) -> None:
    world.meta.counts.count.clear()
    await Catalog(world.log).create(MANY, 10_000)
    assert world.meta.counts.count == {"get": 1, "put_many": 1, "put": 1}


async def test_only_those_that_lost_are_tried_again_and_together(world: World) -> None:
    await Catalog(world.log).create(MANY, 10)
    wire, writer = wired(world)
    await writer.append(groups(10))
    for number in (2, 5, 7):
        await world.append("rival", tp=tp(number))
    wire.requests.clear()
    wire.faults.calls.clear()
    assert starts(await writer.append(groups(10))) == [3 if number in (2, 5, 7) else 2 for number in range(10)]
    assert wire.requests == [[*range(10)], [2, 5, 7]]
    assert [operation for operation, _ in wire.faults.calls] == ["put_many", "get_many", "put_many"]


async def test_a_fenced_partition_refuses_and_holds_up_none_of_the_others(world: World) -> None:
    await Catalog(world.log).create(MANY, 3)
    await world.change_control(tp(1), log_state=LogState.FENCED)
    wire, writer = wired(world)
    for _ in range(2):
        wire.requests.clear()
        results = await writer.append(groups(3))
        assert isinstance(results[1], PartitionFenced)
        assert wire.requests == [[0, 2]]
    assert await world.payloads(tp(2)) == ["x", "x"]
    await world.change_control(tp(1), log_state=LogState.OPEN)
    assert starts(await writer.append(groups(3))) == [3, 1, 3]


@pytest.mark.parametrize("applied", [(), (0,), (1, 3), (0, 1, 2, 3)])
async def test_a_lost_answer_is_settled_for_each_partition_by_itself(world: World, applied: tuple[int, ...]) -> None:
    await Catalog(world.log).create(MANY, 4)
    wire, writer = wired(world)
    await writer.append(groups(4, "before"))

    def in_part(puts: Sequence[Put]) -> Sequence[Put]:
        wire.effect = lambda puts: puts
        # Of the others, the index entry alone: of a partition's puts, some may be applied from the first one on.
        return [put for put in puts if partition_of(put) in applied or not put.key.endswith("control")]

    wire.effect = in_part
    wire.requests.clear()
    results = await writer.append(groups(4, "mine"))
    assert starts(results) == [2, 2, 2, 2]
    assert wire.requests[1:] == [[number for number in range(4) if number not in applied]][: len(applied) < 4]
    for number in range(4):
        assert await world.payloads(tp(number)) == ["before", "mine"]


async def test_an_answer_that_stays_lost_is_unknown_for_those_that_cannot_be_looked_up(world: World) -> None:
    await Catalog(world.log).create(MANY, 2)
    wire, writer = wired(world)
    await writer.append(groups(2))

    def lost(puts: Sequence[Put]) -> Sequence[Put]:
        wire.faults.before = away  # type: ignore[method-assign]
        return puts[:-1]

    async def away(operation: str, key: str) -> None:
        if operation == "get_many":
            raise StoreUnavailable("away")

    wire.effect = lost
    assert starts(await writer.append(groups(2))) == [OutcomeUnknown, OutcomeUnknown]


async def test_groups_of_one_partition_in_one_call_keep_their_order(world: World) -> None:
    await Catalog(world.log).create(MANY, 3)
    wire, writer = wired(world)
    given = [group for payload in "abc" for group in groups(3, payload)]
    assert starts(await writer.append(given)) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert wire.requests == [[0, 1, 2]] * 3
    for number in range(3):
        assert await world.payloads(tp(number)) == list("abc")


async def test_a_partition_that_another_call_holds_up_holds_up_none_of_the_others(world: World) -> None:
    await Catalog(world.log).create(MANY, 3)
    stall = Stall(lambda operation, key: operation == "put_many")
    writer = Writer(world.process(stall))
    first = asyncio.create_task(writer.append(groups(1, "slow")))
    await stall.stalled.wait()
    second = asyncio.create_task(writer.append(groups(3, "next")))
    while await world.payloads(tp(2)) != ["next"]:
        await asyncio.sleep(0)
    assert await world.payloads(tp(0)) == []
    assert not second.done()
    stall.go.set()
    assert (starts(await first), starts(await second)) == ([1], [2, 1, 1])


async def test_calls_on_the_same_partitions_cost_one_request_each(world: World) -> None:
    await Catalog(world.log).create(MANY, 50)
    wire, writer = wired(world)
    await writer.append(groups(50))
    wire.requests.clear()
    results = await asyncio.gather(*(writer.append(groups(50)) for _ in range(4)))
    assert [starts(each) for each in results] == [[turn + 2] * 50 for turn in range(4)]
    assert wire.requests == [[*range(50)]] * 4


async def test_ceilings_of_many_partitions_are_raised_by_one_request(world: World) -> None:
    await Catalog(world.log).create(MANY, 20)
    for number in range(20):
        await world.change_control(tp(number), blob_ceiling_ms=START_MS + 1)
    wire, writer = wired(world)
    await writer.append(groups(20))
    assert wire.requests == [[*range(20)]] * 2
    assert (await world.control(tp(19))).blob_ceiling_ms == START_MS + AHEAD_MS


async def test_what_many_partitions_may_not_commit_is_put_again_as_one_blob(world: World) -> None:
    await Catalog(world.log).create(MANY, 6)
    stall = Stall(lambda operation, key: operation == "put_many")
    task = asyncio.create_task(Writer(world.process(stall)).append(groups(6)))
    await stall.stalled.wait()
    for number in range(5):
        await world.change_control(tp(number), blob_floor_ms=START_MS + 1000)
    # No stamp suits this one and the others.
    await world.change_control(tp(5), clock_repairs=1, blob_ceiling_ms=START_MS + 500)
    stall.go.set()
    assert starts(await task) == [1] * 6
    assert len(world.blob_server.names) == 3
    for number in range(6):
        assert await world.payloads(tp(number)) == ["x"]


async def test_a_request_is_bounded_in_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await Catalog(world.log).create(MANY, 10)
    wire, writer = wired(world)
    monkeypatch.setattr(writing, "COMMIT_BYTES_MAX", 1500)
    assert starts(await writer.append(groups(10))) == [1] * 10
    assert len(wire.requests) > 2
    assert sorted(number for request in wire.requests for number in request) == [*range(10)]


async def test_a_control_record_that_is_too_large_fails_its_own_append_only(world: World) -> None:
    await Catalog(world.log).create(MANY, 2)
    room = VALUE_BYTES_MAX - 300
    await world.change_control(
        tp(0), producers={"x" * room: ProducerState(last=(RememberedAppend(1, 1, 1),), used_ms=0)}
    )
    assert starts(await world.writer.append(groups(2))) == [InvalidArgument, 1]


async def test_a_sink_appends_to_all_partitions_of_a_batch_by_one_request(world: World) -> None:
    await Catalog(world.log).create(MANY, 100)
    world.meta.counts.count.clear()
    columns = columns_of([Record(payload=b"x")])
    upload = await SinkUploader(world.log, "sink").upload([(tp(number), columns) for number in range(100)])
    await publish(world.log, "sink", 0, [upload])
    assert world.meta.counts.count["put_many"] == 1
    assert sum(world.meta.counts.count.values()) < 15
    assert await world.payloads(tp(99)) == ["x"]
