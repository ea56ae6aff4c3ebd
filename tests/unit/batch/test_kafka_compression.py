from __future__ import annotations

import gzip
import random

import cramjam
import pyarrow as pa
import pytest
from aiokafka import codec as aiokafka_codec
from hypothesis import given
from hypothesis import strategies as st

from llog.batch.kafka_compression import KafkaCodec, compress, decompress
from llog.errors import InvalidRecord, RecordTooLarge

BYTES_MAX = 1 << 20
COMPRESSING = [codec for codec in KafkaCodec if codec is not KafkaCodec.NONE]
EXAMPLES = {
    "repetitive": b"abc" * 100_000,
    "random": random.Random(1).randbytes(200_000),
    "small": b"a",
    "one block of snappy": bytes(32 << 10),
    "one block of lz4": bytes(64 << 10),
}


@pytest.mark.parametrize("codec", KafkaCodec)
@pytest.mark.parametrize("plain", EXAMPLES.values(), ids=EXAMPLES)
def test_what_is_compressed_decompresses_to_itself(plain: bytes, codec: KafkaCodec) -> None:
    assert decompress(memoryview(compress(plain, codec)), codec, BYTES_MAX) == plain


@pytest.mark.parametrize("plain", EXAMPLES.values(), ids=EXAMPLES)
def test_kafka_clients_decompress_what_llog_compressed(plain: bytes) -> None:
    assert aiokafka_codec.gzip_decode(compress(plain, KafkaCodec.GZIP)) == plain
    assert aiokafka_codec.snappy_decode(compress(plain, KafkaCodec.SNAPPY)) == plain
    assert aiokafka_codec.lz4_decode(compress(plain, KafkaCodec.LZ4)) == plain
    assert aiokafka_codec.zstd_decode(compress(plain, KafkaCodec.ZSTD)) == plain


@pytest.mark.parametrize("plain", EXAMPLES.values(), ids=EXAMPLES)
def test_llog_decompresses_what_kafka_clients_compressed(plain: bytes) -> None:
    for codec, compressed in (
        (KafkaCodec.GZIP, aiokafka_codec.gzip_encode(plain)),
        (KafkaCodec.SNAPPY, aiokafka_codec.snappy_encode(plain)),
        (KafkaCodec.SNAPPY, aiokafka_codec.snappy_encode(plain, xerial_compatible=False)),
        (KafkaCodec.LZ4, aiokafka_codec.lz4_encode(plain)),
        (KafkaCodec.LZ4, bytes(cramjam.lz4.compress(plain))),
        (KafkaCodec.LZ4, pa.Codec("lz4").compress(plain, asbytes=True)),
        (KafkaCodec.ZSTD, aiokafka_codec.zstd_encode(plain)),
    ):
        assert decompress(memoryview(compressed), codec, BYTES_MAX) == plain


def test_lz4_blocks_are_independent_as_the_java_client_demands() -> None:
    flags = bytes(compress(EXAMPLES["repetitive"], KafkaCodec.LZ4))[4]
    assert flags & 0x20


def test_gzip_may_have_several_members() -> None:
    data = gzip.compress(b"ab") + gzip.compress(b"cd")
    assert bytes(decompress(memoryview(data), KafkaCodec.GZIP, BYTES_MAX)) == b"abcd"


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_bomb_is_refused_before_it_takes_memory(codec: KafkaCodec) -> None:
    bomb = memoryview(compress(bytes(64 << 20), codec))
    usual = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(watched)
    try:
        with pytest.raises(RecordTooLarge, match=f"more than {BYTES_MAX} bytes"):
            decompress(bomb, codec, BYTES_MAX)
    finally:
        pa.set_memory_pool(usual)
    assert watched.max_memory() <= 2 * BYTES_MAX


@pytest.mark.parametrize("codec", COMPRESSING)
def test_what_is_cut_short_or_followed_by_other_bytes_is_refused(codec: KafkaCodec) -> None:
    whole = bytes(compress(EXAMPLES["repetitive"], codec))
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:17], whole + b"\1", b"\xff" * 40):
        with pytest.raises((InvalidRecord, RecordTooLarge)):
            decompress(memoryview(damaged), codec, BYTES_MAX)


@given(st.sampled_from(COMPRESSING), st.binary(max_size=60))
def test_any_bytes_decompress_within_their_bound_or_are_refused(codec: KafkaCodec, data: bytes) -> None:
    start = b"\x82SNAPPY\0" + bytes(8) if codec is KafkaCodec.SNAPPY else bytes(compress(b"ab", codec))[:7]
    for candidate in (data, start + data):
        try:
            assert len(decompress(memoryview(candidate), codec, 1000)) <= 1000
        except (InvalidRecord, RecordTooLarge):
            pass
