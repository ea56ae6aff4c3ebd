"""Plain data that all packages share, without I/O."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

import msgspec

from llog.errors import InvalidArgument

FIRST_OFFSET = 1
TOPIC_NAME_BYTES_MAX = 200
PARTITIONS_MAX = 100_000
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]+")


class TopicPartition(NamedTuple):
    """One ordered sequence of records of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class TimestampType(StrEnum):
    """Which time of a record counts: the producer's own, or the time of its append."""

    CREATE = "create"
    APPEND = "append"


Header = tuple[str, bytes | None]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `timestamp` is the producer's own time in ms; None stands for the append time.

    A payload of None marks the key as deleted.
    """

    payload: bytes | None
    key: bytes | None = None
    timestamp: int | None = None
    headers: tuple[Header, ...] = ()
    offset: int | None = None


def check_topic_name(name: str) -> str:
    """Return the name, or raise `InvalidArgument` if it would have to be escaped in keys and blob names."""
    if len(name) > TOPIC_NAME_BYTES_MAX or name in (".", "..") or not _TOPIC_NAME.fullmatch(name):
        raise InvalidArgument(
            f"topic name {name[:80]!r} is not usable: "
            f"write 1 to {TOPIC_NAME_BYTES_MAX} letters, digits, '.', '_' or '-', but not '.' or '..' alone"
        )
    return name


def murmur2(data: bytes) -> int:
    """Return Kafka's murmur2 hash of the bytes as an unsigned 32-bit number."""
    length = len(data)
    mask = 0xFFFFFFFF
    m = 0x5BD1E995
    h = (0x9747B28C ^ length) & mask
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ (k >> 24)) * m & mask
        h = (h * m & mask) ^ k
    rest = data[whole:]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)


def partition_for_key(key: bytes, partitions: int) -> int:
    """Return the partition that Kafka's default partitioner chooses for `key`. Every interface of llog uses it."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
