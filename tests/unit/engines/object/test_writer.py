"""Appends: dense offsets, one outcome per group, and what a repeated, raced or unanswered append comes to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pyarrow as pa
import pytest

from llog.batch.columns import TIMESTAMP_MS_MAX, Buffer, columns_of
from llog.batch.shared import unpack_header
from llog.engines.object.writer import UploadedGroup, Writer
from llog.errors import (
    Contention,
    InvalidArgument,
    LlogError,
    OutcomeUnknown,
    OutOfOrderSequence,
    PartitionFenced,
    PartitionNotInitialized,
    RecordTooLarge,
    StoreUnavailable,
    TopicNotFound,
    UnknownProducer,
)
from llog.log.engine import AppendGroup, AppendResult, WriterOptions
from llog.log.producers import PRODUCERS_MAX, Producer
from llog.log.records import Kind, LogState
from llog.model import Record, TopicPartition
from llog.runtime import stamp_of
from tests.unit.world import START_MS, TP, Faults, Interleaved, LostAnswers, Stall, World


def group(*payloads: str, partition: int = 0, topic: str = TP.topic, producer: Producer | None = None) -> AppendGroup:
    records = [Record(payload=payload.encode()) for payload in payloads]
    return AppendGroup(topic=topic, partition=partition, records=records, producer=producer)


def producer(sequence: int, since: int = 1, *, id: str = "p", dense: bool = True) -> Producer:
    return Producer(id=id, sequence=sequence, since=since, dense=dense)


def offsets(result: AppendResult | LlogError) -> tuple[int, int]:
    if isinstance(result, LlogError):
        raise result
    return result.start_offset, result.end_offset


async def one(writer: Writer, given: AppendGroup) -> AppendResult:
    [result] = await writer.append([given])
    if isinstance(result, LlogError):
        raise result
    return result


def is_commit(operation: str, key: str) -> bool:
    return operation == "put_many" and key.endswith("meta/control")


async def test_offsets_are_dense_from_one_on(world: World) -> None:
    assert offsets(await one(world.writer, group("a", "b"))) == (1, 2)
    assert offsets(await one(Writer(world.process()), group("c"))) == (3, 3)
    assert offsets(await one(world.writer, group("d", "e", "f"))) == (4, 6)
    assert await world.payloads() == list("abcdef")


async def test_groups_of_one_call_share_a_blob_and_commit_apart(world: World) -> None:
    results = await world.writer.append(
        [group("a"), group("b", partition=1), group("c", "d"), group("x", partition=9), group("y", topic="nope")]
    )
    assert [offsets(result) for result in results[:3]] == [(1, 1), (1, 1), (2, 3)]
    assert isinstance(results[3], PartitionNotInitialized)
    assert isinstance(results[4], TopicNotFound)
    assert await world.payloads() == list("acd")
    assert await world.payloads(TopicPartition(TP.topic, 1)) == ["b"]
    [blob] = world.blob_server.names
    header = unpack_header(world.blob_server.blobs[blob][0])
    assert [(body.partition, body.msg_count) for body in header.partitions] == [(0, 1), (1, 1), (0, 2)]


async def test_an_append_alone_costs_one_blob_put_and_one_metadata_write(world: World) -> None:
    await world.append("a")
    world.meta.counts.count.clear()
    world.blobs.counts.count.clear()
    await world.append("b")
    assert (world.meta.counts.count, world.blobs.counts.count) == ({"put_many": 1}, {"put": 1})


async def test_bad_arguments_append_nothing(world: World) -> None:
    with pytest.raises(InvalidArgument):
        await world.writer.append([])
    with pytest.raises(InvalidArgument, match="no records"):
        await world.writer.append([group("a"), group()])
    with pytest.raises(InvalidArgument, match="producer id"):
        await world.writer.append([group("a", producer=producer(0, id=""))])
    with pytest.raises(RecordTooLarge, match="over the limit of 10 bytes"):
        await Writer(world.log, WriterOptions(append_bytes_max=10)).append([group("a" * 11)])
    with pytest.raises(TopicNotFound):
        await world.writer.append([group("a", topic="nope")])
    assert world.blob_server.names == []
    assert (await world.reader.bounds(TP)).next_offset == 1


async def test_a_timestamp_out_of_bounds_in_arrow_columns_is_refused_and_the_next_append_goes_on(world: World) -> None:
    times = pa.array([TIMESTAMP_MS_MAX + 1], pa.int64())
    columns = columns_of([Record(payload=b"x")])._replace(timestamps=times)
    with pytest.raises(InvalidArgument, match="a timestamp is"):
        await world.writer.append([AppendGroup(topic=TP.topic, partition=0, records=columns)])
    assert world.blob_server.names == []
    assert (await world.append("y")).start_offset == 1


async def test_a_repeated_append_gets_its_offsets_again(world: World) -> None:
    first = await one(world.writer, group("a", "b", producer=producer(0)))
    await world.append("other")
    for writer in (world.writer, Writer(world.process())):
        again = await one(writer, group("a", "b", producer=producer(0)))
        assert (again.start_offset, again.end_offset, again.repeated) == (first.start_offset, first.end_offset, True)
    assert not first.repeated
    assert await world.payloads() == ["a", "b", "other"]


async def test_the_last_five_appends_of_a_producer_are_remembered(world: World) -> None:
    for sequence in range(7):
        await one(world.writer, group(f"a{sequence}", producer=producer(sequence)))
    for sequence in range(2, 7):
        assert offsets(await one(world.writer, group("x", producer=producer(sequence)))) == (sequence + 1,) * 2
    for sequence in (1, 8):
        with pytest.raises(OutOfOrderSequence, match=f"sequence {sequence} .* after its sequence 6"):
            await one(world.writer, group("x", producer=producer(sequence)))
    assert len(await world.payloads()) == 7


async def test_a_producer_that_is_not_dense_may_skip_sequences_but_not_go_back(world: World) -> None:
    await one(world.writer, group("a", producer=producer(3, dense=False)))
    assert offsets(await one(world.writer, group("b", producer=producer(9, dense=False)))) == (2, 2)
    with pytest.raises(OutOfOrderSequence):
        await one(world.writer, group("c", producer=producer(5, dense=False)))


async def test_a_producer_may_go_on_through_another_writer(world: World) -> None:
    there, here = Writer(world.process()), Writer(world.process())
    await one(here, group("a", producer=producer(0)))
    for sequence in (1, 2, 3):
        await one(there, group(f"b{sequence}", producer=producer(sequence, since=2)))
    # What this writer knows of the partition is older than what it is told now.
    assert offsets(await one(here, group("c", producer=producer(4, since=5)))) == (5, 5)
    await one(there, group("d", producer=producer(5)))
    assert offsets(await one(here, group("e", producer=producer(0, since=7, id="new")))) == (7, 7)


async def test_a_forgotten_producer_is_told_so_and_nothing_is_appended_twice(world: World) -> None:
    await one(world.writer, group("a", producer=producer(0)))
    for number in range(PRODUCERS_MAX):
        world.runtime.now += 1
        await one(world.writer, group("x", producer=producer(0, since=2, id=f"q{number}")))
    before = await world.payloads()
    with pytest.raises(UnknownProducer, match="no longer remembers producer p"):
        await one(world.writer, group("a", producer=producer(0)))
    assert await world.payloads() == before
    counter = (await world.reader.bounds(TP)).next_offset
    assert not (await one(world.writer, group("b", producer=producer(0, since=counter)))).repeated


async def test_a_producer_from_beyond_the_end_is_refused(world: World) -> None:
    await world.append("a")
    with pytest.raises(InvalidArgument, match="beyond its next offset 2"):
        await one(world.writer, group("b", producer=producer(0, since=3)))


async def test_a_fenced_partition_refuses_until_it_is_unfenced(world: World) -> None:
    for payload in "ab":
        await world.append(payload)
    await world.change_control(log_state=LogState.FENCED)
    with pytest.raises(PartitionFenced):
        await world.append("c")
    assert await world.payloads() == ["a", "b"]
    await world.change_control(log_state=LogState.OPEN)
    for offset, payload in ((3, "d"), (4, "e")):
        assert (await world.append(payload)).start_offset == offset
    assert await world.payloads() == ["a", "b", "d", "e"]


async def test_a_repeated_append_to_a_fenced_partition_is_still_answered(world: World) -> None:
    await one(world.writer, group("a", producer=producer(0)))
    await world.change_control(log_state=LogState.FENCED)
    assert (await one(Writer(world.process()), group("a", producer=producer(0)))).repeated


async def test_a_writer_finds_a_topic_that_was_created_again(world: World) -> None:
    await world.append("old")
    await world.catalog.delete(TP.topic)
    with pytest.raises(PartitionNotInitialized, match="was deleted"):
        await world.append("lost")
    with pytest.raises(TopicNotFound):
        await world.append("lost")
    await world.catalog.create(TP.topic)
    assert (await world.append("new")).start_offset == 1
    assert await world.payloads() == ["new"]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_a_lost_answer_is_settled_by_looking(world: World, done: bool, number: int) -> None:
    writer = Writer(world.process(LostAnswers(OutcomeUnknown("lost"), is_commit, done=done, number=number)))
    for payload in "abcd":
        await world.append(payload, writer=writer)
    assert await world.payloads() == list("abcd")


async def test_a_lost_answer_that_others_have_outrun_is_still_settled(world: World) -> None:
    stall = Stall(lambda operation, key: operation == "get_many" and key.endswith("meta/control"))
    lost = LostAnswers(OutcomeUnknown("lost"), is_commit, done=True)

    class Both(Faults):
        async def before(self, operation: str, key: str) -> None:
            await lost.before(operation, key)
            if lost.seen:
                await stall.before(operation, key)

        async def after(self, operation: str, key: str) -> None:
            await lost.after(operation, key)

    task = asyncio.create_task(world.append("mine", writer=Writer(world.process(Both()))))
    await stall.stalled.wait()
    for payload in "abcdefg":
        await world.append(payload)
    stall.go.set()
    assert (await task).start_offset == 1
    assert await world.payloads() == ["mine", *"abcdefg"]


async def test_a_lost_answer_of_a_forgotten_writer_is_reported_as_unknown(world: World) -> None:
    lost = LostAnswers(OutcomeUnknown("lost"), is_commit, done=True)
    stall = Stall(lambda operation, key: lost.seen == 1 and operation == "get_many")

    class Both(Faults):
        async def before(self, operation: str, key: str) -> None:
            await lost.before(operation, key)
            await stall.before(operation, key)

        async def after(self, operation: str, key: str) -> None:
            await lost.after(operation, key)

    both = Both()
    task = asyncio.create_task(world.append("mine", writer=Writer(world.process(both))))
    await stall.stalled.wait()
    for _ in range(PRODUCERS_MAX + 1):
        world.runtime.now += 1
        await world.append("x", writer=Writer(world.process()))
    stall.go.set()
    with pytest.raises(OutcomeUnknown, match="no longer remembers this writer"):
        await task
    assert (await world.payloads()).count("mine") == 1
    assert len([key for operation, key in both.calls if is_commit(operation, key)]) == 1
    assert len(both.calls) < 10


async def test_an_unavailable_store_means_nothing_happened(world: World) -> None:
    faults = LostAnswers(StoreUnavailable("away"), is_commit, done=False, number=2)
    writer = Writer(world.process(faults))
    await world.append("a", writer=writer)
    with pytest.raises(StoreUnavailable):
        await world.append("b", writer=writer)
    assert (await world.append("c", writer=writer)).start_offset == 2
    assert await world.payloads() == ["a", "c"]


async def test_a_failed_blob_put_raises_and_the_next_append_goes_on(world: World) -> None:
    faults = LostAnswers(StoreUnavailable("away"), lambda operation, key: operation == "put blob", done=False)
    writer = Writer(world.process(faults))
    with pytest.raises(StoreUnavailable):
        await world.append("a", writer=writer)
    assert (await world.append("b", writer=writer)).start_offset == 1


async def test_a_stalled_writer_uploads_again_what_is_below_the_floor(world: World) -> None:
    stall = Stall(is_commit)
    task = asyncio.create_task(world.append("late", writer=Writer(world.process(stall))))
    await stall.stalled.wait()
    [first] = world.blob_server.names
    await world.change_control(blob_floor_ms=START_MS + 1000)
    await world.blobs.delete_many([first])
    stall.go.set()
    assert (await task).start_offset == 1
    [second] = world.blob_server.names
    assert stamp_of(second) == START_MS + 1000
    assert await world.payloads() == ["late"]


async def test_a_blob_is_stamped_above_the_floor_that_is_known(world: World) -> None:
    await world.change_control(blob_floor_ms=START_MS + 1000)
    await world.append("a")
    [blob] = world.blob_server.names
    assert stamp_of(blob) == START_MS + 1000


async def test_sixteen_racing_writers_leave_dense_offsets(world: World) -> None:
    async def write(number: int) -> list[int]:
        writer = Writer(world.process(Interleaved(number)))
        return [(await world.append(f"{number}-{turn}", writer=writer)).start_offset for turn in range(10)]

    found = await asyncio.gather(*(write(number) for number in range(16)))
    assert sorted(offset for own in found for offset in own) == list(range(1, 161))
    payloads = await world.payloads()
    for number, own in enumerate(found):
        assert own == sorted(own)
        assert [payloads[offset - 1] for offset in own] == [f"{number}-{turn}" for turn in range(10)]
    assert [shape[:2] for shape in await world.shape()] == [(offset, offset) for offset in range(1, 160)]


async def test_overlapping_calls_of_one_writer_commit_in_their_order(world: World) -> None:
    writer = Writer(world.process(Interleaved(3, 9)))
    await world.append("first", writer=writer)
    results = await asyncio.gather(*(world.append(f"a{number}", writer=writer) for number in range(20)))
    assert [result.start_offset for result in results] == list(range(2, 22))


async def test_a_cancelled_append_does_not_hold_up_the_next(world: World) -> None:
    stall = Stall(is_commit)
    writer = Writer(world.process(stall))
    first = asyncio.create_task(world.append("a", writer=writer))
    await stall.stalled.wait()
    second = asyncio.create_task(world.append("b", writer=writer))
    third = asyncio.create_task(world.append("c", writer=writer))
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    assert (await third).start_offset == 1
    assert await world.payloads() == ["c"]


async def test_a_writer_that_always_loses_says_so(world: World) -> None:
    class Rival(Faults):
        async def before(self, operation: str, key: str) -> None:
            if is_commit(operation, key):
                await world.append("rival")

    with pytest.raises(Contention, match="3 attempts"):
        await world.append("a", writer=Writer(world.process(Rival()), WriterOptions(attempts_max=3)))
    assert await world.payloads() == ["rival"] * 3


async def test_the_entries_of_an_append_are_put_by_the_next(world: World) -> None:
    await world.append("a")
    assert await world.shape() == []
    await world.append("b")
    assert await world.shape() == [(1, 1, Kind.WAL)]


async def test_running_maxima_never_go_back(world: World) -> None:
    for add_ms in (100, 0, 200, 50):
        world.runtime.now = START_MS + add_ms
        await world.append("a")
    await world.append("b")
    entries = [span.entry for span in await world.index()]
    assert [entry.append_ms - START_MS for entry in entries] == [100, 0, 200, 50]
    assert [entry.max_append_ms - START_MS for entry in entries] == [100, 100, 200, 200]


async def test_uploaded_bodies_are_appended_as_one_in_their_order(world: World) -> None:
    await world.writer.append([group("a", "b", partition=1), group("c", partition=1)])
    [blob] = world.blob_server.names
    first, second = unpack_header(world.blob_server.blobs[blob][0]).partitions
    for repeated in (False, True):
        [result] = await world.writer.append_uploaded([UploadedGroup(TP, [(blob, second), (blob, first)], producer(0))])
        assert isinstance(result, AppendResult)
        assert (result.start_offset, result.end_offset, result.repeated) == (1, 3, repeated)
    assert await world.payloads() == ["c", "a", "b"]
    await world.append("d")
    assert await world.shape() == [(1, 1, Kind.WAL), (2, 3, Kind.WAL)]


class Commits:
    """The batches that a writer reported, by where they begin."""

    def __init__(self) -> None:
        self.batches: dict[tuple[str, int, int], bytes] = {}
        self.options = WriterOptions(on_commit=self._add)

    def _add(self, directory: str, partition: int, start_offset: int, parts: Sequence[Buffer]) -> None:
        assert (directory, partition, start_offset) not in self.batches
        self.batches[directory, partition, start_offset] = b"".join(parts)


def stored_batches(world: World, blob: str) -> list[bytes]:
    data = bytes(world.blob_server.blobs[blob][0])
    return [data[body.body_offset :][: body.body_length] for body in unpack_header(data).partitions]


async def test_a_writer_reports_each_batch_that_it_committed_as_it_is_stored(world: World) -> None:
    commits = Commits()
    writer = Writer(world.log, commits.options)
    await world.append("before")
    given = [group("a", "b", producer=producer(0)), group("x" * 100_000, partition=1), group("y", topic="nope")]
    await writer.append(given)
    await writer.append(given[:1])
    blob = world.blob_server.names[1]
    first, second = stored_batches(world, blob)
    assert commits.batches == {(TP.topic, 0, 2): first, (TP.topic, 1, 1): second}


async def test_a_batch_that_was_put_again_is_reported_as_it_was_committed(world: World) -> None:
    stall, commits = Stall(is_commit), Commits()
    task = asyncio.create_task(world.append("late", writer=Writer(world.process(stall), commits.options)))
    await stall.stalled.wait()
    [first] = world.blob_server.names
    await world.change_control(blob_floor_ms=START_MS + 1000)
    world.runtime.now = START_MS + 500
    stall.go.set()
    await task
    [second] = {*world.blob_server.names} - {first}
    assert [*commits.batches.values()] == stored_batches(world, second) != stored_batches(world, first)


async def test_an_append_whose_answer_got_lost_and_one_that_failed_are_not_reported(world: World) -> None:
    commits = Commits()
    lost = LostAnswers(OutcomeUnknown("lost"), is_commit, done=True)
    assert (await world.append("a", writer=Writer(world.process(lost), commits.options))).start_offset == 1
    await world.change_control(log_state=LogState.FENCED)
    with pytest.raises(PartitionFenced):
        await world.append("b", writer=Writer(world.log, commits.options))
    assert commits.batches == {}
