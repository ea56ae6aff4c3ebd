"""Rows as JSON: every type exactly, every payload valid, the same bytes for the same row."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch.columns import FEW
from llog.cdc.changes import FewRows, TableShape
from llog.cdc.payloads import diff_payloads, full_payloads, json_of, key_payloads, keys_of
from llog.errors import InvalidArgument

SHAPE = TableShape("chat.messages", ("id", "author", "text", "extra"), ("id",), frozenset({"extra"}))
UTC = dt.UTC


def rows(*values: tuple[Any, ...]) -> pa.Table:
    columns = zip(*values, strict=True)
    types = (pa.int64(), pa.string(), pa.string(), pa.string())
    return pa.table([pa.array(list(column), kind) for column, kind in zip(columns, types, strict=True)], SHAPE.columns)


def texts(array: pa.Array, *, is_json: bool = False) -> list[str]:
    found: list[str] = json_of(array, is_json).to_pylist()
    return found


def test_a_key_payload_has_the_primary_key_alone() -> None:
    table = rows((7, "ann", "hi", None), (8, None, 'say "x"', "{}"))
    assert key_payloads(SHAPE, table).to_pylist() == ['{"id":7}', '{"id":8}']


def test_a_full_payload_has_every_column_in_the_tables_order() -> None:
    table = rows((7, "ann", 'a "b"\n', '{"a": [1, 2]}'), (8, None, "", None)).select(["extra", "text", "author", "id"])
    assert full_payloads(SHAPE, table).to_pylist() == [
        '{"id":7,"author":"ann","text":"a \\"b\\"\\n","extra":{"a": [1, 2]}}',
        '{"id":8,"author":null,"text":"","extra":null}',
    ]


def test_a_preview_is_the_beginning_of_the_row() -> None:
    [found] = key_payloads(SHAPE, rows((7, "änn", "hi", None)), 20).to_pylist()
    assert json.loads(found) == {"id": 7, "preview": '{"id":7,"author":"än'}


def test_a_diff_has_the_key_and_what_changed() -> None:
    before = rows((1, "ann", "hi", None), (2, "bob", None, "{}"), (3, "eve", "x", "{}"))
    after = rows((1, "ann", "ho", None), (2, "bob", "", None), (3, "eve", "x", "{}"))
    assert diff_payloads(SHAPE, after, before).to_pylist() == [
        '{"id":1,"text":"ho"}',
        '{"id":2,"text":"","extra":null}',
        '{"id":3}',
    ]


def test_a_key_is_the_value_as_text_and_several_are_a_json_array() -> None:
    table = rows((7, 'a"b', "hi", None), (8, "c", "ho", None))
    assert keys_of(SHAPE, table).to_pylist() == ["7", "8"]
    assert keys_of(SHAPE._replace(primary_key=("author",)), table).to_pylist() == ['a"b', "c"]
    assert keys_of(SHAPE._replace(primary_key=("author", "id")), table).to_pylist() == ['["a\\"b",7]', '["c",8]']


def test_columns_in_several_chunks_and_slices_are_read_as_one() -> None:
    parts = [rows((1, "a", "b", None), (2, "c", "d", None)), rows((3, "e", "f", None), (4, "g", "h", None))]
    table = pa.concat_tables(parts).slice(1, 2)
    assert keys_of(SHAPE, table).to_pylist() == ["2", "3"]
    assert [json.loads(each)["author"] for each in full_payloads(SHAPE, table).to_pylist()] == ["c", "e"]
    assert [json.loads(each)["id"] for each in full_payloads(SHAPE, parts[0].slice(1)).to_pylist()] == [2]


def test_a_strange_column_name_is_escaped() -> None:
    shape = TableShape("t", ('a "b"\\\n', "ü"), ('a "b"\\\n',))
    [found] = full_payloads(shape, pa.table([[1], [2]], names=list(shape.columns))).to_pylist()
    assert json.loads(found) == {'a "b"\\\n': 1, "ü": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1}', {"a": 1}),
        (" [1, 2] ", [1, 2]),
        ("null", None),
        ('"x"', "x"),
        ("NaN", "NaN"),
        ("[1,]", "[1,]"),
        ('{"a":', '{"a":'),
        ("", ""),
        ('1,"b":2', '1,"b":2'),
    ],
)
def test_json_columns_are_embedded_and_what_is_no_json_is_a_string(text: str, expected: object) -> None:
    [found] = texts(pa.array([text]), is_json=True)
    assert json.loads(found, parse_constant=pytest.fail) == expected


@pytest.mark.parametrize("character", ['"', "\\", "\0", "\x1f", "\n", "\x7f", "ä", "\U0001f600"])
def test_every_character_of_a_string_comes_back(character: str) -> None:
    assert [json.loads(each) for each in texts(pa.array(["a", f"b{character}c", None]))] == [
        "a",
        f"b{character}c",
        None,
    ]


TIMES: list[tuple[pa.Array, list[str | None]]] = [
    (pa.array([dt.date(2024, 2, 29), None]), ["2024-02-29", None]),
    (pa.array([2_932_897, -719_163], pa.int32()).cast(pa.date32()), ["10000-01-01", "0000-12-31"]),
    (pa.array([dt.time(1, 2, 3, 4)]), ["01:02:03.000004"]),
    (pa.array([dt.datetime(2024, 12, 31, 23, 59, 59, 5)]), ["2024-12-31T23:59:59.000005Z"]),
    (pa.array([1_700_000_000], pa.timestamp("s")), ["2023-11-14T22:13:20Z"]),
    (
        pa.array([dt.datetime(2024, 7, 1, tzinfo=UTC), None], pa.timestamp("us", "Europe/Berlin")),
        ["2024-07-01T00:00:00.000000Z", None],
    ),
    (
        pa.array([(1 << 63) - 1, -(1 << 63) + 1, 0], pa.int64()).cast(pa.timestamp("us")),
        ["infinity", "-infinity", "1970-01-01T00:00:00.000000Z"],
    ),
    (pa.array([253_402_300_800_000_000]).cast(pa.timestamp("us")), ["10000-01-01T00:00:00.000000Z"]),
    (pa.array([pa.MonthDayNano([14, -3, -1_500_000_000]), None]), ["P14M-3DT-1.5S", None]),
]


@pytest.mark.parametrize(("array", "expected"), TIMES, ids=lambda each: str(getattr(each, "type", "")))
def test_times_are_iso_8601_in_utc(array: pa.Array, expected: list[str | None]) -> None:
    assert [json.loads(each) for each in texts(array)] == expected


OTHERS: list[tuple[pa.Array, list[Any]]] = [
    (pa.array([True, False, None]), [True, False, None]),
    (pa.array([None, None]), [None, None]),
    (pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
    (pa.array([Decimal("1E-7"), Decimal("12.5")], pa.decimal128(38, 7)), [Decimal("1E-7"), Decimal("12.5")]),
    (pa.array([Decimal(10**37 + 1), None], pa.decimal128(38, 0)), [Decimal(10**37 + 1), None]),
    (pa.array([b"\x00" * 16], pa.binary(16)), [base64.b64encode(b"\x00" * 16).decode()]),
    (pa.array([uuid.UUID(int=5).bytes], pa.uuid()), [str(uuid.UUID(int=5))]),
    (pa.array(['{"a":1}'], pa.json_()), [{"a": 1}]),
    (pa.array([[1, None], [], None, [2]]).slice(1), [[], None, [2]]),
    (pa.array([[[1], []], None], pa.large_list(pa.list_(pa.int8()))), [[[1], []], None]),
    (pa.array([["a", 'b"'], None], pa.list_(pa.string(), 2)), [["a", 'b"'], None]),
    (pa.array([{"x": 1, "y": "a"}, None, {"x": None, "y": None}]), [{"x": 1, "y": "a"}, None, {"x": None, "y": None}]),
    (
        pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        [[{"key": "k", "value": 1}], None, []],
    ),
    (pa.array(["x", "\x7f\u2028"], pa.string_view()), ["x", "\x7f\u2028"]),
]


@pytest.mark.parametrize(("array", "expected"), OTHERS, ids=lambda each: str(getattr(each, "type", "")))
def test_other_types_have_their_json(array: pa.Array, expected: list[Any]) -> None:
    found = [json.loads(each, parse_constant=pytest.fail) for each in texts(array)]
    if any(isinstance(each, Decimal) for each in expected):
        assert all(each is None or isinstance(each, str) for each in found)
        found = [None if each is None else Decimal(each) for each in found]
    assert found == expected


def test_a_type_without_json_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="duration"):
        json_of(pa.array([1], pa.duration("s")), is_json=False)


def same(value: Any) -> Any:
    return value


COLUMNS: list[tuple[pa.DataType, st.SearchStrategy[Any], Callable[[Any], Any]]] = [
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1), same),
    (pa.uint64(), st.integers(0, (1 << 64) - 1), same),
    (pa.float64(), st.floats(), lambda value: value if math.isfinite(value) else None),
    (pa.float32(), st.floats(width=32), lambda value: value if math.isfinite(value) else None),
    (pa.string(), st.text(st.characters(exclude_categories=["Cs"])), same),
    (pa.binary(), st.binary(), lambda value: base64.b64encode(value).decode()),
    (pa.decimal128(38, 9), st.decimals(-(10**28), 10**28, places=9), str),
    (pa.date32(), st.dates(), lambda value: value.isoformat()),
    (pa.time64("us"), st.times(), lambda value: value.isoformat("microseconds")),
    (pa.timestamp("us"), st.datetimes(), lambda value: value.isoformat(timespec="microseconds") + "Z"),
    (pa.list_(pa.string()), st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]))), same),
]


@given(data=st.data())
def test_every_payload_reads_back_as_its_row(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=4))
    count = data.draw(st.integers(1, 4))
    values = [data.draw(st.lists(st.none() | each, min_size=count, max_size=count)) for _, each, _ in chosen]
    names = tuple(f"c{place}" for place in range(len(chosen)))
    table = pa.table([pa.array(column, kind) for column, (kind, _, _) in zip(values, chosen, strict=True)], names)
    payloads = full_payloads(TableShape("t", names, names[:1]), table).to_pylist()
    assert payloads == full_payloads(TableShape("t", names, names[:1]), table).to_pylist()
    for row, payload in enumerate(payloads):
        found = json.loads(payload, parse_constant=pytest.fail)
        for name, column, (kind, _, expected) in zip(names, values, chosen, strict=True):
            wanted = None if column[row] is None else expected(column[row])
            if pa.types.is_decimal(kind) and wanted is not None:
                assert isinstance(found[name], str)
                found[name], wanted = Decimal(found[name]), Decimal(wanted)
            elif kind == pa.float32() and wanted is not None:
                found[name] = pa.scalar(float(found[name]), pa.float32()).as_py()
            assert found[name] == wanted


PLAIN: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(st.characters(exclude_categories=["Cs"]))),
    (pa.timestamp("us"), st.datetimes()),
]


@given(data=st.data())
def test_a_few_rows_as_lists_give_the_same_bytes_as_arrow(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, FEW))
    names = tuple(f"c{place}" for place in range(len(PLAIN)))
    values = [data.draw(st.lists(st.none() | each, min_size=count, max_size=count)) for _, each in PLAIN]
    arrays = [pa.array(column, kind) for column, (kind, _) in zip(values, PLAIN, strict=True)]
    table = pa.table(arrays, names)
    columns = {name: arrays[place] if place == 3 else values[place] for place, name in enumerate(names)}
    few = FewRows(columns, lambda: table)
    for key in (names[:1], names[1:2], names[2:3], names[:3], names[2:]):
        shape = TableShape("t", names, key)
        assert list(keys_of(shape, few)) == keys_of(shape, table).to_pylist()
        assert list(key_payloads(shape, few)) == key_payloads(shape, table).to_pylist()
        assert key_payloads(shape, few, 20).to_pylist() == key_payloads(shape, table, 20).to_pylist()
    assert list(full_payloads(shape, few)) == full_payloads(shape, table).to_pylist()
