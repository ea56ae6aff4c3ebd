"""The order of stored keys, and which shard they belong to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.stores.oxia.keys import ECHO, SORTING_PROBE, decode, encode, hash_of, partition_of

KEYS = st.text(alphabet=st.one_of(st.sampled_from("./0-\x00\x01\x02\x03=#a~"), st.characters(codec="utf-8")))


@given(KEYS, KEYS)
def test_stored_keys_sort_as_keys_do(one: str, other: str) -> None:
    assert (encode(one).encode() < encode(other).encode()) == (one.encode() < other.encode())


@given(KEYS, KEYS)
def test_a_stored_key_has_no_slash_and_can_be_read_back(key: str, rest: str) -> None:
    assert "/" not in encode(key)
    assert decode(encode(key)) == key
    assert encode(key + rest).startswith(encode(key))


def test_keys_of_others_are_not_taken_for_the_logs() -> None:
    assert decode(ECHO) is None
    assert decode(SORTING_PROBE) is None
    assert decode("somebody/elses") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("foo", 125730186),
        ("bar", 2687685474),
        ("baz", 862947621),
        ("", 0x38D394C2),
        ("llog/orders/partitions/0000000000/", 1889791645),
        ("llog/orders/partitions/0000000001/", 2667727486),
    ],
)
def test_hashes_are_those_of_oxias_own_client(text: str, expected: int) -> None:
    assert hash_of(text) == expected


def test_a_range_within_one_partition_names_it() -> None:
    prefix = "llog/t/partitions/0000000001/"
    assert partition_of(prefix, prefix[:-1] + "0") == prefix
    assert partition_of(prefix + "index/0001", prefix + "index/0009") == prefix
    assert partition_of(prefix, prefix[:-1] + "1") is None
    assert partition_of("llog/t/partitions/", "llog/t/partitions0") is None
    assert partition_of("llog/topics/", "llog/topics0") is None
