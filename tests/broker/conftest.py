"""What the tests of the broker share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.broker.serving import Served


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    await served.close()
