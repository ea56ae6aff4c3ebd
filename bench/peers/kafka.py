"""Kafka, a broker of one node from Maven's artifacts, and the produce requests of a client that waits for the sync.

Maven and Java are needed. The requests are made by hand, in the version of the protocol that has no compact fields, so
that a load can repeat one without a client library that batches on its own.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

from awscrt.checksums import crc32c

from bench.load import STALL_S, Address, Exchange, connect
from bench.peers.peer import Peer
from devtools.servers.downloads import UnobtainableError, obtain, run_tool
from devtools.servers.listening import START_S, free_ports, listening_server
from llog.errors import JavaNotFound
from llog.spark.java import java_home

SERVER = ("org.apache.kafka:kafka_2.13:4.1.1", "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3")
_TOPIC = b"bench"
_METADATA, _METADATA_VERSION = 3, 4
_PRODUCE, _PRODUCE_VERSION = 0, 7
_ERROR_AT = 4 + 4 + 4 + 2 + len(_TOPIC) + 4 + 4
"""Where the answer to a produce of one partition has its error: behind the size, the correlation id, a list with one
topic, its name, and a list with one partition with its number.
"""

# Spark's POMs name a repository of their own that is asked first: the same id sends those requests to the usual one.
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>bench</groupId><artifactId>bench</artifactId><version>1</version><packaging>pom</packaging>
  <repositories>
    <repository><id>gcs-maven-central-mirror</id><url>https://repo.maven.apache.org/maven2</url></repository>
  </repositories>
  <dependencies>{dependencies}</dependencies>
</project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
num.partitions={partitions}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
broker.session.timeout.ms=60000
"""
_FLUSHED = "log.flush.interval.messages=1\n"


@contextmanager
def kafka(directory: Path, cache: Path, value: bytes, partitions: int) -> Iterator[Peer]:
    """Run a broker that syncs every append before it answers."""
    jars = fetch_jars(cache, SERVER)
    with kafka_broker(find_java(), jars, directory, partitions, is_flushed=True) as address:
        _create_topic(address)
        for partition in range(partitions):
            _wait_for_leader(address, _append(value, partition, 1))
        yield Peer("Kafka", address, partial(_append, value))


def find_java() -> Path:
    try:
        return java_home() / "bin" / "java"
    except JavaNotFound as error:
        raise UnobtainableError(str(error)) from error


def fetch_jars(cache: Path, artifacts: Sequence[str]) -> list[Path]:
    """Return the jars of these artifacts and of their dependencies."""
    if shutil.which("mvn") is None:
        raise UnobtainableError("PATH has no mvn, which fetches Kafka")
    name = "-".join(each.partition(":")[2].replace(":", "-") for each in artifacts)
    return sorted(obtain(cache, name, partial(_copy_jars, artifacts)).glob("*.jar"))


def _copy_jars(artifacts: Sequence[str], directory: Path) -> None:
    dependencies = "".join(_DEPENDENCY.format(*each.split(":")) for each in artifacts)
    (directory / "pom.xml").write_text(_POM.format(dependencies=dependencies))
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={directory}"]
    done = subprocess.run(["mvn", "-B", "-q", *goal], check=False, capture_output=True, text=True, cwd=directory)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "[ERROR]" in line] or ["mvn printed no error"]
        raise UnobtainableError(errors[0].partition("[ERROR] ")[2].partition(" -> [Help")[0] or errors[0])


@contextmanager
def kafka_broker(
    java: Path, jars: Sequence[Path], directory: Path, partitions: int, *, is_flushed: bool = False
) -> Iterator[Address]:
    """Run a Kafka broker, whose topics have `partitions`, and yield its address."""
    broker, controller = free_ports(2)
    properties = directory / "server.properties"
    text = _PROPERTIES.format(broker=broker, controller=controller, data=directory / "broker", partitions=partitions)
    properties.write_text(text + _FLUSHED * is_flushed)
    run = [str(java), "-Xmx1g", "-cp", ":".join(map(str, jars))]
    identity = urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")
    formatting = ["format", "--standalone", f"--cluster-id={identity}", "-c", str(properties)]
    run_tool([*run, "kafka.tools.StorageTool", *formatting], directory)
    with listening_server([*run, "kafka.Kafka", str(properties)], broker, directory) as address:
        yield address


def _append(value: bytes, partition: int, records: int) -> Exchange:
    batch = _encode_batch(value, records)
    acks_of_all, timeout_ms = -1, 30_000
    head = struct.pack(">hhi", -1, acks_of_all, timeout_ms)  # no transaction
    body = struct.pack(">ih", 1, len(_TOPIC)) + _TOPIC + struct.pack(">iii", 1, partition, len(batch)) + batch
    return Exchange(_request(_PRODUCE, _PRODUCE_VERSION, head + body), take_answers)


def take_answers(buffer: bytearray) -> int:
    """Remove complete answers to produces of one partition, and return how many there were."""
    count = 0
    while len(buffer) >= 4 and len(buffer) >= (size := 4 + int.from_bytes(buffer[:4], "big")):
        error = int.from_bytes(buffer[_ERROR_AT : _ERROR_AT + 2], "big", signed=True)
        if error:
            raise RuntimeError(f"Kafka answered with error {error}")
        del buffer[:size]
        count += 1
    return count


def _request(key: int, version: int, body: bytes) -> bytes:
    client = b"llog-bench"
    head = struct.pack(">hhih", key, version, 1, len(client)) + client
    return struct.pack(">i", len(head) + len(body)) + head + body


def _encode_batch(value: bytes, records: int) -> bytes:
    """Encode a batch of records without keys, of a producer that is not idempotent."""
    now = int(time.time() * 1000)
    body = b"".join(_encode_record(value, number) for number in range(records))
    fields = struct.pack(">hiqqqhii", 0, records - 1, now, now, -1, -1, -1, records)
    checked = fields + body
    head = struct.pack(">qiibI", 0, 9 + len(checked), -1, 2, crc32c(checked))
    return head + checked


def _encode_record(value: bytes, number: int) -> bytes:
    no_key, no_headers = -1, 0
    body = b"\0\0" + _varint(number) + _varint(no_key) + _varint(len(value)) + value + _varint(no_headers)
    return _varint(len(body)) + body


def _varint(number: int) -> bytes:
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    encoded = bytearray()
    while rest > 127:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*encoded, rest])


def _create_topic(address: Address) -> None:
    """Ask for the topic's metadata, which creates the topic."""
    body = struct.pack(">ih", 1, len(_TOPIC)) + _TOPIC + b"\1"
    with connect(address) as connection:
        connection.sendall(_request(_METADATA, _METADATA_VERSION, body))
        if not connection.recv(4):
            raise UnobtainableError("Kafka closed the connection that creates its topic")


def _wait_for_leader(address: Address, exchange: Exchange) -> None:
    """Append one record, as soon as the partition takes it."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with connect(address) as connection:
                connection.settimeout(STALL_S)
                connection.sendall(exchange.request)
                buffer = bytearray()
                while not exchange.take(buffer):
                    received = connection.recv(1 << 16)
                    if not received:
                        raise RuntimeError("Kafka closed the connection of the first append")
                    buffer += received
            return
        except (RuntimeError, OSError) as error:
            if time.monotonic() > deadline:
                raise UnobtainableError(str(error)) from error
            time.sleep(0.1)
