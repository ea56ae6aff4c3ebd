from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch import varints
from llog.batch.varints import Field, VarintReader
from llog.errors import InvalidRecord

LARGEST = (1 << 55) - 1
numbers = st.integers(-LARGEST - 1, LARGEST) | st.sampled_from(
    [0, -1, 63, -64, 64, -65, 8191, 8192, 1 << 20, -(1 << 31)]
)


@given(st.lists(numbers, min_size=1, max_size=40), st.binary(max_size=9))
def test_numbers_are_read_where_they_were_written(written: list[int], between: bytes) -> None:
    data = b""
    positions, ends = [], []
    for number in written:
        positions.append(len(data))
        data += varints.write_one(number)
        ends.append(len(data))
        data += between
    found = VarintReader(memoryview(data)).read(np.array(positions))
    assert found.numbers.tolist() == written
    assert found.ends.tolist() == ends
    assert [varints.read_one(data, position) for position in positions] == list(zip(written, ends, strict=True))


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=40))
def test_rows_have_the_numbers_of_all_fields(pairs: list[tuple[int, int]]) -> None:
    found = varints.rows([Field(np.array(column)) for column in zip(*pairs, strict=True)])
    assert found.to_pylist() == [varints.write_one(a) + varints.write_one(b) for a, b in pairs]


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 7, b"\x80" * 8 + b"\x01"])
def test_a_number_that_is_cut_short_or_too_wide_ends_beyond_the_data(data: bytes) -> None:
    (end,) = VarintReader(memoryview(data)).read(np.array([0])).ends
    assert end > len(data)
    with pytest.raises(InvalidRecord, match="cut short or too wide"):
        varints.read_one(data, 0)


def test_zigzag_has_the_published_bytes() -> None:
    published = {0: "00", -1: "01", 1: "02", 63: "7e", -64: "7f", 64: "8001", -65: "8101", 8191: "fe7f", 8192: "808001"}
    for number, text in published.items():
        assert varints.write_one(number).hex() == text
