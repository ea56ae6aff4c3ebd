"""The bytes of keys: they sort as log keys, segments and sequences do, and are those that docs/keyed-format.md
states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llog.errors import CorruptBatch, WrongStore
from llog.keyed import encoding
from llog.keyed.encoding import (
    LogState,
    SegmentMeta,
    SegmentTotals,
    after_prefix,
    entry_parts,
    entry_prefix,
    escape,
    filter_length,
    listed_key,
    listing_key,
    segment_key,
    segment_of,
    sequence_suffix,
    unescape,
)

VECTORS: Any = json.loads((Path(__file__).parent / "vectors.json").read_text())
NUMBERS = st.integers(0, 2**64 - 1)
AWKWARD = st.sampled_from([b"\x00", b"\x01", b"\x02", b"\xff", b"a"])
KEYS = st.one_of(st.binary(max_size=12), st.lists(AWKWARD, max_size=8).map(b"".join))


def entry(segment_id: int, key: bytes, sequence: int) -> bytes:
    return entry_prefix(segment_id, key) + sequence_suffix(sequence)


@given(st.tuples(NUMBERS, KEYS, NUMBERS), st.tuples(NUMBERS, KEYS, NUMBERS))
@example((0, b"", 0), (0, b"\x00", 0))
@example((0, b"a", 2**64 - 1), (0, b"a\x00", 0))
@example((0, b"a", 2**64 - 1), (0, b"a\x01", 0))
@example((0, b"\x00", 5), (0, b"\x01", 4))
@example((0, b"\xff", 0), (0, b"\xff\xff", 0))
def test_entry_keys_sort_by_segment_then_key_then_sequence(
    left: tuple[int, bytes, int], right: tuple[int, bytes, int]
) -> None:
    assert (entry(*left) < entry(*right)) == (left < right)
    assert (entry(*left) == entry(*right)) == (left == right)


@given(NUMBERS, KEYS, NUMBERS)
def test_an_entry_key_is_taken_apart_into_what_it_was_made_of(segment_id: int, key: bytes, sequence: int) -> None:
    made = entry(segment_id, key, sequence)
    found, last = entry_parts(made)
    assert (segment_of(made), unescape(found), last) == (segment_id, key, sequence)


@given(KEYS, KEYS, NUMBERS)
def test_the_range_of_a_prefix_holds_exactly_the_keys_that_begin_with_it(
    prefix: bytes, key: bytes, sequence: int
) -> None:
    first = segment_key(encoding.ENTRY, 7) + escape(prefix)
    assert (first <= entry(7, key, sequence) < after_prefix(first)) == key.startswith(prefix)
    first = listing_key(7, prefix)
    assert (first <= listing_key(7, key) < after_prefix(first)) == key.startswith(prefix)


@given(KEYS, NUMBERS, NUMBERS)
def test_the_filter_sees_one_prefix_for_all_entries_of_a_key_in_a_segment(
    key: bytes, segment_id: int, sequence: int
) -> None:
    made = entry(segment_id, key, sequence)
    assert made[: filter_length(made)] == entry_prefix(segment_id, key)
    assert filter_length(entry_prefix(segment_id, key)) == len(entry_prefix(segment_id, key))


@given(KEYS)
def test_the_filter_knows_nothing_of_other_keys_and_of_prefixes_that_are_cut(key: bytes) -> None:
    assert filter_length(listing_key(3, key)) == 0
    assert filter_length(segment_key(encoding.ENTRY, 3) + escape(key)) == 0


@given(KEYS, NUMBERS)
def test_a_listing_entry_carries_the_key_as_it_is(key: bytes, segment_id: int) -> None:
    assert listed_key(listing_key(segment_id, key)) == key


@pytest.mark.parametrize("damaged", [b"\x01", b"\x01\x03", b"a\x00b", b"\x01\x02\x01"])
def test_escaped_bytes_that_no_key_becomes_are_damage(damaged: bytes) -> None:
    with pytest.raises(CorruptBatch):
        unescape(damaged)


@given(NUMBERS, st.integers(-(2**63), 2**63 - 1), st.one_of(st.none(), st.binary(min_size=1, max_size=20)))
def test_segment_meta_keeps_its_fields(start_seq: int, start_time_ms: int, user_meta: bytes | None) -> None:
    meta = SegmentMeta(start_seq, start_time_ms, user_meta)
    assert encoding.decode_meta(encoding.meta_value(meta)) == meta


def test_values_of_a_wrong_length_are_damage() -> None:
    for decode in (encoding.decode_meta, encoding.decode_totals, encoding.decode_state, encoding.block_end):
        with pytest.raises(CorruptBatch, match="damaged"):
            decode(b"short")


def test_a_marker_of_another_format_or_none_is_refused() -> None:
    encoding.check_marker(encoding.marker_value(), "here")
    with pytest.raises(WrongStore, match="newer version"):
        encoding.check_marker(b"llog-keyed\x00\x00\x00\x02", "here")
    for other in (None, b"", b"something", encoding.marker_value() + b"x"):
        with pytest.raises(WrongStore, match="not a keyed log"):
            encoding.check_marker(other, "here")


@pytest.mark.parametrize("vector", VECTORS["entries"], ids=lambda vector: vector["log_key"] or "empty")
def test_entry_keys_are_those_of_the_test_vectors(vector: Any) -> None:
    made = entry(vector["segment_id"], bytes.fromhex(vector["log_key"]), vector["sequence"])
    assert made.hex() == vector["key"]


def test_other_keys_and_values_are_those_of_the_test_vectors() -> None:
    assert {
        "marker": [encoding.MARKER_KEY.hex(), encoding.marker_value().hex()],
        "sequence_block": [encoding.SEQUENCE_BLOCK_KEY.hex(), encoding.block_value(4096, 4096).hex()],
        "segment_meta": [
            segment_key(encoding.SEGMENT_META, 1).hex(),
            encoding.meta_value(SegmentMeta(10, 1_700_000_000_000, b"end of day")).hex(),
        ],
        "listing": [listing_key(1, b"a\x00b").hex(), ""],
        "log_state": [
            encoding.STATE_KEY.hex(),
            encoding.state_value(LogState(3, 7, SegmentTotals(20, 10, 1000, 1_700_000_000_500))).hex(),
        ],
        "segment_totals": [
            segment_key(encoding.SEGMENT_TOTALS, 1).hex(),
            encoding.totals_value(SegmentTotals(20, 10, 1000, 1_700_000_000_500)).hex(),
        ],
        "deletion_mark": [segment_key(encoding.DELETION_MARK, 1).hex(), ""],
        "log_id": [encoding.LOG_ID_KEY.hex(), b"018bcfe5-6800-7000-8000-000000000001".hex()],
    } == VECTORS["others"]
