"""The counts of workers: merged as their families say, and never less than before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llog.base.histogram import Histogram
from llog.broker.monitoring.traffic import NAMES_MAX, OTHERS
from llog.broker.workers.counts import RecordedCounts, WorkerReport
from llog.metrics.families import Sample, counter, gauge, histogram
from llog.metrics.merging import PackedSamples, merge

REQUESTS = counter("requests_total", "Requests.", "route")
BY_TOPIC = counter("topic_records_total", "Records.", "topic")
SECONDS = histogram("seconds", "Seconds.")
WAITING = gauge("waiting", "Requests that wait.")
LAG = gauge("lag", "The lag.", across="max")
MEMORY = gauge("memory_bytes", "Memory.", across="each")


def report(worker: int, life: int, number: int, *samples: Sample) -> WorkerReport:
    return WorkerReport(worker=worker, pid=1, life=life, number=number, samples=PackedSamples.pack(samples))


def values(samples: list[Sample]) -> dict[str, float]:
    return {f"{each.family.name}{each.suffix}{dict(each.labels) or ''}": each.value for each in samples}


def test_each_family_says_how_the_values_of_workers_become_one() -> None:
    def samples(value: int) -> list[Sample]:
        observed = Histogram((1.0, 2.0))
        observed.observe(value)
        return [
            REQUESTS.sample(value, "/a"),
            WAITING.sample(value),
            LAG.sample(value),
            MEMORY.sample(value),
            *SECONDS.histogram(observed),
        ]

    merged = merge({0: samples(1), 1: [*samples(2), REQUESTS.sample(5, "/b")]})
    assert values(merged) == {
        "requests_total{'route': '/a'}": 3,
        "requests_total{'route': '/b'}": 5,
        "waiting": 3,
        "lag": 2,
        "memory_bytes{'worker': '0'}": 1,
        "memory_bytes{'worker': '1'}": 2,
        "seconds_bucket{'le': '1'}": 1,
        "seconds_bucket{'le': '2'}": 2,
        "seconds_bucket{'le': '+Inf'}": 2,
        "seconds_sum": 3,
        "seconds_count": 2,
    }
    assert [each.labels[0][1] for each in merged if each.suffix == "_bucket"] == ["1", "2", "+Inf"]
    assert all(isinstance(each.value, int) for each in PackedSamples.pack(merged).unpack() if not each.suffix)


def test_counts_do_not_fall_when_a_worker_dies_or_does_not_answer(tmp_path: Path) -> None:
    counts = RecordedCounts(tmp_path / "counts")

    def total(*reports: WorkerReport) -> float:
        return values(merge(counts.record(reports)))["requests_total{'route': '/a'}"]

    def seen(worker: int, life: int, number: int, value: int) -> WorkerReport:
        return report(worker, life, number, REQUESTS.sample(value, "/a"), WAITING.sample(9))

    assert total(seen(0, 10, 0, 5), seen(1, 11, 0, 7)) == 12
    assert total(seen(0, 10, 1, 6)) == 13, "the other one did not answer"
    assert total(seen(0, 10, 2, 6), seen(1, 20, 0, 0)) == 13, "it died, and counts from 0"
    assert total(seen(1, 20, 1, 3)) == 16
    assert total(seen(1, 20, 0, 1)) == 16, "a report that was overtaken"
    assert total(seen(1, 11, 9, 7)) == 16, "a report of the process that died"
    assert total(seen(1, 30, 0, 1)) == 17
    assert all(each.family.kind != "gauge" for each in merge(counts.record([])))


def test_counts_that_are_recorded_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    def record(worker: int) -> None:
        for number in range(10):
            reports = [report(worker, 1, number, REQUESTS.sample(number, "/a"))]
            RecordedCounts(tmp_path / "counts").record(reports)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(record, range(4))] == [None] * 4
    recorded = RecordedCounts(tmp_path / "counts").record([])
    assert values(merge(recorded)) == {"requests_total{'route': '/a'}": 4 * 9}


def test_the_names_that_workers_which_died_have_counted_are_bounded(tmp_path: Path) -> None:
    counts = RecordedCounts(tmp_path / "counts")
    for life in range(4):
        names = [BY_TOPIC.sample(1, f"{life}-{number}") for number in range(NAMES_MAX)]
        counts.record([report(0, life, 0, *names)])
    (found,) = counts.record([]).values()
    assert len(found) <= 2 * NAMES_MAX
    assert sum(each.value for each in found) == 4 * NAMES_MAX
    assert values(found)[f"topic_records_total{{'topic': '{OTHERS}'}}"] >= NAMES_MAX
