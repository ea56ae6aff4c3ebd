"""The bounds of partitions as they are now: proved by the broker's views, or asked of the engine that owns them."""

from __future__ import annotations

from collections.abc import Sequence

from llog.base.concurrency import gather_bounded
from llog.engines.object.views import Read, Views
from llog.engines.routing import EngineReader
from llog.errors import LlogError
from llog.log.engine import Bounds
from llog.model import TopicPartition

_NO_OFFSET = 0
"""No record has this offset, so that a view counts only if it was right after the request arrived."""
_CONCURRENCY = 16


class BoundsFinder:
    def __init__(self, views: Views, reader: EngineReader) -> None:
        self._views = views
        self._reader = reader

    async def find(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds | LlogError]:
        """Return the bounds of each partition, which include every append that was acknowledged before this call, or
        the error.
        """
        views = await self._views.look([Read(tp, _NO_OFFSET) for tp in tps], self._views.now())
        found: dict[TopicPartition, Bounds | LlogError] = {}
        owned = []
        for tp, view in views.items():
            if isinstance(view, LlogError):
                found[tp] = view
            elif view.bounds is not None:
                found[tp] = view.bounds
            else:
                owned.append(tp)
        found |= zip(owned, await gather_bounded(self._ask_owner, owned, _CONCURRENCY), strict=True)
        return found

    async def _ask_owner(self, tp: TopicPartition) -> Bounds | LlogError:
        try:
            return await self._reader.bounds(tp)
        except LlogError as error:
            return error
