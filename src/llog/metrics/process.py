"""The metrics of the process itself, under the names that Prometheus' own clients use."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from llog.metrics.families import Family, Sample, counter, gauge

START: Final = gauge("process_start_time_seconds", "When the process started, in seconds since 1970.", across="each")
CPU: Final = counter("process_cpu_seconds_total", "CPU time of the process, in user and in system mode.")
MEMORY: Final = gauge(
    "process_resident_memory_bytes", "Memory of the process that is resident. Linux only.", across="each"
)
FILES: Final = gauge("process_open_fds", "Files and connections that the process has open. Linux only.", across="each")
FILES_MAX: Final = gauge("process_max_fds", "Files and connections that the process may have open.", across="each")
FAMILIES: Final[tuple[Family, ...]] = (START, CPU, MEMORY, FILES, FILES_MAX)

_started: Final = time.time()


def uptime_s() -> float:
    """Return the seconds since this module was imported, which is when the process started to serve."""
    return time.time() - _started


def process_samples() -> Iterator[Sample]:
    """Yield what the system knows about this process; what it does not tell is left out."""
    yield START.sample(round(_started, 3))
    used = resource.getrusage(resource.RUSAGE_SELF)
    yield CPU.sample(round(used.ru_utime + used.ru_stime, 3))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        yield MEMORY.sample(pages * resource.getpagesize())
        yield FILES.sample(len(os.listdir("/proc/self/fd")))
    except (OSError, ValueError, IndexError):
        pass
    yield FILES_MAX.sample(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
