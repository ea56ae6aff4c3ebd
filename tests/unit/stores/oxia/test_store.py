"""The adapter against servers that hang, forget and refuse. The conformance suite shows the rest, where a real Oxia can
be had.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from llog.errors import (
    ConfigurationError,
    OutcomeUnknown,
    StaleReads,
    StoreUnavailable,
    StoreUnreachable,
    VersionMismatch,
    WrongStore,
)
from llog.stores.meta import ABSENT, Put, prefix_end
from llog.stores.oxia import channels, client, diagnosis
from llog.stores.oxia import store as store_module
from llog.stores.oxia.channels import Security
from llog.stores.oxia.client import ShardClient
from llog.stores.oxia.cluster import Shard
from llog.stores.oxia.keys import SORTING_PROBE
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.store import OxiaMetaStore
from llog.stores.oxia.writes import Writes
from tests.unit.stores.oxia.certificate import CERTIFICATE, KEY
from tests.unit.stores.oxia.fake import FakeOxia, FakeShard, fake_oxia

LIMIT_S = 60


@pytest.fixture
async def oxia(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeOxia]:
    """Two nodes with two shards, all led by the first. Connections are not replaced for being silent: something else
    must help.
    """
    monkeypatch.setattr(channels, "SILENCE_SECONDS", 3600.0)
    async with fake_oxia(shards=2, nodes=2) as server:
        yield server


@pytest.fixture
async def store(oxia: FakeOxia) -> AsyncIterator[OxiaMetaStore]:
    opened = OxiaMetaStore(oxia.addresses, "default", seconds=LIMIT_S)
    yield opened
    await opened.close()


def key(partition: int, name: str = "control") -> str:
    return f"llog/t/partitions/{partition:010}/{name}"


async def eventually(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not look():
            await asyncio.sleep(0.01)


# --- requests


async def test_a_put_many_over_many_partitions_is_one_request_per_shard(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    puts = [Put(key(number, name), b"", ABSENT) for number in range(1000) for name in ("index", "control")]
    results = await store.put_many(puts)
    assert all(isinstance(result, int) for result in results)
    assert len(oxia.applied) == len(oxia.shards)
    for shard in oxia.shards.values():
        (request,) = shard.requests
        assert len(request.puts) > 100
        # Both keys of a partition are on its shard, in the order of the call, and say why.
        assert [put.partition_key for put in request.puts[::2]] == [put.partition_key for put in request.puts[1::2]]
    assert [entry.version for entry in await store.get_many([put.key for put in puts]) if entry] == results


@pytest.mark.parametrize("refusing", [{0}, {1}, {0, 1}])
async def test_a_put_many_that_one_shard_refuses_may_have_happened_on_the_other(
    oxia: FakeOxia, store: OxiaMetaStore, monkeypatch: pytest.MonkeyPatch, refusing: set[int]
) -> None:
    submit = Writes.submit

    def refused(writes: Writes, call: proto.WriteRequest, size: int | None = None) -> list[asyncio.Future[list[Any]]]:
        if writes.shard.number in refusing:
            raise StoreUnavailable("too much waits")
        return submit(writes, call, size)

    monkeypatch.setattr(Writes, "submit", refused)
    written = len(oxia.shards) - len(refusing)
    with pytest.raises(OutcomeUnknown if written else StoreUnavailable):
        await store.put_many([Put(key(number), b"", ABSENT) for number in range(20)])
    assert sum(bool(shard.records) for shard in oxia.shards.values()) == written


async def test_lookups_of_one_moment_share_a_request(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    await store.put_many([Put(key(number), b"%d" % number) for number in range(50)])
    oxia.reads.clear()
    found = await asyncio.gather(*(store.get(key(number)) for number in range(50)))
    assert [entry.value for entry in found if entry] == [b"%d" % number for number in range(50)]
    assert len(oxia.reads) == len(oxia.shards)


async def test_a_range_of_all_shards_is_merged_and_one_of_a_partition_asks_one_shard(
    oxia: FakeOxia, store: OxiaMetaStore
) -> None:
    keys = [f"llog/topics/{number:03}" for number in range(40)]
    await store.put_many([Put(each, each.encode()) for each in keys])
    assert all(len(shard.records) > 5 for shard in oxia.shards.values())
    assert [entry.key for entry in await store.range("llog/topics/", "llog/topics0", 25)] == keys[:25]
    assert await store.keys("llog/topics/", "llog/topics0", 1000) == keys
    assert await store.keys("llog/topics/005x", "llog/topics0", 1) == [keys[6]]
    await store.put(key(1, "index/1"), b"")
    oxia.reads.clear()
    assert await store.keys(key(1, "index/"), prefix_end(key(1, "index/")), 1) == [key(1, "index/1")]
    assert len(oxia.reads) == 1


async def test_more_than_fits_into_one_request_is_sent_in_parts(
    oxia: FakeOxia, store: OxiaMetaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llog.stores.oxia.writes.REQUEST_BYTES_MAX", 1000)
    results = await store.put_many([Put(key(0, f"{number}"), bytes(300), ABSENT) for number in range(10)])
    assert results == sorted(results, key=lambda result: result if isinstance(result, int) else -1)
    assert len(oxia.applied) == 5


# --- leaders


async def test_a_connection_on_which_nothing_comes_back_is_replaced(
    oxia: FakeOxia, store: OxiaMetaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SILENCE_SECONDS", 0.5)
    await store.put(key(0), b"0")
    oxia.nodes[0].hang()
    waiting = asyncio.ensure_future(store.get(key(0)))
    peers = oxia.nodes[0].peers
    before = len(peers)
    await eventually(lambda: len(peers) > before)
    oxia.nodes[0].awake.set()
    assert await waiting is not None


async def test_a_server_that_lost_its_charge_before_it_was_asked_changes_nothing(
    oxia: FakeOxia, store: OxiaMetaStore
) -> None:
    other = oxia.addresses[1]
    await store.keys("", "z", 1)
    oxia.leaders = dict.fromkeys(oxia.shards, other)  # nobody says so yet
    waiting = asyncio.ensure_future(store.put(key(0), b"1", expected=ABSENT))
    await asyncio.sleep(0.2)
    await oxia.lead(dict.fromkeys(oxia.shards, other))
    assert isinstance(await waiting, int)
    assert len(oxia.applied) == 1


async def test_what_a_hung_leader_was_sent_is_unknown_and_what_waits_goes_to_its_successor(
    oxia: FakeOxia, store: OxiaMetaStore
) -> None:
    one, other = oxia.nodes
    await store.put(key(0), b"0")
    one.hang()
    sent = asyncio.ensure_future(store.put(key(0), b"1"))
    await asyncio.sleep(0.3)
    assert not sent.done()
    await oxia.lead(dict.fromkeys(oxia.shards, other.address))
    with pytest.raises(OutcomeUnknown):
        await sent
    await store.put(key(0), b"2")
    entry = await store.get(key(0))
    assert entry is not None
    assert entry.value == b"2"
    assert [put.value for request in oxia.applied for put in request.puts] == [b"0", b"2"], "nothing is sent twice"


async def test_a_leader_that_hangs_before_its_stream_is_established_was_sent_nothing(
    oxia: FakeOxia, store: OxiaMetaStore
) -> None:
    one, other = oxia.nodes
    await store.keys("", "z", 1)
    one.hang()
    waiting = [asyncio.ensure_future(store.put(key(number), b"", expected=ABSENT)) for number in range(10)]
    await asyncio.sleep(0.3)
    await oxia.lead(dict.fromkeys(oxia.shards, other.address))
    assert len(await asyncio.gather(*waiting)) == 10
    assert sum(len(request.puts) for request in oxia.applied) == 10


async def test_a_stream_whose_first_write_is_not_answered_is_replaced(
    oxia: FakeOxia, store: OxiaMetaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llog.stores.oxia.writes.ECHO_SECONDS", 0.2)
    oxia.nodes[0].streams_ignored = 2
    await store.put(key(0), b"")
    assert oxia.nodes[0].streams_ignored == 0


async def test_a_lost_answer_is_an_unknown_outcome(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    await store.put(key(0), b"0")
    oxia.nodes[0].loses_answers = True
    with pytest.raises(OutcomeUnknown):
        await store.put(key(0), b"1")
    oxia.nodes[0].loses_answers = False
    entry = await store.get(key(0))
    assert entry is not None
    assert entry.value == b"1", "and here it did happen"


async def test_a_put_many_of_which_one_shard_failed_is_an_unknown_outcome(oxia: FakeOxia) -> None:
    store = OxiaMetaStore(oxia.addresses, "default", seconds=1)
    await store.keys("", "z", 1)
    await oxia.lead({1: ""})
    with pytest.raises(OutcomeUnknown, match="1 of 2 parts were written"):
        await store.put_many([Put(key(number), b"1") for number in range(20)])
    await store.close()


async def test_without_a_leader_a_write_is_refused_after_its_deadline_and_did_not_happen(oxia: FakeOxia) -> None:
    store = OxiaMetaStore(oxia.addresses, "default", seconds=0.5)
    await store.keys("", "z", 1)
    await oxia.lead(dict.fromkeys(oxia.shards, ""))
    for call in (store.put("a", b""), store.delete("a"), store.delete_range("a", "b"), store.get("a")):
        with pytest.raises(StoreUnavailable):
            await call
    await oxia.lead(dict.fromkeys(oxia.shards, oxia.addresses[0]))
    assert isinstance(await store.put("a", b"", expected=ABSENT), int)
    assert len(oxia.applied) == 1
    await store.close()


async def test_a_stream_that_hangs_after_it_was_established_makes_writes_unknown_after_their_deadline(
    oxia: FakeOxia,
) -> None:
    store = OxiaMetaStore(oxia.addresses, "default", seconds=0.5)
    await store.put("a", b"")
    for node in oxia.nodes:
        node.hang()
    with pytest.raises(OutcomeUnknown):
        await store.put("a", b"1")
    with pytest.raises(StoreUnavailable):
        await store.get("a")
    await store.close()


async def test_streams_that_swallow_what_they_get_are_replaced(oxia: FakeOxia) -> None:
    store = OxiaMetaStore(oxia.addresses, "default", seconds=1)
    watch = store.watch("a")
    await watch.confirm()
    await store.put("a", b"0")
    for node in oxia.nodes:
        node.swallows = True
    with pytest.raises(OutcomeUnknown):
        await store.put("a", b"1")
    with pytest.raises(StoreUnavailable):
        await watch.confirm()
    assert await store.get("a") is not None, "everything else is answered"
    for node in oxia.nodes:
        node.swallows = False
    await store.put("a", b"2")
    await watch.confirm()
    await store.close()


async def test_a_read_of_a_hung_leader_is_answered_by_its_successor(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    one, other = oxia.nodes
    await store.put(key(0), b"0")
    one.hang()
    waiting = asyncio.gather(store.get(key(0)), store.range("", "z", 10), store.keys("", "z", 10), store.floor("z"))
    await asyncio.sleep(0.1)
    await oxia.lead(dict.fromkeys(oxia.shards, other.address))
    async with asyncio.timeout(LIMIT_S):
        entry, entries, keys, last = await waiting
    assert entry is not None
    assert entries == [entry]
    assert keys == [entry.key]
    assert last == entry


async def test_the_next_server_is_asked_when_the_one_that_tells_of_leaders_hangs(
    oxia: FakeOxia, store: OxiaMetaStore
) -> None:
    one, other = oxia.nodes
    await store.put(key(0), b"0")
    one.hang()  # it leads, and it is the one whose assignments are followed
    await oxia.lead(dict.fromkeys(oxia.shards, other.address))
    entry = await store.get(key(0))
    assert entry is not None


async def test_shards_that_were_replaced_are_found_anew(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    await store.put("a", b"")
    watch = store.watch("w/")
    await watch.confirm()
    reads = await store.begin_reads()
    oxia.shards = {number: FakeShard() for number in (2, 3, 4, 5)}
    oxia.leaders = {}
    await oxia.lead(dict.fromkeys(oxia.shards, oxia.addresses[1]))
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await store.put("a", b"1", expected=ABSENT)
                break
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(0.01)
    with pytest.raises(StaleReads):
        await reads.confirm()
    await watch.confirm()
    assert await store.keys("", "z", 10) == ["a"]


# --- stale reads


async def test_reads_are_confirmed_by_the_leader_that_answered_them(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    reads = await store.begin_reads()
    await reads.confirm()
    assert oxia.applied == [], "nothing was read"
    await store.get(key(0))
    await reads.confirm()
    assert len(oxia.applied) == 1, "one shard was read"


async def test_reads_before_and_after_a_new_leader_are_not_confirmed(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    other = oxia.nodes[1]
    reads = await store.begin_reads()
    await store.get(key(0))
    await oxia.lead(dict.fromkeys(oxia.shards, other.address))
    await store.get(key(0))
    with pytest.raises(StaleReads):
        await reads.confirm()
    again = await store.begin_reads()
    await store.get(key(0))
    await again.confirm()


async def test_reads_are_not_confirmed_if_an_election_gave_the_shard_to_the_same_leader(
    oxia: FakeOxia, store: OxiaMetaStore
) -> None:
    reads = await store.begin_reads()
    await store.get(key(0))
    await oxia.lead(dict.fromkeys(oxia.shards, ""))
    await eventually(lambda: not any(shard.leader for shard in _shards(store)))
    await oxia.lead(dict.fromkeys(oxia.shards, oxia.addresses[0]))
    with pytest.raises(StaleReads):
        await reads.confirm()


async def test_reads_are_not_confirmed_after_the_stream_broke(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    await store.put(key(0), b"")
    reads = await store.begin_reads()
    await store.get(key(0))
    oxia.nodes[0].loses_answers = True
    with pytest.raises(OutcomeUnknown):
        await store.put(key(0), b"1")
    oxia.nodes[0].loses_answers = False
    with pytest.raises(StaleReads):
        await reads.confirm()


# --- watches and sessions


async def test_a_watch_goes_on_at_the_next_leader(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    other = oxia.nodes[1]
    watch = store.watch(key(0, "w/"))
    await watch.confirm()
    await anext(watch)
    await oxia.lead(dict.fromkeys(oxia.shards, other.address))
    await watch.confirm()
    await anext(watch)  # whatever happened meanwhile
    writer = OxiaMetaStore(oxia.addresses, "default")
    waiting = asyncio.ensure_future(anext(watch))
    await writer.put(key(0, "w/1"), b"")
    async with asyncio.timeout(LIMIT_S):
        await waiting
    await writer.close()


async def test_confirmations_that_come_together_share_an_echo(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    watches = [store.watch(f"{number}/") for number in range(100)]
    await watches[0].confirm()
    await watches[0].confirm()
    before = len(oxia.applied)
    await asyncio.gather(*(watch.confirm() for watch in watches for _ in range(10)))
    assert len(oxia.applied) - before <= 2 * len(oxia.shards)


async def test_a_session_that_the_server_forgot_is_opened_again(oxia: FakeOxia, store: OxiaMetaStore) -> None:
    await store.put("claim", b"1", ephemeral=True)
    for shard in oxia.shards.values():
        shard.sessions.clear()
    await store.put("claim", b"2", ephemeral=True)
    assert oxia.sessions_opened == 2
    with pytest.raises(VersionMismatch):
        await store.put("claim", b"3", ephemeral=True, expected=ABSENT)
    await store.close()
    assert not any(shard.sessions for shard in oxia.shards.values())


# --- opening and closing


async def test_closing_does_not_wait_for_a_server_that_hangs(oxia: FakeOxia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CLOSE_SECONDS", 0.5)
    store = OxiaMetaStore(oxia.addresses, "default", seconds=LIMIT_S)
    await store.put("claim", b"", ephemeral=True)
    watch = store.watch("")
    await watch.confirm()
    for node in oxia.nodes:
        node.hang()
    under_way = [asyncio.ensure_future(store.put("a", b"")), asyncio.ensure_future(store.get("a"))]
    confirming = asyncio.ensure_future(watch.confirm())
    await asyncio.sleep(0.1)
    async with asyncio.timeout(LIMIT_S / 2):
        await store.close()
        results = await asyncio.gather(*under_way, confirming, return_exceptions=True)
    assert isinstance(results[0], OutcomeUnknown)
    assert isinstance(results[1], StoreUnavailable)
    assert isinstance(results[2], StoreUnavailable)


async def test_what_is_wrong_with_an_address_is_said(oxia: FakeOxia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "OPEN_SECONDS", 1.0)
    other = grpc.aio.server()
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    with pytest.raises(ConfigurationError, match="no namespace 'missing'"):
        await OxiaMetaStore(oxia.addresses, "missing").connect()
    with pytest.raises(WrongStore, match="is not Oxia"):
        await OxiaMetaStore([f"127.0.0.1:{port}"], "default").connect()
    with pytest.raises(StoreUnreachable, match=r"no Oxia answers at 127\.0\.0\.1:1"):
        await OxiaMetaStore(["127.0.0.1:1"], "default").connect()
    with pytest.raises(ConfigurationError, match="oxia://"):
        await OxiaMetaStore(oxia.addresses, "default", security=Security(tls=True)).connect()
    await other.stop(None)


async def test_a_key_whose_shard_is_missing_for_a_moment_is_looked_for_again(
    oxia: FakeOxia, store: OxiaMetaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put(key(1), b"")
    whole, asked = oxia.assignments(), 0

    def missing_twice() -> proto.ShardAssignments:
        nonlocal asked
        asked += 1
        return whole if asked > 2 else proto.ShardAssignments()

    monkeypatch.setattr(oxia, "assignments", missing_twice)
    assert await asyncio.to_thread(store.has_key, key(1)) is True
    assert await asyncio.to_thread(store.has_key, key(2)) is False


async def test_a_key_whose_shard_stays_missing_makes_the_store_unreachable(
    oxia: FakeOxia, store: OxiaMetaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "OPEN_SECONDS", 0.5)
    monkeypatch.setattr(oxia, "assignments", proto.ShardAssignments)
    with pytest.raises(StoreUnreachable, match=r"no shard of Oxia has the hash \d+: its shards are being changed"):
        await asyncio.to_thread(store.has_key, key(1))


async def test_natural_sorting_is_refused(oxia: FakeOxia, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = await OxiaMetaStore(oxia.addresses, "default").connect()
    await opened.close()
    assert any(SORTING_PROBE in shard.records for shard in oxia.shards.values())
    monkeypatch.setattr("tests.unit.stores.oxia.fake._look_up", lambda shard, _: shard.records[SORTING_PROBE])
    with pytest.raises(WrongStore, match="keySorting: hierarchical"):
        await OxiaMetaStore(oxia.addresses, "default").connect()


async def test_doctor_finds_natural_sorting_and_ephemeral_keys_that_stay(
    oxia: FakeOxia, store: OxiaMetaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_VANISH_SECONDS", 0.3)
    monkeypatch.setattr(ShardClient, "sorts_naturally", lambda _: asyncio.sleep(0, result=True))
    found = {each.check: each.verdict for each in await store.diagnose(lambda: 10**12)}  # the fake's clock is at 0
    assert found == {
        "its shards have leaders": "ok",
        "its clock is near ours": "warning",
        "its keys sort hierarchically": "failed",
        "ephemeral keys vanish with their session": "failed",
    }
    assert not any("#llog-doctor" in shard.records for shard in oxia.shards.values())


async def test_a_token_and_tls_are_used_if_the_server_asks_for_them(tmp_path: Path) -> None:
    authority, token = tmp_path / "ca.pem", tmp_path / "token"
    authority.write_bytes(CERTIFICATE)
    token.write_text("from-a-file\n")
    credentials = grpc.ssl_server_credentials([(KEY, CERTIFICATE)])
    async with fake_oxia(token="from-a-file", credentials=credentials) as oxia:

        def connect(security: Security) -> Awaitable[OxiaMetaStore]:
            return OxiaMetaStore(oxia.addresses, "default", security=security).connect()

        store = await connect(Security(tls=True, ca_file=str(authority), token_file=str(token)))
        await store.put("a", b"", ephemeral=True)
        assert await store.get("a") is not None
        watch = store.watch("a")
        await watch.confirm()
        await store.close()
        assert await asyncio.to_thread(store.has_key, "b") is False
        with pytest.raises(ConfigurationError, match="LLOG_OXIA_TOKEN") as refused:
            await connect(Security(tls=True, ca_file=str(authority), token="wrong-secret"))
        assert "wrong-secret" not in str(refused.value)
        with pytest.raises(ConfigurationError, match="LLOG_OXIA_CA_FILE"):
            await connect(Security(tls=True, token="from-a-file"))
        with pytest.raises(ConfigurationError, match=r"LLOG_OXIA_CA_FILE is .*missing.* cannot be read"):
            await connect(Security(tls=True, ca_file=str(tmp_path / "missing")))
    assert "wrong" not in repr(Security(token="wrong-secret"))


def _shards(store: OxiaMetaStore) -> list[Shard]:
    assert store._clients is not None
    return list(store._clients.cluster.shards.values())
