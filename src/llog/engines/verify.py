"""Verifies partitions by their own engines, and reports those that cannot be read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from llog.errors import (
    ConfigurationError,
    CorruptBatch,
    InconsistentReadState,
    LlogError,
    LogOwned,
    MissingExtra,
    OwnerUnavailable,
    StoreUnavailable,
    TopicElsewhere,
)
from llog.log.catalog import Catalog
from llog.log.engine import pick_engine
from llog.log.findings import Findings, Problem, ProblemKind, VerifyReport
from llog.log.log import Log
from llog.model import TopicPartition


class EngineVerifier:
    """Verifies partitions of any engine. Use one verifier for many partitions: it reads what they share once."""

    def __init__(self, log: Log) -> None:
        self._catalog = Catalog(log)
        self._verifiers = {name: engine.verifier(log) for name, engine in log.engines.items()}

    async def verify(self, tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read every record below the present next offset; `progress` gets the number of records read so far.

        Damage is reported, not raised. So is a partition that cannot be read from here, as unchecked, which is no
        damage. Raises `TopicNotFound` if the topic does not exist.
        """
        topic = await self._catalog.get(tp.topic)
        return await pick_engine(self._verifiers, topic.engine, topic.name)(tp, progress=progress)


async def verify_or_report(tp: TopicPartition, verifying: Awaitable[VerifyReport]) -> VerifyReport:
    """Return the report of `verifying`, or one that says that the records are out of reach, or unreadable."""
    try:
        return await verifying
    except (LogOwned, OwnerUnavailable, ConfigurationError, MissingExtra, TopicElsewhere) as error:
        return msgspec.structs.replace(Findings(tp).report(), unchecked=str(error))
    except (CorruptBatch, InconsistentReadState, StoreUnavailable) as error:
        return report_unreadable(tp, error)


def report_unreadable(tp: TopicPartition, error: LlogError) -> VerifyReport:
    """Return a report of this error alone."""
    found = Findings(tp)
    found.add(Problem(kind=ProblemKind.UNREADABLE, start_offset=0, end_offset=0, detail=str(error)))
    return found.report()
