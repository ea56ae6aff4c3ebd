"""llog on Spark: the data source `llog` and the jobs of the pipeline.

from llog.spark import register
register(spark)
spark.read.format("llog").option("subscribe", "orders").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Makes the format `llog` known to this session, for batch and stream, read and write."""
    from llog.spark.source import LlogDataSource

    spark.dataSource.register(LlogDataSource)
