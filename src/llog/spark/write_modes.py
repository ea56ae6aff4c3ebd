"""Accepts and refuses the modes of a write as Kafka's sink does, when the write is built.

Spark 4.3 refuses the default mode for every data source in Python, and reports only in the first batch that a stream
cannot be written in its output mode. It asks no source before, so `register` makes PySpark's writers ask here.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

from pyspark.sql.readwriter import DataFrameWriter
from pyspark.sql.streaming.readwriter import DataStreamWriter

from llog.errors import ConfigurationError

FORMAT: Final = "llog"
APPEND_ONLY: Final = (
    "llog is a log: a stream is appended to it, with outputMode('append'). To append the result of "
    "outputMode('update') or 'complete', write each batch by foreachBatch, with a writeId that makes it happen once: "
    "lambda rows, batch: rows.write.format('llog').option('topic', …).option('writeId', f'totals-{batch}').save()"
)
_is_watching = False


def watch_writers() -> None:
    """Make PySpark's writers ask here from now on. Idempotent."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        _append_by_default()
        for setting in ("format", "outputMode"):
            _refuse_early(setting)


def _append_by_default() -> None:
    save = DataFrameWriter.save

    @wraps(save)
    def append_by_default(
        self: DataFrameWriter,
        path: str | None = None,
        format: str | None = None,
        mode: str | None = None,
        partitionBy: str | list[str] | None = None,
        **options: Any,
    ) -> None:
        if format is not None:
            self.format(format)
        self.mode(mode)
        if self._jwrite.source().lower() == FORMAT and self._jwrite.curmode().name() == "ErrorIfExists":
            self.mode("append")
        save(self, path, partitionBy=partitionBy, **options)

    DataFrameWriter.save = append_by_default


def _refuse_early(setting: str) -> None:
    """Make a stream's writer of format `llog` refuse output modes other than append as soon as they are set."""
    method = getattr(DataStreamWriter, setting)

    @wraps(method)
    def checked(self: DataStreamWriter, *given: str, **named: str) -> DataStreamWriter:
        method(self, *given, **named)
        chosen = vars(self).setdefault("_llog_chosen", {})
        [value] = (*given, *named.values())
        chosen[setting] = value.lower()
        if chosen.get("format") == FORMAT and chosen.get("outputMode", "append") != "append":
            raise ConfigurationError(APPEND_ONLY)
        return self

    setattr(DataStreamWriter, setting, checked)
