"""Kafka's protocol: produces and fetches of 1 KB records, by the same requests to llog and to a real Kafka.

`python -m bench.kafka [--peers kafka] [--rounds N] [--seconds S]`. llog is a broker on SQLite and local files. Kafka,
where Java and Maven are there, runs twice: with a sync of every append before its answer, as llog does it, and as it
comes, without any. This process is the client of all of them, with as many requests under way on a connection as a
producer has by default. The sides take turns, and a ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.broker.process import TOPIC, Process
from bench.load import STALL_S, Address, Exchange, connect, run_load
from bench.logs import records
from bench.peers.kafka import SERVER, fetch_jars, find_java, kafka_broker
from bench.report import Report
from bench.turns import in_turns
from devtools.servers.downloads import UnobtainableError
from devtools.servers.listening import START_S, free_ports
from llog.batch.columns import stamp
from llog.batch.kafka_batch import encode
from llog.kafka.error_codes import ErrorCode
from llog.kafka.messages import APIS, Message, decode_response, encode_request
from llog.kafka.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from llog.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from llog.kafka.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData

PARTITIONS = 4
RECORD_BYTES = 1000
SMALL_BATCH = 16
"""Records of a batch of about 16 KiB, the default of producers."""
LARGE_BATCH = 1000
UNDER_WAY = 5
"""Requests of a connection, as many as a producer has by default."""
FETCH_BYTES = 8 << 20
_PRODUCE, _FETCH, _METADATA = 0, 1, 3
_VERSIONS = {_PRODUCE: 9, _FETCH: 11, _METADATA: 4}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench kafka", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each measurement, after one to warm up")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn of a load")
    parser.add_argument("--peers", choices=("kafka", ""), default="kafka", help="'' leaves Kafka out")
    parser.add_argument("--downloads", type=Path, help="where Kafka's jars are kept; default: with the temporary files")
    arguments = parser.parse_args()
    report = Report(f"Kafka's protocol, {os.cpu_count()} cores shared with the client")
    report.note("load when it began", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="llog-bench-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        peers: dict[str, Address] = {}
        if arguments.peers:
            try:
                peers = _start_peers(stack, directory, arguments.downloads or directory / "downloads")
            except UnobtainableError as error:
                report.note("Kafka", f"left out: {error}")
        (port,) = free_ports(1)
        process = Process(directory, {"LLOG_KAFKA_PORT": str(port), "LLOG_AUTO_CREATE": str(PARTITIONS)})
        stack.callback(process.end)
        address = ("127.0.0.1", port)
        for each in (address, *peers.values()):
            _create_topic(each)
        _measure_produces(report, address, peers, arguments)
        _measure_cpu(report, process, address, arguments.seconds)
        _measure_fetches(report, process, address, arguments.seconds)
    report.note("load when it ended", f"{os.getloadavg()[0]:.1f}")
    report.print()
    return 1 if report.missed else 0


def _start_peers(stack: ExitStack, directory: Path, cache: Path) -> dict[str, Address]:
    jars, java = fetch_jars(cache, SERVER), find_java()
    peers = {}
    for name, is_flushed in (("Kafka flushed", True), ("Kafka as it comes", False)):
        own = directory / name.replace(" ", "-")
        own.mkdir()
        peers[name] = stack.enter_context(kafka_broker(java, jars, own, PARTITIONS, is_flushed=is_flushed))
    return peers


def _measure_produces(
    report: Report, address: Address, peers: dict[str, Address], arguments: argparse.Namespace
) -> None:
    for size, count, peer, at_least in (
        ("16 KiB", SMALL_BATCH, "Kafka flushed", 1.5),
        ("1 MB", LARGE_BATCH, "Kafka as it comes", 1.0),
    ):
        exchange = produce([0], count, UNDER_WAY)
        sides = {"llog": address, **({peer: peers[peer]} if peer in peers else {})}
        per_request = count * RECORD_BYTES * UNDER_WAY / 1e6
        turns = in_turns(
            {
                name: partial(_megabytes_per_second, each, exchange, arguments.seconds, per_request)
                for name, each in sides.items()
            },
            arguments.rounds,
        )
        measure, value = f"produce, one partition, batches of {size}", f"{turns.median('llog'):,.0f} MB/s"
        if peer in peers:
            against = f"{peer} {turns.median(peer):,.0f} MB/s"
            report.ratio(f"{measure}, over {peer}", value, against, turns.ratio("llog", peer), at_least)
        else:
            report.note(measure, value)


def _megabytes_per_second(address: Address, exchange: Exchange, seconds: float, per_request: float) -> float:
    return run_load(address, [exchange], seconds).per_second * per_request


def _measure_cpu(report: Report, process: Process, address: Address, seconds: float) -> None:
    for count in (SMALL_BATCH, 4 * SMALL_BATCH):
        exchange = produce(range(PARTITIONS), count, UNDER_WAY)
        run_load(address, [exchange], seconds)
        cpu = process.cpu_s()
        pace = run_load(address, [exchange], 3 * seconds)
        megabytes = len(pace.latencies_ms) * UNDER_WAY * PARTITIONS * count * RECORD_BYTES / 1e6
        kilobytes = count * RECORD_BYTES // 1000
        report.limit(
            f"produce, {PARTITIONS} × {kilobytes} kB, CPU of the broker per MB",
            (process.cpu_s() - cpu) * 1000 / megabytes,
            *(3, "ms"),
        )


def _measure_fetches(report: Report, process: Process, address: Address, seconds: float) -> None:
    run_load(address, [produce([3], LARGE_BATCH)], seconds)
    exchange = fetch(3)
    size = _answer_bytes(address, exchange)
    run_load(address, [exchange], seconds)
    cpu = process.cpu_s()
    pace = run_load(address, [exchange], 3 * seconds)
    gigabytes = len(pace.latencies_ms) * size / 1e9
    report.limit("fetch from the hot tail, CPU of the broker per GB", (process.cpu_s() - cpu) / gigabytes, 1, "s")


def _answer_bytes(address: Address, exchange: Exchange) -> int:
    with connect(address) as connection:
        connection.sendall(exchange.request)
        return int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")


def produce(partitions: Sequence[int], count: int, under_way: int = 1) -> Exchange:
    """Return requests that append a batch of `count` records to each partition, several at a time."""
    batch = b"".join(encode(stamp(records(count, RECORD_BYTES), int(time.time() * 1000)), 0))
    data = [PartitionProduceData(index=number, records=batch) for number in partitions]
    message = ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=[TopicProduceData(name=TOPIC, partition_data=data)])
    return Exchange(_encode(_PRODUCE, message) * under_way, partial(_take, _PRODUCE), under_way)


def fetch(partition: int) -> Exchange:
    """Return a request that fetches from the beginning of a partition."""
    wanted = FetchPartition(partition=partition, fetch_offset=0, partition_max_bytes=FETCH_BYTES)
    message = FetchRequest(
        max_wait_ms=0, min_bytes=1, max_bytes=FETCH_BYTES, topics=[FetchTopic(topic=TOPIC, partitions=[wanted])]
    )
    return Exchange(_encode(_FETCH, message), partial(_take, _FETCH))


def _encode(key: int, message: Message) -> bytes:
    return b"".join(encode_request(APIS[key], _VERSIONS[key], 1, "llog-bench", message))


def _take(key: int, buffer: bytearray) -> int:
    """Remove complete answers, and return how many there were; an error in one of them is a `RuntimeError`."""
    count = 0
    while len(buffer) >= 4 and len(buffer) >= (size := 4 + int.from_bytes(buffer[:4], "big")):
        _, response = decode_response(APIS[key], _VERSIONS[key], memoryview(bytes(buffer[4:size])))
        codes: set[int] = {ErrorCode.NONE}
        if isinstance(response, ProduceResponse):
            codes = {each.error_code for topic in response.responses for each in topic.partition_responses}
        elif isinstance(response, FetchResponse):
            codes = {each.error_code for topic in response.responses for each in topic.partitions}
        if codes != {ErrorCode.NONE}:
            raise RuntimeError(f"the server answered with the errors {codes}")
        del buffer[:size]
        count += 1
    return count


def _create_topic(address: Address) -> None:
    """Create the topic by asking for it, and wait until its partitions take records."""
    wanted = MetadataRequest(topics=[MetadataRequestTopic(name=TOPIC)], allow_auto_topic_creation=True)
    first = produce(range(PARTITIONS), 1)
    deadline = time.monotonic() + START_S
    while True:
        with connect(address) as connection:
            connection.settimeout(STALL_S)
            connection.sendall(_encode(_METADATA, wanted))
            connection.recv(1 << 16)
        try:
            run_load(address, [first], 0)
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
