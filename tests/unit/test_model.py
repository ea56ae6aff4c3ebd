from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.errors import InvalidArgument
from llog.model import TOPIC_NAME_BYTES_MAX, TopicPartition, check_topic_name, murmur2, partition_for_key


@pytest.mark.parametrize(
    ("key", "signed_hash"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_agrees_with_the_vectors_of_the_kafka_client(key: bytes, signed_hash: int) -> None:
    assert murmur2(key) == signed_hash % (1 << 32)


@pytest.mark.parametrize(("key", "partition"), [(b"21", 340), (b"foobar", 166), (b"abc", 107)])
def test_a_key_goes_where_kafkas_default_partitioner_puts_it(key: bytes, partition: int) -> None:
    assert partition_for_key(key, 1000) == partition


@given(st.binary(max_size=64), st.integers(1, 100_000))
def test_every_key_has_one_partition_of_those_there_are(key: bytes, partitions: int) -> None:
    assert 0 <= partition_for_key(key, partitions) < partitions
    assert partition_for_key(key, 1) == 0


@given(st.binary(max_size=64))
def test_murmur2_is_an_unsigned_32_bit_number(key: bytes) -> None:
    assert 0 <= murmur2(key) < 1 << 32


@pytest.mark.parametrize("name", ["a", "orders", "Orders.v2_eu-west", "...", "0", "x" * TOPIC_NAME_BYTES_MAX])
def test_usable_topic_names_are_returned(name: str) -> None:
    assert check_topic_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a b", "a\n", "ü", "a~2", "a%2F", "\0", "x" * (TOPIC_NAME_BYTES_MAX + 1)]
)
def test_topic_names_that_would_not_fit_into_keys_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="topic name"):
        check_topic_name(name)


def test_a_partition_is_shown_by_topic_and_number() -> None:
    assert str(TopicPartition("orders", 3)) == "orders/3"
