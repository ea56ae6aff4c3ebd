"""What the workers of a supervisor have counted, those that have ended included: a file that they share.

A sum over the workers alone would fall when one dies or answers too late, and a monitor would take the fall for a
restart and count the rest of the sum once more. So whoever collects the workers' reports records their counts here
first, and answers with what is recorded: it never falls. Counts that a worker that died had reported to nobody are
lost.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from llog.base.decoders import json_decoder
from llog.base.durable import FILE_MODE
from llog.broker.monitoring.traffic import NAMES_MAX, OTHERS
from llog.metrics.families import Sample
from llog.metrics.footprint import Footprint
from llog.metrics.merging import PackedSamples, is_count, merge

TOPIC_LABEL = "topic"
NAME_LABEL = "name"


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker exports at one moment."""

    worker: int
    pid: int
    life: int
    """When the process started, by the machine's monotonic clock: each process of a worker counts from 0."""
    number: int
    """The number of the report in the life of the process."""
    samples: PackedSamples
    footprint: Footprint | None = None


class _RecordedCounts(msgspec.Struct):
    life: int
    number: int
    current: PackedSamples
    """What the process that lives, or ended last, has counted."""
    past: PackedSamples
    """What the processes before it have counted."""


class RecordedCounts:
    """The counts in one file. Several processes may use it at the same time; every call may block for a moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = path.with_name(f"{path.name}-lock")

    def record(self, reports: Sequence[WorkerReport]) -> dict[int, list[Sample]]:
        """Record the counts in the reports; return everything that is recorded by now, by worker."""
        with self._locked():
            recorded = self._read()
            for report in reports:
                recorded[report.worker] = _record(recorded.get(report.worker), report)
            written = self._path.with_name(f"{self._path.name}-new")
            written.write_bytes(msgspec.json.encode(recorded))
            written.replace(self._path)
        return {
            worker: merge({0: counts.past.unpack(), 1: counts.current.unpack()})
            for worker, counts in sorted(recorded.items())
        }

    def _read(self) -> dict[int, _RecordedCounts]:
        try:
            return json_decoder(dict[int, _RecordedCounts]).decode(self._path.read_bytes())
        except FileNotFoundError:
            return {}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _record(was: _RecordedCounts | None, report: WorkerReport) -> _RecordedCounts:
    """Return the counts of a worker after its report. A report that is older than a recorded one changes nothing."""
    if was is not None and (was.life, was.number) >= (report.life, report.number):
        return was
    current = PackedSamples.pack(filter(is_count, report.samples.unpack()))
    past = PackedSamples([], []) if was is None else was.past
    if was is not None and was.life != report.life:
        past = PackedSamples.pack(_with_bounded_names(merge({0: past.unpack(), 1: was.current.unpack()})))
    return _RecordedCounts(report.life, report.number, current, past)


def _with_bounded_names(samples: list[Sample]) -> list[Sample]:
    """Return the samples, with all names that clients chose counted together if there are too many of them."""
    names = {value for sample in samples for label, value in sample.labels if label in (TOPIC_LABEL, NAME_LABEL)}
    if len(names) <= NAMES_MAX:
        return samples
    return merge(
        {
            0: (
                sample._replace(
                    labels=tuple(
                        (label, OTHERS if label in (TOPIC_LABEL, NAME_LABEL) else value)
                        for label, value in sample.labels
                    )
                )
                for sample in samples
            )
        }
    )
