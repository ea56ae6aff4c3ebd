"""Producers that number their records: repeated, next and wrong appends, many of them in one CAS, and how long a
partition remembers them.
"""

from __future__ import annotations

import asyncio

import pytest

from llog.engines.object.collector import sweep_partition
from llog.engines.object.compaction.compactor import Compactor, CompactorOptions
from llog.engines.object.fencing import fence
from llog.engines.object.retention import trim
from llog.engines.object.writer import Writer
from llog.errors import (
    InvalidArgument,
    LlogError,
    OutcomeUnknown,
    OutOfOrderSequence,
    PartitionFenced,
    PartitionNotInitialized,
    ProducerFenced,
    StoreUnavailable,
    UnknownProducer,
)
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult
from llog.log.keys import LOG_FORMAT, end_offset_of
from llog.log.log import check_format
from llog.log.producers import Producer
from llog.log.record_producers import PRODUCER_EXPIRY_MS, ProducerKind, RecordProducer
from llog.log.records import LogFormat, decode
from llog.model import Record
from llog.stores.meta import prefix_end
from tests.unit.world import TP, Faults, Interleaved, LostAnswers, StaleMeta, Stall, World


def part(
    payloads: str, sequence: int | None, *, id: str = "p", epoch: int = 0, kind: ProducerKind = ProducerKind.HTTP
) -> AppendGroup:
    """Return a group with one record for each character."""
    producer = None if sequence is None else RecordProducer(kind=kind, id=id, epoch=epoch, sequence=sequence)
    records = [Record(payload=each.encode()) for each in payloads]
    return AppendGroup(topic=TP.topic, partition=0, records=records, producer=producer)


async def one(writer: Writer, group: AppendGroup) -> AppendResult:
    [result] = await writer.append([group])
    if isinstance(result, LlogError):
        raise result
    return result


def shown(result: AppendResult | LlogError) -> tuple[int, int, bool] | type[LlogError]:
    if isinstance(result, LlogError):
        return type(result)
    return result.start_offset, result.end_offset, result.repeated


async def test_the_first_append_of_such_a_producer_raises_the_format_of_the_log(world: World) -> None:
    await check_format(world.log)
    await one(world.writer, part("a", None))
    assert await format_number(world) == 1
    await one(world.writer, part("b", 0))
    assert await format_number(world) == 2


async def format_number(world: World) -> int:
    found = await world.meta.get(LOG_FORMAT)
    assert found is not None
    return decode(LogFormat, found.value, found.key).number


def is_commit(operation: str, key: str) -> bool:
    return operation == "put_many" and key.endswith("meta/control")


async def state_keys(world: World) -> list[int]:
    prefix = (await world.keys()).producers
    return [end_offset_of(key) for key in await world.meta.keys(prefix, prefix_end(prefix), 1000)]


async def test_a_repeated_append_gets_its_offsets_again_and_appends_nothing(world: World) -> None:
    other = Writer(world.process())
    assert shown(await one(world.writer, part("abc", 0))) == (1, 3, False)
    assert shown(await one(other, part("abc", 0))) == (1, 3, True)
    assert shown(await one(other, part("de", 3))) == (4, 5, False)
    assert shown(await one(world.writer, part("abc", 0))) == (1, 3, True)
    assert shown(await one(world.writer, part("de", 3))) == (4, 5, True)
    assert await world.payloads() == list("abcde")


async def test_a_retry_inside_a_remembered_append_gets_its_offsets_by_difference(world: World) -> None:
    await one(world.writer, part("x", 0, id="other"))
    await one(world.writer, part("abcd", 0))
    assert shown(await one(Writer(world.process()), part("bc", 1))) == (3, 4, True)
    assert await world.payloads() == list("xabcd")


async def test_appends_that_follow_one_another_are_remembered_as_one(world: World) -> None:
    for sequence in range(20):
        await one(world.writer, part("x", sequence))
    assert shown(await one(Writer(world.process()), part("x", 0))) == (1, 1, True)


async def test_the_last_five_appends_are_remembered_and_older_ones_refused(world: World) -> None:
    for sequence in range(7):
        await one(world.writer, part("x", sequence))
        await world.append("between")
    for writer in (world.writer, Writer(world.process())):
        assert shown(await one(writer, part("x", 2))) == (5, 5, True)
        with pytest.raises(OutOfOrderSequence, match="its next is 7"):
            await one(writer, part("x", 1))


