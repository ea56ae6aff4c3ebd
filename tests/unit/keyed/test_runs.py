"""Runs: what an append packs is what a scan unpacks, and damage is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.errors import CorruptBatch
from llog.keyed import runs
from llog.keyed.model import columns_of
from llog.keyed.runs import decode, decode_head, encode, group_by_key, iter_runs, sequences_of

VECTORS: Any = json.loads((Path(__file__).parent / "vectors.json").read_text())
PAIRS = st.lists(
    st.tuples(st.sampled_from([b"", b"a", b"b", b"ab", b"\x00"]), st.binary(max_size=6)), min_size=1, max_size=40
)
Pair = tuple[bytes, bytes]


def packed(pairs: list[Pair], base: int = 0) -> tuple[list[bytes], list[bytes]]:
    """Keys and values of the entries of one append into an empty log."""
    keys, values, totals = [], [], dict[bytes, int]()
    for run in iter_runs(group_by_key(*columns_of(pairs))):
        totals[run.key] = totals.get(run.key, 0) + run.records
        keys.append(run.key)
        values.append(encode(run, base, totals[run.key], 1234))
    return keys, values


def by_key(pairs: list[Pair], base: int = 0) -> list[tuple[bytes, int, bytes]]:
    first_seen = list(dict.fromkeys(key for key, _ in pairs))
    numbered = [(key, base + position, value) for position, (key, value) in enumerate(pairs)]
    return sorted(numbered, key=lambda record: first_seen.index(record[0]))


@given(PAIRS, st.integers(0, 2**40))
def test_unpacked_runs_are_the_records_of_the_append_key_by_key(pairs: list[Pair], base: int) -> None:
    batch = decode(*packed(pairs, base))
    assert batch.schema == runs.SCHEMA
    found = zip(*(batch.column(name).to_pylist() for name in ("key", "sequence", "value")), strict=True)
    assert list(found) == by_key(pairs, base)


@given(PAIRS)
def test_a_run_says_its_first_sequence_its_records_and_the_total_before_it_is_decoded(pairs: list[Pair]) -> None:
    keys, values = packed(pairs, 100)
    assert len(keys) == len({key for key, _ in pairs})
    for key, value in zip(keys, values, strict=True):
        numbers = [100 + place for place, pair in enumerate(pairs) if pair[0] == key]
        assert decode_head(value) == (len(numbers), numbers[0], len(numbers), 1234)
        assert sequences_of(value).tolist() == numbers


def test_records_given_as_arrow_are_packed_like_pairs() -> None:
    pairs = [(b"a", b"1"), (b"b", b""), (b"a", b"2")]
    batch = pa.record_batch({"key": pa.array([k for k, _ in pairs]), "value": pa.array([v for _, v in pairs])})
    table = pa.concat_tables([pa.table(batch.slice(0, 1)), pa.table(batch.slice(1))])
    text = pa.table({"key": pa.array(["a", "b", "a"]), "value": pa.array(["1", "", "2"])})
    expected = packed(pairs)
    for given_as in (batch, table, text, batch.slice(0)):
        assert packed(given_as) == expected
    assert packed(batch.slice(1)) == packed(pairs[1:])


def test_a_run_is_cut_where_it_becomes_too_long_and_no_record_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", 10)
    monkeypatch.setattr(runs, "RUN_RECORDS_MAX", 3)
    pairs = [(b"a", b"x" * size) for size in (4, 4, 4, 30, 0, 0, 0, 0, 1)] + [(b"b", b"")]
    keys, values = packed(pairs)
    assert [decode_head(value).records for value in values] == [2, 1, 1, 3, 2, 1]
    assert [decode_head(value).total for value in values] == [2, 3, 4, 7, 9, 1]
    assert decode(keys, values).column("value").to_pylist() == [value for _, value in pairs]


def test_a_long_key_makes_runs_short_so_that_a_column_can_repeat_it() -> None:
    key = b"k" * (64 << 10)
    records = [run.records for run in iter_runs(group_by_key(*columns_of([(key, b"")] * 2000)))]
    assert records == [1024, 976]


@given(PAIRS, st.data())
def test_a_changed_or_missing_byte_is_found(pairs: list[Pair], data: st.DataObject) -> None:
    keys, values = packed(pairs)
    number = data.draw(st.integers(0, len(values) - 1))
    value = values[number]
    place = data.draw(st.integers(0, len(value) - 1))
    changed = value[:place] + bytes([value[place] ^ data.draw(st.integers(1, 255))]) + value[place + 1 :]
    for damaged in (changed, value[:place], value + b"\x00"):
        with pytest.raises(CorruptBatch):
            decode(keys, [*values[:number], damaged, *values[number + 1 :]])


@pytest.mark.parametrize("vector", VECTORS["runs"], ids=lambda vector: vector["what"])
def test_runs_are_those_of_the_test_vectors(vector: Any) -> None:
    pairs = [(bytes.fromhex(key), bytes.fromhex(value)) for key, value in vector["append"]]
    made = [
        (run.key.hex(), encode(run, vector["base"], vector["total"], vector["append_ms"]).hex())
        for run in iter_runs(group_by_key(*columns_of(pairs)))
    ]
    assert made == [(entry["log_key"], entry["value"]) for entry in vector["entries"]]
