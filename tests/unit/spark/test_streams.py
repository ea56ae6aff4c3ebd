"""Which queries are started again, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from llog.errors import SparkFailed
from llog.spark.streams import STARTS_MAX, run_stream

LATE = "[STREAM_FAILED] Query terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST"


def queries_that_end(*failures: str | None) -> tuple[Callable[[], Any], Iterator[str | None]]:
    """Starts queries that end so, one after the other; and what is left of them."""
    left = iter(failures)

    def start() -> Any:
        failure = next(left)

        def wait() -> None:
            if failure is not None:
                raise StreamingQueryException(failure)

        return SimpleNamespace(awaitTermination=wait)

    return start, left


def test_a_query_whose_process_came_too_late_is_started_again() -> None:
    start, left = queries_that_end(LATE, LATE, None, "not started")
    run_stream(start)
    assert list(left) == ["not started"]


def test_a_query_that_failed_otherwise_is_not() -> None:
    start, left = queries_that_end("data_loss", None)
    with pytest.raises(StreamingQueryException, match="data_loss"):
        run_stream(start)
    assert list(left) == [None]


def test_after_some_starts_the_error_says_what_to_do() -> None:
    start, left = queries_that_end(*[LATE] * STARTS_MAX, "not started")
    with pytest.raises(SparkFailed, match=r"5 times in a row.*Start the stream again when it is less busy"):
        run_stream(start)
    assert list(left) == ["not started"]
