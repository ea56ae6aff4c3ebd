"""How far key compaction has come, durably: `compacted`, JSON, replaced as a whole after each pass.

A pass up to an offset has removed, below it, every record that has a newer one of its key below it. Deletions (records
without a payload) go when the pass that came over them first is long enough ago: whoever read one of the removed
records has had so long to read on and meet its deletion. Without this file, or with a damaged one, everything counts as
new: more work, and deletions stay longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from llog.engines.disk.format.files import put_small, read_small

COMPACTED: Final = "compacted"
VERSION: Final = 1
_GRAINS: Final = 64
"""Passes within this part of the delay count as one, the last: so many are kept, and deletions stay that much longer at
most.
"""


class Pass(msgspec.Struct, frozen=True, array_like=True):
    through: int
    """The first offset that it did not reach."""
    ended_ms: int


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    passes: tuple[Pass, ...] = ()
    """In order; offsets below the first one's were reached by that one or before it."""
    deletions: int = 0
    """How many were left below the last one's offset, not counting one that may not go."""

    @property
    def through(self) -> int:
        """The first offset that no pass has reached."""
        return self.passes[-1].through if self.passes else 0

    def expired(self, delay_ms: int, now_ms: int) -> int:
        """Deletions below this offset were passed over at least `delay_ms` ago."""
        return max((each.through for each in self.passes if each.ended_ms + delay_ms <= now_ms), default=0)

    def deletions_due(self, delay_ms: int, now_ms: int) -> bool:
        """Whether all deletions that are left may go: before that, they wait for the next pass that has other work."""
        return self.deletions > 0 and self.expired(delay_ms, now_ms) == self.through

    def after(self, through: int, deletions: int, delay_ms: int, now_ms: int) -> Passes:
        """With one more pass, which ended now."""
        passes = self.passes
        if through > self.through:
            expired, grain_ms = self.expired(delay_ms, now_ms), max(delay_ms // _GRAINS, 1)
            passes = tuple(
                each for each in passes if each.through >= expired and each.ended_ms // grain_ms != now_ms // grain_ms
            )
            passes = (*passes, Pass(through, now_ms))
        return Passes(passes=passes, deletions=deletions)


def read_passes(directory: Path, end: int) -> Passes:
    """What was put last. `end` is the offset up to which segments are sealed: what reaches beyond it is of another
    log.
    """
    data = read_small(directory / COMPACTED)
    if data is None:
        return Passes()
    try:
        found = msgspec.json.decode(data, type=Passes)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Passes()
    return found if found.version == VERSION and found.through <= end else Passes()


def put_passes(directory: Path, passes: Passes) -> None:
    put_small(directory / COMPACTED, msgspec.json.encode(passes))
