"""Decodes values into columns. A value that cannot be decoded is kept with the reason: it must not stop the table.

JSON is decoded strictly against the columns (a number in quotes is not a number); members without a column are ignored.
Both formats are decoded record by record in Python.
"""

from __future__ import annotations

import datetime
import decimal
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec
import pyarrow as pa

from llog.errors import ConfigurationError
from llog.spark.jobs.tasks import optional_module

_ERROR_CHARACTERS_MAX: Final = 500
_LOGICAL: Final = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("us", tz="UTC"),
    "timestamp-micros": pa.timestamp("us", tz="UTC"),
    "local-timestamp-millis": pa.timestamp("us"),
    "local-timestamp-micros": pa.timestamp("us"),
}
_AVRO: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
}

Decode = Callable[[pa.BinaryArray], tuple[pa.StructArray, pa.StringArray]]
"""Decodes values to one struct each (null for null and bad values) and one error each (null if there is none)."""


class Decoding(msgspec.Struct, frozen=True):
    kind: Literal["json", "avro"]
    columns: pa.Schema
    avro: Any = None
    """The Avro schema, for `avro`."""
    lenient: tuple[str, ...] = ()
    """Text columns that become null, instead of an error, if a member is of another type."""


def json_decoding(ddl: str) -> Decoding:
    """Return the decoding for a schema in Spark's notation, `id bigint, name string`. Needs a running session."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    try:
        columns = to_arrow_schema(StructType.fromDDL(ddl), timezone="UTC")
    except Exception as error:  # Spark's parser has many ways to say no
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"--schema {ddl!r} is not a list of columns like 'id bigint, name string': {reason}"
        ) from error
    for field in columns:
        _json_type(field.type)
    return Decoding("json", columns)


def avro_decoding(file: Path) -> Decoding:
    """Return the decoding for the Avro schema of a record, whose fields become columns.

    Values are bare Avro, without a header or schema id.
    """
    fastavro = optional_module("fastavro", "lake", "--decode avro")
    try:
        schema = _without_unknown_logical_types(json.loads(file.read_text(encoding="utf-8")))
        parsed = fastavro.parse_schema(schema)
    except (OSError, ValueError, TypeError, KeyError, fastavro.schema.SchemaParseException) as error:
        raise ConfigurationError(f"--avro-schema {file} is not a readable Avro schema: {error}") from error
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise ConfigurationError(f"--avro-schema {file} must be of a record: its fields become columns")
    arrow = _avro_type(schema, {}, str(file))
    return Decoding("avro", pa.schema(list(arrow)), parsed)


def decoded_columns(own: Iterable[pa.Field], decoding: Decoding | None) -> list[pa.Field]:
    """Return the decoded columns, renamed if they collide with a table's own: a `timestamp`, for example."""
    taken = {field.name.lower() for field in own}
    decoded = decoding.columns if decoding else ()
    return [each.with_name(f"value_{each.name}") if each.name.lower() in taken else each for each in decoded]


def decoder(decoding: Decoding) -> Decode:
    """Return the function that decodes values. Each task creates it once."""
    row = pa.struct(list(decoding.columns))
    one = _json_row(decoding) if decoding.kind == "json" else _avro_row(decoding.avro)

    def decode(values: pa.BinaryArray) -> tuple[pa.StructArray, pa.StringArray]:
        rows: list[Any] = []
        wrong: list[str | None] = []
        for value in values.to_pylist():
            problem = None
            decoded = None
            if value is not None:
                try:
                    decoded = one(value)
                except Exception as error:  # a codec may raise anything for bytes that are not its own
                    problem = (str(error) or type(error).__name__)[:_ERROR_CHARACTERS_MAX]
            rows.append(decoded)
            wrong.append(problem)
        try:
            return pa.array(rows, row), pa.array(wrong, pa.string())
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            return _one_by_one(rows, wrong, row)

    return decode


