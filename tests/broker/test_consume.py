"""Consuming: limits, paging, and waits for more."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from msgspec.structs import replace

from llog.broker.http.json_records import JSON_RECORD_OVERHEAD
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.reader import Reader
from llog.engines.object.retention import trim
from llog.log.records import encode
from llog.model import TopicPartition
from tests.broker.serving import Served


async def _paged(served: Served, **asked: Any) -> tuple[list[Any], int]:
    records: list[Any] = []
    offset, requests = 1, 0
    while True:
        found = await served.consume("t", offset, **asked)
        requests += 1
        if not found["records"]:
            return records, requests
        records += found["records"]
        offset = found["next_fetch_offset"]


@pytest.mark.parametrize("limit", ["partition_max_bytes", "max_bytes"])
@pytest.mark.parametrize("compacted", [False, True])
async def test_pages_within_a_limit_hand_out_every_record_once(served: Served, limit: str, compacted: bool) -> None:
    for n in range(0, 100, 10):
        await served.produce("t", *(f"{i:04}" for i in range(n, n + 10)))
    if compacted:
        assert (await Compactor(served.log).compact_once(TopicPartition("t", 0), force=True)).records == 100
    served.blobs.reads = 0
    other = Served(beside=served)
    records, requests = await _paged(other, **{limit: 7 * (JSON_RECORD_OVERHEAD + 4)})
    assert [each["payload"] for each in records] == [f"{i:04}" for i in range(100)]
    assert [each["offset"] for each in records] == list(range(1, 101))
    assert requests == 16
    assert served.blobs.reads == (1 if compacted else 10), "a blob was fetched again for every page"
    await other.close()


async def test_a_cold_consume_of_partitions_in_one_blob_is_one_get(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 8})
    items = [{"topic": "t", "partition": p, "records": [f"{p}"]} for p in range(8)]
    await served.client.post("/produce", json={"topic_partitions": items})
    assert len(served.blobs.puts) == 1
    other = Served(beside=served)
    wanted = [{"topic": "t", "partition": p, "fetch_offset": 1} for p in range(8)]
    response = await other.client.post("/consume", json={"topic_partitions": wanted})
    found = [each["records"][0]["payload"] for each in response.json()["topic_partitions"]]
    assert found == [f"{p}" for p in range(8)]
    assert served.blobs.reads == 1
    await other.close()


async def test_what_was_read_ahead_and_had_no_room_is_there_for_the_next_request(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 8})
    items = [{"topic": "t", "partition": p, "records": [f"{p}" * 1000] * 5} for p in range(8)]
    await served.client.post("/produce", json={"topic_partitions": items})
    other = Served(beside=served)
    offsets = dict.fromkeys(range(8), 1)
    found: dict[int, list[str]] = {p: [] for p in range(8)}
    for _ in range(8):
        wanted = [{"topic": "t", "partition": p, "fetch_offset": offset} for p, offset in offsets.items()]
        asked = {"topic_partitions": wanted, "max_bytes": 5 * (1000 + JSON_RECORD_OVERHEAD)}
        for each in (await other.client.post("/consume", json=asked)).json()["topic_partitions"]:
            offsets[each["partition"]] = each["next_fetch_offset"]
            found[each["partition"]] += [record["payload"] for record in each["records"]]
    assert found == {p: [f"{p}" * 1000] * 5 for p in range(8)}
    assert served.blobs.reads == 1
    await other.close()


async def test_a_damaged_partition_that_is_read_ahead_fails_alone(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 8})
    items = [{"topic": "t", "partition": p, "records": [f"{p}" * 1000]} for p in range(8)]
    await served.client.post("/produce", json={"topic_partitions": items})
    keys, control = await Reader(served.log).control(TopicPartition("t", 7))
    assert control.pending is not None
    lost = [replace(entry, data_uri="llog/wal/none") for entry in control.pending.entries]
    damaged = replace(control, pending=replace(control.pending, entries=tuple(lost)))
    await served.log.meta.put(keys.control, encode(damaged))
    other = Served(beside=served)
    wanted = [{"topic": "t", "partition": p, "fetch_offset": 1} for p in range(8)]
    answers = (await other.client.post("/consume", json={"topic_partitions": wanted})).json()["topic_partitions"]
    assert [len(each["records"]) for each in answers] == [1] * 7 + [0]
    assert answers[7]["error"]["code"] == "inconsistent_read_state"
    await other.close()


async def test_consumers_that_catch_up_get_large_pieces_of_compacted_blobs(served: Served) -> None:
    source = random.Random(1)
    values = [source.randbytes(50_000).hex() for _ in range(300)]
    for first in range(0, 300, 10):
        await served.produce("t", *values[first : first + 10])
    assert (await Compactor(served.log).compact_once(TopicPartition("t", 0), force=True)).records == 300
    served.blobs.counts.count.clear()
    served.blobs.counts.bytes.clear()
    other = Served(beside=served)
    await other.produce("t", "at the end")
    offsets = [1, 151]  # two consumers of one partition that take turns
    found: list[list[str]] = [[], []]
    while offsets[0] < 151 or offsets[1] < 302:
        for number in range(2):
            answer = await other.consume("t", offsets[number])
            assert len(answer["records"]) <= 11, "the limits are those of the request"
            found[number] += [each["payload"] for each in answer["records"]]
            offsets[number] = answer["next_fetch_offset"]
    assert found[1] == [*values[150:], "at the end"]
    assert (found[0] + found[1])[: offsets[0] - 1] == [*values, "at the end"][: offsets[0] - 1]
    fetched, gets = served.blobs.counts.bytes["range_get"], served.blobs.counts.count["range_get"]
    # The consumers overlap by a piece in the middle.
    assert fetched < 1.5 * sum(map(len, values)), "what was read ahead was read again"
    assert fetched / gets >= 4 << 20
    await other.close()


async def test_requests_that_come_together_share_a_get(served: Served) -> None:
    await served.produce("t", "a")
    other = Served(beside=served)
    found = await asyncio.gather(*(other.consume("t", 1) for _ in range(5)))
    assert [each["records"][0]["payload"] for each in found] == ["a"] * 5
    assert served.blobs.reads == 1
    await other.close()


async def test_a_record_larger_than_every_limit_comes_alone(served: Served) -> None:
    await served.produce("t", "small", "x" * 10_000, "small")
    records, _ = await _paged(served, partition_max_bytes=1000, max_bytes=1000)
    assert [len(each["payload"]) for each in records] == [5, 10_000, 5]
    assert len((await served.consume("t", 2, partition_max_bytes=1, max_bytes=1))["records"]) == 1


async def test_partitions_share_what_a_request_may_hold_and_empty_ones_take_nothing(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 20})
    for partition in (17, 19):
        await served.produce("t", *["x" * 20] * 100, partition=partition)
    items = [{"topic": "t", "partition": p, "fetch_offset": 1} for p in range(20)]
    limit = 50 * (JSON_RECORD_OVERHEAD + 20)
    response = await served.client.post("/consume", json={"topic_partitions": items, "max_bytes": limit})
    counts = [len(each["records"]) for each in response.json()["topic_partitions"]]
    assert counts[17] == 50
    assert sum(counts) == 50
    response = await served.client.post("/consume", json={"topic_partitions": items, "max_bytes": 3 * limit})
    counts = [len(each["records"]) for each in response.json()["topic_partitions"]]
    assert (counts[17], counts[19]) == (100, 50)


@pytest.mark.parametrize("kind", ["create", "append"])
async def test_timestamps_are_of_the_kind_that_the_topic_has(served: Served, kind: str) -> None:
    await served.client.post("/topics", json={"name": "t", "timestamp_type": kind})
    before = served.log.runtime.now_ms()
    await served.produce("t", {"value": "given", "timestamp": 5}, "none")
    given, none = [record["timestamp"] for record in (await served.consume("t", 1))["records"]]
    assert before <= none <= served.log.runtime.now_ms()
    assert given == (5 if kind == "create" else none)


async def test_an_offset_outside_the_bounds_is_told_with_them(served: Served) -> None:
    await served.produce("t", "a", "b", "c")
    await trim(served.log, TopicPartition("t", 0), 3)
    for offset in (2, 5):
        found = await served.consume("t", offset, max_wait_ms=60_000)
        assert found["error"]["code"] == "offset_out_of_range"
        assert (found["error"]["log_start_offset"], found["error"]["next_offset"]) == (3, 4)
        assert found["next_fetch_offset"] == offset
    assert "error" not in await served.consume("t", 4)


async def test_what_was_trimmed_is_refused_though_it_was_read_before() -> None:
    served = Served(tail_staleness_ms=0)
    await served.produce("t", "a", "b", "c")
    assert len((await served.consume("t", 1))["records"]) == 3
    await trim(served.log, TopicPartition("t", 0), 2)
    assert (await served.consume("t", 1))["error"]["code"] == "offset_out_of_range"
    await served.close()


async def test_unknown_topics_and_partitions_are_errors_of_their_items(served: Served) -> None:
    await served.produce("t", "a")
    assert (await served.consume("t", 1, partition=1))["error"]["code"] == "partition_not_initialized"
    assert (await served.consume("u", 1, max_wait_ms=60_000))["error"]["code"] == "topic_not_found"


async def test_a_wait_ends_with_the_first_record_of_any_of_its_partitions(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 2})
    items = [{"topic": "t", "partition": p, "fetch_offset": 1} for p in (0, 1)]
    asked = {"topic_partitions": items, "max_wait_ms": 60_000}
    waiting = asyncio.ensure_future(served.client.post("/consume", json=asked))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await served.produce("t", "here", partition=1)
    found = (await waiting).json()["topic_partitions"]
    assert [[record["payload"] for record in each["records"]] for each in found] == [[], ["here"]]


async def test_a_wait_for_more_bytes_hands_out_what_came_meanwhile_without_reading_twice(served: Served) -> None:
    await served.produce("t", "first")
    wanted = 3 * (JSON_RECORD_OVERHEAD + 5)
    other = Served(beside=served)
    waiting = asyncio.ensure_future(other.consume("t", 1, max_wait_ms=60_000, min_bytes=wanted))
    for text in ("again", "third"):
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await served.produce("t", text)
    assert [each["payload"] for each in (await waiting)["records"]] == ["first", "again", "third"]
    assert served.blobs.reads == 3
    await other.close()


async def test_a_wait_that_gets_too_little_answers_with_it_in_the_end(served: Served) -> None:
    await served.produce("t", "little")
    found = await served.consume("t", 1, max_wait_ms=50, min_bytes=1 << 20)
    assert [each["payload"] for each in found["records"]] == ["little"]
    assert (await served.consume("t", 2, max_wait_ms=50))["records"] == []


async def test_a_stopping_broker_answers_its_waits(served: Served) -> None:
    await served.produce("t", "a")
    waiting = asyncio.ensure_future(served.consume("t", 2, max_wait_ms=60_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await served.broker.close()
    assert (await waiting)["records"] == []


async def test_a_topic_that_is_deleted_during_a_wait_ends_it_with_an_error(served: Served) -> None:
    await served.produce("t", "a")
    waiting = asyncio.ensure_future(served.consume("t", 2, max_wait_ms=60_000))
    await asyncio.sleep(0.05)
    await served.client.delete("/topics/t")
    assert (await waiting)["error"]["code"] in ("topic_not_found", "partition_not_initialized")
