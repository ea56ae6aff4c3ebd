"""Maintenance: retention, key compaction and collection of a log, one step at a time, each on its own schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from llog.config import Settings
from llog.engines.object.collector import CollectionResult, Collector
from llog.engines.routing import EngineAppender
from llog.engines.upkeep import clean_all, release_deleted, retain_all
from llog.errors import LlogError, LogOwned, OwnerUnavailable
from llog.log.log import Log
from llog.log.opening import collector_options
from llog.runtime import Runtime

OWNED_MS: Final = 60_000
"""The pause between two rounds over the topics that this process owns."""


class Pause(NamedTuple):
    ms: int
    jitter_ms: int = 0
    """The most that is added to `ms`, at random."""

    def draw_s(self, runtime: Runtime) -> float:
        """Return the seconds of one pause."""
        return (self.ms + runtime.random().randint(0, self.jitter_ms)) / 1000


class Step(NamedTuple):
    name: str
    pause: Pause
    do: Callable[[], Awaitable[object]]


async def repeat_steps(runtime: Runtime, steps: Sequence[Step], report: Callable[[str], None]) -> None:
    """Repeat every step after its pause, each beside the others, until cancelled. A failure is reported, and the next
    round tries again.
    """

    async def repeat(step: Step) -> None:
        while True:
            await runtime.sleep(step.pause.draw_s(runtime))
            try:
                await step.do()
            except Exception as error:  # even a bug must not stop the process
                report(f"{step.name} failed, and is tried again later: {describe_failure(error)}")

    async with asyncio.TaskGroup() as group:
        for step in steps:
            group.create_task(repeat(step))


def describe_failure(error: Exception) -> str:
    """Return the error for people; one that is no error of llog is a bug, and begins with its type."""
    return str(error) if isinstance(error, LlogError) else f"{type(error).__name__}: {error}"


class Maintenance:
    """The steps that keep a log in order besides its compaction. Other processes may run them at the same time."""

    def __init__(self, log: Log, settings: Settings, report: Callable[[str], None]) -> None:
        self._log = log
        self._report = report
        self._collector = Collector(log, collector_options(settings))
        self._appender = EngineAppender(log)

    async def run_on_disk(self) -> None:
        """Run until cancelled the steps that only the owner of disk topics and of RocksDB can do."""
        await repeat_steps(self._log.runtime, self.steps_of_owner(), self._report)

    def steps_of_owner(self) -> list[Step]:
        """Return the steps that only the owner of disk topics and of RocksDB can do."""
        return [
            Step("key compaction", Pause(OWNED_MS), self.clean),
            Step("retention of owned topics", Pause(OWNED_MS), self.retain_owned),
        ]

    async def retain_owned(self) -> None:
        for name, engine in self._log.engines.items():
            if engine.has_owner:
                await self.retain(name)

    async def retain(self, engine: str | None = None) -> tuple[int, int]:
        """Apply retention to all topics, except for those that another process owns and maintains; return the records
        and bytes that it removed.
        """
        records = size = 0
        for tp, result in (await retain_all(self._log, self._appender, engine, only_owned=True)).items():
            if not isinstance(result, LlogError):
                records, size = records + result.records, size + result.bytes
            elif not isinstance(result, LogOwned | OwnerUnavailable):
                self._report(f"retention of {tp}: {result}")
        return records, size

    async def clean(self) -> None:
        """Compact by key the topics that ask for it, except for those that another process owns; close deleted ones."""
        await release_deleted(self._log)
        for tp, result in (await clean_all(self._log, only_owned=True)).items():
            if isinstance(result, LlogError) and not isinstance(result, LogOwned | OwnerUnavailable):
                self._report(f"key compaction of {tp}: {result}")

    async def collect(self) -> CollectionResult:
        result = await self._collector.collect_once()
        if result.warning is not None:
            self._report(f"collection: {result.warning}")
        return result
