"""Servers that a test may kill and pause: each has its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from devtools.servers.oxia import OxiaMissing, oxia_server
from devtools.servers.postgres import postgres_server
from devtools.servers.weed import ServerError, Weed, running_weed
from tests.conftest import unavailable
from tests.faults.cluster import Metadata


@pytest.fixture
def weed(tmp_path: Path) -> Iterator[Weed]:
    """An S3 server."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(running_weed(tmp_path / "weed"))
        except ServerError as error:
            unavailable(str(error))
        yield started


@pytest.fixture(params=["postgresql", "oxia"])
def metadata(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Metadata]:
    """A metadata server of each kind."""
    with ExitStack() as stack:
        try:
            if request.param == "postgresql":
                postgres = stack.enter_context(postgres_server())
                found = Metadata(postgres, postgres.environment(), postgres.port)
            else:
                oxia = stack.enter_context(oxia_server(tmp_path / "oxia", shards=4))
                if not oxia.nodes:
                    pytest.skip("the Oxia at LLOG_TEST_OXIA_ADDRESS cannot be killed")
                port = int(oxia.addresses[0].rpartition(":")[2])
                found = Metadata(oxia.nodes[0], {"LLOG_META": oxia.url}, port)
        except OxiaMissing as error:
            pytest.skip(str(error))
        except ServerError as error:
            unavailable(str(error))
        yield found
