"""Packages that not every installation has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from llog.errors import MissingExtra


def optional_module(name: str, extra: str, what: str) -> Any:
    """A module that only an extra brings; `MissingExtra` says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingExtra(
            f'{what} needs the package {package}, which is not installed: pip install "leaderless-log[{extra}]"'
        ) from error
