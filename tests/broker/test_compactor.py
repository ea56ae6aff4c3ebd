"""The compactor service: what it does to a log, when it does it, and what it answers over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from itertools import pairwise

import httpx
import msgspec
import pytest

from devtools.servers.downloads import UnobtainableError
from devtools.servers.prometheus import prometheus_program
from llog.broker.maintenance import Pause
from llog.compactor.metrics import ERRORS, FAMILIES, RECOVERIES, compactor_samples
from llog.compactor.server import CompactorServer
from llog.compactor.service import CompactorService, ServiceOptions, service_options
from llog.config import Settings
from llog.engines.object.compaction.claims import Claims
from llog.engines.object.description import describe_partition
from llog.engines.object.partition_keys import find_keys
from llog.engines.object.reader import Reader
from llog.errors import StoreUnavailable
from llog.log.catalog import Catalog
from llog.log.keys import upkeep_claim
from llog.log.opening import compactor_options
from llog.log.records import Kind
from llog.metrics.exposition import as_prometheus
from llog.model import TopicPartition
from llog.runtime import SystemRuntime
from llog.stores.memory.meta import MemoryMetaStore
from tests.broker.serving import Served

LIMIT_S = 60
NOW = Pause(1)
QUICK = ServiceOptions(discovery_ms=0, idle=NOW, error=NOW, retain_ms=1, collect_ms=1, linger_ms=0, look_again_ms=0)
PATIENT = ServiceOptions(retain_ms=86_400_000, collect_ms=86_400_000, linger_ms=0)


def _unexpected(report: str) -> None:
    raise AssertionError(report)


class _Running:
    """A service that runs until the end of the block, and then stops by itself."""

    def __init__(self, service: CompactorService) -> None:
        self._service = service
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> CompactorService:
        self._task = asyncio.create_task(self._service.run(self._stopping))
        return self._service

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        await asyncio.wait_for(self._task, LIMIT_S)


async def _until(done: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await done():
            await asyncio.sleep(0.01)


async def _is_compacted(served: Served, topic: str = "t") -> bool:
    described = await describe_partition(served.log, TopicPartition(topic, 0))
    return any(each.entry.kind is Kind.COMPACTED for each in described.entries)


async def _claims(served: Served) -> list[str]:
    found = await served.log.meta.keys("", "~", 10_000)
    return [key for key in found if key.endswith("compactor-claim") or "/upkeep/" in key]


async def test_it_compacts_retains_and_collects(served: Served) -> None:
    await served.produce("t", "first")
    await served.produce("old", "a", "b")
    await Catalog(served.log).set_retention("old", retention_ms=0, retention_bytes=None)
    settings = msgspec.structs.replace(served.settings, collect_grace_ms=0)
    reports: list[str] = []
    for n in range(20):
        await served.produce("t", f"{n}")

    async def tidy() -> bool:
        entries = (await describe_partition(served.log, TopicPartition("t", 0))).entries
        start = (await Reader(served.log).bounds(TopicPartition("old", 0))).log_start_offset
        return len(entries) < 10 and start == 3 and len(served.blobs.server.blobs) < 10

    async with _Running(CompactorService(served.log, settings, reports.append, QUICK)) as service:
        await _until(tidy)
    assert reports == []
    assert service.metrics.trimmed_records == 2
    assert service.metrics.deleted_blobs > 0
    payloads = [each["payload"] for each in (await served.consume("t", 1))["records"]]
    assert payloads == ["first", *(f"{n}" for n in range(20))]
    assert await _claims(served) == []


class _Hurried(SystemRuntime):
    """Time that passes in sleeps only."""

    def __init__(self) -> None:
        super().__init__()
        self.ms = 0
        self.passed: list[float] = []

    def now_ms(self) -> int:
        return self.ms

    async def sleep(self, seconds: float) -> None:
        if seconds > 3600:
            await asyncio.Event().wait()
        self.ms += max(1, round(seconds * 1000))
        self.passed.append(seconds)
        await asyncio.sleep(0)


async def test_it_pauses_as_the_settings_say_longer_after_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = _Hurried()
    settings = Settings(
        compactor_idle_sleep_ms=1000,
        compactor_idle_jitter_ms=500,
        compactor_error_sleep_ms=10_000,
        compactor_error_jitter_ms=5000,
        retain_interval_ms=86_400_000,
        collect_interval_ms=86_400_000,
    )
    times: list[int] = []
    reports: list[str] = []
    service = CompactorService(served.log._replace(runtime=runtime), settings, reports.append)

    async def search_once() -> None:
        times.append(runtime.ms)
        if len(times) == 10:
            raise StoreUnavailable("out of order")

    monkeypatch.setattr(service, "search_once", search_once)
    async with _Running(service):
        async with asyncio.timeout(LIMIT_S):
            while len(times) < 30:
                await asyncio.sleep(0)
    pauses = [late - early for early, late in pairwise(times[:30])]
    assert 10_000 <= pauses.pop(9) <= 15_000
    assert all(1000 <= pause <= 1500 for pause in pauses)
    assert len(set(pauses)) > 1
    assert [report for report in reports if "out of order" in report]


async def test_every_setting_of_the_service_has_its_meaning() -> None:
    settings = Settings(
        compactor_targets="orders:1,audit",
        compactor_workers=7,
        compactor_discovery_interval_ms=1000,
        compactor_idle_sleep_ms=2000,
        compactor_idle_jitter_ms=3000,
        compactor_error_sleep_ms=4000,
        compactor_error_jitter_ms=5000,
        retain_interval_ms=6000,
        collect_interval_ms=7000,
        compactor_linger_ms=8000,
    )
    assert service_options(settings) == ServiceOptions(
        targets=(("orders", 1), ("audit", None)),
        workers=7,
        discovery_ms=1000,
        idle=Pause(2000, 3000),
        error=Pause(4000, 5000),
        retain_ms=6000,
        collect_ms=7000,
        linger_ms=8000,
    )


async def test_the_compactors_claims_have_its_name() -> None:
    assert compactor_options(Settings(compactor_id="c-1", client_identifier="b-1")).holder == "c-1"
    assert compactor_options(Settings(client_identifier="b-1")).holder == "b-1"
    assert compactor_options(Settings()).holder == Settings().client_name


async def test_it_reports_a_failing_store_once_for_all_and_goes_on_once_it_is_back(served: Served) -> None:
    for partition in range(3):
        for n in range(3):
            await served.produce("t", f"{n}", partition=partition)
    served.blobs.broken = True
    reports: list[str] = []

    async def compacted() -> bool:
        return await _is_compacted(served)

    service = CompactorService(served.log, served.settings, reports.append, msgspec.structs.replace(QUICK, workers=1))
    await service.search_once()
    async with _Running(service):

        async def reported() -> bool:
            return any(report.startswith("compaction of") for report in reports)

        await _until(reported)
        compaction = [report for report in reports if report.startswith("compaction of")]
        assert "and 2 other partitions: the blob store is out of order" in compaction[0]
        served.blobs.broken = False
        await _until(compacted)
    assert service.metrics.runs["failed"] >= 3
    assert service.metrics.errors["store_unavailable"] >= 3


async def test_a_partition_with_nothing_to_compact_is_left_alone_until_it_grows(served: Served) -> None:
    await served.produce("t", "only")
    service = CompactorService(served.log, served.settings, _unexpected, PATIENT)
    taken = _taken(service)
    await service.run_once()
    assert _taken(service) == taken + 1
    await service.run_once()
    assert _taken(service) == taken + 1, "it was claimed again for nothing"
    await served.produce("t", "one more")
    await served.produce("t", "and one")
    await service.run_once()
    assert _taken(service) > taken + 1
    assert await _is_compacted(served)


def _taken(service: CompactorService) -> int:
    return service.metrics.runs["compacted"] + service.metrics.runs["nothing"]


async def test_a_partition_that_failed_is_left_alone_for_the_error_pause(served: Served) -> None:
    for n in range(3):
        await served.produce("t", f"{n}")
    served.blobs.broken = True
    reports: list[str] = []
    service = CompactorService(served.log, served.settings, reports.append, PATIENT)
    await service.run_once()
    assert service.failures == 2, "compaction and collection"
    served.blobs.broken = False
    await service.run_once()
    assert service.metrics.runs == {"failed": 1}


async def test_targets_come_first(served: Served) -> None:
    for topic in ("a", "b", "c"):
        for n in range(3):
            await served.produce(topic, f"{n}")
    for target in ("a", "b:0", "c"):
        settings = msgspec.structs.replace(served.settings, compactor_targets=target)
        service = CompactorService(served.log, settings, _unexpected)
        await service.search_once()
        queued = await service._queue.take(10)
        assert queued[0].topic == target[0]
        assert {tp.topic for tp in queued} == {"a", "b", "c"}


async def test_a_target_that_does_not_exist_is_noted_once_and_is_no_failure(served: Served) -> None:
    await served.produce("t", "a", partition=1)
    notes: list[str] = []
    settings = msgspec.structs.replace(served.settings, compactor_targets="t:1,t:2,gone,t")
    options = msgspec.structs.replace(service_options(settings), discovery_ms=0)
    service = CompactorService(served.log, settings, notes.append, options)
    await service.search_once()
    await service.search_once()
    assert [note.split("'")[1] for note in notes] == ["t:2", "gone"]
    assert service.failures == 0


async def test_new_topics_are_discovered_and_deleted_ones_forgotten(served: Served) -> None:
    runtime = _Hurried()
    log = served.log._replace(runtime=runtime)
    service = CompactorService(log, Settings(compactor_discovery_interval_ms=1000), _unexpected)
    await served.produce("t", "a")
    await service.search_once()
    assert service.metrics.partitions == 1
    await served.produce("more", "a", partition=3)
    await service.search_once()
    assert service.metrics.partitions == 1, "the catalog was read too early"
    await runtime.sleep(1)
    await service.search_once()
    assert service.metrics.partitions == 5
    await Catalog(served.log).delete("more")
    await service.run_once()
    assert service.metrics.runs["gone"] + service.metrics.runs["nothing"] > 0
    assert service.metrics.discoveries["done"] == 2


async def test_two_services_share_the_partitions_and_one_of_them_collects(served: Served) -> None:
    for partition in range(40):
        for n in range(3):
            await served.produce("t", f"{n}", partition=partition)
    server = served.log.meta
    assert isinstance(server, MemoryMetaStore)
    other = served.log._replace(meta=MemoryMetaStore(server._server))
    settings = msgspec.structs.replace(served.settings, compactor_id="c-1")
    services = [
        CompactorService(served.log, settings, _unexpected, QUICK),
        CompactorService(other, msgspec.structs.replace(settings, compactor_id="c-2"), _unexpected, QUICK),
    ]

    async def compacted() -> bool:
        described = [await describe_partition(served.log, TopicPartition("t", p)) for p in range(40)]
        return all(any(each.entry.kind is Kind.COMPACTED for each in one.entries) for one in described)

    async def collected() -> bool:
        return all(service.metrics.steps["collection", "done"] + _left(service) > 2 for service in services)

    def _left(service: CompactorService) -> int:
        return service.metrics.steps["collection", "claimed"]

    async with _Running(services[0]), _Running(services[1]):
        await _until(compacted)
        await _until(collected)
        assert sorted(bool(service.metrics.steps["collection", "done"]) for service in services) == [False, True]
    assert sum(service.metrics.runs["compacted"] for service in services) == 40, "something was compacted twice"
    assert await _claims(served) == []


async def test_a_partition_that_another_compactor_has_claimed_is_left_to_it(served: Served) -> None:
    for n in range(4):
        await served.produce("t", f"{n}")
    key = (await find_keys(served.log, TopicPartition("t", 0))).claim
    other = Claims(served.log, "other")
    assert await other.take(key)
    service = CompactorService(served.log, served.settings, _unexpected, PATIENT)
    await service.run_once()
    assert service.metrics.runs == {"claimed": 1}
    await other.release(key)
    await service.run_once()
    assert service.metrics.runs["compacted"] == 1


async def test_collection_is_left_to_the_service_that_does_it(served: Served) -> None:
    await served.produce("t", "a")
    other = Claims(served.log, "other")
    assert await other.keep(upkeep_claim("collection"))
    service = CompactorService(served.log, served.settings, _unexpected, PATIENT)
    await service.run_once()
    assert service.metrics.steps == {("collection", "claimed"): 1, ("retention", "done"): 1}
    assert "list" not in served.blobs.counts.count


async def test_the_collector_is_not_run_before_its_time(served: Served) -> None:
    options = msgspec.structs.replace(QUICK, retain_ms=86_400_000, collect_ms=86_400_000)
    async with _Running(CompactorService(served.log, Settings(), _unexpected, options)) as service:
        await served.produce("t", "a")

        async def looked_around() -> bool:
            return service.metrics.discoveries["done"] > 5

        await _until(looked_around)
    assert "list" not in served.blobs.counts.count


async def test_a_stop_finishes_the_run_under_way_and_gives_the_claims_back(served: Served) -> None:
    for n in range(4):
        await served.produce("t", f"{n}")
    served.blobs.gate.clear()
    stopping = asyncio.Event()
    service = CompactorService(served.log, served.settings, _unexpected, PATIENT)
    running = asyncio.create_task(service.run(stopping))
    puts = len(served.blobs.puts)

    async def uploading() -> bool:
        return len(served.blobs.puts) > puts

    await _until(uploading)
    assert len(await _claims(served)) == 1
    stopping.set()
    await asyncio.sleep(0.05)
    assert not running.done()
    served.blobs.gate.set()
    await asyncio.wait_for(running, LIMIT_S)
    assert await _is_compacted(served)
    assert await _claims(served) == []
    described = await describe_partition(served.log, TopicPartition("t", 0))
    assert described.compaction is None


async def test_a_run_that_takes_too_long_is_left_to_the_next_compactor(served: Served) -> None:
    for n in range(4):
        await served.produce("t", f"{n}")
    served.blobs.gate.clear()
    stopping = asyncio.Event()
    reports: list[str] = []
    options = msgspec.structs.replace(PATIENT, stop_s=0.05)
    service = CompactorService(served.log, served.settings, reports.append, options)
    puts = len(served.blobs.puts)
    running = asyncio.create_task(service.run(stopping))

    async def uploading() -> bool:
        return len(served.blobs.puts) > puts

    await _until(uploading)
    stopping.set()
    await asyncio.wait_for(running, LIMIT_S)
    assert "another compactor will resume it" in reports[0]
    assert await _claims(served) == []
    served.blobs.gate.set()
    following = CompactorService(served.log, served.settings, _unexpected, PATIENT)
    await following.run_once()
    assert following.metrics.recoveries == {"WRITING_BLOB": 1}
    assert await _is_compacted(served)


async def test_its_routes_answer_health_readiness_and_metrics(served: Served) -> None:
    for n in range(4):
        await served.produce("t", f"{n}")
    settings = msgspec.structs.replace(
        served.settings, compactor_id="c-1", compactor_targets="t:0", compactor_linger_ms=0
    )
    server = CompactorServer(served.log, settings, _unexpected)
    await server.compactor.run_once()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=server.app()), base_url="http://localhost"
    ) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready"}
        found = (await client.get("/metrics")).json()
        assert found["compactor"]["id"] == "c-1"
        assert found["compactor"]["targets"] == ["t:0"]
        assert found["llog_compactor_runs_total"] == [{"outcome": "compacted", "value": 1}]
        assert found["llog_compactor_run_records_sum"] == 3
        assert found["llog_compactor_run_entries_count"] == 1
        assert found["llog_compactor_partitions"] == 1
        assert found["llog_compactor_lag_offsets"] == 4
        assert found["llog_compactor_pending_appends"] == 1
        assert {each["outcome"]: each["value"] for each in found["llog_compactor_claims_total"]} == {
            "taken": 3,
            "released": 3,
        }
        stages = {each["stage"] for each in found["llog_compactor_stage_duration_seconds_count"]}
        assert stages == {"claim", "choose", "begin", "fetch", "write", "publish"}
        assert "llog_produced_records_total" not in found
        assert any(each["operation"] == "put" for each in found["llog_store_operations_total"])
        for path, headers in (("/metrics", {"accept": "text/plain;version=0.0.4"}), ("/metrics/prometheus", {})):
            text = await client.get(path, headers=headers)
            assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert 'llog_compactor_runs_total{outcome="compacted"} 1' in text.text
            assert 'llog_compactor_info{id="c-1"} 1' in text.text
        assert (await client.get("/topics")).status_code == 404
        server.stopping.set()
        assert (await client.get("/ready")).status_code == 503


async def test_health_says_that_partitions_cannot_be_looked_at(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    server = CompactorServer(served.log, served.settings, lambda _: None)

    async def fail() -> None:
        raise StoreUnavailable("the catalog is out of order")

    monkeypatch.setattr(server.compactor, "search_once", fail)
    transport = httpx.ASGITransport(app=server.app())
    async with (
        _Running(server.compactor),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):

        async def unhealthy() -> bool:
            return (await client.get("/health")).status_code == 503

        await _until(unhealthy)
        detail = (await client.get("/health")).json()["detail"]
        assert "compaction: partitions cannot be looked at: the catalog is out of order" in detail


async def test_promtool_finds_nothing_to_improve_in_its_metrics(served: Served) -> None:
    try:
        promtool = prometheus_program("promtool")
    except UnobtainableError as error:
        pytest.skip(f"promtool is not on PATH, and Debian's package cannot be had: {error}")
    for n in range(4):
        await served.produce("t", f"{n}")
    service = CompactorService(served.log, served.settings, _unexpected, PATIENT)
    await service.run_once()
    samples = list(compactor_samples(service.metrics))
    assert {sample.family for sample in samples} >= set(FAMILIES) - {ERRORS, RECOVERIES}
    done = await asyncio.to_thread(
        subprocess.run,
        [promtool, "check", "metrics"],
        input=as_prometheus(samples),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