async def test_what_does_not_follow_is_refused_and_nothing_is_appended(world: World) -> None:
    with pytest.raises(UnknownProducer, match="sequence 5"):
        await one(world.writer, part("x", 5))
    await one(world.writer, part("ab", 0))
    with pytest.raises(OutOfOrderSequence, match="sequences 3 to 3"):
        await one(world.writer, part("x", 3))
    with pytest.raises(OutOfOrderSequence, match="sequences 1 to 2"):
        await one(world.writer, part("xy", 1))
    for bad in (part("x", 0, id=""), part("x", 0, id="i" * 201), part("x", -1), part("x", 0, epoch=-1)):
        with pytest.raises(InvalidArgument):
            await one(world.writer, bad)
    assert await world.payloads() == list("ab")


async def test_a_higher_epoch_begins_at_sequence_0_and_fences_the_lower_one(world: World) -> None:
    await one(world.writer, part("ab", 0))
    with pytest.raises(OutOfOrderSequence, match="begins at sequence 0"):
        await one(world.writer, part("x", 2, epoch=1))
    assert shown(await one(world.writer, part("c", 0, epoch=1))) == (3, 3, False)
    for writer in (world.writer, Writer(world.process())):
        with pytest.raises(ProducerFenced, match="epoch 1"):
            await one(writer, part("ab", 0))
        assert shown(await one(writer, part("c", 0, epoch=1))) == (3, 3, True)


async def test_kinds_of_producers_and_those_that_number_appends_share_no_state(world: World) -> None:
    await one(world.writer, part("a", 0))
    assert shown(await one(world.writer, part("b", 0, kind=ProducerKind.KAFKA))) == (2, 2, False)
    by_append = AppendGroup(
        topic=TP.topic, partition=0, records=[Record(payload=b"c")], producer=Producer(id="p", sequence=0, since=1)
    )
    assert shown(await one(world.writer, by_append)) == (3, 3, False)


async def test_many_producers_share_one_blob_and_one_cas(world: World) -> None:
    groups = [part("x", 0, id=f"p{number}") for number in range(50)]
    groups.insert(20, part("plain", None))
    before = world.writer.attempts
    results = await world.writer.append(groups)
    assert world.writer.attempts - before == 1
    assert len(world.blob_server.names) == 1
    assert [shown(result) for result in results][19:22] == [(20, 20, False), (21, 25, False), (26, 26, False)]
    control = await world.control()
    assert control.pending is not None
    assert (len(control.pending.entries), len(control.pending.producers)) == (1, 50)
    again = await Writer(world.process()).append(groups)
    assert [shown(result)[:2] for result in again[:20]] == [shown(result)[:2] for result in results[:20]]  # type: ignore[index]
    assert (await world.reader.bounds(TP)).next_offset == 56 + 5, "only the records without a producer"


async def test_more_producers_than_one_record_can_name_take_several_appends(world: World) -> None:
    groups = [part("x", 0, id=f"p{number}") for number in range(2500)]
    results = await world.writer.append(groups)
    assert [shown(result) for result in results] == [(n, n, False) for n in range(1, 2501)]
    again = await Writer(world.process()).append(groups)
    assert [shown(result) for result in again] == [(n, n, True) for n in range(1, 2501)]


async def test_a_group_is_put_again_without_the_parts_that_were_repeated(world: World) -> None:
    """Another broker appends one of the parts while this broker's blob is under way."""
    await world.append("first")
    stall = Stall(is_commit)
    slow = Writer(world.process(stall))
    appending = asyncio.ensure_future(
        slow.append([part("a", 0, id="a"), part("b", 0, id="b"), part("c", None), part("bb", 1, id="b")])
    )
    await stall.stalled.wait()
    assert shown(await one(world.writer, part("b", 0, id="b"))) == (2, 2, False)
    stall.go.set()
    results = await appending
    assert [shown(result) for result in results] == [(3, 3, False), (2, 2, True), (4, 4, False), (5, 6, False)]
    assert await world.payloads() == ["first", "b", "a", "c", "b", "b"]


async def test_a_part_that_is_repeated_within_its_group_gets_the_offsets_of_the_first(world: World) -> None:
    results = await world.writer.append([part("ab", 0), part("ab", 0), part("c", 2), part("b", 1)])
    assert [shown(result) for result in results] == [(1, 2, False), (1, 2, True), (3, 3, False), (2, 2, True)]
    assert await world.payloads() == list("abc")


