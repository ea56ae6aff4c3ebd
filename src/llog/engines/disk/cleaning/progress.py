"""The durable progress of key compaction: the file `compacted`, JSON, replaced as a whole after each pass.

A pass up to an offset has removed every record below it that has a newer record of its key, also below it. Deletions
(records without a value) are removed `delete_retention_ms` after the first pass over them: a reader of the removed
records had that long to read on and meet the deletion. If this file is missing or damaged, everything counts as new:
more work, and deletions stay longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from llog.engines.disk.format.files import read_small_file, replace_small_file

COMPACTED: Final = "compacted"
VERSION: Final = 1
_GRAINS: Final = 64
"""The delay is divided into this many intervals, and only the last pass of each is kept. Deletions stay at most one
interval longer.
"""


class Pass(msgspec.Struct, frozen=True, array_like=True):
    through: int
    """The first offset that the pass did not reach."""
    ended_ms: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    passes: tuple[Pass, ...] = ()
    """In order. Offsets below the first one's `through` were reached by that pass or an earlier one."""
    deletions: int = 0
    """The number of deletions left below the last pass's offset, except one that must stay."""

    @property
    def through(self) -> int:
        """The first offset that no pass has reached."""
        return self.passes[-1].through if self.passes else 0

    def expired_through(self, delay_ms: int, now_ms: int) -> int:
        """Return the offset below which a pass reached all deletions at least `delay_ms` ago."""
        return max((each.through for each in self.passes if each.ended_ms + delay_ms <= now_ms), default=0)

    def deletions_due(self, delay_ms: int, now_ms: int) -> bool:
        """Whether all remaining deletions can be removed. Until then, they wait for a pass that has other work."""
        return self.deletions > 0 and self.expired_through(delay_ms, now_ms) == self.through

    def after(self, through: int, deletions: int, delay_ms: int, now_ms: int) -> Progress:
        """Return the progress after one more pass, which ended now."""
        passes = self.passes
        if through > self.through:
            expired_through, grain_ms = self.expired_through(delay_ms, now_ms), max(delay_ms // _GRAINS, 1)
            passes = tuple(
                each
                for each in passes
                if each.through >= expired_through and each.ended_ms // grain_ms != now_ms // grain_ms
            )
            passes = (*passes, Pass(through, now_ms))
        return Progress(passes=passes, deletions=deletions)


def read_progress(directory: Path, end: int) -> Progress:
    """Return the stored progress. `end` is the offset up to which segments are sealed: progress beyond it belongs to
    another log, and is ignored.
    """
    data = read_small_file(directory / COMPACTED)
    if data is None:
        return Progress()
    try:
        found = msgspec.json.decode(data, type=Progress)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Progress()
    return found if found.version == VERSION and found.through <= end else Progress()


def put_progress(directory: Path, passes: Progress) -> None:
    replace_small_file(directory / COMPACTED, msgspec.json.encode(passes))
