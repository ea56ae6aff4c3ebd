"""The vectorised partitioner gives the same numbers as the plain one."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from llog.batch.partitioning import partitions_for_keys
from llog.model import partition_for_key


@given(st.lists(st.none() | st.binary(max_size=21), max_size=40), st.integers(1, 1000), st.integers(0, 5))
def test_columns_and_single_keys_go_to_the_same_partitions(
    keys: list[bytes | None], partitions: int, skipped: int
) -> None:
    column = pa.array(keys, pa.binary()).slice(min(skipped, len(keys)))
    expected = [-1 if key is None else partition_for_key(key, partitions) for key in keys[skipped:]]
    assert partitions_for_keys(column, partitions).tolist() == expected
