"""Programs that tests and benches take from registries and unpack without installing them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4


class UnobtainableError(Exception):
    """A program is not available here, for the reason in the message."""


def obtain(cache: Path, name: str, fill: Callable[[Path], None]) -> Path:
    """Return the directory `name` of the cache, which `fill` fills once: a download that failed leaves nothing."""
    target = cache / name
    if not target.exists():
        new = cache / uuid4().hex
        new.mkdir(parents=True)
        try:
            fill(new)
            try:
                new.rename(target)
            except OSError:
                if not target.exists():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return target


def run_tool(command: Sequence[str], directory: Path) -> None:
    """Run a program that downloads or unpacks into `directory`; raise `UnobtainableError` with its last words."""
    if shutil.which(command[0]) is None:
        raise UnobtainableError(f"PATH has no {command[0]}")
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise UnobtainableError(f"{' '.join(command[:2])} failed: {said}")


def download_wheel(package: str, directory: Path) -> None:
    """Download and unpack a wheel without installing it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", package]
    run_tool(pip, directory)
    for wheel in directory.glob("*.whl"):
        run_tool([sys.executable, "-m", "zipfile", "-e", wheel.name, "."], directory)
        wheel.unlink()


def debian_programs(cache: Path, name: str, packages: Sequence[str]) -> Path:
    """Return a directory with the unpacked Debian packages, in which `usr/bin` has their programs. Needs no root."""
    return obtain(cache, name, partial(_unpack_debian, packages))


def library_environment(unpacked: Path) -> dict[str, str]:
    """Return the environment in which programs of unpacked Debian packages find the libraries beside them."""
    libraries = {str(library.parent) for library in unpacked.glob("usr/lib/**/*.so*")}
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(sorted(libraries))}


def _unpack_debian(packages: Sequence[str], directory: Path) -> None:
    for package in packages:
        run_tool(["apt-get", "download", "-q", package], directory)
    files = list(directory.glob("*.deb"))
    if not files:
        raise UnobtainableError("apt-get downloaded no package")
    for package_file in files:
        run_tool(["dpkg-deb", "-x", package_file.name, "."], directory)
        package_file.unlink()
