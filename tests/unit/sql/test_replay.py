"""Random changes, made through `llog.connect()`: what the topics tell of them rebuilds the table, as `full` rows and as
`diff`s.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llog
from llog.client import Connection, IntegrityError

_COLUMNS = (
    "a BIGINT, b VARCHAR, n BIGINT DEFAULT 7, s VARCHAR, f DOUBLE, d DECIMAL(12, 3), ok BOOLEAN, "
    "ts TIMESTAMP, tz TIMESTAMPTZ, day DATE, raw BLOB, j JSON, PRIMARY KEY (a, b)"
)
_TEXTS = st.sampled_from(["", "a", "it's", 'a "quote" and \\', "line\nbreak", "☃", "null", "\x7f\x01"])
_TIMES = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59))
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(-(2**63), 2**63 - 1),
    "s": _TEXTS,
    "f": st.floats(allow_nan=False, allow_infinity=False),
    "d": st.decimals(-999_999_999, 999_999_999, places=3),
    "ok": st.booleans(),
    "ts": _TIMES,
    "tz": st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
    "day": st.dates(),
    "raw": st.binary(max_size=8),
    "j": st.sampled_from(
        ['{"a":1}', "[1,2.5,null]", '"text"', "12345678901234567890", "true", '{"b":{"c":[]}}', "null"]
    ),
}
_READ: dict[str, Callable[[Any], Any]] = {
    "d": Decimal,
    "ts": lambda text: datetime.fromisoformat(text).replace(tzinfo=None),
    "tz": datetime.fromisoformat,
    "day": date.fromisoformat,
    "raw": base64.b64decode,
}
"""How a value comes back from JSON, where it is not the same."""

_KEYS = st.tuples(st.integers(0, 3), st.sampled_from(["", "x", 'y"', "☃"]))
_SETS = st.sampled_from(
    [
        "n = a",
        "s = upper(s), n = NULL",
        "ok = NOT ok, s = s || b",
        "d = d / 2, f = -f",
        "ts = NULL, tz = NULL",
        "raw = raw || 'z'::BLOB",
        "j = json_object('k', n, 's', s)",
        "n = n",
    ]
)
_WHERES = st.sampled_from(["a = ?", "a >= ?", "a % 2 = ?", "n > ? OR s IS NULL", "length(b) = ?"])

Key = tuple[int, str]
Step = tuple[str, list[Any]]


@st.composite
def _inserts(draw: st.DrawFn) -> Step:
    names = draw(st.lists(st.sampled_from(sorted(_VALUES)), unique=True, max_size=6))
    keys = draw(st.lists(_KEYS, min_size=1, max_size=3, unique=True))
    rows = [[*key, *(draw(st.none() | _VALUES[name]) for name in names)] for key in keys]
    places = ", ".join(f"({', '.join('?' * len(row))})" for row in rows)
    conflict = draw(
        st.sampled_from(["", " ON CONFLICT (a, b) DO NOTHING", " ON CONFLICT (a, b) DO UPDATE SET n = 1, s = 'again'"])
    )
    sql = f"INSERT INTO {{table}} ({', '.join(['a', 'b', *names])}) VALUES {places}{conflict}"
    return sql, [value for row in rows for value in row]


@st.composite
def _others(draw: st.DrawFn) -> Step:
    where, value = draw(_WHERES), [draw(st.integers(0, 3))]
    kind = draw(st.sampled_from(["set", "set", "value", "value", "delete"]))
    if kind == "delete":
        return f"DELETE FROM {{table}} WHERE {where}", value
    if kind == "set":
        return f"UPDATE {{table}} SET {draw(_SETS)} WHERE {where}", value
    name = draw(st.sampled_from(sorted(_VALUES)))
    return f"UPDATE {{table}} SET {name} = ? WHERE {where}", [draw(st.none() | _VALUES[name]), *value]


_STEPS = st.lists(st.one_of(st.sampled_from(["BEGIN", "COMMIT", "ROLLBACK"]), _inserts(), _others()), max_size=14)
_numbers = count()


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    with llog.connect(data_dir=tmp_path_factory.mktemp("replay")) as made:
        yield made


def change(connection: Connection, table: str, steps: list[Any]) -> None:
    for step in steps:
        if step == "BEGIN" and not connection.in_transaction:
            connection.begin()
        elif step == "COMMIT":
            connection.commit()
        elif step == "ROLLBACK":
            connection.rollback()
        elif isinstance(step, tuple):
            try:
                connection.execute(step[0].format(table=table), step[1])
            except IntegrityError:
                connection.rollback()  # a failed statement fails its transaction
    connection.commit()


def events(connection: Connection, topic: str) -> list[tuple[str, dict[str, Any]]]:
    """Ops and payloads in the order of the changes, whatever partitions they are in."""
    rows = connection.execute(f"SELECT op, payload FROM TOPIC {topic} ORDER BY message_id").fetchall()
    return [(op, json.loads(payload)) for op, payload in rows]


def applied(table: dict[Key, dict[str, Any]], op: str, payload: dict[str, Any], *, is_diff: bool) -> None:
    key = payload["a"], payload["b"]
    assert (key in table) == (op != "INSERT")
    if op == "DELETE":
        before = table.pop(key)
        assert payload == ({"a": key[0], "b": key[1]} if is_diff else before)
    elif op == "UPDATE" and is_diff:
        told = {name: value for name, value in payload.items() if name not in ("a", "b")}
        assert all(table[key][name] != value for name, value in told.items() if value != 0)  # there is a 0.0 and a -0.0
        table[key] = {**table[key], **told}
    else:
        table[key] = payload


def rebuilt(told: list[tuple[str, dict[str, Any]]], *, is_diff: bool) -> list[dict[str, Any]]:
    table: dict[Key, dict[str, Any]] = {}
    for op, payload in told:
        applied(table, op, payload, is_diff=is_diff)
    return [table[key] for key in sorted(table)]


def read_back(row: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value is None else _READ.get(name, lambda same: same)(value) for name, value in row.items()}


def stored(connection: Connection, table: str) -> list[dict[str, Any]]:
    found = connection.execute(f"SELECT * FROM {table}").arrow().to_pylist()
    rows: list[dict[str, Any]] = [{**row, "j": None if row["j"] is None else json.loads(row["j"])} for row in found]
    return sorted(rows, key=lambda row: (row["a"], row["b"]))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps=_STEPS)
def test_replaying_a_topic_of_full_rows_or_of_diffs_rebuilds_the_table(
    connection: Connection, steps: list[Any]
) -> None:
    number = next(_numbers)
    table, whole, diffs = f"app.table_{number}", f"app.whole_{number}", f"app.diffs_{number}"
    connection.execute(f"CREATE TABLE {table} ({_COLUMNS}); CREATE TOPIC {whole}; CREATE TOPIC {diffs} PARTITIONS 3")
    for topic, payload in ((whole, "full"), (diffs, "diff")):
        connection.execute(
            f"ALTER TOPIC {topic} ADD SOURCE {table} ON INSERT, UPDATE, DELETE WITH (payload = '{payload}')"
        )
    try:
        change(connection, table, steps)
        rows = stored(connection, table)
        from_rows = rebuilt(events(connection, whole), is_diff=False)
        assert [read_back(row) for row in from_rows] == rows
        assert rebuilt(events(connection, diffs), is_diff=True) == from_rows
    finally:
        connection.rollback()
        connection.execute(f"DROP TOPIC {whole}; DROP TOPIC {diffs}; DROP TABLE {table}")
