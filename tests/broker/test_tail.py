"""The tail: hot records without a blob store, and nothing that may not be read any more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from llog.batch.columns import Buffer, columns_of, records_of, stamp
from llog.batch.format import encode
from llog.broker.cache.shared_tail import SharedBatch, TailKey
from llog.broker.cache.tail import Tail
from llog.broker.metrics import Metrics
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.reader import Reader
from llog.engines.object.retention import trim
from llog.engines.object.writer import Writer
from llog.log.engine import AppendGroup
from llog.log.records import encode as encode_record
from llog.model import Record, TopicPartition
from tests.broker.serving import Served

T = TopicPartition("t", 0)
PLACE = ("t", 0)


def _stored(*payloads: bytes) -> Sequence[Buffer]:
    return encode(stamp(columns_of([Record(payload=each) for each in payloads]), 5))


async def _payloads(served: Served, offset: int = 1, topic: str = "t") -> list[Any]:
    return [each["payload"] for each in (await served.consume(topic, offset))["records"]]


async def _until_under_way(served: Served, puts: int) -> None:
    while len(served.blobs.puts) < puts:
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["create", "append"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
async def test_what_a_broker_appended_it_serves_without_the_blob_store_and_exactly_as_it_is_stored(
    kind: str, codec: str
) -> None:
    served = Served(codec=codec)
    await served.client.post("/topics", json={"name": "t", "timestamp_type": kind})
    full = {"value": "v", "key": "k", "timestamp": 5, "headers": [["a", "b"]]}
    for _ in range(3):
        await served.produce("t", "text", full, {"value": None, "key": "k"})
    hot = await served.consume("t", 2)
    assert served.blobs.reads == 0
    other = Served(beside=served)
    assert hot == await other.consume("t", 2)
    assert served.blobs.reads == 3
    assert served.broker.metrics.tail_hits == 3
    assert served.broker.metrics.tail_misses == 0
    await served.close()
    await other.close()


async def test_what_was_read_at_the_end_is_served_again_without_the_blob_store(served: Served) -> None:
    await served.produce("t", "a")
    await served.produce("t", "b")
    other = Served(beside=served)
    for _ in range(3):
        assert await _payloads(other) == ["a", "b"]
    assert served.blobs.reads == 2
    await other.close()


async def test_records_of_requests_that_shared_a_blob_are_told_apart(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 3})
    items = [{"topic": "t", "partition": p, "records": [f"{p}" * 100, "x"]} for p in (2, 0, 1)]
    await served.client.post("/produce", json={"topic_partitions": items})
    for p in range(3):
        found = (await served.consume("t", 1, partition=p))["records"]
        assert [each["payload"] for each in found] == [f"{p}" * 100, "x"]
    assert served.blobs.reads == 0


async def test_what_was_trimmed_is_refused_though_it_is_kept(served: Served) -> None:
    await served.produce("t", "a", "b", "c")
    await trim(served.log, T, 3)
    assert (await served.consume("t", 2))["error"]["code"] == "offset_out_of_range"
    assert await _payloads(served, 3) == ["c"]
    assert served.blobs.reads == 0


async def test_a_deleted_topic_is_gone_though_its_records_are_kept(served: Served) -> None:
    await served.produce("t", "a")
    other = Served(beside=served)
    await other.client.delete("/topics/t")
    assert (await served.consume("t", 1))["error"]["code"] == "topic_not_found"
    await other.close()


@pytest.mark.parametrize("read_before", [False, True])
async def test_a_topic_that_was_created_again_elsewhere_never_shows_old_records(
    served: Served, read_before: bool
) -> None:
    await served.produce("t", "old 1", "old 2")
    if read_before:
        assert await _payloads(served) == ["old 1", "old 2"]
    other = Served(beside=served)
    await other.client.delete("/topics/t")
    await other.produce("t", "new 1", "new 2")
    assert await _payloads(served) == ["new 1", "new 2"]
    assert (await served.produce("t", "new 3"))["start_offset"] == 3
    assert await _payloads(served) == await _payloads(other) == ["new 1", "new 2", "new 3"]
    await other.close()


async def test_an_append_that_its_topic_was_deleted_under_is_not_kept_for_the_new_one(served: Served) -> None:
    await served.produce("t", "old")
    served.blobs.gate.clear()
    writing = asyncio.ensure_future(served.produce("t", "straggler"))
    await _until_under_way(served, 2)
    other = Served(beside=served)
    await other.client.delete("/topics/t")
    await other.client.post("/topics", json={"name": "t"})
    served.blobs.gate.set()
    start = (await writing)["start_offset"]
    stored = [each.payload for each in await _all(served)]
    assert await _payloads(served) == [(each or b"").decode() for each in stored]
    assert stored[start - 1] == b"straggler"
    await other.close()


async def _all(served: Served) -> list[Record]:
    batches = await Reader(served.log).read(T, 1)
    return [record for batch in batches for record in records_of(batch.columns, batch.start_offset)]


async def test_records_of_other_writers_between_ones_own_are_found(served: Served) -> None:
    other = Writer(served.log)
    for n in range(3):
        await served.produce("t", f"own {n}")
        await other.append([AppendGroup(topic="t", partition=0, records=[Record(payload=f"other {n}".encode())])])
    expected = [f"{who} {n}" for n in range(3) for who in ("own", "other")]
    assert await _payloads(served) == expected
    assert served.blobs.reads == 3


async def test_a_compaction_in_between_changes_nothing(served: Served) -> None:
    for n in range(10):
        await served.produce("t", f"{n}")
    await Compactor(served.log).compact_once(T, force=True)
    served.blobs.reads = 0
    assert await _payloads(served, 4) == [f"{n}" for n in range(3, 10)]
    assert served.blobs.reads == 0


async def test_without_a_tail_everything_is_read_from_the_blob_store() -> None:
    served = Served(tail_cache_max_bytes=0)
    await served.produce("t", "a")
    for _ in range(2):
        assert await _payloads(served) == ["a"]
    assert served.blobs.reads == 2
    assert served.broker.metrics.tail_bytes == 0
    await served.close()


async def test_the_oldest_go_first_and_the_bound_holds() -> None:
    metrics = Metrics()
    tail = Tail(20_000, metrics)
    for n in range(100):
        tail.keep_appended(*PLACE, 1 + n, _stored(b"x" * 100))
        assert 0 < metrics.tail_bytes <= 20_000
    kept = [n for n in range(1, 101) if tail.get(PLACE, n) is not None]
    assert kept == list(range(kept[0], 101))
    assert 10 < len(kept) < 50
    tail.keep_appended(*PLACE, 101, _stored(b"x" * 30_000))
    assert tail.get(PLACE, 101) is None, "larger than all there may be"
    assert tail.get(PLACE, 100) is not None


async def test_a_way_through_the_past_takes_one_page_at_a_time_and_leaves_the_end_alone() -> None:
    metrics = Metrics()
    tail = Tail(10_000, metrics)
    tail.keep_appended(*PLACE, 1000, _stored(b"x" * 3000))
    columns = stamp(columns_of([Record(payload=b"y" * 1000)]), 5)
    for n in range(1, 100):
        tail.keep_read(PLACE, [(n, columns)], 1001)
        assert tail.get(PLACE, n) is not None
        assert tail.get(PLACE, n - 1) is None
    assert tail.get(PLACE, 1000) is not None


async def test_clients_that_read_the_past_share_half_of_the_room() -> None:
    metrics = Metrics()
    tail = Tail(20_000, metrics)
    for n in range(4):
        tail.keep_appended(*PLACE, 1000 + n, _stored(b"x" * 1000))
    columns = stamp(columns_of([Record(payload=b"y" * 1000)]), 5)
    for page in range(50):
        tail.keep_read(PLACE, [(20 * page + 1, columns), (20 * page + 2, columns)], 1004)
    assert all(tail.get(PLACE, 1000 + n) is not None for n in range(4))
    kept = [page for page in range(50) if tail.get(PLACE, 20 * page + 2) is not None]
    assert kept[-1] == 49, "the newest is there"
    assert 2 <= len(kept) <= 4
    assert metrics.tail_bytes <= 17_000
    for n in range(30):
        tail.keep_appended(*PLACE, 1004 + n, _stored(b"x" * 1000))
    assert all(tail.get(PLACE, 20 * page + 2) is None for page in range(50)), "the oldest go first"
    for n in range(30):
        assert metrics.tail_bytes <= 20_000
        tail.keep_read(PLACE, [(20 * n + 1, columns)], 1040)
        assert tail.get(PLACE, 20 * n + 1) is not None


async def test_what_is_larger_once_it_is_decompressed_still_stays_within_the_bound() -> None:
    served = Served(codec="zstd", tail_cache_max_bytes=100_000)
    for _ in range(20):
        await served.produce("t", "x" * 30_000)
    assert served.broker.metrics.tail_bytes < 20_000
    for offset in range(1, 21):
        assert len((await served.consume("t", offset, partition_max_bytes=1))["records"]) == 1
        assert served.broker.metrics.tail_bytes <= 100_000
    await served.close()


async def test_an_append_whose_blob_had_to_be_put_again_is_kept_as_it_was_committed(served: Served) -> None:
    await served.produce("t", "first")
    served.blobs.gate.clear()
    writing = asyncio.ensure_future(served.produce("t", "second"))
    await _until_under_way(served, 2)
    keys, control = await Reader(served.log).control(T)
    raised = msgspec.structs.replace(control, blob_floor_ms=served.log.runtime.now_ms() + 60_000)
    await served.log.meta.put(keys.control, encode_record(raised))
    served.blobs.gate.set()
    assert (await writing)["start_offset"] == 2
    assert len(served.blobs.puts) == 3
    hot = await served.consume("t", 1)
    assert [record["payload"] for record in hot["records"]] == ["first", "second"]
    assert served.blobs.reads == 0
    other = Served(beside=served)
    assert hot == await other.consume("t", 1)
    await other.close()


async def test_damaged_bytes_in_memory_are_not_served() -> None:
    tail = Tail(10_000, Metrics())
    data = bytearray(b"".join(_stored(b"abc")))
    data[-1] ^= 1
    tail.keep_appended(*PLACE, 1, [data])
    assert tail.get(PLACE, 1) is None
    assert await tail.find(PLACE, 1) is None


class LateShared:
    """A shared tail whose writer has committed each batch some looks before it puts the batch there."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.batches: dict[int, bytes] = {}
        self.looks: Counter[int] = Counter()

    async def find(self, key: TailKey, offset: int) -> list[SharedBatch]:
        self.looks[offset] += 1
        if self.looks[offset] <= self.late or offset not in self.batches:
            return []
        return [SharedBatch(offset, self.batches[offset])]

    async def close(self) -> None:
        pass


