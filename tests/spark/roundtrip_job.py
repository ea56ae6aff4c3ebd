"""A job for a Spark of any kind: a write whose tasks fail once after they uploaded, a read of it, and a stream over it.
It sets in its own code which log it means.

Arguments: blob store, a directory of its own, and variables with the other settings (`NAME=value`). Prints what it
found as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

import llog
from llog.spark import register

ROWS = 120


def main(blobs: str, directory: str, *variables: str) -> None:
    settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": "10", "spark.ui.enabled": "false"}
    spark = SparkSession.builder.appName("roundtrip").config(map=settings).getOrCreate()
    os.environ |= dict(variable.split("=", 1) for variable in variables) | {"LLOG_BLOBS": blobs}
    register(spark)
    uploads = Path(blobs.removeprefix("file://")) / "llog" / "sink"

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0:
            while not any(path.is_file() for path in uploads.rglob("*")):
                time.sleep(0.05)
            raise RuntimeError("this attempt is lost after it uploaded")

    rows = spark.range(0, ROWS, 1, 2).selectExpr("concat(id, repeat('x', 20000)) as value")
    written = rows.mapInArrow(fail_once, "value string").write.format("llog").option("topic", "a")
    written.options(uploadBytes="1", createTopicPartitions="3").mode("append").save()

    read = spark.read.format("llog").options(subscribe="a", minPartitions="2").load()
    values = [value for [value] in read.selectExpr("cast(value as string)").collect()]

    stream = spark.readStream.format("llog").options(subscribe="a", startingOffsets="earliest").load()
    writing = stream.select("value").writeStream.format("llog").options(topic="b", createTopicPartitions="2")
    writing.option("checkpointLocation", f"{directory}/checkpoint").trigger(
        availableNow=True
    ).start().awaitTermination()

    def where(_: int) -> str:
        return str(llog.__file__)

    homes = spark.sparkContext.parallelize([0], 1).map(where).collect()
    found = {"numbers": sorted(int(value.rstrip("x")) for value in values), "homes": [llog.__file__, *homes]}
    print(json.dumps({**found, "master": spark.sparkContext.master}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
