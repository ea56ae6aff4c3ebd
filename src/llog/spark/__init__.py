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
    """Register the formats `llog` (batch and stream, read and write) and `llog-keyed` (batch reads) with a session.

    Reads and writes use these settings; without them, the settings of this process at the time it names the format.
    """
    from llog.spark.registration import register_sources
    from llog.spark.write_modes import watch_writers

    watch_writers()
    register_sources(spark, settings)