async def test_a_refused_part_does_not_stop_the_others(world: World) -> None:
    results = await world.writer.append([part("x", 7), part("a", 0, id="a"), part("y", 0), part("z", 5), part("b", 1)])
    found = [shown(result) for result in results]
    assert found == [UnknownProducer, (1, 1, False), (2, 2, False), OutOfOrderSequence, (3, 3, False)]
    assert await world.payloads() == ["a", "y", "b"]


@pytest.mark.parametrize("done", [False, True])
async def test_an_append_whose_answer_was_lost_is_appended_once(world: World, done: bool) -> None:
    faults = LostAnswers(OutcomeUnknown("lost"), is_commit, done=done)
    writer = Writer(world.process(faults))
    groups = [part("ab", 0), part("c", 0, id="c"), part("ab", 0)]
    results = await writer.append(groups)
    assert [shown(result) for result in results] == [(1, 2, False), (3, 3, False), (1, 2, True)]
    assert await world.payloads() == list("abc")


async def test_a_sequence_that_is_retried_while_its_first_attempt_is_under_way_is_appended_once(world: World) -> None:
    await one(world.writer, part("a", 0))
    results = await asyncio.gather(*(world.writer.append([part("b", 1), part("c", 2)]) for _ in range(5)))
    assert sorted(shown(first) for first, _ in results) == [(2, 2, False), *[(2, 2, True)] * 4]  # type: ignore[type-var]
    assert {shown(second)[:2] for _, second in results} == {(3, 3)}  # type: ignore[index]
    assert await world.payloads() == list("abc")


@pytest.mark.parametrize("seed", range(20))
async def test_brokers_that_race_with_the_same_retries_append_each_once(world: World, seed: int) -> None:
    async def client(writer: Writer, id: str) -> None:
        for sequence in range(6):
            await one(writer, part("x", sequence, id=id))

    writers = [Writer(world.process(Interleaved(10 * seed + number))) for number in range(3)]
    await asyncio.gather(*(client(writer, id) for writer in writers for id in ("a", "b")))
    assert (await world.reader.bounds(TP)).next_offset == 13


async def test_a_broker_that_knows_the_state_reads_nothing(world: World) -> None:
    await one(world.writer, part("a", 0))
    world.meta.counts.count.clear()
    await one(world.writer, part("b", 1))
    assert world.meta.counts.count == {"put_many": 1}
    await one(world.writer, part("b", 1))
    assert world.meta.counts.count == {"put_many": 1, "floor_many": 1}, "a repetition is looked up"
    await one(world.writer, part("c", 0, id="new"))
    assert world.meta.counts.count == {"put_many": 2, "floor_many": 2}


async def test_a_repetition_puts_no_blob(world: World) -> None:
    await one(world.writer, part("a", 0))
    blobs = list(world.blob_server.names)
    await one(Writer(world.process()), part("a", 0))
    assert world.blob_server.names == blobs


async def test_a_fenced_partition_answers_repetitions_and_refuses_the_rest(world: World) -> None:
    await one(world.writer, part("a", 0))
    await fence(world.log, TP)
    for writer in (world.writer, Writer(world.process())):
        results = await writer.append([part("a", 0), part("b", 1)])
        assert [shown(result) for result in results] == [(1, 1, True), PartitionFenced]


async def test_an_old_state_neither_accepts_nor_refuses(world: World) -> None:
    stale = StaleMeta(world.meta_server)
    await one(world.writer, part("a", 0))
    keys = await world.keys()
    stale.pause(keys.prefix)
    await one(world.writer, part("b", 1))
    await world.append("other")
    writer = Writer(world.log._replace(meta=stale))
    with pytest.raises(StoreUnavailable):
        await one(writer, part("c", 2))  # out of order in the old state, which cannot be confirmed
    stale.wake()
    assert shown(await one(writer, part("b", 1))) == (2, 2, True)
    assert shown(await one(writer, part("c", 2))) == (4, 4, False)


# --- what replaces or drops `pending`


async def test_retention_that_drops_the_pending_append_keeps_its_producers(world: World) -> None:
    await one(world.writer, part("ab", 0))
    await trim(world.log, TP, 3)
    control = await world.control()
    assert (control.pending, control.log_start_offset) == (None, 3)
    assert await state_keys(world) == [2]
    assert shown(await one(Writer(world.process()), part("ab", 0))) == (1, 2, True)
    assert await world.index() == []


