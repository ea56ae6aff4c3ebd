"""What the conformance suite cannot ask of Oxia: servers that die, hang and come back, and addresses that are wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from devtools.servers.oxia import OxiaMissing, OxiaServer, oxia_cluster, oxia_server
from llog.cli.main import main
from llog.errors import OutcomeUnknown, StaleReads, StoreUnavailable, VersionMismatch
from llog.stores.meta import ABSENT
from llog.stores.oxia.store import OxiaMetaStore

LIMIT_S = 120
"""More than any failover takes on a slow machine."""


@contextmanager
def had(server: Callable[[Path], object], directory: Path) -> Iterator[OxiaServer]:
    """Start the server, or skip where there is no Oxia."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(server(directory))  # type: ignore[arg-type]
        except OxiaMissing as error:
            pytest.skip(str(error))


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[OxiaServer]:
    """A server of the test's own, which it may kill."""
    with had(lambda directory: oxia_server(directory, shards=2), tmp_path) as server:
        if not server.nodes:
            pytest.skip("the server at LLOG_TEST_OXIA_ADDRESS cannot be killed")
        yield server


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OxiaServer]:
    with had(lambda directory: oxia_cluster(directory, shards=4), tmp_path) as server:
        yield server


class Load:
    """Writers that increment keys on every shard by compare-and-swap, and what they were told."""

    KEYS = 8
    WRITERS = 2

    def __init__(self, server: OxiaServer) -> None:
        self.stores = [OxiaMetaStore(server.addresses, server.namespace) for _ in range(self.WRITERS)]
        self.acknowledged: dict[str, list[int]] = {f"llog/t/partitions/{n:010}/n": [] for n in range(self.KEYS)}
        self.unknown = dict.fromkeys(self.acknowledged, 0)
        self.refused = 0
        self.at: dict[str, list[float]] = {key: [] for key in self.acknowledged}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def __aenter__(self) -> Load:
        for key in self.acknowledged:
            await self.stores[0].put(key, b"0", expected=ABSENT)
        self._tasks = [
            asyncio.create_task(self._write(store, key)) for store in self.stores for key in self.acknowledged
        ]
        await self.progress()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        for store in self.stores:
            await store.close()

    async def _write(self, store: OxiaMetaStore, key: str) -> None:
        while not self._is_over:
            try:
                entry = await store.get(key)
                assert entry is not None
                number = int(entry.value) + 1
                await store.put(key, b"%d" % number, expected=entry.version)
                self.acknowledged[key].append(number)
                self.at[key].append(time.monotonic())
            except VersionMismatch:
                pass
            except OutcomeUnknown:
                self.unknown[key] += 1
            except StoreUnavailable:
                self.refused += 1
            await asyncio.sleep(0.002)

    async def progress(self, count: int = 5) -> None:
        """Wait until every key was incremented as often again."""
        before = {key: len(done) for key, done in self.acknowledged.items()}
        async with asyncio.timeout(LIMIT_S):
            while not all(len(done) >= before[key] + count for key, done in self.acknowledged.items()):
                await asyncio.sleep(0.02)

    def longest_gap_s(self) -> float:
        return max(later - earlier for at in self.at.values() for earlier, later in pairwise(at))

    async def check(self, server: OxiaServer) -> None:
        """Nothing that was acknowledged is lost, and nothing was applied twice."""
        store = OxiaMetaStore(server.addresses, server.namespace)
        reads = await store.begin_reads()
        for key, numbers in self.acknowledged.items():
            entry = await store.get(key)
            assert entry is not None
            assert len(set(numbers)) == len(numbers), "two writers were told the same number"
            assert int(entry.value) >= max(numbers)
            assert len(numbers) <= int(entry.value) <= len(numbers) + self.unknown[key]
        await reads.confirm()
        await store.close()


async def test_a_standalone_that_is_killed_and_comes_back_loses_nothing(standalone: OxiaServer) -> None:
    (node,) = standalone.nodes
    holder = OxiaMetaStore(standalone.addresses, "default", session_timeout_ms=30_000)
    await holder.put("claim", b"", ephemeral=True)
    watch = holder.watch("w/")
    async with Load(standalone) as load:
        node.kill()
        await asyncio.sleep(1)
        node.start()
        await load.progress()
    await load.check(standalone)
    assert await holder.get("claim") is not None
    await watch.confirm()
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await holder.put("w/1", b"")
    async with asyncio.timeout(LIMIT_S):
        await waiting
    await holder.close()


async def test_a_killed_leader_loses_nothing(cluster: OxiaServer) -> None:
    async with Load(cluster) as load:
        cluster.leader_of(0).kill()
        await load.progress(20)
    print(f"longest gap {load.longest_gap_s():.1f} s, {sum(load.unknown.values())} unknown, {load.refused} refused")
    await load.check(cluster)


async def test_a_stopped_leader_loses_nothing_and_its_stale_reads_are_not_confirmed(cluster: OxiaServer) -> None:
    leader = cluster.leader_of(0)
    async with Load(cluster) as load:
        reads = [(store, await store.begin_reads()) for store in load.stores]
        leader.pause()
        try:
            await load.progress(20)
        finally:
            leader.resume()
        for _, begun in reads:
            with pytest.raises(StaleReads):
                await begun.confirm()
        await load.progress(20)
    print(f"longest gap {load.longest_gap_s():.1f} s, {sum(load.unknown.values())} unknown, {load.refused} refused")
    await load.check(cluster)


@pytest.fixture
def llog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("LLOG_BLOBS", f"file://{tmp_path / 'blobs'}")

    def run(meta: str, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["--meta", meta, *arguments])

    return run


def refusal(result: Result) -> str:
    """The one line that a command said, which names the setting."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("llog: LLOG_META is oxia://")
    return line


def test_a_missing_namespace_and_natural_sorting_are_refused_in_one_line(
    standalone: OxiaServer, tmp_path: Path, llog: Callable[..., Result]
) -> None:
    line = refusal(llog(f"oxia://{standalone.addresses[0]}/missing", "topics", "create", "t"))
    assert "no namespace 'missing'" in line
    with oxia_server(tmp_path / "natural", key_sorting="natural") as natural:
        line = refusal(llog(natural.url, "topics", "create", "t"))
        assert "keySorting: hierarchical" in line


def test_a_log_in_oxia_is_made_by_the_first_write_and_not_by_reads(
    oxia: OxiaServer, llog: Callable[..., Result]
) -> None:
    oxia.wipe()
    assert "there is no log" in refusal(llog(oxia.url, "topics", "list"))
    assert llog(oxia.url, "topics", "create", "orders", "--partitions", "3").exit_code == 0
    assert "orders" in llog(oxia.url, "topics", "list").stdout
    oxia.wipe()


def test_doctor_looks_at_the_server(oxia: OxiaServer, llog: Callable[..., Result]) -> None:
    result = llog(oxia.url, "doctor", "--json")
    oxia.wipe()
    assert result.exit_code == 0, result.output
    checks = {each["check"]: each for each in json.loads(result.stdout)["checks"] if each["store"] == "meta"}
    assert all(each["ok"] for each in checks.values())
    assert "ephemeral keys vanish with their session" in checks
    assert checks["its keys sort hierarchically"]["detail"] == "namespace default"
    assert "shards, led by" in checks["its shards have leaders"]["detail"]
    assert checks["its clock is near ours"]["detail"].endswith(" s")
    assert checks["compare and swap"]["detail"].endswith(" ms")
