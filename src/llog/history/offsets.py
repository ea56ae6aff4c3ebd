"""What is known about every offset of a partition: the record's hash, the append that was acknowledged there, and a
read that found it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]
_PAGE: Final = 4096
NOBODY: Final = -1


class Clash(NamedTuple):
    """Offsets at which two operations contradict each other; `row` is that of the earlier one."""

    start: int
    end: int
    row: int


class _Page:
    def __init__(self) -> None:
        self.hashes: Hashes = np.zeros(_PAGE, np.uint64)
        self.appends = np.full(_PAGE, NOBODY, np.int32)
        self.reads = np.full(_PAGE, NOBODY, np.int32)


class OffsetTable:
    """Pages of offsets, 16 bytes for each offset. Only pages with known offsets exist, and they may become known in any
    order.
    """

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}

    def acknowledge(self, start: int, hashes: Hashes, row: int) -> list[Clash]:
        """Note that this append has these offsets. Return the offsets that another append has, or at which a read found
        other records.
        """
        clashes: list[Clash] = []
        for at, page, part, new in self._page_slices(start, hashes):
            known, appends = page.hashes[part], page.appends[part]
            if known.any():
                taken = appends != NOBODY
                clashes += _clashes(at, taken, appends)
                clashes += _clashes(at, (known != 0) & (known != new) & ~taken, page.reads[part])
            known[known == 0] = new[known == 0]
            appends[appends == NOBODY] = row
        return clashes

    def find(self, start: int, hashes: Hashes, row: int) -> list[Clash]:
        """Note that this read found these records. Return the offsets at which an append or an earlier read shows other
        records.
        """
        clashes: list[Clash] = []
        for at, page, part, new in self._page_slices(start, hashes):
            known, appends, reads = page.hashes[part], page.appends[part], page.reads[part]
            if not (known == new).all():
                differs = (known != 0) & (known != new)
                clashes += _clashes(at, differs, np.where(appends != NOBODY, appends, reads))
                known[known == 0] = new[known == 0]
            reads[reads == NOBODY] = row
        return clashes

    def hash_at(self, offset: int) -> int:
        """Return the hash of the record at the offset; 0 if it is not known."""
        page = self._pages.get(offset // _PAGE)
        return 0 if page is None else int(page.hashes[offset % _PAGE])

    def append_at(self, offset: int) -> int:
        page = self._pages.get(offset // _PAGE)
        return NOBODY if page is None else int(page.appends[offset % _PAGE])

    def read_at(self, offset: int) -> int:
        page = self._pages.get(offset // _PAGE)
        return NOBODY if page is None else int(page.reads[offset % _PAGE])

    def unowned(self) -> Iterator[tuple[int, int]]:
        """Iterate over the offsets, rising, with their hashes, that were read and at which no append was
        acknowledged.
        """
        for number in sorted(self._pages):
            page = self._pages[number]
            for position in np.flatnonzero((page.hashes != 0) & (page.appends == NOBODY)).tolist():
                yield number * _PAGE + position, int(page.hashes[position])

    def unread(self, from_offset: int) -> Offsets:
        """Return the offsets from this one on that were acknowledged and never read."""
        found = [
            np.flatnonzero((page.appends != NOBODY) & (page.reads == NOBODY)) + number * _PAGE
            for number, page in sorted(self._pages.items())
        ]
        offsets: Offsets = np.concatenate(found) if found else np.zeros(0, np.int64)
        return offsets[offsets >= from_offset]

    def count_acknowledged(self) -> int:
        return sum(int(np.count_nonzero(page.appends != NOBODY)) for page in self._pages.values())

    def count_known(self, below: int) -> int:
        """Return the number of known offsets below this one."""
        count = 0
        for number, page in self._pages.items():
            known = page.hashes[: max(0, min(_PAGE, below - number * _PAGE))]
            count += int(np.count_nonzero(known))
        return count

    def first_unknown(self, start: int, below: int) -> int:
        """Return the first unknown offset in [start, below); `below` if there is none."""
        while start < below:
            page = self._pages.get(start // _PAGE)
            if page is None:
                return start
            empty = np.flatnonzero(page.hashes[start % _PAGE :] == 0)
            if len(empty):
                return min(start + int(empty[0]), below)
            start += _PAGE - start % _PAGE
        return below

    def acknowledged_with(self, hash_: int) -> tuple[int, int] | None:
        """Return an offset whose acknowledged record has this hash, and the row of its append; None if there is
        none.
        """
        for number, page in self._pages.items():
            found = np.flatnonzero((page.hashes == hash_) & (page.appends != NOBODY))
            if len(found):
                return number * _PAGE + int(found[0]), int(page.appends[found[0]])
        return None

    def _page_slices(self, start: int, hashes: Hashes) -> Iterator[tuple[int, _Page, slice, Hashes]]:
        """Split the records into parts that lie on one page each."""
        done = 0
        while done < len(hashes):
            number, first = divmod(start + done, _PAGE)
            count = min(_PAGE - first, len(hashes) - done)
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = _Page()
            yield start + done, page, slice(first, first + count), hashes[done : done + count]
            done += count


def pack_hashes(hashes: Sequence[str]) -> Hashes:
    """Return the hashes as numbers, none of which is 0."""
    numbers = np.frombuffer(bytes.fromhex("".join(hashes)), ">u8").astype(np.uint64)
    return np.maximum(numbers, np.uint64(1))


def _clashes(at: int, where: npt.NDArray[np.bool_], rows: npt.NDArray[np.int32]) -> list[Clash]:
    """Return runs of consecutive offsets that clash with the same row."""
    found: list[Clash] = []
    for position in np.flatnonzero(where).tolist():
        row = int(rows[position])
        if found and found[-1].row == row and found[-1].end == at + position - 1:
            found[-1] = found[-1]._replace(end=at + position)
        else:
            found.append(Clash(at + position, at + position, row))
    return found
