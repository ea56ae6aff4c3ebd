"""From files to operations: begins and ends are joined, and what was never ended stays without an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from llog.errors import InvalidArgument
from llog.history.lines import FORMAT, Begin, End, Line, Outcome, Process, decoder

_PROGRESS_LINES: Final = 1000


class Section(NamedTuple):
    """The lines of one process in one file."""

    file: Path
    process: Process


class Operation(NamedTuple):
    """One operation. `end` is None where the process did not live to see it."""

    begin: Begin
    end: End | None
    section: int
    line: int
    end_line: int
    """0: there is none."""

    @property
    def outcome(self) -> Outcome:
        return Outcome.UNKNOWN if self.end is None else self.end.outcome


class Histories:
    """The operations of several files, one after the other, in bounded memory: only what is under way is held."""

    def __init__(self, files: Sequence[Path], progress: Callable[[int], None] | None = None) -> None:
        self._files = files
        self._progress = progress
        self._bytes = 0
        self.sections: list[Section] = []

    def __iter__(self) -> Iterator[Operation]:
        for file in self._files:
            yield from self._operations(file)

    def _operations(self, file: Path) -> Iterator[Operation]:
        """`InvalidArgument` names the line that is not what it should be."""
        under_way: dict[int, tuple[Begin, int]] = {}
        is_begun = False
        for number, line in self._lines(file):
            if isinstance(line, Process):
                yield from self._unended(under_way)
                under_way.clear()
                if line.format != FORMAT:
                    raise _bad(
                        file, number, f"the history is of format {line.format}: this version of llog knows {FORMAT}"
                    )
                self.sections.append(Section(file, line))
                is_begun = True
            elif not is_begun:
                raise _bad(file, number, "the first line of a history is of kind 'process'")
            elif not isinstance(line, End):
                if line.op in under_way:
                    raise _bad(file, number, f"operation {line.op} began before, and has not ended")
                under_way[line.op] = line, number
            else:
                begin, begin_line = under_way.pop(line.op, (None, 0))
                if begin is None:
                    raise _bad(file, number, f"operation {line.op} ends, but did not begin")
                if line.end_ns < begin.start_ns:
                    raise _bad(file, number, f"operation {line.op} ends before it began")
                yield Operation(begin, line, len(self.sections) - 1, begin_line, number)
        yield from self._unended(under_way)

    def _unended(self, under_way: dict[int, tuple[Begin, int]]) -> Iterator[Operation]:
        for begin, number in under_way.values():
            yield Operation(begin, None, len(self.sections) - 1, number, 0)

    def _lines(self, file: Path) -> Iterator[tuple[int, Line]]:
        """Decoded lines. One that was cut off when its process was killed is left out: the last, or the one before a
        new process.
        """
        cut: InvalidArgument | None = None
        try:
            with file.open("rb") as lines:
                for number, text in enumerate(lines, 1):
                    self._bytes += len(text)
                    if self._progress is not None and number % _PROGRESS_LINES == 0:
                        self._progress(self._bytes)
                    try:
                        line = decoder.decode(text)
                    except (msgspec.DecodeError, UnicodeDecodeError) as error:
                        if cut is not None:
                            raise cut from error
                        cut = _bad(file, number, f"it is no line of a history: {error}")
                        if not text.endswith(b"\n"):
                            return
                        continue
                    if cut is not None and not isinstance(line, Process):
                        raise cut
                    cut = None
                    yield number, line
        except OSError as error:
            raise InvalidArgument(f"{file} cannot be read: {error.strerror}") from error
        if cut is not None:
            raise cut


def _bad(file: Path, number: int, why: str) -> InvalidArgument:
    return InvalidArgument(f"{file}, line {number}: {why}")
