"""The data sources as a session knows them, each with the settings of the driver.

Spark plans in processes that have the JVM's environment, which is older than what a job sets in its own code. So the class that is
registered carries the settings, and is registered again when a read or write names its format under other ones.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.readwriter import DataFrameReader, DataFrameWriter
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter

from llog.config import Settings
from llog.loading import load_settings
from llog.spark.keyed import LlogKeyedDataSource
from llog.spark.source import LlogDataSource

_SOURCES: Final = (LlogDataSource, LlogKeyedDataSource)
_FORMATS: Final = {source.name() for source in _SOURCES}
_registered: WeakKeyDictionary[SparkSession, Settings] = WeakKeyDictionary()
"""The settings that a session's sources took from this process; not those that it was given."""
_is_watching = False


def register_sources(spark: SparkSession, settings: Settings | None) -> None:
    global _is_watching
    if settings is None:
        settings = _registered[spark] = load_settings()
    else:
        _registered.pop(spark, None)
    for source in _SOURCES:
        # A class that no module has is pickled with what is in it.
        spark.dataSource.register(type(f"{source.__name__}OfDriver", (source,), {"settings": settings}))
    if not _is_watching:
        _is_watching = True
        for each in (DataFrameReader, DataFrameWriter, DataStreamReader, DataStreamWriter):
            _follow_settings(each)


def _follow_settings(owner: Any) -> None:
    """Have readers or writers take the settings of this process when their format is named."""
    method = owner.format

    @wraps(method)
    def format_with_settings(self: Any, source: str) -> Any:
        known = _registered.get(self._spark)
        if known is not None and source.lower() in _FORMATS and load_settings() != known:
            register_sources(self._spark, None)
        return method(self, source)

    owner.format = format_with_settings
