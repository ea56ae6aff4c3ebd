"""Parameters and results between a broker and its clients: parameters as JSON, results as Arrow. No I/O.

A parameter is null, a boolean, a number, text, or an object whose one field names the type: `{"base64": …}`,
`{"decimal": "1.50"}`, `{"timestamp": "2026-01-31T12:00:00Z"}`, `{"date": …}`, `{"time": …}`, `{"interval": "P1DT2H"}`,
`{"uuid": …}`, `{"integer": …}` beyond 64 bits, `{"float": "nan"}`, or `{"json": …}` for any JSON value.

Results are consecutive Arrow streams. The metadata of each schema has `llog.kind`, `llog.changed` and `llog.rows`,
which is 0 for a statement that returns no rows. It may also have `llog.warnings`, a JSON list, and `llog.member`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal, DecimalException
from typing import Any, Final

import msgspec
import pyarrow as pa

from llog.errors import InvalidArgument
from llog.sql.result import Result

ALL_RESULTS: Final = "results=all"
"""Parameter of the accepted media type that asks for every result, not only the last one with rows."""
_KIND, _CHANGED, _ROWS = b"llog.kind", b"llog.changed", b"llog.rows"
_WARNINGS, _MEMBER = b"llog.warnings", b"llog.member"
_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "base64": lambda text: base64.b64decode(text, validate=True),
    "decimal": Decimal,
    "timestamp": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "interval": lambda text: msgspec.convert(text, timedelta),
    "uuid": uuid.UUID,
    "integer": int,
    "float": float,
}


def params_out(params: Sequence[Any] | Mapping[str, Any]) -> list[Any] | dict[str, Any]:
    if isinstance(params, Mapping):
        return {str(name): param_out(value) for name, value in params.items()}
    return [param_out(value) for value in params]


def params_in(params: Sequence[Any] | Mapping[str, Any]) -> list[Any] | dict[str, Any]:
    if isinstance(params, Mapping):
        return {name: param_in(value) for name, value in params.items()}
    return [param_in(value) for value in params]


def param_out(value: Any) -> Any:
    """Return the value as JSON that `param_in` converts back."""
    if value is None or isinstance(value, bool):
        return value
    match value:
        case str():
            return str(value)
        case int():
            return int(value) if -(1 << 63) <= value < 1 << 63 else {"integer": str(int(value))}
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case Decimal():
            return {"decimal": str(value)}
        case bytes() | bytearray() | memoryview():
            return {"base64": base64.b64encode(value).decode()}
        case datetime():
            return {"timestamp": value.isoformat()}
        case date():
            return {"date": value.isoformat()}
        case time():
            return {"time": value.isoformat()}
        case timedelta():
            return {"interval": msgspec.to_builtins(value)}
        case uuid.UUID():
            return {"uuid": str(value)}
        case dict() | list() | tuple():
            return {"json": value}
        case _ if is_numpy(value):
            return param_out(from_numpy(value))
        case _:
            raise InvalidArgument(f"a parameter is a {type(value).__name__}, which no statement accepts")


def is_numpy(value: Any) -> bool:
    """Whether the value is a scalar of numpy, which need not be installed."""
    return hasattr(value, "dtype") and getattr(value, "ndim", None) == 0


def from_numpy(value: Any) -> Any:
    """Return the Python value. Times are cut to microseconds, since nanoseconds would become numbers."""
    return (value.astype(f"{value.dtype.kind}8[us]") if value.dtype.kind in "mM" else value).item()


def param_in(value: Any) -> Any:
    if isinstance(value, list):
        raise InvalidArgument('a parameter is a list: write {"json": […]} for a JSON value')
    if not isinstance(value, dict):
        return value
    name, inner = next(iter(value.items())) if len(value) == 1 else ("", None)
    if name == "json":
        # A JSON string stays one only in quotes.
        return json.dumps(inner, ensure_ascii=False) if isinstance(inner, str) else inner
    if name not in _DECODERS or not isinstance(inner, str):
        raise InvalidArgument(
            f"a parameter is an object with the fields {', '.join(map(str, value))[:80]}: it must have exactly one, "
            f"either json or text in {', '.join(_DECODERS)}"
        )
    try:
        return _DECODERS[name](inner)
    except (ValueError, DecimalException, binascii.Error, msgspec.ValidationError):
        raise InvalidArgument(f"a parameter is not a valid {name}: {inner[:80]!r}") from None


def stream_of(results: Iterable[Result]) -> pa.Buffer:
    """Return the results as Arrow streams."""
    sink = pa.BufferOutputStream()
    for result in results:
        table = pa.table({}) if result.table is None else result.table
        about = {_KIND: result.kind, _CHANGED: str(result.changed), _ROWS: str(int(result.table is not None))}
        if result.warnings:
            about[_WARNINGS] = msgspec.json.encode(result.warnings).decode()
        if result.member is not None:
            about[_MEMBER] = result.member
        with pa.ipc.new_stream(sink, table.schema.with_metadata((table.schema.metadata or {}) | about)) as writer:
            writer.write_table(table)
    return sink.getvalue()


def results_from(body: bytes) -> list[Result]:
    """Return the results in the output of `stream_of`. Raises `InvalidArgument` if the body is anything else."""
    source = pa.BufferReader(body)
    results = []
    try:
        while source.tell() < len(body):
            with pa.ipc.open_stream(source) as reader:
                about = dict(reader.schema.metadata or {})
                table = reader.read_all()
            kind, changed, rows = (about.pop(each).decode() for each in (_KIND, _CHANGED, _ROWS))
            warnings = msgspec.json.decode(about.pop(_WARNINGS, b"[]"), type=tuple[str, ...])
            member = about.pop(_MEMBER, None)
            results.append(
                Result(
                    kind=kind,
                    table=table.replace_schema_metadata(about or None) if rows == "1" else None,
                    changed=int(changed),
                    warnings=warnings,
                    member=None if member is None else member.decode(),
                )
            )
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise InvalidArgument(f"the answer is not an Arrow stream of results: {str(error)[:200]}") from error
    return results
