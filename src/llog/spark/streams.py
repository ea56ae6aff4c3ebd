"""Runs streams that survive a busy start of Spark. The documented import of `run_stream`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pyspark.errors import StreamingQueryException

from llog.errors import SparkFailed
from llog.spark.offsets import logger

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

STARTS_MAX: Final = 5
_LATE: Final = "Python worker failed to connect back"


def run_stream(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query, wait for its end and return it. A query whose Python process started too late is started again.

    Spark 4.3 gives the Python process of a source 10 s to start, which no setting changes. A query that missed them has
    read nothing, and its checkpoint is unchanged. Raise `SparkFailed` after `STARTS_MAX` starts, and any other failure
    at once.
    """
    starts = 0
    while True:
        starts += 1
        query = start()
        try:
            query.awaitTermination()
            return query
        except StreamingQueryException as error:
            if _LATE not in str(error):
                raise
            if starts == STARTS_MAX:
                raise SparkFailed(
                    f"the Python process of a stream did not start within Spark's 10 s, {starts} times in a row: the "
                    "machine is too busy. Start the stream again when it is less busy, or on more cores; the "
                    "checkpoint is unchanged"
                ) from error
            logger.warning(
                "the Python process of a stream did not start within Spark's 10 s: starting the stream again"
            )
