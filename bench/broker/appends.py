"""Durable appends: small ones, batches and Arrow, beside the same appends to peers and a bare durable write."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from bench.blobs import bare as write_synced
from bench.broker.process import TOPIC, Client, consume, empty_exchange, encode_request, exchange, produce
from bench.broker.subject import PARTITIONS, VALUE, Subject
from bench.load import p50_ms
from bench.logs import records
from bench.report import rate
from bench.stores_bare import Pace
from bench.turns import in_turns
from llog.broker.http.arrow import MEDIA_TYPE, encode_stream

ARROW_CONNECTIONS = 4
ARROW_RECORD_BYTES = 1000
ARROW_REQUEST_BYTES = 2 << 20
"""Four of them are what one flush takes at most."""
ARROW_TURN_BYTES = 256 << 20
"""Of the bare writes of one turn: files are deleted only after the last turn, because deleting slows the disk."""
LARGE_BYTES = 8 << 20


class Comparison(NamedTuple):
    """Appends that the broker and its peers do alike, each connection to a partition of its own."""

    name: str
    connections: int
    records: int
    """Of one request."""
    figure: Callable[[Pace], float]
    unit: str
    at_least: Mapping[str, float]
    at_most: Mapping[str, float]
    """The bounds of the ratio to each peer that has one."""

    def show(self, value: float) -> str:
        return f"{value:,.2f} {self.unit}" if self.unit == "ms" else f"{value:,.0f} {self.unit}"


def _per_second(pace: Pace) -> float:
    return pace.per_second


COMPARISONS = (
    Comparison("one record per request, 1 connection, p50", 1, 1, p50_ms, "ms", {}, {"Redis": 5}),
    Comparison(
        "one record per request, 16 connections",
        *(16, 1, _per_second, "requests/s", {"Redis": 0.25}, {}),
    ),
    Comparison(
        "JSON, 100 × 100 B per request, 16 connections",
        *(16, 100, lambda pace: 100 * pace.per_second, "records/s", {"Redis": 0.5, "Kafka": 1.5}, {}),
    ),
)


def measure_comparison(subject: Subject, comparison: Comparison) -> None:
    """Measure the broker and its peers in turns, and report one row for each peer."""
    partitions = range(comparison.connections)
    requests = [exchange(produce(partition, [VALUE] * comparison.records)) for partition in partitions]
    turns = {"llog": partial(subject.load, subject.process.address, requests, comparison.figure)}
    for peer in subject.peers:
        requests = [peer.append(partition, comparison.records) for partition in partitions]
        turns[peer.name] = partial(subject.load, peer.address, requests, comparison.figure)
    found = in_turns(turns, subject.rounds)
    value = comparison.show(found.median("llog"))
    wanted = {**comparison.at_least, **comparison.at_most}
    for name in dict.fromkeys([*wanted, *(peer.name for peer in subject.peers)]):
        measure = f"{comparison.name}, over {name}"
        if name not in turns:
            subject.report.note(measure, f"{value}; {name} was left out")
            continue
        against, ratio = f"{name} {comparison.show(found.median(name))}", found.ratio("llog", name)
        if name in comparison.at_least:
            subject.report.ratio(measure, value, against, ratio, comparison.at_least[name])
        elif name in comparison.at_most:
            subject.report.ratio_at_most(measure, value, against, ratio, comparison.at_most[name])
        else:
            subject.report.compare(measure, value, against, ratio)


def append_arrow(partition: int, size: int) -> bytes:
    """Encode a request that appends about `size` bytes of records as Arrow."""
    values = records(size // ARROW_RECORD_BYTES, ARROW_RECORD_BYTES).values
    batch = pa.record_batch({"value": values})
    path = f"/topics/{TOPIC}/partitions/{partition}/records"
    return encode_request("POST", path, bytes(encode_stream(batch.schema, [batch])), MEDIA_TYPE)


def measure_arrow(subject: Subject) -> None:
    """Measure appends as Arrow beside bare durable writes of files, each of which has the bytes of one flush."""
    exchanges = [exchange(append_arrow(partition, ARROW_REQUEST_BYTES)) for partition in range(ARROW_CONNECTIONS)]
    content = b"".join(each.request for each in exchanges)
    made = 0

    def write_files() -> float:
        nonlocal made
        began = time.perf_counter()
        count = ARROW_TURN_BYTES // len(content)
        for number in range(made, made + count):
            write_synced(subject.directory / f"bare-{number}", content)
        made += count
        return count * len(content) / (time.perf_counter() - began)

    def append() -> float:
        address = subject.process.address
        return subject.load(address, exchanges, lambda pace: pace.per_second * len(content) / len(exchanges))

    turns = in_turns({"llog": append, "bare": write_files}, subject.rounds)
    subject.report.ratio(
        f"Arrow, records of 1 KB, {ARROW_CONNECTIONS} connections",
        rate(turns.median("llog"), 1),
        f"bare durable write {rate(turns.median('bare'), 1)}",
        turns.ratio("llog", "bare"),
        0.5,
    )


def measure_large(subject: Subject) -> None:
    """Measure one record that is as large as a flush, in and out."""
    client = Client(subject.process)
    request = produce(1, ["x" * LARGE_BYTES])
    first = client.next_offset(1)
    written, read, bare = [], [], []
    for number in range(subject.rounds):
        bare.append(write_synced(subject.directory / f"large-{number}", request))
        written.append(_seconds_of(client, request))
        read.append(_seconds_of(client, consume(1, first + number)))
    produced, file = statistics.median(written), statistics.median(bare)
    size = f"{LARGE_BYTES >> 20} MiB"
    against = f"bare durable write {rate(LARGE_BYTES, file)}"
    subject.report.compare(f"produce of {size}, durable", rate(LARGE_BYTES, produced), against, file / produced)
    subject.report.note(f"consume of {size}", rate(LARGE_BYTES, statistics.median(read)))
    client.close()


def _seconds_of(client: Client, request: bytes) -> float:
    began = time.perf_counter()
    client.ask(request)
    return time.perf_counter() - began


def measure_small(subject: Subject, at_a_time: int = 64) -> None:
    """Measure small requests of each kind beside a request that asks for nothing, and so uses neither store."""
    exchanges = {
        "empty round trip": empty_exchange(),
        "consume of one record": exchange(consume(PARTITIONS - 1, 1)),  # a partition with few records
        "produce of one record, durable": exchange(produce(0, [VALUE])),
    }
    base, *others = exchanges
    turns = in_turns(
        {
            name: partial(subject.load, subject.process.address, [each] * at_a_time, _per_second)
            for name, each in exchanges.items()
        },
        subject.rounds,
    )
    for name in others:
        against = f"{base} {turns.median(base):,.0f}/s"
        measure = f"{name}, {at_a_time} at a time"
        subject.report.compare(measure, f"{turns.median(name):,.0f}/s", against, turns.ratio(name, base))
