"""Prometheus and promtool: from PATH, else from Debian's package, which is unpacked without being installed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from devtools.servers.downloads import UnobtainableError, debian_programs

CACHE = Path(tempfile.gettempdir()) / f"llog-programs-{os.getuid()}"
"""Where an unpacked program waits for the next run."""


def prometheus_program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; raise `UnobtainableError` where neither PATH nor apt has it."""
    found = shutil.which(name)
    if found is not None:
        return found
    CACHE.mkdir(mode=0o700, exist_ok=True)
    if CACHE.stat().st_uid != os.getuid():
        raise UnobtainableError(f"{CACHE} belongs to another user, who could have put programs there")
    return str(debian_programs(CACHE, "prometheus", ["prometheus"]) / "usr/bin" / name)
