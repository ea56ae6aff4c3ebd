"""Topic ids: Kafka's name for one incarnation of a topic, computed from the log's id and the topic's directory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

from llog.errors import InvalidArgument, LlogError
from llog.log.catalog import Catalog
from llog.log.records import Topic
from llog.runtime import Runtime

NO_TOPIC_ID: Final = bytes(16)
"""What stands in a message where no topic is named by its id."""
_FRESH_MS: Final = 1000
"""How long a name that was found is believed: a topic may be deleted, and created again, through another process."""
_FOUND_MAX: Final = 100_000
_SCAN_MS: Final = 100
"""The least time between two looks at all topics, which ids that belong to none must not make frequent."""


def topic_id(log_id: str, directory: str) -> bytes:
    """Return the id of the topic with this directory; a topic that is created again has another one."""
    return blake2b(f"{log_id}/{directory}".encode(), digest_size=16).digest()


class UnknownTopicId(InvalidArgument):
    """A client named a topic by an id that none has."""


class TopicIds:
    """Finds the names of topics by their ids."""

    def __init__(self, log_id: str, catalog: Catalog, runtime: Runtime) -> None:
        self._log_id = log_id
        self._catalog = catalog
        self._runtime = runtime
        self._found: dict[bytes, tuple[str, int]] = {}
        """The name of each topic that was looked up, and when."""
        self._scanned_ms = 0
        self._looking = asyncio.Lock()

    def id_of(self, directory: str) -> bytes:
        return topic_id(self._log_id, directory)

    def forget(self, name: str) -> None:
        """Look the topic up again before its id is believed, since this broker has changed or deleted it."""
        self._found = {each: found for each, found in self._found.items() if found[0] != name}

    async def names(self, ids: Sequence[bytes]) -> list[str | LlogError]:
        """Return the name of the topic with each of these ids, or why there is none.

        Callers go on in the order in which they called, so that the appends of a producer stay in order.
        """
        try:
            found = await self._find(ids)
        except LlogError as error:
            return [error] * len(ids)
        missing = UnknownTopicId("no topic has this id: it was deleted, or created again")
        return [found.get(each, missing) for each in ids]

    async def _find(self, ids: Sequence[bytes]) -> dict[bytes, str]:
        async with self._looking:
            stale = [each for each in ids if not self._is_fresh(each)]
            if stale:
                known = [self._found[each][0] for each in stale if each in self._found]
                if known:
                    try:
                        topics = await self._catalog.find(known)
                    except LlogError:
                        if len(known) < len(stale):
                            raise
                        return self._known(ids)  # what is done with the topics meets the same failure
                    for each in stale:
                        self._found.pop(each, None)
                    self.note(topic for topic in topics.values() if isinstance(topic, Topic))
                now = self._runtime.now_ms()
                if any(each not in self._found for each in stale) and abs(now - self._scanned_ms) >= _SCAN_MS:
                    self._scanned_ms = now
                    self._found.clear()
                    self.note(await self._catalog.topics())
            return self._known(ids)

    def _known(self, ids: Sequence[bytes]) -> dict[bytes, str]:
        return {each: self._found[each][0] for each in ids if each in self._found}

    def _is_fresh(self, identity: bytes) -> bool:
        found = self._found.get(identity)
        return found is not None and abs(self._runtime.now_ms() - found[1]) < _FRESH_MS

    def note(self, topics: Iterable[Topic]) -> None:
        """Remember topics that were just read from the catalog."""
        now = self._runtime.now_ms()
        if len(self._found) >= _FOUND_MAX:
            self._found.clear()
        self._found |= {self.id_of(topic.directory): (topic.name, now) for topic in topics}