async def test_a_follower_waits_for_a_batch_that_its_writer_is_about_to_share() -> None:
    shared, tail = LateShared(late=0), Tail(1 << 20, Metrics())
    tail.share(shared)  # type: ignore[arg-type]
    shared.batches = {offset: b"".join(_stored(b"%d" % offset)) for offset in range(1, 10)}
    assert await tail.find(PLACE, 1) is not None
    shared.late = 2
    for offset in range(2, 10):
        found = await tail.find(PLACE, offset)
        assert found is not None, "without asking the blob store"
        assert found[0] == offset
    assert shared.looks[9] == 3


async def test_a_follower_does_not_wait_for_batches_that_come_from_elsewhere() -> None:
    shared, tail = LateShared(late=0), Tail(1 << 20, Metrics())
    tail.share(shared)  # type: ignore[arg-type]
    shared.batches = {offset: b"".join(_stored(b"%d" % offset)) for offset in (1, 3, 5)}
    assert await tail.find(PLACE, 7) is None
    assert shared.looks[7] == 1, "nothing of this partition was shared before"
    assert await tail.find(PLACE, 1) is not None
    assert await tail.find(PLACE, 2) is None
    assert shared.looks[2] > 1
    for offset in (3, 5):
        assert await tail.find(PLACE, offset) is not None
        assert await tail.find(PLACE, offset + 1) is None
        assert shared.looks[offset + 1] == 1, "the one before it did not come"
