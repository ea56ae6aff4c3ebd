"""The checker: decides from recorded histories whether the log kept its promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from llog.errors import InvalidArgument
from llog.history.checks import Times, check_partition
from llog.history.loading import Histories, Section
from llog.history.operations import NEVER, PartitionHistory
from llog.history.report import HistoryReport, PartitionReport
from llog.model import FIRST_OFFSET, TopicPartition


def check_history(
    files: Sequence[str | Path],
    *,
    clock_skew_ms: int | None = None,
    unrecorded_retention: bool = False,
    progress: Callable[[int], None] | None = None,
) -> HistoryReport:
    """Check the operations of all these files together against I1 to I3, I8 and I9, for each partition.

    The files must contain every append to their partitions. Files of one machine share a clock; files of several need
    `clock_skew_ms`, the most by which the machines' clocks differ. `unrecorded_retention` allows log starts to rise by
    retention that was not recorded. `progress` is called with the bytes read so far. Raises `InvalidArgument` if a file
    is not a history.
    """
    histories = Histories([Path(file) for file in files], progress)
    partitions: dict[TopicPartition, PartitionHistory] = {}
    for operation in histories:
        tp = TopicPartition(operation.begin.topic, operation.begin.partition)
        partition = partitions.get(tp)
        if partition is None:
            partition = partitions[tp] = PartitionHistory(tp, histories.sections)
        partition.add(operation)
    if not partitions:
        raise InvalidArgument(f"no operation is recorded in {', '.join(map(str, files))}")
    shifts, skew_ns = _time_line(histories.sections, clock_skew_ms)
    reports = []
    for tp in sorted(partitions):
        history = partitions.pop(tp)
        times = _times(history, shifts, skew_ns)
        check_partition(history, times, unrecorded_retention=unrecorded_retention)
        reports.append(_report(history))
    return HistoryReport(partitions=tuple(reports))


def _time_line(sections: Sequence[Section], clock_skew_ms: int | None) -> tuple[list[int], int]:
    """Return what to add to the times of each section, and by how much the sums may be wrong, in nanoseconds."""
    if len({section.process.machine for section in sections}) == 1:
        return [0] * len(sections), (clock_skew_ms or 0) * 1_000_000
    if clock_skew_ms is None:
        raise InvalidArgument(
            "the files are from several machines, or from one that was restarted: say by how much their clocks may "
            "differ, e.g. --clock-skew 50ms"
        )
    return [section.process.wall_ns - section.process.clock_ns for section in sections], clock_skew_ms * 1_000_000


def _times(history: PartitionHistory, shifts: Sequence[int], skew_ns: int) -> Times:
    shift = np.array(shifts, np.int64)[history.rows.column("section")]
    end = history.rows.column("end")
    return Times(history.rows.column("start") + shift, np.where(end == NEVER, NEVER, end + shift), skew_ns)


def _report(history: PartitionHistory) -> PartitionReport:
    log_start = max(
        FIRST_OFFSET,
        history.reads.column("log_start").max(initial=FIRST_OFFSET),
        history.trims.column("log_start").max(initial=FIRST_OFFSET),
    )
    unread = history.offsets.unread(int(log_start))
    return PartitionReport(
        topic=history.tp.topic,
        partition=history.tp.partition,
        operations=len(history.rows),
        acknowledged=history.offsets.count_acknowledged(),
        unread=len(unread),
        unread_first=int(unread[0]) if len(unread) else None,
        unknown=history.unknown,
        findings=tuple(sorted(history.findings, key=lambda each: each.start_offset)),
        findings_left_out=history.left_out,
    )
