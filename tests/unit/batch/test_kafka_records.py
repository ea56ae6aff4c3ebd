from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch import kafka_few_records, kafka_records
from llog.batch.columns import Columns, columns_of, records_of, stamp
from llog.batch.varints import write_one
from llog.errors import InvalidRecord
from llog.model import Header, Record
from tests.unit.batch.examples import stamped_columns

BOTH = [kafka_few_records, kafka_records]
ALIKE: list[tuple[Header, ...]] = [
    (("ab", b"12"),),
    (("ab", b"34"),),
    (("cd", b"12"),),
    (("abc", b"1"),),
    (("a", b"123"),),
    (("ab", None), ("", None)),
    (("ab", b""), ("", b"")),
    (("a", b"1"), ("", b"")),
]
"""Headers of the same length in Kafka's form or in llog's, of which some differ only in their values."""


def outcome(module: ModuleType, body: bytes, count: int) -> list[Record] | str:
    """The records that a module finds in a body, or the name of its refusal."""
    try:
        return records_of(stamp(module.decode(memoryview(body) if module is kafka_records else body, count, 5), 1), 0)
    except InvalidRecord as error:
        return type(error).__name__


def record(*parts: bytes | int, length: int | None = None) -> bytes:
    """A record of these parts, numbers as varints, with its right length in front unless another is given."""
    body = b"\0" + b"".join(write_one(part) if isinstance(part, int) else part for part in parts)
    return write_one(len(body) if length is None else length) + body


@given(stamped_columns(), st.lists(st.integers(-(1 << 40), 1 << 40), min_size=36, max_size=36))
def test_the_loop_and_the_arrays_write_and_read_the_same(columns: Columns, deltas: list[int]) -> None:
    times = np.array(deltas[: columns.count])
    body = bytes(kafka_records.encode(columns, times))
    assert bytes(kafka_few_records.encode(columns, times)) == body
    found = outcome(kafka_records, body, columns.count)
    assert found == outcome(kafka_few_records, body, columns.count)
    assert isinstance(found, list)


@given(stamped_columns(), st.data())
def test_the_loop_and_the_arrays_refuse_the_same_damage(columns: Columns, data: st.DataObject) -> None:
    body = bytearray(kafka_records.encode(columns, np.zeros(columns.count, np.int64)))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(
            st.integers(0, 255) | st.sampled_from([0, 1, 2, 128])
        )
    assert outcome(kafka_records, bytes(body), columns.count) == outcome(kafka_few_records, bytes(body), columns.count)


@given(st.lists(st.sampled_from(ALIKE), min_size=1, max_size=9) | st.sampled_from(ALIKE).map(lambda one: [one] * 9))
def test_headers_of_one_length_are_kept_apart(headers: list[tuple[Header, ...]]) -> None:
    columns = stamp(columns_of([Record(payload=b"", headers=each) for each in headers]), 1)
    body = bytes(kafka_records.encode(columns, np.zeros(len(headers), np.int64)))
    assert body == kafka_few_records.encode(columns, np.zeros(len(headers), np.int64))
    found = outcome(kafka_records, body, len(headers))
    assert isinstance(found, list)
    assert [each.headers for each in found] == headers


def test_headers_of_one_length_may_have_numbers_that_are_wider_than_they_need_to_be() -> None:
    body = record(0, 0, -1, -1, 1, 1, b"k", b"\x82\0", b"v") + record(0, 1, -1, -1, 1, 1, b"k", 2, b"vw")
    found = outcome(kafka_records, body, 2)
    assert isinstance(found, list)
    assert [each.headers for each in found] == [(("k", b"v"),), (("k", b"vw"),)]


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(record(0, 0, -1, -1, 0, length=5), id="a length that is too short"),
        pytest.param(record(0, 0, -1, -1, 0, length=7), id="a length beyond the batch"),
        pytest.param(record(0, 0, -1, -1, 0, length=-6), id="a negative length"),
        pytest.param(record(0, 0, -1, -1, 0) + b"\0", id="bytes after the last record"),
        pytest.param(record(0, 0, -1, -1, 0, b"x"), id="bytes after the headers"),
        pytest.param(record(0, 1, -1, -1, 0), id="an offset delta that skips"),
        pytest.param(record(0, 0, -2, -1, 0), id="a key of -2 bytes"),
        pytest.param(record(0, 0, 9, -1, 0), id="a key beyond the record"),
        pytest.param(record(0, 0, -1, -2, 0), id="a value of -2 bytes"),
        pytest.param(record(0, 0, -1, 9, b"v", 0), id="a value beyond the record"),
        pytest.param(record(0, 0, -1, 1 << 31, 0), id="a value of 2 GiB"),
        pytest.param(record(0, 0, -1, -1, -1), id="-1 headers"),
        pytest.param(record(0, 0, -1, -1, 1), id="a header that is missing"),
        pytest.param(record(0, 0, -1, -1, 1 << 40), id="more headers than bytes"),
        pytest.param(record(0, 0, -1, -1, 1, -1, -1), id="a header without a key"),
        pytest.param(record(0, 0, -1, -1, 1, 1, b"\xff", -1), id="a header key that is not UTF-8"),
        pytest.param(record(0, 0, -1, -1, 1, 1, b"k", -2), id="a header value of -2 bytes"),
        pytest.param(record(0, 0, -1, -1, 1, 1, b"k", 9), id="a header value beyond the record"),
        pytest.param(record(0, 0, -1, -1, 1, 1, b"k", -1, b"x"), id="bytes after a header"),
        pytest.param(record(b"\x80" * 9 + b"\1", 0, -1, -1, 0), id="a timestamp delta of ten bytes"),
        pytest.param(record(0, 0, -1, -1)[:-1] + b"\x80\x80", id="a number without an end"),
    ],
)
def test_a_damaged_record_is_refused(module: ModuleType, damaged: bytes) -> None:
    assert outcome(module, damaged, 1) == "InvalidRecord"


@pytest.mark.parametrize("module", BOTH)
def test_numbers_may_be_wider_than_they_need_to_be(module: ModuleType) -> None:
    body = record(0, b"\x80\0", -1, b"\x82\0", b"v", 0)
    assert outcome(module, body, 1) == [Record(payload=b"v", timestamp=5, offset=0)]
