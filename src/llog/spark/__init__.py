"""llog on Spark: the data sources `llog` and `llog-keyed`, and the jobs of the pipeline.

from llog.spark import register
register(spark)
spark.read.format("llog").option("subscribe", "orders").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Makes the formats known to this session: `llog`, for batch and stream, read and write; `llog-keyed`, for batch reads."""
    from llog.spark.keyed import LlogKeyedDataSource
    from llog.spark.source import LlogDataSource

    spark.dataSource.register(LlogDataSource)
    spark.dataSource.register(LlogKeyedDataSource)
