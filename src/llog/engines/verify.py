"""Verification of partitions by their own engines, and what those report that cannot be read."""

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
    """Verifies partitions of any engine. One for many partitions reads what they share once."""

    def __init__(self, log: Log) -> None:
        self._catalog = Catalog(log)
        self._verifiers = {name: engine.verifier(log) for name, engine in log.engines.items()}

    async def verify(self, tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Reads every record below the present next offset; `progress` gets the records read so far.

        Damage is reported, not raised, and so is that the partition cannot be read from here, which is no damage.
        `TopicNotFound` if there is no such topic, or not any more.
        """
        topic = await self._catalog.get(tp.topic)
        return await pick_engine(self._verifiers, topic.engine, topic.name)(tp, progress=progress)


async def report_reach(tp: TopicPartition, verifying: Awaitable[VerifyReport]) -> VerifyReport:
    """The report, or one that says that the records are out of reach, or cannot be read."""
    try:
        return await verifying
    except (LogOwned, OwnerUnavailable, ConfigurationError, MissingExtra, TopicElsewhere) as error:
        return msgspec.structs.replace(Findings(tp).report(), unchecked=str(error))
    except (CorruptBatch, InconsistentReadState, StoreUnavailable) as error:
        return report_unreadable(tp, error)


def report_unreadable(tp: TopicPartition, error: LlogError) -> VerifyReport:
    """A report of nothing but this error."""
    found = Findings(tp)
    found.add(Problem(kind=ProblemKind.UNREADABLE, start_offset=0, end_offset=0, detail=str(error)))
    return found.report()
