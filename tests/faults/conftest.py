"""Servers that a test may kill and pause: each has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from devtools.servers.weed import ServerError, Weed, running_weed
from tests.conftest import unavailable


@pytest.fixture
def weed(tmp_path: Path) -> Iterator[Weed]:
    """An S3 server."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(running_weed(tmp_path / "weed"))
        except ServerError as error:
            unavailable(str(error))
        yield started
