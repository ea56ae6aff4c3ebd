"""Messages that were delivered too often and never acknowledged: appended to a topic of their own, as they were.

A dead letter is the record itself, with its key, payload, time and headers, and five headers more:

| header | value, as text |
| --- | --- |
| `llog-dead-topic`, `llog-dead-partition`, `llog-dead-offset` | where the message was |
| `llog-dead-group` | the group that could not handle it |
| `llog-dead-attempts` | how often it was delivered |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from llog.batch.columns import records_of
from llog.engines.port import Batch, Group, LogAppender
from llog.errors import InvalidArgument, LlogError, TopicExists, TopicNotFound
from llog.log.catalog import Catalog
from llog.log.records import Topic
from llog.model import Header

SUFFIX: Final = ".dead-letter"


class DeadLetters:
    def __init__(self, catalog: Catalog, appender: LogAppender) -> None:
        self._catalog = catalog
        self._appender = appender

    async def send(self, batches: Sequence[Batch], *, topic: Topic, to: str | None, group: str, attempts: int) -> None:
        """Durable when this returns. A crash before they are acknowledged brings them twice: at least once."""
        name = target_of(topic.name, to)
        records = []
        for batch in batches:
            for record in records_of(batch.columns, batch.start_offset):
                marks = {
                    "topic": topic.name,
                    "partition": batch.tp.partition,
                    "offset": record.offset,
                    "group": group,
                    "attempts": attempts,
                }
                more: tuple[Header, ...] = tuple((f"llog-dead-{mark}", str(of).encode()) for mark, of in marks.items())
                records.append(replace(record, headers=record.headers + more, offset=None))
        if not records:
            return
        await self._made(name, topic)
        (result,) = await self._appender.append([Group(topic=name, partition=0, records=records)])
        if isinstance(result, LlogError):
            raise result

    async def _made(self, name: str, topic: Topic) -> None:
        """Makes the topic, on the engine of the one that the letters come from, if there is none."""
        try:
            await self._catalog.get(name)
        except TopicNotFound:
            try:
                await self._catalog.create(name, engine=topic.engine)
            except TopicExists:
                pass


def target_of(topic: str, to: str | None) -> str:
    """Where dead letters of a topic go."""
    name = to if to is not None else topic + SUFFIX
    if name == topic:
        raise InvalidArgument(f"the dead letters of topic {topic!r} cannot go to that topic itself: name another one")
    return name
