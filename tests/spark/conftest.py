"""One warm session for every test that needs Spark: starting one takes seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from llog.spark.session import spark_session
from tests.spark.logs import LogOnDisk


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session("llog-tests", master="local[2]", fast_start=True)
    yield session
    session.stop()


@pytest.fixture
def log(tmp_path: Path) -> LogOnDisk:
    return LogOnDisk(tmp_path)


def message_of(error: pytest.ExceptionInfo[PySparkException]) -> str:
    """The one line among Spark's that says what was wrong."""
    found = re.search(r"llog\.errors\.\w+: .*", str(error.value))
    assert found is not None, str(error.value)
    assert "UnboundLocalError" not in str(error.value)
    return found[0]
