"""The report of a check: which promises were broken, where, and by which operations."""

from __future__ import annotations

from typing import Final

import msgspec

FINDINGS_MAX: Final = 100
"""The most findings listed for one partition; further ones are counted, because one fault often causes many."""


class OperationRef(msgspec.Struct, frozen=True, kw_only=True):
    """An operation, by the lines in which it begins and ends."""

    what: str
    file: str
    line: int
    end_line: int | None

    def __str__(self) -> str:
        ended = "never ended" if self.end_line is None else f"ended in line {self.end_line}"
        return f"{self.what} ({self.file}, line {self.line}, {ended})"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A promise that was broken at these offsets."""

    invariant: str
    start_offset: int
    end_offset: int
    detail: str
    operations: tuple[OperationRef, ...]


class PartitionReport(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partition: int
    operations: int
    acknowledged: int
    """The number of acknowledged records."""
    unread: int
    """The number of acknowledged records that no read found and no trim explains: whether they are lost was not
    decided.
    """
    unread_first: int | None
    unknown: int
    """The number of appends that may or may not have happened."""
    findings: tuple[Finding, ...]
    findings_left_out: int


class HistoryReport(msgspec.Struct, frozen=True, kw_only=True):
    partitions: tuple[PartitionReport, ...]

    @property
    def operations(self) -> int:
        return sum(each.operations for each in self.partitions)

    @property
    def findings(self) -> int:
        return sum(len(each.findings) + each.findings_left_out for each in self.partitions)

    @property
    def unread(self) -> int:
        return sum(each.unread for each in self.partitions)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong and every acknowledged record was read."""
        return not self.findings and not self.unread

    def __str__(self) -> str:
        """Return one paragraph for every finding, and a summary."""
        return "\n".join([*self.paragraphs(), self.summary()])

    def paragraphs(self) -> list[str]:
        found = []
        for each in self.partitions:
            for finding in each.findings:
                offsets = f"offset {finding.start_offset}"
                if finding.end_offset > finding.start_offset:
                    offsets = f"offsets {finding.start_offset} to {finding.end_offset}"
                found.append(f"{each.topic}/{each.partition}, {offsets}: {finding.invariant}: {finding.detail}")
            if each.findings_left_out:
                found.append(f"{each.topic}/{each.partition}: {each.findings_left_out:,} more findings")
            if each.unread:
                found.append(
                    f"{each.topic}/{each.partition}: {each.unread:,} acknowledged records were never read, the first "
                    f"at offset {each.unread_first}: whether they exist was not decided"
                )
        return found

    def summary(self) -> str:
        partitions = f"{len(self.partitions)} partition{'s' if len(self.partitions) != 1 else ''}"
        verdict = "nothing wrong"
        if self.findings:
            broken = sorted({finding.invariant for each in self.partitions for finding in each.findings})
            verdict = f"{self.findings:,} finding{'s' if self.findings > 1 else ''} ({', '.join(broken)})"
        elif self.unread:
            verdict = f"nothing wrong was found, but {self.unread:,} acknowledged records were never read"
        return f"{self.operations:,} operations on {partitions}: {verdict}"
