"""How Oxia stores the log's keys, and to which shard they belong.

Oxia's hierarchical sorting, its default, compares the number of slashes first. A stored key has no slash, so that keys
sort by bytes; and it begins with "=", so that other keys of a namespace are not taken for the log's.
"""

from __future__ import annotations

from typing import Final

import xxhash

from llog.stores.meta import partition_prefix, prefix_end

FIRST: Final = "="
"""The beginning of every stored key."""
ECHO: Final = "#llog-echo"
"""A key on every shard that is not the log's. A write to it shows that the shard's leader is in charge."""
SORTING_PROBE: Final = "#llog-sorting/probe"
SORTING_BOUND: Final = "#llog-sorting0"
"""Sorts right after the probe by bytes, but has no slash: a lookup below the bound finds the probe only in natural
sorting.
"""


def encode(key: str) -> str:
    """Return the stored form of a key. Keys keep their order, and a prefix of a key remains a prefix."""
    return FIRST + key.replace(".", ".\x01").replace("/", ".\x02")


def decode(stored: str) -> str | None:
    """Return the log's key, or None if the stored key is not the log's."""
    if not stored.startswith(FIRST):
        return None
    return stored[1:].replace(".\x02", "/").replace(".\x01", ".")


def partition_of(start: str, end: str) -> str | None:
    """Return the prefix of the partition to which all keys of [start, end) belong, or None if others may be between."""
    prefix = partition_prefix(start)
    return prefix if prefix is not None and end <= prefix_end(prefix) else None


def hash_of(text: str) -> int:
    """Return the hash by which Oxia chooses the shard of a partition key, or of a stored key that has none."""
    return xxhash.xxh3_64_intdigest(text.encode()) & 0xFFFFFFFF
