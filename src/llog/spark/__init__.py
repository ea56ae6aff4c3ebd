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
    """Make the formats known to this session: `llog`, for batch and stream, read and write; `llog-keyed`, for batch reads.

    What is planned from now on has these settings, or those that this process has now. Call it again after a change of them.
    """
    from llog.loading import load_settings
    from llog.spark.keyed import LlogKeyedDataSource
    from llog.spark.modes import watch_writers
    from llog.spark.source import LlogDataSource

    settings = load_settings() if settings is None else settings
    for source in (LlogDataSource, LlogKeyedDataSource):
        # Spark plans in processes that have the JVM's environment, which is older than what a job sets in its own code. So the class
        # carries the settings: one that no module has is pickled with what is in it.
        spark.dataSource.register(type(f"{source.__name__}OfDriver", (source,), {"settings": settings}))
    watch_writers()
