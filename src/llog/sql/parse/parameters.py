"""Values of parameters into statements: checked like values that are written, named by their clause when they do not
fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import msgspec

from llog.errors import InvalidArgument, SqlError
from llog.sql.parse.clauses import CLAUSES, Check
from llog.sql.parse.renderer import place_text
from llog.sql.parse.statements import Parameter, StartAt, Statement, TableStatement
from llog.sql.wire import from_numpy, is_numpy

Params = Sequence[Any] | Mapping[str, Any]

_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, Decimal, date, datetime})
"""What most parameters are, and goes on as it is."""


def parameters_of(statement: Statement) -> tuple[int | str, ...]:
    """The places of the statement's parameters, each once."""
    if isinstance(statement, TableStatement):
        return statement.parameters
    found: dict[int | str, None] = {}
    _collect([getattr(statement, name) for name in statement.__struct_fields__], found)
    return tuple(found)


def bind(statement: Statement, params: Params | None = None) -> Statement:
    """Returns the statement with the values in place of its parameters.

    A field is checked as the clause of its name is, `options` by the statement's `OPTIONS`. The text of a table
    statement keeps its placeholders, for DuckDB; its `values` are filled. `SqlError` if there are too few or too many
    values, or one does not fit its clause.
    """
    given = _values_by_place(parameters_of(statement), params)
    if not given:
        return statement
    if isinstance(statement, TableStatement):
        return _with_values(statement, given)
    changed: dict[str, Any] = {}
    for name in statement.__struct_fields__:
        value = getattr(statement, name)
        if isinstance(value, Parameter):
            clause = name.upper()
            changed[name] = _value(value, given, clause, CLAUSES[clause])
        elif isinstance(value, StartAt) and isinstance(value.value, Parameter):
            clause = value.kind.name
            changed[name] = StartAt(value.kind, _value(value.value, given, clause, CLAUSES[clause]))
        elif isinstance(value, TableStatement):
            changed[name] = _with_values(value, given)
        elif name == "options":
            checks: Mapping[str, Check] = statement.OPTIONS  # type: ignore[attr-defined]  # goes with `options`
            changed[name] = {option: _value(v, given, option, checks[option]) for option, v in value.items()}
        elif name == "upto":
            changed[name] = _upto(value, given)
    return msgspec.structs.replace(statement, **changed)


def given_values(params: Params) -> Params:
    """With lists and dictionaries as the JSON text that they are: DuckDB would make one type of all that a list has,
    `[1, "x"]` text.

    A list of numbers of one type, or of texts, stays one, for `unnest(?)` and the like. Scalars of numpy become
    Python's.
    """
    if isinstance(params, Mapping):
        return {name: _value_or_json(value) for name, value in params.items()}
    if isinstance(params, str | bytes | bytearray) or _PLAIN.issuperset(map(type, params)):
        return params
    return [_value_or_json(value) for value in params]


def _value_or_json(value: Any) -> Any:
    if not isinstance(value, dict | list | tuple):
        return from_numpy(value) if is_numpy(value) else _plain(value)
    if not isinstance(value, dict) and len({*map(type, value)}) == 1 and not isinstance(value[0], dict | list | tuple):
        return value if type(value[0]) in _PLAIN else [_plain(each) for each in value]
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SqlError(f"a parameter cannot be made JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Text and numbers of classes that only this process may know, such as those of an enumeration, as what they
    are.
    """
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


def shares(statements: Sequence[Statement], params: Params | None) -> list[Params]:
    """The parameters of each of several statements: numbered ones begin after those of the statement before, names are
    common.
    """
    if isinstance(params, Mapping):
        wanted = [parameters_of(statement) for statement in statements]
        unused = set(params).difference(place for places in wanted for place in places)
        if unused:
            raise SqlError(f"no statement has the parameter {sorted(map(str, unused))[0]!r}")
        return [{p: params[p] for p in places if isinstance(p, str) and p in params} for places in wanted]
    values = list(params or ())
    found: list[Params] = []
    begin = 0
    for statement in statements:
        count = len(parameters_of(statement))
        found.append(values[begin : begin + count])
        begin += count
    if begin != len(values):
        raise SqlError(f"the statements have {begin} parameters, and {len(values)} values were given")
    return found


def _values_by_place(places: Sequence[int | str], params: Params | None) -> dict[int | str, Any]:
    if params is None:
        params = ()
    if isinstance(params, str | bytes | bytearray):
        raise SqlError("parameters must be a list or a mapping, not text")
    if isinstance(params, Mapping):
        if any(isinstance(place, int) for place in places):
            raise SqlError("the statement has parameters without names, and a mapping was given", hint="give a list")
        missing = [place for place in places if place not in params]
        if missing:
            raise SqlError(f"the parameter ${missing[0]} has no value")
        unused = [name for name in params if name not in places]
        if unused:
            raise SqlError(f"the statement has no parameter {str(unused[0])[:80]!r}")
        return {place: params[place] for place in places if isinstance(place, str)}
    if any(isinstance(place, str) for place in places):
        raise SqlError("the statement has named parameters, and no mapping was given", hint="give a mapping of names")
    if len(params) != len(places):
        raise SqlError(f"the statement has {len(places)} parameters, and {len(params)} values were given")
    return dict(enumerate(params))


def _value(value: Any, given: Mapping[int | str, Any], clause: str, check: Check) -> Any:
    if not isinstance(value, Parameter):
        return value
    try:
        return check(given[value.place])
    except InvalidArgument as error:
        raise SqlError(f"{clause} ({place_text(value)}): {error}") from None


def _upto(upto: Sequence[tuple[Any, Any]], given: Mapping[int | str, Any]) -> tuple[tuple[int | None, int], ...]:
    found: dict[int | None, int] = {}
    for partition, offset in upto:
        at = _value(partition, given, "PARTITION", CLAUSES["PARTITION"])
        if at in found:
            raise SqlError(f"PARTITION: {at} is named twice")
        found[at] = _value(offset, given, "OFFSET", CLAUSES["OFFSET"])
    return tuple(found.items())


def _with_values(statement: TableStatement, given: Mapping[int | str, Any]) -> TableStatement:
    if statement.values is None:
        return statement
    rows = tuple(
        tuple(given[value.place] if isinstance(value, Parameter) else value for value in row)
        for row in statement.values
    )
    return msgspec.structs.replace(statement, values=rows)


def _collect(value: Any, found: dict[int | str, None]) -> None:
    if isinstance(value, Parameter):
        found[value.place] = None
    elif isinstance(value, StartAt):
        _collect(value.value, found)
    elif isinstance(value, TableStatement):
        found.update(dict.fromkeys(value.parameters))
    elif isinstance(value, dict):
        _collect(list(value.values()), found)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect(inner, found)
