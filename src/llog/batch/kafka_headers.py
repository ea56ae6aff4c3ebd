"""The headers of a record between Kafka's form, framed by varints, and llog's (`columns.encode_headers`)."""

from __future__ import annotations

from llog.batch import varints
from llog.batch.columns import decode_headers
from llog.errors import InvalidRecord

_NULL = b"\xff\xff\xff\xff"


def from_kafka(section: bytes, count: int) -> bytes:
    """Return `count` headers of Kafka's form as llog's; raises `InvalidRecord` unless they fill the whole section."""
    parts: list[bytes] = []
    position = 0
    for _ in range(count):
        name, position = _read(section, position)
        if name is None:
            raise InvalidRecord("a record of a Kafka batch has a header without a key")
        try:
            name.decode()
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"header key {name[:80]!r} of a Kafka batch is not UTF-8") from error
        value, position = _read(section, position)
        parts += (len(name).to_bytes(4, "little"), name)
        parts += (_NULL,) if value is None else (len(value).to_bytes(4, "little"), value)
    if position != len(section):
        raise InvalidRecord(f"a record of a Kafka batch has {len(section) - position} bytes after {count} headers")
    return b"".join(parts)


def to_kafka(encoded: bytes) -> bytes:
    """Return headers of llog's form as Kafka's, with their number in front."""
    headers = decode_headers(encoded)
    parts = [varints.write_one(len(headers))]
    for key, value in headers:
        name = key.encode()
        parts += (varints.write_one(len(name)), name)
        parts += (varints.write_one(-1),) if value is None else (varints.write_one(len(value)), value)
    return b"".join(parts)


def _read(section: bytes, position: int) -> tuple[bytes | None, int]:
    length, start = varints.read_one(section, position)
    end = start + length
    if length < -1 or end > len(section):
        raise InvalidRecord(f"a record of a Kafka batch has a header of {length} bytes, which exceed the record")
    return (None, start) if length == -1 else (section[start:end], end)
