"""Dead letters: messages that were delivered too often without being acknowledged, appended to a topic of their own.

A dead letter is the record itself, with its key, payload, time and headers, and five additional headers:

| header | value, as text |
| --- | --- |
| `llog-dead-topic`, `llog-dead-partition`, `llog-dead-offset` | where the message was |
| `llog-dead-group` | the group that did not acknowledge it |
| `llog-dead-attempts` | how often it was delivered |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from llog.batch.columns import records_of
from llog.errors import InvalidArgument, LlogError
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, Batch, LogAppender
from llog.log.records import Topic
from llog.model import Header

SUFFIX: Final = ".dead-letter"


class DeadLetters:
    def __init__(self, catalog: Catalog, appender: LogAppender) -> None:
        self._catalog = catalog
        self._appender = appender

    async def send(self, batches: Sequence[Batch], *, topic: Topic, to: str | None, group: str, attempts: int) -> None:
        """Append the records of the batches as dead letters, durably; create the topic if it does not exist.

        After a crash before the records are acknowledged, they are sent again: at least once.
        """
        name = dead_letter_topic(topic.name, to)
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
        await self._catalog.get_or_create(name, engine=topic.engine)
        (result,) = await self._appender.append([AppendGroup(topic=name, partition=0, records=records)])
        if isinstance(result, LlogError):
            raise result


def dead_letter_topic(topic: str, to: str | None) -> str:
    """Return the topic of a topic's dead letters; raise `InvalidArgument` if that is the topic itself."""
    name = to if to is not None else topic + SUFFIX
    if name == topic:
        raise InvalidArgument(f"the dead letters of topic {topic!r} cannot go to that topic itself: name another one")
    return name
