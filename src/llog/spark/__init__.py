"""llog on Spark: the data sources `llog` and `llog-keyed`, and the jobs of the pipeline.

from llog.spark import register
register(spark)
spark.read.format("llog").option("subscribe", "orders").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from llog.config import Settings


def register(spark: SparkSession, settings: Settings | None = None) -> None:
    """Make the formats known to this session: `llog`, for batch and stream, read and write; `llog-keyed`, for batch
    reads.

    A read or write has these settings; without them, those that this process has when it names the format.
    """
    from llog.spark.registration import register_sources
    from llog.spark.write_modes import watch_writers

    watch_writers()
    register_sources(spark, settings)
