"""Bytes from outside: every decoder returns a message or refuses the bytes, and allocates little either way."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llog.kafka.messages import (
    APIS,
    Api,
    decode_assignment,
    decode_header,
    decode_request,
    decode_response,
    decode_subscription,
    encode_assignment,
    encode_request,
    encode_response,
    encode_subscription,
)
from llog.kafka.messages.consumer_protocol import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from llog.kafka.messages.schema import in_range
from llog.kafka.wire import MalformedMessage
from tests.unit.kafka.sample_messages import VERSION_NAMES, VERSIONS, frame, sample, seeded

Decode = Callable[[memoryview], Any]
RANDOM_INPUTS = 20
FLIPS = 40
CUTS_MAX = 60
HUGE_LENGTHS = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff\x0f", b"\x7f\xff", b"\xff\xff\xff\xff\xff\xff")
FILLED_BYTES = 16 * 1024
ITEMS = 1000
SMALLEST = {"string": "", "uuid": bytes(16)}
ALLOCATED_PER_BYTE_MAX = 100
"""An empty field of bytes takes one byte of a message, and a memoryview of 184 bytes when it was read."""


def _decoders(api: Api, version: int) -> Iterator[tuple[Decode, bytes]]:
    """Yield the decoders of a version, each with a message that it understands."""
    rng = seeded(api, version)
    _, body = decode_header(frame(encode_request(api, version, 1, None, sample(api.request, version, rng))))
    yield lambda data: decode_request(api, version, data), bytes(body)
    response = frame(encode_response(api, version, 1, sample(api.response, version, rng)))
    yield lambda data: decode_response(api, version, data), bytes(response)


def _is_refused(decode: Decode, data: bytes | bytearray) -> bool:
    try:
        decode(memoryview(data))
    except MalformedMessage as error:
        refusal = str(error)
    else:
        return False
    assert refusal
    assert "\n" not in refusal
    return True


@pytest.mark.parametrize(("api", "version"), VERSIONS, ids=VERSION_NAMES)
def test_arbitrary_bytes_are_a_message_or_refused(api: Api, version: int) -> None:
    rng = seeded(api, version)
    for decode, valid in _decoders(api, version):
        for _ in range(RANDOM_INPUTS):
            _is_refused(decode, rng.randbytes(rng.randrange(100)))
        for _ in range(FLIPS if valid else 0):
            data = bytearray(valid)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            _is_refused(decode, data)
        for huge in HUGE_LENGTHS:
            for _ in range(RANDOM_INPUTS):
                data = bytearray(valid)
                at = rng.randrange(len(data) + 1)
                data[at : at + len(huge)] = huge
                _is_refused(decode, data)


@pytest.mark.parametrize(("api", "version"), VERSIONS, ids=VERSION_NAMES)
def test_a_message_that_was_cut_short_is_always_refused(api: Api, version: int) -> None:
    rng = seeded(api, version)
    for decode, valid in _decoders(api, version):
        assert not _is_refused(decode, valid)
        for cut in rng.sample(range(len(valid)), min(len(valid), CUTS_MAX)):
            assert _is_refused(decode, valid[:cut])


@pytest.mark.parametrize(("api", "version"), VERSIONS, ids=VERSION_NAMES)
def test_no_bytes_make_a_decoder_allocate_more_than_a_multiple_of_them(api: Api, version: int) -> None:
    for decode, valid in _decoders(api, version):
        _is_refused(decode, valid)  # compiles the codec
        for filler in (b"\0", b"\1", b"\2", b"\0\0\x40\0", b"\x80\x80\2"):
            filled = (filler * FILLED_BYTES)[:FILLED_BYTES]
            for data in (filled, valid[: len(valid) // 2] + filled):
                assert _allocated(decode, data) < ALLOCATED_PER_BYTE_MAX * len(data)


@pytest.mark.parametrize(("api", "version"), VERSIONS, ids=VERSION_NAMES)
def test_many_small_items_allocate_no_more_than_a_multiple_of_their_bytes(api: Api, version: int) -> None:
    def decode(data: memoryview) -> Any:
        return decode_request(api, version, data)

    for field in api.request.FIELDS:
        if field.array and in_range(version, field.versions):
            smallest = SMALLEST.get(field.kind, 0) if isinstance(field.kind, str) else field.kind()
            message = api.request(**{field.name: [smallest] * ITEMS})
            _, body = decode_header(frame(encode_request(api, version, 1, None, message)))
            assert not _is_refused(decode, bytes(body))
            assert _allocated(decode, bytes(body)) < ALLOCATED_PER_BYTE_MAX * len(body)


def _allocated(decode: Decode, data: bytes) -> int:
    tracemalloc.start()
    try:
        _is_refused(decode, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_unknown_tagged_fields_are_skipped_and_known_ones_must_fit() -> None:
    fetch, empty = APIS[1], b"\xff\xff\xff\xff" + bytes(8) + b"\x7f\xff\xff\xff\0" + bytes(8) + b"\1\1\1"
    assert decode_request(fetch, 12, memoryview(empty + b"\2\0\2\2x\x09\4abcd")).cluster_id == "x"
    with pytest.raises(MalformedMessage, match="tagged field 0 ends at byte 33 instead of byte 34"):
        decode_request(fetch, 12, memoryview(empty + b"\1\0\3\2x\0"))
    with pytest.raises(MalformedMessage, match="tagged field 9 has 4 bytes at byte 31, but 1 are left"):
        decode_request(fetch, 12, memoryview(empty + b"\1\x09\4a"))


def test_a_header_of_arbitrary_bytes_is_a_header_or_refused() -> None:
    rng = random.Random(0)
    for _ in range(5000):
        data = rng.randbytes(rng.randrange(40))
        if len(data) > 8 and rng.random() < 0.7:
            data = b"\0" + bytes([rng.randrange(80), 0, rng.randrange(14)]) + data[4:8] + b"\0\1" + data[8:]
        _is_refused(decode_header, data)


@pytest.mark.parametrize("version", range(4))
def test_what_members_say_is_a_payload_or_refused(version: int) -> None:
    rng = random.Random(version)
    subscription = encode_subscription(sample(ConsumerProtocolSubscription, version, rng), version)
    assignment = encode_assignment(sample(ConsumerProtocolAssignment, version, rng), version)
    for decode, valid in ((decode_subscription, subscription), (decode_assignment, assignment)):
        assert not _is_refused(decode, valid)
        for cut in range(len(valid)):
            assert _is_refused(decode, valid[:cut])
        for _ in range(300):
            data = bytearray(valid)
            data[rng.randrange(len(data))] = rng.randrange(256)
            _is_refused(decode, data)
            _is_refused(decode, rng.randbytes(rng.randrange(60)))
