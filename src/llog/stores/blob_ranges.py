"""Ranges of a blob: which of them one request fetches, and what each of them found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from llog.errors import CorruptBatch, InvalidArgument, LlogError
from llog.stores.blobs import BlobStore, Buffer

GAP_BYTES_MAX: Final = 256 << 10
"""Bytes between two ranges that are fetched for nothing, because a further request takes longer."""
JOINED_BYTES_MAX: Final = 16 << 20
"""Bytes that ranges are joined up to: beyond, requests side by side are faster. One range may be larger."""


class CoalescedRange(NamedTuple):
    """Neighbouring ranges that one request fetches. `members` are their positions among the requested ranges."""

    start: int
    end: int
    members: list[int]


def coalesce(
    ranges: Sequence[tuple[int, int]], *, gap: int = GAP_BYTES_MAX, max_bytes: int = JOINED_BYTES_MAX
) -> list[CoalescedRange]:
    """Join (offset, length) ranges that are at most `gap` bytes apart, up to `max_bytes`. Empty ranges are left out."""
    coalesced: list[CoalescedRange] = []
    for index in sorted((i for i, (_, length) in enumerate(ranges) if length), key=lambda i: ranges[i]):
        offset, length = ranges[index]
        if coalesced:
            last = coalesced[-1]
            end = max(last.end, offset + length)
            if offset <= last.end + gap and end - last.start <= max_bytes:
                last.members.append(index)
                coalesced[-1] = last._replace(end=end)
                continue
        coalesced.append(CoalescedRange(offset, offset + length, [index]))
    return coalesced


def part_of(data: Buffer, offset: int, length: int) -> Buffer:
    """Return a part of what a request fetched, and a copy if that is less than half: a view would keep all of it in
    memory for as long as the part is used.
    """
    if length == len(data):
        return data
    part = memoryview(data)[offset : offset + length]
    return part if 2 * length >= len(data) else bytes(part)


async def get_each(blobs: BlobStore, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer | LlogError]:
    """Return for each (offset, length) its bytes, or the error that kept them away.

    A blob that is too short for one range may hold the others.
    """
    try:
        return list(await blobs.get_ranges(name, ranges))
    except (CorruptBatch, InvalidArgument) as error:
        if len(ranges) == 1:
            return [error]
    except LlogError as error:
        return [error] * len(ranges)
    return [(await get_each(blobs, name, [one]))[0] for one in ranges]