async def test_a_compactor_that_clears_the_pending_append_keeps_its_producers(world: World) -> None:
    await one(world.writer, part("ab", 0))
    await Compactor(world.log, CompactorOptions(idle_ms=0)).compact_once(TP, force=True)
    assert (await world.control()).pending is None
    assert shown(await one(Writer(world.process()), part("ab", 0))) == (1, 2, True)


async def test_a_stalled_retention_that_loses_its_cas_does_no_harm(world: World) -> None:
    await one(world.writer, part("ab", 0))
    stall = Stall(is_commit)
    trimming = asyncio.ensure_future(trim(world.process(stall), TP, 3))
    await stall.stalled.wait()
    await one(world.writer, part("c", 2))
    stall.go.set()
    await trimming
    assert shown(await one(Writer(world.process()), part("c", 2))) == (3, 3, True)
    assert await world.payloads() == ["c"]


async def test_a_deleted_topic_leaves_no_states_behind(world: World) -> None:
    await one(world.writer, part("a", 0))
    await one(world.writer, part("b", 1))
    keys = await world.keys()
    await Catalog(world.log).delete(TP.topic)
    assert await world.meta.keys(keys.producers, prefix_end(keys.producers), 10) == []


async def test_a_topic_that_is_created_again_knows_none_of_its_producers(world: World) -> None:
    await one(world.writer, part("a", 0))
    await Catalog(world.log).delete(TP.topic)
    await Catalog(world.log).create(TP.topic)
    with pytest.raises(PartitionNotInitialized):
        await one(world.writer, part("a", 0))
    assert shown(await one(world.writer, part("a", 0))) == (1, 1, False)
    assert await world.payloads() == ["a"]


# --- upkeep


async def test_upkeep_leaves_the_newest_state_of_each_producer(world: World) -> None:
    for sequence in range(4):
        await one(world.writer, part("x", sequence))
        await one(world.writer, part("y", sequence, id="other"))
    assert len(await state_keys(world)) == 7, "the last one is pending"
    await sweep_partition(world.log, await world.keys())
    assert sorted(await state_keys(world)) == [6, 7]
    assert shown(await one(Writer(world.process()), part("x", 3))) == (7, 7, True)
    assert shown(await one(Writer(world.process()), part("y", 3, id="other"))) == (8, 8, True)


async def test_a_producer_is_forgotten_a_day_of_the_partition_after_its_last_append(world: World) -> None:
    await one(world.writer, part("a", 0, id="early"))
    await one(world.writer, part("b", 0, id="late"))
    world.runtime.now += PRODUCER_EXPIRY_MS + 1
    await sweep_partition(world.log, await world.keys())
    assert (await world.control()).producers_expired_through == 0, "nothing was appended since"
    await one(world.writer, part("c", 1, id="late"))
    await sweep_partition(world.log, await world.keys())
    assert (await world.control()).producers_expired_through == 2
    assert await state_keys(world) == []
    for writer in (world.writer, Writer(world.process())):
        assert shown(await one(writer, part("c", 1, id="late"))) == (3, 3, True)
        with pytest.raises(UnknownProducer):
            await one(writer, part("x", 1, id="early"))


async def test_a_stalled_writer_that_puts_an_expired_state_again_does_not_bring_it_back(world: World) -> None:
    await one(world.writer, part("a", 0, id="early"))
    stall = Stall(is_commit)
    slow = Writer(world.process(stall))
    appending = asyncio.ensure_future(slow.append([part("z", None)]))
    await stall.stalled.wait()
    await one(world.writer, part("b", 0, id="late"))
    world.runtime.now += PRODUCER_EXPIRY_MS + 1
    await one(world.writer, part("c", 1, id="late"))
    await sweep_partition(world.log, await world.keys())
    stall.go.set()
    await appending
    assert 1 in await state_keys(world)
    with pytest.raises(UnknownProducer):
        await one(Writer(world.process()), part("x", 1, id="early"))
    await sweep_partition(world.log, await world.keys())
    assert 1 not in await state_keys(world)


async def test_an_error_of_the_store_while_states_are_read_fails_the_append_alone(world: World) -> None:
    class Unavailable(Faults):
        async def before(self, operation: str, key: str) -> None:
            if operation == "floor_many":
                raise StoreUnavailable("down")

    writer = Writer(world.process(Unavailable()))
    with pytest.raises(StoreUnavailable):
        await one(writer, part("a", 0))
    assert shown(await one(writer, part("b", None))) == (1, 1, False)
