"""Checks of appends and their records, shared by the engines."""

from __future__ import annotations

from collections.abc import Sequence

from llog.batch.columns import Columns, byte_size, columns_of
from llog.errors import IdempotenceUnsupported, InvalidArgument, RecordTooLarge
from llog.log.engine import AppendGroup
from llog.log.producers import Producer, check_producer
from llog.log.record_producers import RecordProducer, check_record_producer
from llog.log.records import Cleanup, Topic


def check_keys(topic: Topic, columns: Columns) -> None:
    """Raise `InvalidArgument` if a record of a topic with cleanup `compact` has no key: it would stay for ever."""
    if topic.cleanup is Cleanup.COMPACT and (columns.keys is None or columns.keys.null_count):
        raise InvalidArgument(
            f"topic {topic.name!r} keeps the newest record of each key (cleanup compact): give every record a key"
        )


def producer_of_appends(topic: Topic, producer: Producer | RecordProducer | None) -> Producer | None:
    """Return the producer of a group for an engine that knows only producers that number their appends; raise
    `IdempotenceUnsupported` for one that numbers its records.
    """
    if isinstance(producer, RecordProducer):
        raise IdempotenceUnsupported(
            f"topic {topic.name!r} is of engine {topic.engine!r}, which does not keep the states of producers such as "
            f"{producer.id[:40]!r}: send the records without a producer id, or to a topic of engine 'object'"
        )
    return producer


def checked_columns(groups: Sequence[AppendGroup], append_bytes_max: int) -> list[Columns]:
    """Return the records of each group as columns. Raises if there are no groups, if a group has no records or an
    invalid producer, or if all together exceed `append_bytes_max`.
    """
    if not groups:
        raise InvalidArgument("an append needs at least one group of records")
    columns = []
    for group in groups:
        part = group.records if isinstance(group.records, Columns) else columns_of(group.records)
        if part.count == 0:
            raise InvalidArgument(f"the group for {group.topic}/{group.partition} has no records")
        if isinstance(group.producer, RecordProducer):
            check_record_producer(group.producer, part.count)
        elif group.producer is not None:
            check_producer(group.producer)
        columns.append(part)
    size = sum(byte_size(part) for part in columns)
    if size > append_bytes_max:
        raise RecordTooLarge(
            f"an append of {size} bytes is over the limit of {append_bytes_max} bytes: append fewer records"
        )
    return columns
