"""Maintenance: compaction, retention and collection in the broker's own process, which is enough for a small log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from llog.config import Settings
from llog.engines.object.collector import Collector
from llog.engines.object.compaction.compactor import Compactor, lagging_partitions
from llog.engines.routing import EngineAppender
from llog.engines.upkeep import clean_all, release_deleted, retain_all
from llog.errors import LlogError, LogOwned, OwnerUnavailable
from llog.log.log import Log
from llog.log.opening import collector_options, compactor_options
from llog.model import TopicPartition

_PAGE: Final = 256
_PASSES_MAX: Final = 100


class MaintenanceOptions(msgspec.Struct, frozen=True, kw_only=True):
    compact_ms: int = 30_000
    compact_jitter_ms: int = 0
    """The most that is added to `compact_ms`, at random."""
    compact_error_ms: int = 30_000
    """The pause, instead of `compact_ms`, after a compaction that failed as a whole."""
    compact_error_jitter_ms: int = 0
    clean_ms: int = 60_000
    retain_ms: int = 60_000
    collect_ms: int = 600_000
    look_again_ms: int = 120_000
    """How long a partition that had nothing to compact is left alone, unless it grows."""


def maintenance_options(settings: Settings) -> MaintenanceOptions:
    return MaintenanceOptions(
        compact_ms=settings.compactor_idle_sleep_ms,
        compact_jitter_ms=settings.compactor_idle_jitter_ms,
        compact_error_ms=settings.compactor_error_sleep_ms,
        compact_error_jitter_ms=settings.compactor_error_jitter_ms,
    )


class _Pause(NamedTuple):
    ms: int
    jitter_ms: int = 0


class _Step(NamedTuple):
    name: str
    pause: _Pause
    do: Callable[[], Awaitable[None]]
    pause_after_error: _Pause | None = None


class _Idle(NamedTuple):
    """A partition that had nothing to compact when it had this many offsets."""

    offsets: int
    until_ms: int


class Maintenance:
    """Maintains a log step by step. A failure is reported, and the next round tries again.

    Other processes may maintain the same log at the same time.
    """

    def __init__(
        self, log: Log, settings: Settings, report: Callable[[str], None], options: MaintenanceOptions | None = None
    ) -> None:
        self._log = log
        self._report = report
        self._options = options or maintenance_options(settings)
        self._compactor = Compactor(log, compactor_options(settings))
        self._collector = Collector(log, collector_options(settings))
        self._appender = EngineAppender(log)
        self._idle: dict[TopicPartition, _Idle] = {}

    async def run(self) -> None:
        """Run all steps until cancelled."""
        options = self._options
        await self._repeat(
            [
                _Step(
                    "compaction",
                    _Pause(options.compact_ms, options.compact_jitter_ms),
                    self.compact,
                    _Pause(options.compact_error_ms, options.compact_error_jitter_ms),
                ),
                _Step("key compaction", _Pause(options.clean_ms), self.clean),
                _Step("retention", _Pause(options.retain_ms), self.retain),
                _Step("collection", _Pause(options.collect_ms), self.collect),
            ]
        )

    async def run_on_disk(self) -> None:
        """Run until cancelled the steps that only the owner of disk topics and of RocksDB can do."""
        options = self._options
        await self._repeat(
            [
                _Step("key compaction", _Pause(options.clean_ms), self.clean),
                _Step("retention", _Pause(options.retain_ms), self.retain_owned),
            ]
        )

    async def _repeat(self, steps: Sequence[_Step]) -> None:
        runtime = self._log.runtime
        due = [self._end_of(step.pause) for step in steps]
        longest_ms = min(step.pause.ms for step in steps)
        while True:
            # Bounded, since the clock may be set back.
            await runtime.sleep(min(max(0, min(due) - runtime.now_ms()), longest_ms) / 1000)
            for index, step in enumerate(steps):
                if runtime.now_ms() >= due[index]:
                    pause = step.pause
                    try:
                        await step.do()
                    except Exception as error:  # even a bug must not stop the broker
                        kind = "" if isinstance(error, LlogError) else f"{type(error).__name__}: "
                        self._report(f"{step.name} failed, and is tried again later: {kind}{error}")
                        pause = step.pause_after_error or pause
                    due[index] = self._end_of(pause)

    def _end_of(self, pause: _Pause) -> int:
        """Return when a pause that begins now is over."""
        runtime = self._log.runtime
        return runtime.now_ms() + pause.ms + runtime.random().randint(0, pause.jitter_ms)

    async def compact(self) -> None:
        """Compact the partitions that lag, until none is left that is worth it."""
        now = self._log.runtime.now_ms()
        found: dict[TopicPartition, int] = {}
        idle: dict[TopicPartition, _Idle] = {}
        async for each in lagging_partitions(self._log):
            known = self._idle.get(each.tp)
            if known is not None and not each.begun and known.offsets == each.offsets and now < known.until_ms:
                idle[each.tp] = known
            else:
                found[each.tp] = each.offsets
        self._idle = idle
        every = list(found)
        for first in range(0, len(every), _PAGE):
            await self._compact_page(every[first : first + _PAGE], found)

    async def _compact_page(self, left: list[TopicPartition], offsets: dict[TopicPartition, int]) -> None:
        until = self._log.runtime.now_ms() + self._options.look_again_ms
        grown: set[TopicPartition] = set()
        for _ in range(_PASSES_MAX):
            results = dict(zip(left, await self._compactor.compact_many(left), strict=True))
            for tp, result in results.items():
                for what in (*result.damaged, *([result.error] if result.error else [])):
                    self._report(f"compaction of {tp}: {what}")
                if result.end_offset is None and result.error is None and tp not in grown:
                    self._idle[tp] = _Idle(offsets[tp], until)
            left = [tp for tp, result in results.items() if result.end_offset is not None and result.error is None]
            grown.update(left)
            if not left:
                return

    async def retain_owned(self) -> None:
        for name, engine in self._log.engines.items():
            if engine.has_owner:
                await self.retain(name)

    async def retain(self, engine: str | None = None) -> None:
        """Apply retention to all topics, except for those that another process owns and maintains."""
        for tp, result in (await retain_all(self._log, self._appender, engine, only_owned=True)).items():
            if isinstance(result, LlogError) and not isinstance(result, LogOwned | OwnerUnavailable):
                self._report(f"retention of {tp}: {result}")

    async def clean(self) -> None:
        """Compact by key the topics that ask for it, except for those that another process owns; close deleted ones."""
        await release_deleted(self._log)
        for tp, result in (await clean_all(self._log, only_owned=True)).items():
            if isinstance(result, LlogError) and not isinstance(result, LogOwned | OwnerUnavailable):
                self._report(f"key compaction of {tp}: {result}")

    async def collect(self) -> None:
        warning = (await self._collector.collect_once()).warning
        if warning is not None:
            self._report(f"collection: {warning}")
