"""How keys of the log are written in Oxia, and which shard they belong to.

Oxia's hierarchical sorting, its default, compares the number of slashes first. A stored key has none, so that its order
is that of bytes; and it begins with "=", so that other keys of a namespace are not taken for the log's.
"""

from __future__ import annotations

from typing import Final

import xxhash

from llog.stores.meta import after, partition_prefix

FIRST: Final = "="
"""At or below every stored key."""
ECHO: Final = "#llog-echo"
"""Not a key of the log. On every shard; a write to it shows that the shard's leader is in charge."""
SORTING_PROBE: Final = "#llog-sorting/probe"
SORTING_BOUND: Final = "#llog-sorting0"
"""Bytes come right after those of the probe, but it has no slash: a lookup below the bound finds the probe in natural
sorting only.
"""


def encode(key: str) -> str:
    """Preserves the order of keys, and of a prefix makes a prefix."""
    return FIRST + key.replace(".", ".\x01").replace("/", ".\x02")


def decode(stored: str) -> str | None:
    """The log's key; None for a key of somebody else."""
    if not stored.startswith(FIRST):
        return None
    return stored[1:].replace(".\x02", "/").replace(".\x01", ".")


def partition_of(start: str, end: str) -> str | None:
    """The prefix of the one partition that all keys of [start, end) belong to; None if there may be others between."""
    prefix = partition_prefix(start)
    return prefix if prefix is not None and end <= after(prefix) else None


def hash_of(text: str) -> int:
    """What Oxia routes by: of the partition key, or of a stored key that has none."""
    return xxhash.xxh3_64_intdigest(text.encode()) & 0xFFFFFFFF
