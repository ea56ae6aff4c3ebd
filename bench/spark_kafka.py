"""The same records read from llog and from Kafka, in turns, by one Spark session.

Kafka's server and Spark's connector come from Maven. A broker of one node runs on 127.0.0.1 while this measures, on the
disk that has the log; Spark copies the log's records to it, partition by partition. Both are read with the options that
a user finds set.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import pyspark

from bench.report import Report, rate
from llog.errors import JavaNotFound
from llog.spark.java import java_home

PARTITIONS = 8
"""Of each topic, as of the log's."""
START_S = 60
WARMING = 3
"""Reads that the JVMs of Kafka's client and broker are given to compile themselves: llog has its time in Python, which
does not.
"""

_SERVER = ("org.apache.kafka:kafka_2.13:4.1.1", "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3")
_CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_TOKENS = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
# Tried one after the other. Not all that PyPI has is on Maven's servers; no token is asked for here, so that part may
# be older.
_CONNECTORS = tuple(
    (f"{_CONNECTOR}:{connector}", f"{_TOKENS}:{tokens}")
    for connector, tokens in ((pyspark.__version__, pyspark.__version__), ("4.2.0", "4.2.0"), ("4.2.0", "4.0.0"))
)
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
# The connector keeps what consumers have fetched for the next reads.
_MEMORY = {"spark.driver.memory": "2g"}
_PRODUCER = {"kafka.linger.ms": "100", "kafka.batch.size": str(1 << 19), "kafka.delivery.timeout.ms": "600000"}


class Unobtainable(Exception):
    """Kafka is not available here, for the reason in the message."""


def measure(report: Report, directory: Path, size: int, cache: Path) -> None:
    """Measure reads of `size` bytes of each kind of record. Jars are kept in `cache`.

    Without Maven, Java or the jars, the report has the reason instead.
    """
    try:
        java, server, connector, versions = _obtain_jars(cache)
    except Unobtainable as reason:
        report.note("reads beside Kafka", f"not measured: {reason}")
        return
    report.note("reads beside Kafka", versions)
    directory.mkdir()
    with _broker(java, server, directory) as servers:
        command = [sys.executable, "-m", "bench.spark_kafka", str(directory), str(size), servers, ",".join(connector)]
        # In a process of its own, because a JVM gets its jars when it starts.
        answer = subprocess.run(command, check=False, stdout=subprocess.PIPE)
    if answer.returncode:
        report.note("", f"not measured: Spark ended with {answer.returncode} and what it printed above")
        return
    for name, seconds in json.loads(answer.stdout).items():
        llog, kafka = seconds["llog"], seconds["kafka"]
        report.compare(f"batch read, {name}", rate(size, llog), f"Kafka {rate(size, kafka)}", kafka / llog)


def _obtain_jars(cache: Path) -> tuple[Path, list[str], list[str], str]:
    """Return Java, the jars of the server, those that Spark lacks, and a description of the versions."""
    maven = shutil.which("mvn")
    if maven is None:
        raise Unobtainable("PATH has no mvn, which fetches Kafka")
    try:
        java = java_home() / "bin" / "java"
    except JavaNotFound as error:
        raise Unobtainable(str(error)) from error
    server = _fetch_jars(maven, cache, _SERVER)
    refusals = []
    for artifacts in _CONNECTORS:
        try:
            connector = _fetch_jars(maven, cache, artifacts)
        except Unobtainable as error:
            refusals.append(str(error))
            continue
        there = {_artifact(path) for path in Path(pyspark.__file__).with_name("jars").glob("*.jar")}
        lacking = [str(path) for path in connector if _artifact(path) not in there]
        names = ", ".join(each.partition(":")[2].replace(":", " ") for each in (_SERVER[0], *artifacts))
        return java, list(map(str, server)), lacking, f"{names}, on Spark {pyspark.__version__}"
    raise Unobtainable("; ".join(refusals))


def _artifact(jar: Path) -> str:
    """Return the name of a jar without its version."""
    return jar.stem.rpartition("-")[0]


def _fetch_jars(maven: str, cache: Path, artifacts: Sequence[str]) -> list[Path]:
    """Return the jars of these artifacts and of their dependencies."""
    target = cache / "-".join(each.partition(":")[2].replace(":", "-") for each in artifacts)
    if not target.exists():
        new = cache / uuid4().hex
        new.mkdir(parents=True)
        try:
            dependencies = "".join(_DEPENDENCY.format(*each.split(":")) for each in artifacts)
            (new / "pom.xml").write_text(_POM.format(dependencies=dependencies))
            goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={new}"]
            done = subprocess.run(
                [maven, "-B", "-q", "-f", str(new / "pom.xml"), *goal], check=False, capture_output=True, text=True
            )
            if done.returncode:
                errors = [line for line in done.stdout.splitlines() if "[ERROR]" in line] or ["mvn printed no error"]
                raise Unobtainable(errors[0].partition("[ERROR] ")[2].partition(" -> [Help")[0] or errors[0])
            new.rename(target)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return sorted(target.glob("*.jar"))


@contextmanager
def _broker(java: Path, jars: Sequence[str], directory: Path) -> Iterator[str]:
    """Run a Kafka broker and yield its address."""
    ports = _free_ports(2)
    properties = directory / "server.properties"
    properties.write_text(
        _PROPERTIES.format(broker=ports[0], controller=ports[1], data=directory / "broker", partitions=PARTITIONS)
    )
    run = [str(java), "-Xmx1g", "-cp", ":".join(jars)]
    identity = urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")
    formatting = [
        "kafka.tools.StorageTool",
        "format",
        "--standalone",
        f"--cluster-id={identity}",
        "-c",
        str(properties),
    ]
    subprocess.run([*run, *formatting], check=True, stdout=subprocess.DEVNULL)
    log = directory / "broker.log"
    with log.open("wb") as output:
        broker = subprocess.Popen([*run, "kafka.Kafka", str(properties)], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not _listens(ports[0]):
            if broker.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the broker did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield f"127.0.0.1:{ports[0]}"
    finally:
        broker.terminate()
        try:
            broker.wait(START_S)
        except subprocess.TimeoutExpired:
            broker.kill()
            broker.wait()


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _compare(directory: Path, size: int, servers: str, jars: str) -> dict[str, dict[str, float]]:
    """Return the seconds of a read of each kind of record, from llog and from Kafka."""
    from bench.spark import READ_CASES, create_log, drain, in_turns, load_frame
    from llog.spark.session import spark_session

    logs = [(reading, create_log(directory, reading, size)) for reading in READ_CASES]
    spark = spark_session("llog-bench-kafka", master="local[2]", conf={"spark.jars": jars, **_MEMORY})
    address = {"kafka.bootstrap.servers": servers}
    found = {}
    for reading, log in logs:
        topic = f"bench-{reading.record_bytes}"
        records = load_frame(spark, log).select("value", "partition")
        records.write.format("kafka").options(**address, **_PRODUCER, topic=topic).save()
        kafka = spark.read.format("kafka").options(**address, subscribe=topic)
        assert kafka.load().count() == records.count()
        for _ in range(WARMING):
            drain(kafka.load)
        found[reading.name] = in_turns(
            {"llog": partial(drain, partial(load_frame, spark, log)), "kafka": partial(drain, kafka.load)}
        )
    spark.stop()
    return found


if __name__ == "__main__":
    print(json.dumps(_compare(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
