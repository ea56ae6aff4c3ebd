"""A broker that Kafka clients connect to, as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.kafka.serving import KafkaBroker, kafka_broker


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with kafka_broker(tmp_path_factory.mktemp("kafka")) as started:
        yield started


@pytest.fixture
def topic() -> str:
    """The name of a topic that no other test uses."""
    return f"topic-{uuid4().hex[:12]}"


@pytest.fixture
def group() -> str:
    return f"group-{uuid4().hex[:12]}"
