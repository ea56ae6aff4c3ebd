"""Registers the data sources with a session, each with the settings of the driver.

Spark plans in processes that have the JVM's environment, which lacks what a job sets in its own code. So the registered
class carries the settings, and is registered again when a read or write names its format under other settings.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.readwriter import DataFrameReader, DataFrameWriter
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter

from llog.config import Settings
from llog.config.loading import load_settings
from llog.spark.keyed import LlogKeyedDataSource
from llog.spark.options import warn_of_ignored
from llog.spark.source import LlogDataSource

_SOURCES: Final = (LlogDataSource, LlogKeyedDataSource)
_FORMATS: Final = {source.name() for source in _SOURCES}
_LAST_CALLS: Final = {
    DataFrameReader: "load",
    DataFrameWriter: "save",
    DataStreamReader: "load",
    DataStreamWriter: "start",
}
"""The method that begins a read or write, after its options are set."""
_registered: WeakKeyDictionary[SparkSession, Settings] = WeakKeyDictionary()
"""The settings that a session's sources took from this process; sessions that were given settings are not here."""
_is_watching = False


def register_sources(spark: SparkSession, settings: Settings | None) -> None:
    global _is_watching
    if settings is None:
        settings = _registered[spark] = load_settings()
    else:
        _registered.pop(spark, None)
    for source in _SOURCES:
        # A class that is in no module is pickled with its contents.
        spark.dataSource.register(type(f"{source.__name__}OfDriver", (source,), {"settings": settings}))
    if not _is_watching:
        _is_watching = True
        for each, last in _LAST_CALLS.items():
            _follow_settings(each)
            _warn_of_ignored(each, last)


def _follow_settings(owner: Any) -> None:
    """Make readers or writers take the settings of this process when their format is named."""
    method = owner.format

    @wraps(method)
    def format_with_settings(self: Any, source: str) -> Any:
        known = _registered.get(self._spark)
        if known is not None and source.lower() in _FORMATS and load_settings() != known:
            register_sources(self._spark, None)
        return method(self, source)

    owner.format = format_with_settings


def _warn_of_ignored(owner: Any, last_call: str) -> None:
    """Make readers or writers warn of options that llog ignores.

    The driver warns, because Spark plans one stream in many processes.
    """
    method = getattr(owner, last_call)

    @wraps(method)
    def begin(self: Any, path: Any = None, format: str | None = None, *given: Any, **named: Any) -> Any:
        jvm = self._jwrite if hasattr(self, "_jwrite") else self._jreader
        if (format or jvm.source() or "").lower() == LlogDataSource.name():
            options = jvm.extraOptions().originalMap().keySet().mkString("\n").splitlines()
            warn_of_ignored({*options, *named}, stacklevel=3)
        return method(self, path, format, *given, **named)

    setattr(owner, last_call, begin)
