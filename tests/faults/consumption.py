"""What the members of a consumer group have read and committed, in the order in which it happened, and what is wrong
with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Attempt(NamedTuple):
    """A commit of one partition that was sent to the coordinator."""

    member: str
    partition: int
    offset: int


class _Partition:
    def __init__(self) -> None:
        self.values: list[bytes] = []
        """The records that the group has read, by offset: there is no gap, or that is a finding."""
        self.committed: int | None = None
        """The last commit that was acknowledged."""
        self.attempts: set[int] = set()
        """All offsets that members have tried to commit: a commit without an answer may count."""
        self.floors: dict[str, int] = {}
        """Of each member that has yet to read its first record since it got the partition: where it may begin at the
        lowest, which is what had been committed when it got the partition.
        """
        self.positions: dict[str, int] = {}
        """Of each member that has read since it got the partition: the offset that must come next."""
        self.resumed: dict[str, int] = {}
        """Where each member began since it got the partition, or its last commit since then."""


class Consumption:
    """All threads of a test may share it. Findings are collected, so that a test shows all of them."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.failures: Counter[str] = Counter()
        self.rebalances = 0
        self._lock = threading.Lock()
        self._partitions: dict[int, _Partition] = {}

    @property
    def records_read(self) -> int:
        """How many different records the group has read."""
        with self._lock:
            return sum(len(each.values) for each in self._partitions.values())

    @property
    def records_committed(self) -> int:
        with self._lock:
            return sum(each.committed or 0 for each in self._partitions.values())

    def assigned(self, member: str, partitions: Sequence[int]) -> None:
        with self._lock:
            self.rebalances += 1
            for partition in partitions:
                of = self._of(partition)
                self._forget(of, member)
                of.floors[member] = of.committed or 0

    def revoked(self, member: str, partitions: Sequence[int]) -> None:
        with self._lock:
            for partition in partitions:
                self._forget(self._of(partition), member)

    def read(self, member: str, partition: int, offset: int, value: bytes) -> None:
        with self._lock:
            of = self._of(partition)
            where = f"{member} read offset {offset} of partition {partition}"
            floor, expected = of.floors.pop(member, None), of.positions.get(member)
            if floor is not None:
                if offset < floor:
                    self.findings.append(f"{where} first, but {floor} had been committed: a commit was lost")
                if offset not in of.attempts | {0}:
                    self.findings.append(f"{where} first, which nobody ever committed")
                of.resumed[member] = offset
            elif expected is None:
                self.findings.append(f"{where} without having the partition")
            elif offset != expected:
                self.findings.append(f"{where} instead of {expected}")
            of.positions[member] = offset + 1
            if offset > len(of.values):
                self.findings.append(f"{where}, but nobody has read {len(of.values)} yet: records were skipped")
            elif offset == len(of.values):
                of.values.append(value)
            elif of.values[offset] != value:
                self.findings.append(f"{where}: {value!r}, where {of.values[offset]!r} was read before")

    def committing(self, member: str, offsets: Mapping[int, int]) -> dict[int, Attempt]:
        with self._lock:
            for partition, offset in offsets.items():
                self._of(partition).attempts.add(offset)
        return {partition: Attempt(member, partition, offset) for partition, offset in offsets.items()}

    def committed(self, attempt: Attempt) -> None:
        """Note that the coordinator has acknowledged a commit. It may be below the last one only if the member began
        there when it got the partition.
        """
        member, partition, offset = attempt
        with self._lock:
            of = self._of(partition)
            if offset < of.resumed.get(member, 0):
                self.findings.append(
                    f"{member} committed {offset} in partition {partition} after {of.resumed[member]}: it went back"
                )
            of.resumed[member] = of.committed = offset

    def has_read(self, ends: Mapping[int, int]) -> bool:
        with self._lock:
            return all(len(self._of(partition).values) >= end for partition, end in ends.items())

    def has_committed(self, ends: Mapping[int, int]) -> bool:
        with self._lock:
            return all((self._of(partition).committed or 0) >= end for partition, end in ends.items())

    def compare(self, partition: int, values: Sequence[bytes]) -> None:
        """Find out whether the group has read the same records as are in the log."""
        with self._lock:
            read = self._of(partition).values
            if read != list(values[: len(read)]):
                self.findings.append(f"the group has read other records of partition {partition} than it has")

    def _of(self, partition: int) -> _Partition:
        return self._partitions.setdefault(partition, _Partition())

    @staticmethod
    def _forget(of: _Partition, member: str) -> None:
        for known in (of.floors, of.positions, of.resumed):
            known.pop(member, None)
