"""Offsets at the edge: those of Kafka begin at 0, those of llog at 1. Nothing else in llog knows of the difference."""

from __future__ import annotations

from llog.model import FIRST_OFFSET


def to_kafka(offset: int) -> int:
    """Return Kafka's number of the record at this offset."""
    return offset - FIRST_OFFSET


def from_kafka(offset: int) -> int:
    """Return the offset of the record that has this number in Kafka."""
    return offset + FIRST_OFFSET
