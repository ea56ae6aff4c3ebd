"""The estimate of costs: prices of requests and storage, shares, and what other batches would cost."""

from __future__ import annotations

import asyncio

import pytest

from llog.broker.metrics import Metrics
from llog.broker.monitoring.attribution import attribute
from llog.config import Settings
from llog.config.loading import load_settings
from llog.engines.registry import all_engines
from llog.errors import ConfigurationError, StoreUnavailable
from llog.log.log import Log
from llog.metrics.billing import GB, Billing, Prices, make_bill
from llog.metrics.cached import Cached
from llog.metrics.flush_model import FlushSettings, Rates, predict_blobs
from llog.metrics.footprint import Footprint
from llog.runtime import SystemRuntime
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore

PRICES = Prices(storage_gb_month=0.023, put_1000=0.005, get_10000=0.004)


def _bucket_log() -> tuple[Log, MemoryBlobStore]:
    blobs = MemoryBlobStore(MemoryBlobs(), uri="s3://bucket/prefix")
    return Log(MemoryMetaStore(MemoryMeta()), blobs, SystemRuntime(), all_engines()), blobs


def test_a_bill_has_the_prices_of_the_document_and_its_requests() -> None:
    counts = {"put": 2000, "list": 1000, "get": 10_000, "range_get": 20_000, "head": 5, "delete": 7}
    bill = make_bill(PRICES, counts, Footprint(objects=3, bytes=10 * GB, measured_at_ms=5)).as_json()
    assert bill["request_costs"] == pytest.approx({"put": 0.01, "list": 0.005, "get": 0.004, "range_get": 0.008})
    assert bill["request_cost"] == pytest.approx(0.027)
    assert (bill["objects"], bill["stored_bytes"], bill["stored_gb"]) == (3, 10 * GB, 10)
    assert bill["storage_cost_month"] == pytest.approx(0.23)
    assert "KMS" in bill["excluded"]


def test_prices_are_settings() -> None:
    assert load_settings({}, environment={"LLOG_PRICE_PUT_1000": "0.0054"}).price_put_1000 == 0.0054
    assert load_settings({"price_get_10000": "1"}, environment={}).price_get_10000 == 1.0
    defaults = Settings()
    assert (defaults.price_storage_gb_month, defaults.price_put_1000, defaults.price_get_10000) == (0.023, 0.005, 0.004)


@pytest.mark.parametrize("text", ["free", "-0.1", "nan", "inf"])
def test_a_price_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"LLOG_PRICE_PUT_1000.*number such as 0.02"):
        load_settings({}, environment={"LLOG_PRICE_PUT_1000": text})


async def test_the_footprint_is_listed_once_and_kept() -> None:
    log, blobs = _bucket_log()
    await blobs.put("wal/a", [b"12345"])
    billing = Billing(log, Settings(footprint_interval_ms=3_600_000))
    for _ in range(3):
        bill = await billing.bill()
        assert bill is not None
        assert bill.footprint is not None
        assert (bill.footprint.objects, bill.footprint.bytes, bill.requests["list"]) == (1, 5, 1)
    assert blobs.counts.count["list"] == 1
    await billing.close()


async def test_a_footprint_that_is_turned_off_costs_no_requests() -> None:
    log, blobs = _bucket_log()
    bill = await Billing(log, Settings(footprint_interval_ms=0)).bill()
    assert bill is not None
    assert bill.as_json()["stored_bytes"] is None
    assert "list" not in blobs.counts.count


async def test_local_files_have_no_bill() -> None:
    log = Log(MemoryMetaStore(MemoryMeta()), MemoryBlobStore(MemoryBlobs()), SystemRuntime(), all_engines())
    assert await Billing(log, Settings()).bill() is None


async def test_a_value_that_cannot_be_read_again_stays() -> None:
    values = iter([1])

    async def read() -> int:
        try:
            return next(values)
        except StopIteration:
            raise StoreUnavailable("away") from None

    cached = Cached(read, lambda _: 0.0)
    assert await cached.get() == 1
    while not cached.failures:
        assert await cached.get() == 1
        await asyncio.sleep(0)
    await cached.close()


def test_costs_are_shared_by_batches_and_by_bytes_from_the_bucket() -> None:
    metrics = Metrics()
    metrics.count_batch_share("a", "p", 0.25)
    metrics.count_batch_share("b", None, 0.75)
    metrics.count_batch_share("a", None, 1.0)
    metrics.count_consumed("a", None, 10, 1000)  # from the tail: nothing was fetched
    metrics.count_consumed("b", "g", 10, 300)
    metrics.count_fetched("b", "g", 300)
    metrics.count_fetched("b", None, 100)
    shares = attribute(make_bill(PRICES, {"put": 2000, "range_get": 40_000}, None), metrics.traffic)
    topics = {share.name: share for share in shares["topics"]}
    assert topics["a"].request_cost == pytest.approx(0.00625)
    assert topics["b"].request_cost == pytest.approx(0.00375 + 0.016)
    assert [share.name for share in shares["topics"]] == ["b", "a"], "the most expensive first"
    (producer,), (group,) = shares["producers"], shares["groups"]
    assert (producer.name, producer.put_requests) == ("p", pytest.approx(250))
    assert (group.name, group.request_cost) == ("g", pytest.approx(0.012))


NOW = FlushSettings(delay_s=0.5, bytes_max=8 << 20)


def test_a_busy_broker_puts_in_proportion_to_the_delay() -> None:
    rates = Rates(requests=1e6, bytes=1000, blobs=2)
    assert predict_blobs(rates, NOW, NOW) == 2
    assert predict_blobs(rates, NOW, FlushSettings(delay_s=0.25, bytes_max=8 << 20)) == pytest.approx(4, rel=1e-3)
    assert predict_blobs(rates, NOW, FlushSettings(delay_s=1, bytes_max=8 << 20)) == pytest.approx(1, rel=1e-3)
    assert predict_blobs(rates, NOW, FlushSettings(delay_s=0.5, bytes_max=16 << 20)) == 2, "the delay decides"


def test_a_broker_with_full_batches_puts_in_proportion_to_their_size() -> None:
    rates = Rates(requests=1e6, bytes=64 << 20, blobs=8)
    assert predict_blobs(rates, NOW, FlushSettings(delay_s=0.5, bytes_max=16 << 20)) == pytest.approx(4)
    assert predict_blobs(rates, NOW, FlushSettings(delay_s=0.25, bytes_max=8 << 20)) == pytest.approx(8)


def test_an_idle_broker_puts_nothing_whatever_the_settings() -> None:
    assert predict_blobs(Rates(requests=0, bytes=0, blobs=0), NOW, NOW) == 0
    rare = Rates(requests=0.01, bytes=1, blobs=0.01)
    assert predict_blobs(rare, NOW, FlushSettings(delay_s=1, bytes_max=8 << 20)) == pytest.approx(0.01, rel=0.01)
