"""How `llog cost` adds up what several services report, since their start or between two readings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llog.cli.cost import ServiceMetrics, make_report
from llog.metrics.billing import MONTH_S

PRICES = {"storage_gb_month": 0.023, "put_1000": 0.005, "get_10000": 0.004}


def _share(name: str, puts: float) -> dict[str, Any]:
    shares = {"produced_bytes": 10, "consumed_bytes": 0, "put_requests": puts, "get_requests": 0.0}
    return {"name": name, **shares, "request_cost": puts / 1000 * 0.005}


def _metrics(uptime_s: float, puts: int, *topics: dict[str, Any], stored: int = 0, **more: float) -> ServiceMetrics:
    billing = {
        "prices": PRICES,
        "requests": {"put": puts, "list": 0, "get": 0, "range_get": 0},
        "request_costs": {"put": puts / 1000 * 0.005, "list": 0.0, "get": 0.0, "range_get": 0.0},
        "stored_bytes": stored,
        "objects": 1,
        "storage_cost_month": stored / (1 << 30) * 0.023,
        "topics": list(topics),
    }
    return msgspec.convert({"uptime_seconds": uptime_s, "s3": {"billing": billing}, **more}, ServiceMetrics)


def _broker(uptime_s: float, puts: int, *topics: dict[str, Any], stored: int = 0) -> ServiceMetrics:
    batches = {"llog_batch_queue_wait_seconds_count": puts * 10, "llog_blob_bytes_count": puts}
    limits = {"llog_batch_max_delay_seconds": 0.5, "llog_batch_max_bytes": 8 << 20, "llog_batch_bytes_sum": 1.0}
    return _metrics(uptime_s, puts, *topics, stored=stored, **batches, **limits)


def test_requests_of_all_services_are_added_up_and_the_bucket_is_counted_once() -> None:
    found = [_broker(100, 1000, stored=1 << 30), _broker(100, 3000, stored=2 << 30), _metrics(100, 500)]
    report = make_report(found, None)
    lines = {line.item: line for line in report.lines}
    assert lines["put"].quantity == 4500
    assert lines["put"].dollars == pytest.approx(0.0225)
    assert lines["put"].dollars_month == pytest.approx(0.0225 / 100 * MONTH_S)
    assert lines["storage"].dollars_month == pytest.approx(0.046)
    assert report.alternatives[0].puts_month == pytest.approx(40 * MONTH_S), "the compactor flushes nothing"


def test_only_what_was_done_between_two_readings_counts() -> None:
    before = [_broker(100, 1000, _share("a", 900), _share("b", 100))]
    report = make_report([_broker(110, 1020, _share("a", 905), _share("b", 115))], before)
    assert report.observed_s == pytest.approx(10)
    assert next(line for line in report.lines if line.item == "put").quantity == 20
    assert [(part.name, part.puts) for part in report.topics] == [("b", 15), ("a", 5)]


def test_a_service_that_was_started_again_counts_from_its_start() -> None:
    report = make_report([_broker(5, 10)], [_broker(100, 1000)])
    assert next(line for line in report.lines if line.item == "put").quantity == 10
    assert report.observed_s == 5


def test_a_compactor_alone_has_no_flushes_to_compare() -> None:
    assert make_report([_metrics(100, 500)], None).alternatives == []
