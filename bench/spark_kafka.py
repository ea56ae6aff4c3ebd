"""The same records read from llog and from Kafka, in turns, by one Spark session.

Kafka's server and Spark's connector come from Maven. A broker of one node runs on 127.0.0.1 while this measures, on the
disk that has the log; Spark copies the log's records to it, partition by partition. Both are read with the options that
a user finds set.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyspark

from bench.peers.kafka import SERVER, fetch_jars, find_java, kafka_broker
from bench.report import Report, rate
from bench.turns import in_turns
from devtools.servers.downloads import UnobtainableError

PARTITIONS = 8
"""Of each topic, as of the log's."""
WARMING = 3
"""Reads that the JVMs of Kafka's client and broker are given to compile themselves: llog has its time in Python, which
does not.
"""

_CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_TOKENS = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
# Tried one after the other. Not all that PyPI has is on Maven's servers; no token is asked for here, so that part may
# be older.
_CONNECTORS = tuple(
    (f"{_CONNECTOR}:{connector}", f"{_TOKENS}:{tokens}")
    for connector, tokens in ((pyspark.__version__, pyspark.__version__), ("4.2.0", "4.2.0"), ("4.2.0", "4.0.0"))
)
# The connector keeps what consumers have fetched for the next reads.
_MEMORY = {"spark.driver.memory": "2g"}
_PRODUCER = {"kafka.linger.ms": "100", "kafka.batch.size": str(1 << 19), "kafka.delivery.timeout.ms": "600000"}


def measure(report: Report, directory: Path, size: int, cache: Path) -> None:
    """Measure reads of `size` bytes of each kind of record. Jars are kept in `cache`.

    Without Maven, Java or the jars, the report has the reason instead.
    """
    try:
        java, server, connector, versions = _obtain_jars(cache)
    except UnobtainableError as reason:
        report.note("reads beside Kafka", f"not measured: {reason}")
        return
    report.note("reads beside Kafka", versions)
    directory.mkdir()
    with kafka_broker(java, server, directory, PARTITIONS) as (host, port):
        servers = f"{host}:{port}"
        command = [sys.executable, "-m", "bench.spark_kafka", str(directory), str(size), servers, ",".join(connector)]
        # In a process of its own, because a JVM gets its jars when it starts.
        answer = subprocess.run(command, check=False, stdout=subprocess.PIPE)
    if answer.returncode:
        report.note("", f"not measured: Spark ended with {answer.returncode} and what it printed above")
        return
    for name, (llog, kafka, ratio) in json.loads(answer.stdout).items():
        report.compare(f"batch read, {name}", rate(size, llog), f"Kafka {rate(size, kafka)}", ratio)


def _obtain_jars(cache: Path) -> tuple[Path, list[Path], list[str], str]:
    """Return Java, the jars of the server, those that Spark lacks, and a description of the versions."""
    java, server = find_java(), fetch_jars(cache, SERVER)
    refusals = []
    for artifacts in _CONNECTORS:
        try:
            connector = fetch_jars(cache, artifacts)
        except UnobtainableError as error:
            refusals.append(str(error))
            continue
        there = {_artifact(path) for path in Path(pyspark.__file__).with_name("jars").glob("*.jar")}
        lacking = [str(path) for path in connector if _artifact(path) not in there]
        names = ", ".join(each.partition(":")[2].replace(":", " ") for each in (SERVER[0], *artifacts))
        return java, server, lacking, f"{names}, on Spark {pyspark.__version__}"
    raise UnobtainableError("; ".join(refusals))


def _artifact(jar: Path) -> str:
    """Return the name of a jar without its version."""
    return jar.stem.rpartition("-")[0]


def _compare(directory: Path, size: int, servers: str, jars: str) -> dict[str, tuple[float, float, float]]:
    """Return the seconds of a read of each kind of record, from llog and from Kafka, and Kafka's over llog's."""
    from bench.spark import READ_CASES, ROUNDS, create_log, drain, load_frame
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
        reads = {"llog": partial(drain, partial(load_frame, spark, log)), "kafka": partial(drain, kafka.load)}
        turns = in_turns(reads, ROUNDS)
        found[reading.name] = turns.median("llog"), turns.median("kafka"), turns.ratio("kafka", "llog")
    spark.stop()
    return found


if __name__ == "__main__":
    print(json.dumps(_compare(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
