"""The operations of one partition in columns: a few numbers for each operation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    DataLoss,
    InconsistentReadState,
    InvalidArgument,
    PartitionNotInitialized,
    TopicNotFound,
)
from llog.history.lines import Append, Bounds, End, Outcome, Read, Trim
from llog.history.loading import Operation, Section
from llog.history.offsets import Clash, Hashes, OffsetTable, pack_hashes
from llog.history.report import FINDINGS_MAX, Finding, OperationRef
from llog.model import FIRST_OFFSET, TopicPartition

Column = npt.NDArray[np.int64]
UNSAID: Final = -1
NEVER: Final = (1 << 63) - 1
OUTCOMES: Final = {Outcome.OK: 0, Outcome.UNKNOWN: 1, Outcome.FAILED: 2}
_KINDS: Final = (Append, Read, Bounds, Trim)
_NAMES: Final = ("append", "read", "look at the bounds", "trim")
_DAMAGE: Final = frozenset({CorruptBatch.code, InconsistentReadState.code, BlobNotFound.code, DataLoss.code})
_ABSENT: Final = frozenset({PartitionNotInitialized.code, TopicNotFound.code})


class Table:
    """Columns of numbers that grow row by row."""

    def __init__(self, *names: str) -> None:
        self._columns = {name: array("q") for name in names}

    def add(self, **values: int) -> None:
        for name, value in values.items():
            self._columns[name].append(value)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def value(self, name: str, row: int) -> int:
        return self._columns[name][row]

    def column(self, name: str) -> Column:
        return np.frombuffer(self._columns[name], np.int64) if self._columns[name] else np.zeros(0, np.int64)


class PartitionHistory:
    """The operations on a partition. Contradictions that do not depend on times are found while operations are
    added.
    """

    def __init__(self, tp: TopicPartition, sections: Sequence[Section]) -> None:
        self.tp = tp
        self.offsets = OffsetTable()
        self.rows = Table("kind", "start", "end", "section", "line", "end_line", "via", "identity")
        self.appends = Table("row", "producer", "epoch", "sequence", "outcome", "first", "count", "content")
        """One row for each attempt."""
        self.reads = Table("row", "asked", "reach", "next", "log_start")
        """`reach`: the answer shows that all offsets below it exist. `next`: the next offset, if the answer had it."""
        self.trims = Table("row", "bound", "log_start")
        """`bound`: the highest log start that the trim can have caused."""
        self.hashes: dict[int, Hashes] = {}
        """The hashes of attempts that were not acknowledged, by their position in `appends`."""
        self.findings: list[Finding] = []
        self.left_out = 0
        self.unknown = 0
        """The number of appends of unknown outcome, once they were counted."""
        self._sections = sections
        self._producers: dict[str, int] = {}
        self._vias: list[str] = []

    def add(self, operation: Operation) -> None:
        begin, end = operation.begin, operation.end
        row = len(self.rows)
        producer = begin.producer if isinstance(begin, Append) else None
        identity = row
        if producer is not None:
            identity = hash((producer.id, producer.epoch, producer.sequence)) | 1 << 62
        self.rows.add(
            kind=_KINDS.index(type(begin)),
            start=begin.start_ns,
            end=NEVER if end is None else end.end_ns,
            section=operation.section,
            line=operation.line,
            end_line=operation.end_line,
            via=self._via(begin.via),
            identity=identity,
        )
        if isinstance(begin, Append):
            self._add_append(row, begin, operation)
        elif isinstance(begin, Trim):
            self._add_trim(row, begin, operation)
        elif end is not None:
            self._add_read(row, begin, end)

    @property
    def is_full(self) -> bool:
        return len(self.findings) >= FINDINGS_MAX

    def report(self, invariant: str, start: int, end: int, *detail: str | int) -> None:
        """Add a finding, or count it if there are many already. Numbers in `detail` are rows, and become references to
        their operations.
        """
        if self.is_full:
            self.left_out += 1
            return
        parts = [self.ref(part) if isinstance(part, int) else part for part in detail]
        self.findings.append(
            Finding(
                invariant=invariant,
                start_offset=start,
                end_offset=end,
                detail="".join(map(str, parts)),
                operations=tuple(part for part in parts if isinstance(part, OperationRef)),
            )
        )

    def ref(self, row: int) -> OperationRef:
        section = self._sections[self.rows.value("section", row)]
        via = self._vias[self.rows.value("via", row)]
        what = f"the {_NAMES[self.rows.value('kind', row)]} by {section.process.process}"
        return OperationRef(
            what=f"{what} through {via}" if via else what,
            file=str(section.file),
            line=self.rows.value("line", row),
            end_line=self.rows.value("end_line", row) or None,
        )

    def is_append(self, row: int) -> bool:
        return self.rows.value("kind", row) == _KINDS.index(Append)

    def _via(self, name: str) -> int:
        if name not in self._vias:
            self._vias.append(name)
        return self._vias.index(name)

    def _add_append(self, row: int, begin: Append, operation: Operation) -> None:
        hashes = pack_hashes(begin.hashes)
        producer, end = begin.producer, operation.end
        first = UNSAID
        if operation.outcome is Outcome.OK:
            assert end is not None
            if end.start_offset is None or end.end_offset is None:
                raise InvalidArgument(f"{self.ref(row)} is ok, but its end has no start_offset and end_offset")
            first = end.start_offset
            self._acknowledge(row, first, end.end_offset, hashes)
        else:
            self.hashes[len(self.appends)] = hashes
        self.appends.add(
            row=row,
            producer=UNSAID if producer is None else self._producers.setdefault(producer.id, len(self._producers)),
            epoch=0 if producer is None else producer.epoch,
            sequence=row if producer is None else producer.sequence,
            outcome=OUTCOMES[operation.outcome],
            first=first,
            count=len(hashes),
            content=hash(hashes.tobytes()),
        )

    def _acknowledge(self, row: int, first: int, last: int, hashes: Hashes) -> None:
        if last != first + len(hashes) - 1:
            self.report(
                "I2",
                first,
                last,
                row,
                f" was acknowledged with offsets {first} to {last}, but has {len(hashes)} records",
            )
        for clash in self.offsets.acknowledge(first, hashes, row):
            if not self.is_append(clash.row):
                self._report_other_bytes(clash, row, clash.row)
            # An attempt and its retry with different offsets are found once all attempts are known.
            elif self.rows.value("identity", clash.row) != self.rows.value("identity", row):
                self.report(
                    "I2",
                    clash.start,
                    clash.end,
                    "two appends were acknowledged at the same offsets: ",
                    clash.row,
                    " and ",
                    row,
                )

    def _add_read(self, row: int, begin: Read | Bounds, end: End) -> None:
        next_offset, asked = end.next_offset, begin.offset if isinstance(begin, Read) else UNSAID
        if end.error in _DAMAGE:
            self.report("I1", asked, asked, row, f" failed with {end.error}: the record is damaged or gone")
        elif end.error in _ABSENT:
            next_offset = FIRST_OFFSET
        elif end.outcome is Outcome.FAILED and end.log_start_offset is not None and next_offset is not None:
            low, high = end.log_start_offset, next_offset
            if low <= asked < high:
                self.report(
                    "I1",
                    asked,
                    asked,
                    row,
                    f" was refused with {end.error}, though the offset is within {low} and {high}",
                )
        reach = self._note_records(row, asked, end) if end.outcome is Outcome.OK else UNSAID
        if next_offset is not None:
            if reach > next_offset:
                self.report(
                    "I2",
                    next_offset,
                    reach - 1,
                    row,
                    f" has records up to {reach - 1}, though it says that the next offset is {next_offset}",
                )
            reach = max(reach, next_offset)
        # Beside records, a broker may name bounds that are one staleness old, and the records may be trimmed by now.
        may_be_old = bool(begin.via and end.batches)
        self.reads.add(
            row=row,
            asked=UNSAID if may_be_old or not end.batches else asked,
            reach=reach,
            next=UNSAID if may_be_old or next_offset is None else next_offset,
            log_start=UNSAID if may_be_old or end.log_start_offset is None else end.log_start_offset,
        )

    def _note_records(self, row: int, asked: int, end: End) -> int:
        """Note the records of an answer, and return the offset after the last one."""
        expected, reach = asked, UNSAID
        for first, hashes in end.batches:
            if first != expected:
                self._report_misplaced(row, expected, first)
            for clash in self.offsets.find(first, pack_hashes(hashes), row):
                self._report_other_bytes(clash, clash.row, row)
            expected = first + len(hashes)
            reach = max(reach, expected)
        return reach

    def _report_misplaced(self, row: int, expected: int, found: int) -> None:
        if found > expected:
            kind, offsets = "leaves a gap", (expected, found - 1)
        else:
            kind, offsets = "goes back", (found, expected - 1)
        self.report("I2", *offsets, row, f" {kind}: it has offset {found} where {expected} comes next")

    def _report_other_bytes(self, clash: Clash, said: int, found: int) -> None:
        if self.is_append(said):
            self.report(
                "I1", clash.start, clash.end, said, " was acknowledged there, but ", found, " found another record"
            )
        else:
            self.report("I1", clash.start, clash.end, said, " found one record, and ", found, " another")

    def _add_trim(self, row: int, begin: Trim, operation: Operation) -> None:
        log_start = operation.end.log_start_offset if operation.end is not None else None
        bound = begin.before_offset or NEVER
        if operation.outcome is Outcome.FAILED:
            bound = UNSAID
        elif operation.outcome is Outcome.OK and log_start is not None:
            bound = max(log_start, begin.before_offset or UNSAID)
        self.trims.add(row=row, bound=bound, log_start=log_start or UNSAID)
