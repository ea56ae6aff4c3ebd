"""Export and materialize as steps of the pipeline, with options as text: `--option export.topic=orders`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from llog.base.units import format_size, parse_size
from llog.config import Settings
from llog.errors import ConfigurationError
from llog.spark.jobs.lake.decoder import Decoding, avro_decoding, json_decoding
from llog.spark.jobs.lake.export import ExportOptions, export
from llog.spark.jobs.lake.materialize import MaterializeOptions, materialize
from llog.spark.jobs.lake.topic_table import in_spark
from llog.spark.jobs.tasks import StepResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T", bound=msgspec.Struct)

_SIZES: Final = ("file_bytes", "commit_bytes")
_DECODINGS: Final = ("json_schema", "avro_schema")


def export_step(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """Run the step `export`.

    It needs the options `topic`, `format` and `to`, and takes `name`, `file_bytes`, `commit_bytes`, `headers`,
    `allow_gaps`, `json_schema` and `avro_schema`.
    """
    result = export(settings, _parse_options("export", ExportOptions, options), in_spark(spark))
    rows = [("records", f"{result.records:,}"), ("files", str(result.files)), ("bytes", format_size(result.bytes))]
    return StepResult(name="export", seconds=result.seconds, rows=rows)


def materialize_step(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """Run the step `materialize`.

    It needs the options `topic` and `to`, and takes `key` (columns, separated by commas), `commit_bytes`, `allow_gaps`,
    `json_schema` and `avro_schema`.
    """
    result = materialize(settings, _parse_options("materialize", MaterializeOptions, options), in_spark(spark))
    rows = [(name, f"{getattr(result, name):,}") for name in ("records", "inserted", "updated", "deleted")]
    return StepResult(name="materialize", seconds=result.seconds, rows=rows)


def _parse_options(step: str, kind: type[T], options: Mapping[str, Any]) -> T:
    fields = (set(kind.__struct_fields__) - {"decoding"}) | set(_DECODINGS)
    unknown = sorted(set(options) - fields)
    if unknown:
        raise ConfigurationError(f"the step {step} has no option {unknown[0]!r}: it has {', '.join(sorted(fields))}")
    values: dict[str, Any] = {name: value for name, value in options.items() if name not in _DECODINGS}
    for name in _SIZES:
        if name in values:
            values[name] = parse_size(values[name])
    if "key" in values:
        values["key"] = [each.strip() for each in values["key"].split(",")]
    try:
        parsed = msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the step {step} cannot run with these options: {error}") from error
    return msgspec.structs.replace(parsed, decoding=_decoding(step, options))


def _decoding(step: str, options: Mapping[str, Any]) -> Decoding | None:
    given = [name for name in _DECODINGS if name in options]
    if len(given) > 1:
        raise ConfigurationError(f"the step {step} takes one of {' and '.join(_DECODINGS)}, not both")
    if not given:
        return None
    value = str(options[given[0]])
    return json_decoding(value) if given[0] == "json_schema" else avro_decoding(Path(value))
