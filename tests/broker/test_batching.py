"""Batching: few blobs for many requests, in order, and nothing that was accepted is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from llog.batch.columns import TIMESTAMP_MS_MAX, columns_of
from llog.broker.batching import BatchingProducer, Part
from llog.broker.http.arrow import MEDIA_TYPE
from llog.broker.metrics import Metrics
from llog.engines.object.writer import Writer
from llog.errors import LlogError, StoreUnavailable, TopicNotFound
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult, WriterOptions
from llog.log.inline import InlineLimits
from llog.log.log import Log
from llog.model import Record, TopicPartition
from llog.stores.memory.meta import MemoryMetaStore
from llog.stores.sqlite.store import SqliteMetaStore
from tests.broker.serving import Served

T = TopicPartition("t", 0)


async def _payloads(served: Served) -> list[str]:
    return [each["payload"] for each in (await served.consume("t", 1))["records"]]


async def test_requests_that_come_while_one_is_under_way_share_a_blob(served: Served) -> None:
    await served.produce("t", "first")
    served.blobs.gate.clear()
    calls = [asyncio.ensure_future(served.produce("t", "under way"))]
    while len(served.blobs.puts) < 2:
        await asyncio.sleep(0)
    calls += [asyncio.ensure_future(served.produce("t", f"{n}", f"{n} again")) for n in range(50)]
    await asyncio.sleep(0.05)
    served.blobs.gate.set()
    answers = await asyncio.gather(*calls)
    assert len(served.blobs.puts) == 3
    payloads = await _payloads(served)
    assert len(payloads) == 102
    for n, answer in enumerate(answers[1:]):
        assert payloads[answer["start_offset"] - 1 : answer["end_offset"]] == [f"{n}", f"{n} again"]


async def test_a_full_batch_leaves_while_another_is_under_way_and_order_is_kept() -> None:
    served = Served(batch_max_bytes=1000)
    await served.produce("t", "first")
    served.blobs.gate.clear()
    calls = []
    for n in range(6):
        calls.append(asyncio.ensure_future(served.produce("t", f"{n}" * 900)))
        await asyncio.sleep(0.01)
    assert len(served.blobs.puts) == 1 + 4, "as many as may be under way"
    served.blobs.gate.set()
    assert [(await call)["start_offset"] for call in calls] == [2, 3, 4, 5, 6, 7]
    await served.close()


async def test_what_has_waited_long_enough_leaves_while_another_is_under_way() -> None:
    served = Served(batch_max_delay_ms=10)
    await served.produce("t", "first")
    served.blobs.gate.clear()
    calls = [asyncio.ensure_future(served.produce("t", "second"))]
    while len(served.blobs.puts) < 2:
        await asyncio.sleep(0)
    calls.append(asyncio.ensure_future(served.produce("t", "third")))
    while len(served.blobs.puts) < 3:
        await asyncio.sleep(0.005)
    served.blobs.gate.set()
    assert [(await call)["start_offset"] for call in calls] == [2, 3]
    await served.close()


async def test_closing_appends_what_was_accepted_and_refuses_what_comes_after(served: Served) -> None:
    await served.produce("t", "first")
    served.blobs.gate.clear()
    calls = [asyncio.ensure_future(served.produce("t", f"{n}")) for n in range(3)]
    await asyncio.sleep(0.05)
    closing = asyncio.ensure_future(served.broker.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    served.blobs.gate.set()
    await closing
    assert sorted(each["start_offset"] for each in await asyncio.gather(*calls)) == [2, 3, 4]
    assert (await served.produce("t", "late"))["error"]["code"] == "store_unavailable"
    assert sorted(await _payloads(served)) == ["0", "1", "2", "first"]


async def test_a_caller_that_goes_away_takes_neither_its_records_nor_those_of_others(served: Served) -> None:
    await served.produce("t", "first")
    producer = BatchingProducer(Writer(served.log), Metrics(), max_bytes=1 << 20, max_delay_s=60, is_eager=True)
    calls = [
        asyncio.ensure_future(producer.append([Part(T, columns_of([Record(payload=text)]))]))
        for text in (b"gone", b"stays")
    ]
    await asyncio.sleep(0)
    calls[0].cancel()
    [result] = await calls[1]
    assert isinstance(result, AppendResult)
    assert result.start_offset == 3
    await producer.close()
    assert await _payloads(served) == ["first", "gone", "stays"]


async def test_a_failed_batch_fails_its_own_and_the_next_one_goes_on(served: Served) -> None:
    await served.produce("t", "first")
    producer = BatchingProducer(Writer(served.log), Metrics(), max_bytes=1 << 20, max_delay_s=60, is_eager=True)
    served.blobs.broken = True
    with pytest.raises(StoreUnavailable):
        await producer.append([Part(T, columns_of([Record(payload=b"lost")]))])
    served.blobs.broken = False
    [result] = await producer.append([Part(T, columns_of([Record(payload=b"kept")]))])
    assert isinstance(result, AppendResult)
    assert result.start_offset == 2
    await producer.close()


async def test_each_of_several_missing_topics_has_an_error_that_names_it(served: Served) -> None:
    producer = BatchingProducer(Writer(served.log), Metrics(), max_bytes=1 << 20, max_delay_s=60, is_eager=True)
    columns = columns_of([Record(payload=b"x")])
    errors = await producer.append([Part(TopicPartition(name, 0), columns) for name in ("one", "two")])
    assert [type(error) for error in errors] == [TopicNotFound, TopicNotFound]
    assert "'one'" in str(errors[0])
    assert "'two'" in str(errors[1])


async def test_new_partitions_of_one_request_share_a_blob(tmp_path: Path) -> None:
    meta = SqliteMetaStore.open(
        tmp_path / "meta.sqlite"
    )  # where creating takes time, in which an append could leave alone
    served = Served(meta_store=meta)
    items = [{"topic": topic, "partition": p, "records": ["x"]} for topic in ("t", "u") for p in range(8)]

    async def start_offsets() -> list[int]:
        response = await served.client.post("/produce", json={"topic_partitions": items})
        return [each["start_offset"] for each in response.json()["topic_partitions"]]

    assert await start_offsets() == [1] * 16
    assert len(served.blobs.puts) == 1
    await served.client.delete("/topics/t")
    await served.client.delete("/topics/u")
    assert await start_offsets() == [1] * 16
    assert len(served.blobs.puts) == 3, "one more for the attempt that found the topics deleted"
    await served.close()
    await meta.close()


async def test_a_request_of_many_partitions_is_one_blob_and_one_metadata_write(served: Served) -> None:
    await Catalog(served.log).create("t", 300)
    meta = served.log.meta
    assert isinstance(meta, MemoryMetaStore)
    items = [{"topic": "t", "partition": p, "records": ["x"]} for p in range(300)]
    for expected in (1, 2):
        meta.counts.count.clear()
        served.blobs.puts.clear()
        answer = (await served.client.post("/produce", json={"topic_partitions": items})).json()["topic_partitions"]
        assert [(each["partition"], each["start_offset"]) for each in answer] == [(p, expected) for p in range(300)]
        assert meta.counts.count["put_many"] == 1
        assert sum(meta.counts.count.values()) < 10
        assert len(served.blobs.puts) == 1


async def test_parts_of_one_partition_share_out_its_offsets_in_their_order(served: Served) -> None:
    items = [{"topic": "t", "partition": p, "records": ["x"] * n} for p, n in ((0, 2), (1, 1), (0, 3), (0, 1))]
    answer = (await served.client.post("/produce", json={"topic_partitions": items})).json()["topic_partitions"]
    offsets = [(each["partition"], each["start_offset"], each["end_offset"]) for each in answer]
    assert offsets == [(0, 1, 2), (1, 1, 1), (0, 3, 5), (0, 6, 6)]


async def test_many_topics_are_looked_up_by_one_request(served: Served) -> None:
    items = [{"topic": f"t{n}", "partition": 0, "records": ["x"]} for n in range(50)]
    await served.client.post("/produce", json={"topic_partitions": items})
    beside = Served(served)
    meta = served.log.meta
    assert isinstance(meta, MemoryMetaStore)
    meta.counts.count.clear()
    await beside.client.post("/produce", json={"topic_partitions": items})
    assert sum(meta.counts.count.values()) < 10
    await beside.close()


async def test_a_timestamp_out_of_bounds_fails_nobody_elses_records(served: Served) -> None:
    await served.produce("t", "first")
    table = pa.table({"value": pa.array([b"bad"], pa.binary()), "timestamp": pa.array([TIMESTAMP_MS_MAX + 1])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    bad, good = await asyncio.gather(
        served.client.post(
            "/topics/t/partitions/0/records", content=sink.getvalue().to_pybytes(), headers={"content-type": MEDIA_TYPE}
        ),
        served.produce("t", "second"),
    )
    assert (bad.status_code, bad.json()["code"]) == (400, "invalid_argument")
    assert good["start_offset"] == 2


async def test_what_needs_no_blob_leaves_at_once_until_its_partition_is_full(served: Served) -> None:
    await served.produce("t", "x" * 5000)
    limits = InlineLimits(group_bytes_max=1000, partition_bytes_max=1200)
    metrics = Metrics()
    writer = Writer(served.log, WriterOptions(inline=limits, counts=metrics.appends))
    producer = BatchingProducer(writer, metrics, max_bytes=1 << 20, max_delay_s=1e6, is_eager=False, inline=limits)
    small = [Part(T, columns_of([Record(payload=b"s" * 400)]))]
    for offset in (2, 3, 4):
        [result] = await producer.append(small)
        assert isinstance(result, AppendResult)
        assert result.start_offset == offset
    assert (metrics.appends.inline, metrics.appends.blob, metrics.appends.full) == (2, 1, 1)
    waiting = producer.append(small)
    await asyncio.sleep(0.05)
    assert not waiting.done(), "the last batch needed a blob, so the next one waits for more"
    await producer.close()
    assert waiting.done()


async def test_what_needs_a_blob_waits_beside_what_does_not(served: Served) -> None:
    await served.produce("t", "first")
    limits = InlineLimits(group_bytes_max=1000)
    writer = Writer(served.log, WriterOptions(inline=limits))
    producer = BatchingProducer(writer, Metrics(), max_bytes=1 << 20, max_delay_s=1e6, is_eager=False, inline=limits)
    large = producer.append([Part(T, columns_of([Record(payload=b"l" * 2000)]))])
    small = producer.append([Part(T, columns_of([Record(payload=b"s")]))])
    await asyncio.sleep(0.05)
    assert not large.done()
    assert not small.done()
    await producer.close()
    [[first], [second]] = await large, await small
    assert isinstance(first, AppendResult)
    assert isinstance(second, AppendResult)
    assert (first.start_offset, second.start_offset) == (2, 3)


class SlowWriter(Writer):
    """Appends as slowly as it is told to, and notes how many groups each call had."""

    def __init__(self, log: Log, seconds: float) -> None:
        super().__init__(log)
        self.seconds = seconds
        self.groups: list[int] = []

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]:
        self.groups.append(len(groups))
        await asyncio.sleep(self.seconds)
        return [
            AppendResult(topic=each.topic, partition=each.partition, start_offset=1, end_offset=1) for each in groups
        ]


async def test_a_batch_waits_for_the_clients_that_were_just_answered(served: Served) -> None:
    await Catalog(served.log).create("t", 5)
    appender = SlowWriter(served.log, 2.0)
    producer = BatchingProducer(appender, Metrics(), max_bytes=1 << 20, max_delay_s=60, is_eager=True)
    rounds, clients = 3, 5

    async def ask_again_and_again(number: int) -> None:
        for _ in range(rounds):
            await producer.append([Part(TopicPartition("t", number), columns_of([Record(payload=b"x")]))])
            await asyncio.sleep(0.005 * number)

    await asyncio.gather(*map(ask_again_and_again, range(clients)))
    assert appender.groups == [clients] * rounds


async def test_a_lone_client_waits_for_nobody(served: Served) -> None:
    await Catalog(served.log).create("t", 1)
    appender = SlowWriter(served.log, 0)
    producer = BatchingProducer(appender, Metrics(), max_bytes=1 << 20, max_delay_s=60, is_eager=True)
    for number in range(1, 4):
        asked = asyncio.ensure_future(producer.append([Part(T, columns_of([Record(payload=b"x")]))]))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(appender.groups) == number, "it leaves at once"
        await asked
