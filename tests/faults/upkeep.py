"""A program: compacts or collects the log of its settings again and again, until it is killed.

What a store that is away makes of a pass is told and tried again; anything else ends the program.
"""

from __future__ import annotations

import asyncio
import sys

from llog.config.loading import load_settings
from llog.engines.object.collector import Collector
from llog.engines.object.compaction.compactor import Compactor, lagging_partitions
from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable, VersionMismatch
from llog.log.log import Log
from llog.log.opening import collector_options, compactor_options, opened_log

_PAUSE_S = 0.3
_PASSING = (StoreUnavailable, OutcomeUnknown)


class _Compacting:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._compactor = Compactor(log, compactor_options(load_settings()))

    async def once(self) -> int:
        tps = [each.tp async for each in lagging_partitions(self._log)]
        results = await self._compactor.compact_many(tps)
        for each in results:
            if each.damaged:
                raise LlogError(f"{each.topic}/{each.partition}: {each.damaged}")
            if each.error is not None and not isinstance(each.error, (*_PASSING, VersionMismatch)):
                raise each.error
        return sum(each.entries for each in results)


class _Collecting:
    def __init__(self, log: Log) -> None:
        self._collector = Collector(log, collector_options(load_settings()))

    async def once(self) -> int:
        result = await self._collector.collect_once()
        if result.warning is not None:
            raise LlogError(result.warning)
        return result.deleted


async def main(kind: str) -> None:
    while True:
        try:
            async with opened_log(load_settings()) as log:
                await _keep_up(_Compacting(log) if kind == "compactor" else _Collecting(log))
        except _PASSING as error:
            print(f"not open: {error}", flush=True)
            await asyncio.sleep(_PAUSE_S)


async def _keep_up(upkeep: _Compacting | _Collecting) -> None:
    while True:
        try:
            print(f"done {await upkeep.once()}", flush=True)
        except _PASSING as error:
            print(f"failed: {error}", flush=True)
        await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
