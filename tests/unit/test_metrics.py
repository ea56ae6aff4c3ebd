"""Histograms, samples, and the choice between the two forms of the answer."""

from __future__ import annotations

import pytest

from llog.base.histogram import Histogram
from llog.broker.monitoring.traffic import OTHERS, TrafficByName
from llog.metrics.exposition import as_json, as_prometheus, prefers_prometheus
from llog.metrics.families import counter, histogram

PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


def test_a_value_counts_in_every_bucket_whose_bound_it_does_not_exceed() -> None:
    counted = Histogram((1, 10))
    for value in (0, 1, 1.5, 10, 11):
        counted.observe(value)
    family = histogram("sizes_bytes", "Sizes.", "kind")
    lines = as_prometheus(family.histogram(counted, "a")).splitlines()
    assert lines[2:] == [
        'sizes_bytes_bucket{kind="a",le="1"} 2',
        'sizes_bytes_bucket{kind="a",le="10"} 4',
        'sizes_bytes_bucket{kind="a",le="+Inf"} 5',
        'sizes_bytes_sum{kind="a"} 23.5',
        'sizes_bytes_count{kind="a"} 5',
    ]


def test_values_of_which_only_the_total_is_known_count_as_their_mean() -> None:
    counted = Histogram((1, 10))
    counted.observe_mean(12, 4)
    counted.observe_mean(0, 0)
    assert (counted.counts, counted.sum) == ([0, 4, 0], 12)


def test_a_label_keeps_its_value_whatever_characters_it_has() -> None:
    samples = [counter("x_total", "X.", "route").sample(1, 'a"b\\c\nd')]
    assert as_prometheus(samples).splitlines()[-1] == 'x_total{route="a\\"b\\\\c\\nd"} 1'
    assert as_json(samples) == {"x_total": [{"route": 'a"b\\c\nd', "value": 1}]}


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("llog_store_bytes_total", "bytes"),
        ("llog_request_duration_seconds", "seconds"),
        ("llog_connections", ""),
        ("llog_requests_total", "requests"),
    ],
)
def test_the_unit_of_a_metric_is_the_end_of_its_name(name: str, unit: str) -> None:
    assert counter(name, "X.").unit == unit


@pytest.mark.parametrize(
    ("accept", "is_text"),
    [
        (PROMETHEUS_ACCEPT, True),
        ("text/plain", True),
        ("text/plain;version=0.0.4", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        (None, False),
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/plain, */*", False),
        ("text/plain;q=0.2, application/json", False),
        ("text/plain;q=nonsense", False),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
    ],
)
def test_prometheus_gets_text_and_everybody_else_json(accept: str | None, is_text: bool) -> None:
    assert prefers_prometheus(accept) is is_text


def test_names_beyond_the_bound_count_together_and_no_sum_shrinks() -> None:
    traffic = TrafficByName(names_max=2)
    for name in ("a", "b", "a", "c", "d"):
        traffic.of(name).add_produced(1, 10)
    assert {name: each.produced_bytes for name, each in traffic} == {"c": 10, "d": 10, OTHERS: 30}
    traffic.of("a").add_consumed(1, 5)
    assert sum(each.produced_bytes for _, each in traffic) == 50
    assert sum(each.consumed_bytes for _, each in traffic) == 5