def _one_by_one(rows: list[Any], wrong: list[str | None], row: pa.DataType) -> tuple[pa.StructArray, pa.StringArray]:
    """Find the values that their columns cannot hold (a decimal with too many digits, for example) by trying each."""
    for index, decoded in enumerate(rows):
        try:
            pa.array([decoded], row)
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            rows[index] = None
            wrong[index] = str(error)[:_ERROR_CHARACTERS_MAX]
    return pa.array(rows, row), pa.array(wrong, pa.string())


def _json_row(decoding: Decoding) -> Callable[[bytes], Any]:
    row = _json_object(decoding.columns, decoding.lenient)
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(row).decode
    if not decoding.lenient:
        return decode

    def decode_leniently(value: bytes) -> Any:
        found = decode(value)
        for name in decoding.lenient:
            if not isinstance(found.get(name), str):
                found[name] = None
        return found

    return decode_leniently


def _json_object(fields: Any, lenient: tuple[str, ...] = ()) -> Any:
    members = {each.name: Any if each.name in lenient else _json_type(each.type) | None for each in fields}
    typed_dict: Any = TypedDict
    return typed_dict("Row", members, total=False)


def _json_type(kind: pa.DataType) -> Any:
    """Return the Python type that msgspec checks a member against."""
    if pa.types.is_boolean(kind):
        return bool
    if pa.types.is_integer(kind):
        limit = 1 << (kind.bit_width - 1)
        return Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)]
    if pa.types.is_floating(kind):
        return float
    if pa.types.is_decimal(kind):
        return decimal.Decimal
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return str
    if pa.types.is_binary(kind):
        return bytes
    if pa.types.is_timestamp(kind):
        return datetime.datetime
    if pa.types.is_date(kind):
        return datetime.date
    if pa.types.is_list(kind):
        return list[_json_type(kind.value_type) | None]  # type: ignore[misc]
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return dict[str, _json_type(kind.item_type) | None]  # type: ignore[misc]
    if pa.types.is_struct(kind):
        return _json_object(kind)
    raise ConfigurationError(f"a column of type {kind} cannot be decoded from JSON")


def _avro_row(schema: Any) -> Callable[[bytes], Any]:
    read = optional_module("fastavro", "lake", "--decode avro").schemaless_reader

    def decode(value: bytes) -> Any:
        stream = io.BytesIO(value)
        row = read(stream, schema)
        if stream.tell() != len(value):
            raise ValueError(f"{len(value) - stream.tell()} bytes are left after the record")
        return row

    return decode


def _without_unknown_logical_types(node: Any) -> Any:
    """Return the schema without logical types that are unknown here: their values are of the plain type, as in Avro."""
    if isinstance(node, list):
        return [_without_unknown_logical_types(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {
        name: _without_unknown_logical_types(each) if name in ("type", "items", "values", "fields") else each
        for name, each in node.items()
    }
    if "logicalType" in kept and kept["logicalType"] not in (*_LOGICAL, "decimal"):
        del kept["logicalType"]
    return kept


def _avro_type(node: Any, named: dict[str, pa.DataType], where: str) -> pa.DataType:
    if isinstance(node, list):
        some = [each for each in node if each != "null"]
        if len(some) != 1:
            raise ConfigurationError(f"{where} is a union of {len(some)} types: only one type and null make a column")
        return _avro_type(some[0], named, where)
    if isinstance(node, str):
        node = {"type": node}
    kind = node["type"]
    if isinstance(kind, dict | list):
        return _avro_type(kind, named, where)
    if kind in named:
        return named[kind]
    logical = node.get("logicalType")
    if logical == "decimal":
        return pa.decimal128(node["precision"], node.get("scale", 0))
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    if kind == "record":
        fields = [(each["name"], _avro_type(each["type"], named, f"{where}.{each['name']}")) for each in node["fields"]]
        found: pa.DataType = pa.struct(fields)
    elif kind == "array":
        found = pa.list_(_avro_type(node["items"], named, where))
    elif kind == "map":
        found = pa.map_(pa.string(), _avro_type(node["values"], named, where))
    elif kind == "fixed":
        found = pa.binary()
    elif kind in _AVRO:
        found = _AVRO[kind]
    else:
        raise ConfigurationError(f"{where} has the type {kind!r}, for which there is no column type")
    if "name" in node:
        named[node["name"]] = found
    return found
