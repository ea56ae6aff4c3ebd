"""One warm session for every test of the pipeline, and a log of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from llog.config import Settings
from llog.spark.session import spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session("llog-tests", master="local[2]", fast_start=True)
    yield session
    session.stop()


@pytest.fixture
def log_settings(tmp_path: Path) -> Settings:
    """A new, empty log on local stores."""
    return Settings(data_dir=str(tmp_path / "data"))
