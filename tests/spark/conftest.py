"""One warm session for every test that needs Spark: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from llog.spark.session import spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session("llog-tests", master="local[2]", fast_start=True)
    yield session
    session.stop()
