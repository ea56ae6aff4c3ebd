"""The type objects and constructors of PEP 249. The type code of a column is its Arrow type, which equals one of the
objects.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pyarrow as pa

Date = datetime.date
Time = datetime.time
Timestamp = datetime.datetime
Binary = bytes


def DateFromTicks(ticks: float) -> datetime.date:
    return TimestampFromTicks(ticks).date()


def TimeFromTicks(ticks: float) -> datetime.time:
    return TimestampFromTicks(ticks).time()


def TimestampFromTicks(ticks: float) -> datetime.datetime:
    """Return the time in UTC without a time zone, as TIMESTAMP columns have it."""
    return datetime.datetime.fromtimestamp(ticks, datetime.UTC).replace(tzinfo=None)


class TypeObject:
    """Compares equal to every Arrow type of its kind."""

    def __init__(self, name: str, *fits: Callable[[Any], bool]) -> None:
        self._name = name
        self._fits = fits

    def __eq__(self, other: object) -> bool:
        if isinstance(other, pa.DataType):
            return any(fits(other) for fits in self._fits)
        return self is other

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return self._name


_types = pa.types
STRING = TypeObject("STRING", _types.is_string, _types.is_large_string, _types.is_string_view, _types.is_dictionary)
BINARY = TypeObject("BINARY", _types.is_binary, _types.is_large_binary, _types.is_fixed_size_binary)
NUMBER = TypeObject("NUMBER", _types.is_boolean, _types.is_integer, _types.is_floating, _types.is_decimal)
DATETIME = TypeObject(
    "DATETIME", _types.is_timestamp, _types.is_date, _types.is_time, _types.is_duration, _types.is_interval
)
ROWID = TypeObject("ROWID")
