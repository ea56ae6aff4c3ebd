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
        length, position = varints.read_one(section, position)
        end = position + length
        if length < 0 or end > len(section):
            raise InvalidRecord(f"a record has a header with a key of {length} bytes, which is not in the record")
        name = section[position:end]
        try:
            name.decode()
        except UnicodeDecodeError as error:
            raise InvalidRecord(f"header key {name[:80]!r} is not UTF-8") from error
        parts += (length.to_bytes(4, "little"), name)
        length, position = varints.read_one(section, end)
        if length == -1:
            parts.append(_NULL)
            continue
        end = position + length
        if length < 0 or end > len(section):
            raise InvalidRecord(f"a record has a header with a value of {length} bytes, which is not in the record")
        parts += (length.to_bytes(4, "little"), section[position:end])
        position = end
    if position != len(section):
        raise InvalidRecord(f"a record has {len(section) - position} bytes after its {count} headers")
    return b"".join(parts)


def to_kafka(encoded: bytes) -> bytes:
    """Return headers of llog's form as Kafka's, with their number in front."""
    headers = decode_headers(encoded)
    parts = [varints.of_length(len(headers))]
    for key, value in headers:
        name = key.encode()
        parts += (varints.of_length(len(name)), name)
        parts += (b"\x01",) if value is None else (varints.of_length(len(value)), value)
    return b"".join(parts)
