"""Kafka's primitive types: numbers, strings, bytes and lengths, as they are written and as they are checked."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.schemas.fields.codecs import Bytes, String, UnsignedVarInt32

from llog.kafka import wire
from llog.kafka.wire import MalformedMessage

STRINGS = st.text(max_size=300)
BYTES = st.binary(max_size=3000)
READERS: list[Any] = [
    wire.read_uvarint,
    wire.read_string,
    wire.read_nullable_string,
    wire.read_compact_string,
    wire.read_compact_nullable_string,
    wire.read_bytes,
    wire.read_nullable_bytes,
    wire.read_compact_bytes,
    wire.read_compact_nullable_bytes,
]
LENGTH_READERS: list[Any] = [
    wire.read_length,
    wire.read_nullable_length,
    wire.read_compact_length,
    wire.read_compact_nullable_length,
]
REFUSALS = (MalformedMessage, struct.error, IndexError, UnicodeDecodeError)


def _written(write: Any, value: Any) -> bytes:
    out = bytearray()
    if "bytes" in write.__name__:
        splices: wire.Splices = []
        write(out, splices, value)
        return b"".join(wire.pieces(out, splices))
    write(out, value)
    return bytes(out)


@given(st.integers(0, 2**32 - 1))
def test_a_variable_length_number_is_read_as_it_was_written(value: int) -> None:
    data = _written(wire.write_uvarint, value)
    assert data == UnsignedVarInt32.encode(value)
    assert wire.read_uvarint(memoryview(b"x" + data + b"y"), 1) == (value, len(data) + 1)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff\x1f", b"\x80\x80\x80\x80\x80\x01", b"\xff" * 9])
def test_a_variable_length_number_of_more_than_32_bits_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="the variable-length number at byte 0 has more than 32 bits"):
        wire.read_uvarint(memoryview(data), 0)


@given(st.none() | STRINGS)
def test_a_string_is_read_as_it_was_written_and_as_kafka_python_writes_it(value: str | None) -> None:
    for compact in (False, True):
        write = wire.write_compact_nullable_string if compact else wire.write_nullable_string
        read = wire.read_compact_nullable_string if compact else wire.read_nullable_string
        data = _written(write, value)
        assert data == String("utf-8").encode(value, compact=compact)
        assert read(memoryview(data), 0) == (value, len(data))


@given(st.none() | BYTES)
def test_bytes_are_read_as_they_were_written_and_as_kafka_python_writes_them(value: bytes | None) -> None:
    for compact in (False, True):
        write = wire.write_compact_nullable_bytes if compact else wire.write_nullable_bytes
        read = wire.read_compact_nullable_bytes if compact else wire.read_nullable_bytes
        data = _written(write, value)
        assert data == Bytes.encode(value, compact=compact)
        assert read(memoryview(data), 0) == (value, len(data))


@given(st.lists(BYTES, max_size=5))
def test_buffers_of_one_field_are_written_one_behind_the_other(buffers: list[bytes]) -> None:
    assert _written(wire.write_bytes, buffers) == _written(wire.write_bytes, b"".join(buffers))


@given(st.binary(max_size=60), st.integers(1, 20))
def test_readers_take_what_is_there_or_refuse(data: bytes, item_bytes_min: int) -> None:
    view = memoryview(data)
    for read in READERS:
        try:
            _, end = read(view, 0)
        except REFUSALS:
            continue
        assert 0 < end <= len(data)
    for read in LENGTH_READERS:
        try:
            length, end = read(view, 0, item_bytes_min)
        except REFUSALS:
            continue
        assert -1 <= length <= (len(data) - end) / item_bytes_min


def test_null_is_not_empty() -> None:
    for write, null, empty in (
        (wire.write_nullable_string, b"\xff\xff", b"\0\0"),
        (wire.write_compact_nullable_string, b"\0", b"\1"),
    ):
        assert (_written(write, None), _written(write, "")) == (null, empty)
    assert (_written(wire.write_nullable_bytes, None), _written(wire.write_nullable_bytes, b"")) == (
        b"\xff" * 4,
        bytes(4),
    )
    assert wire.read_nullable_length(memoryview(b"\xff\xff\xff\xff"), 0, 4) == (-1, 4)
    assert wire.read_compact_nullable_length(memoryview(b"\1"), 0, 4) == (0, 1)


def test_a_length_that_is_negative_but_not_null_is_refused() -> None:
    for read in (wire.read_nullable_bytes, wire.read_bytes):
        with pytest.raises(MalformedMessage, match="before byte 4 has the length -2"):
            read(memoryview(b"\xff\xff\xff\xfe"), 0)


@pytest.mark.parametrize("write", [wire.write_string, wire.write_compact_string])
def test_a_string_that_kafka_cannot_hold_is_not_written(write: Any) -> None:
    assert len(_written(write, "x" * wire.STRING_BYTES_MAX)) > wire.STRING_BYTES_MAX
    with pytest.raises((ValueError, struct.error)):
        _written(write, "x" * (wire.STRING_BYTES_MAX + 1))


def test_a_uuid_of_another_length_is_not_written() -> None:
    with pytest.raises(ValueError, match="a uuid has 16 bytes, not 15"):
        wire.uuid_bytes(bytes(15))
