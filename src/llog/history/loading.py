"""Loading of operations from history files: joins begins and ends; an operation that never ended has no end."""

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
    """One operation. `end` is None if the process died before the operation ended."""

    begin: Begin
    end: End | None
    section: int
    line: int
    end_line: int
    """0 if the operation has no end."""

    @property
    def outcome(self) -> Outcome:
        return Outcome.UNKNOWN if self.end is None else self.end.outcome


class Histories:
    """The operations of several files, one after the other. Holds only operations under way in memory."""

    def __init__(self, files: Sequence[Path], progress: Callable[[int], None] | None = None) -> None:
        self._files = files
        self._progress = progress
        self._bytes = 0
        self.sections: list[Section] = []

    def __iter__(self) -> Iterator[Operation]:
        for file in self._files:
            yield from self._operations(file)

    def _operations(self, file: Path) -> Iterator[Operation]:
        """Iterate over the operations of a file; raise `InvalidArgument` that names an invalid line."""
        under_way: dict[int, tuple[Begin, int]] = {}
        is_begun = False
        for number, line in self._lines(file):
            if isinstance(line, Process):
                yield from self._unfinished(under_way)
                under_way.clear()
                if line.format != FORMAT:
                    raise _invalid_line(
                        file, number, f"the history is of format {line.format}: this version of llog knows {FORMAT}"
                    )
                self.sections.append(Section(file, line))
                is_begun = True
            elif not is_begun:
                raise _invalid_line(file, number, "the first line of a history is of kind 'process'")
            elif not isinstance(line, End):
                if line.op in under_way:
                    raise _invalid_line(file, number, f"operation {line.op} began before, and has not ended")
                under_way[line.op] = line, number
            else:
                begin, begin_line = under_way.pop(line.op, (None, 0))
                if begin is None:
                    raise _invalid_line(file, number, f"operation {line.op} ends, but did not begin")
                if line.end_ns < begin.start_ns:
                    raise _invalid_line(file, number, f"operation {line.op} ends before it began")
                yield Operation(begin, line, len(self.sections) - 1, begin_line, number)
        yield from self._unfinished(under_way)

    def _unfinished(self, under_way: dict[int, tuple[Begin, int]]) -> Iterator[Operation]:
        for begin, number in under_way.values():
            yield Operation(begin, None, len(self.sections) - 1, number, 0)

    def _lines(self, file: Path) -> Iterator[tuple[int, Line]]:
        """Iterate over the decoded lines. Skips a line that was cut off when its process was killed: the last one, or
        one before a new process.
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
                        cut = _invalid_line(file, number, f"it is not a line of a history: {error}")
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


def _invalid_line(file: Path, number: int, why: str) -> InvalidArgument:
    return InvalidArgument(f"{file}, line {number}: {why}")
