"""Binds values to the parameters of statements. Each is checked as a literal would be, and errors name its clause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import msgspec

from llog.errors import InvalidArgument, SqlError
from llog.sql.parse.clauses import CLAUSES, Check
from llog.sql.parse.renderer import placeholder
from llog.sql.parse.statements import Parameter, StartAt, Statement, TableStatement
from llog.sql.wire import from_numpy, is_numpy

Params = Sequence[Any] | Mapping[str, Any]

_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, Decimal, date, datetime})
"""Types that most parameters have, and that are passed on as they are."""


def parameters_of(statement: Statement) -> tuple[int | str, ...]:
    """Return the places of the statement's parameters, each once."""
    if isinstance(statement, TableStatement):
        return statement.parameters
    found: dict[int | str, None] = {}
    _collect_places([getattr(statement, name) for name in statement.__struct_fields__], found)
    return tuple(found)


def bind(statement: Statement, params: Params | None = None) -> Statement:
    """Return the statement with the values in place of its parameters.

    A field is checked like the clause of its name, `options` by the statement's `OPTIONS`. The text of a table
    statement keeps its placeholders for DuckDB; only its `values` are filled in. Raises `SqlError` for too few or too
    many values, and for a value that does not fit its clause.
    """
    values = _values_by_place(parameters_of(statement), params)
    if not values:
        return statement
    if isinstance(statement, TableStatement):
        return _bind_rows(statement, values)
    changed: dict[str, Any] = {}
    for name in statement.__struct_fields__:
        value = getattr(statement, name)
        if isinstance(value, Parameter):
            clause = name.upper()
            changed[name] = _bind_value(value, values, clause, CLAUSES[clause])
        elif isinstance(value, StartAt) and isinstance(value.value, Parameter):
            clause = value.kind.name
            changed[name] = StartAt(value.kind, _bind_value(value.value, values, clause, CLAUSES[clause]))
        elif isinstance(value, TableStatement):
            changed[name] = _bind_rows(value, values)
        elif name == "options":
            checks: Mapping[str, Check] = statement.OPTIONS  # type: ignore[attr-defined]  # goes with `options`
            changed[name] = {option: _bind_value(v, values, option, checks[option]) for option, v in value.items()}
        elif name == "upto":
            changed[name] = _bind_upto(value, values)
    return msgspec.structs.replace(statement, **changed)


def normalize_params(params: Params) -> Params:
    """Return the parameters with lists and dictionaries as JSON text, and numpy scalars as Python values.

    DuckDB would cast all values of a list to one type: those of `[1, "x"]` to text. A list of values that already have
    one type stays a list, for `unnest(?)` and the like.
    """
    if isinstance(params, Mapping):
        return {name: _value_or_json(value) for name, value in params.items()}
    if isinstance(params, str | bytes | bytearray) or _PLAIN.issuperset(map(type, params)):
        return params
    return [_value_or_json(value) for value in params]


def _value_or_json(value: Any) -> Any:
    if not isinstance(value, dict | list | tuple):
        return from_numpy(value) if is_numpy(value) else _plain_value(value)
    if not isinstance(value, dict) and len({*map(type, value)}) == 1 and not isinstance(value[0], dict | list | tuple):
        return value if type(value[0]) in _PLAIN else [_plain_value(each) for each in value]
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SqlError(f"a parameter cannot be written as JSON: {error}") from None


def _plain_value(value: Any) -> Any:
    """Return text and numbers of a subclass, such as an enumeration, as `str`, `int` or `float`, which workers know."""
    match value:
        case bytearray() | memoryview():
            return bytes(value)
        case str():
            return str.__str__(value)
        case int() if not isinstance(value, bool):
            return int.__int__(value)
        case float():
            return float.__float__(value)
    return value


def split_params(statements: Sequence[Statement], params: Params | None) -> list[Params]:
    """Return the parameters of each statement. Numbers continue from one statement to the next; names are shared."""
    if isinstance(params, Mapping):
        places_of_each = [parameters_of(statement) for statement in statements]
        unused = set(params).difference(place for places in places_of_each for place in places)
        if unused:
            raise SqlError(f"no statement has the parameter {sorted(map(str, unused))[0]!r}")
        return [{p: params[p] for p in places if isinstance(p, str) and p in params} for places in places_of_each]
    values = list(params or ())
    found: list[Params] = []
    begin = 0
    for statement in statements:
        count = len(parameters_of(statement))
        found.append(values[begin : begin + count])
        begin += count
    if begin != len(values):
        raise SqlError(f"the statements have {begin} parameters, but {len(values)} values were given")
    return found


def _values_by_place(places: Sequence[int | str], params: Params | None) -> dict[int | str, Any]:
    if params is None:
        params = ()
    if isinstance(params, str | bytes | bytearray):
        raise SqlError("parameters must be a list or a mapping, not text")
    if isinstance(params, Mapping):
        if any(isinstance(place, int) for place in places):
            raise SqlError("the statement has unnamed parameters, but a mapping was given", hint="pass a list")
        missing = [place for place in places if place not in params]
        if missing:
            raise SqlError(f"the parameter ${missing[0]} has no value")
        unused = [name for name in params if name not in places]
        if unused:
            raise SqlError(f"the statement has no parameter {str(unused[0])[:80]!r}")
        return {place: params[place] for place in places if isinstance(place, str)}
    if any(isinstance(place, str) for place in places):
        raise SqlError("the statement has named parameters, but no mapping was given", hint="pass a mapping of names")
    if len(params) != len(places):
        raise SqlError(f"the statement has {len(places)} parameters, but {len(params)} values were given")
    return dict(enumerate(params))


def _bind_value(value: Any, values: Mapping[int | str, Any], clause: str, check: Check) -> Any:
    if not isinstance(value, Parameter):
        return value
    try:
        return check(values[value.place])
    except InvalidArgument as error:
        raise SqlError(f"{clause} ({placeholder(value)}): {error}") from None


def _bind_upto(upto: Sequence[tuple[Any, Any]], values: Mapping[int | str, Any]) -> tuple[tuple[int | None, int], ...]:
    found: dict[int | None, int] = {}
    for partition, offset in upto:
        at = _bind_value(partition, values, "PARTITION", CLAUSES["PARTITION"])
        if at in found:
            raise SqlError(f"PARTITION: {at} is named twice")
        found[at] = _bind_value(offset, values, "OFFSET", CLAUSES["OFFSET"])
    return tuple(found.items())


def _bind_rows(statement: TableStatement, values: Mapping[int | str, Any]) -> TableStatement:
    if statement.values is None:
        return statement
    rows = tuple(
        tuple(values[value.place] if isinstance(value, Parameter) else value for value in row)
        for row in statement.values
    )
    return msgspec.structs.replace(statement, values=rows)


def _collect_places(value: Any, found: dict[int | str, None]) -> None:
    if isinstance(value, Parameter):
        found[value.place] = None
    elif isinstance(value, StartAt):
        _collect_places(value.value, found)
    elif isinstance(value, TableStatement):
        found.update(dict.fromkeys(value.parameters))
    elif isinstance(value, dict):
        _collect_places(list(value.values()), found)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect_places(inner, found)
