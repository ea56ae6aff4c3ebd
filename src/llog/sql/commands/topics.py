"""Statements about topics and groups, on topics of every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import Columns
from llog.batch.partitioning import partitions_for_keys
from llog.engines.port import AppendResult, Group
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import InvalidArgument, LlogError, PartlyAppended, SqlError, TopicExists, TopicNotFound
from llog.groups.acks import committed_in, warnings_of
from llog.groups.consumption import ConsumeCall, Consuming, Start
from llog.log.catalog import ROCKSDB, Catalog
from llog.log.log import Log
from llog.log.records import Cleanup, Topic
from llog.model import TimestampType, TopicPartition
from llog.sql.parse import statements as sql
from llog.sql.parse.clauses import time_ms
from llog.sql.result import Result
from llog.sql.topic_tables import as_text

_COLUMNS: Final = {"key": pa.binary(), "payload": pa.binary(), "partition": pa.int64(), "ts": pa.timestamp("ms", "UTC")}
"""What INSERT INTO TOPIC takes."""
_UNNAMED: Final = {1: ("payload",), 2: ("key", "payload")}


class TopicCommands:
    """What needs the log and no tables."""

    def __init__(
        self, log: Log, reader: EngineReader, appender: EngineAppender, stopping: asyncio.Event | None = None
    ) -> None:
        self._log = log
        self._catalog = Catalog(log)
        self._reader = reader
        self._appender = appender
        self.consuming = Consuming(log, reader, appender, stopping=stopping)

    async def create(self, statement: sql.CreateTopic) -> Result:
        changes = _settings(statement.options)
        engine = statement.options.get("engine", ROCKSDB)
        timestamp_type = TimestampType(statement.options.get("timestamp_type", TimestampType.CREATE))
        assert isinstance(statement.partitions, int)
        try:
            await self._catalog.create(
                statement.topic, statement.partitions, engine=engine, timestamp_type=timestamp_type, **changes
            )
        except TopicExists:
            if not statement.if_not_exists:
                raise
        return Result("CREATE TOPIC")

    async def set(self, statement: sql.SetTopic) -> Result:
        fixed = sorted({"engine", "timestamp_type"} & set(statement.options))
        if fixed:
            raise SqlError(
                f"{fixed[0]} of a topic cannot be changed", hint="create another topic, and copy its records if need be"
            )
        await self._catalog.set_options(statement.topic, **_settings(statement.options))
        return Result("ALTER TOPIC")

    async def drop(self, statement: sql.DropTopic) -> Topic | None:
        """The topic that is gone now; None if there was none, and that is allowed."""
        try:
            topic = await self._catalog.get(statement.topic)
            await self._catalog.delete(statement.topic)
        except TopicNotFound:
            if statement.if_exists:
                return None
            raise
        return topic

    async def clear(self, statement: sql.ClearTopic) -> Result:
        topic = await self._catalog.get(statement.topic)
        removed = 0
        for partition in range(topic.partitions):
            tp = TopicPartition(topic.name, partition)
            removed += (await self._appender.trim(tp, (await self._reader.bounds(tp)).next_offset)).records
        return Result("CLEAR TOPIC", changed=removed)

    async def consume(self, statement: sql.Consume, member: str) -> Result:
        given = {
            "group": statement.group,
            "partition": statement.partition,
            "start": None if statement.start is None else start_of(statement.start),
            "limit": statement.limit,
            "wait_ms": statement.wait,
            **{{"visibility": "visibility_ms"}.get(name, name): value for name, value in statement.options.items()},
        }
        fields = {name: value for name, value in given.items() if value is not None}
        call = msgspec.convert(
            {"topic": statement.topic, "member": member if statement.member is None else statement.member} | fields,
            ConsumeCall,
            from_attributes=True,
        )
        named = self.consuming.named(call)
        found = await self.consuming.consume(named)
        return Result("CONSUME", as_text(found), member=None if named is call else named.member)

    async def ack(self, statement: sql.Ack, member: str) -> Result:
        upto: dict[int | None, int] = dict(statement.upto)  # type: ignore[arg-type]  # bound by now
        group, given = str(statement.group), statement.member
        acked = await self.consuming.ack(statement.topic, group, upto, member if given is None else str(given))
        table = _positions(statement.topic, group, committed_in(acked))
        return Result("ACK", table, warnings=warnings_of(statement.topic, acked))

    async def reset(self, statement: sql.ResetGroup) -> Result:
        partition = statement.partition
        assert partition is None or isinstance(partition, int)
        group = str(statement.group)
        found = await self.consuming.reset(group, statement.topic, start_of(statement.start), partition)
        return Result("RESET CONSUMER GROUP", _positions(statement.topic, group, found))

    async def insert(self, statement: sql.InsertTopic, rows: pa.Table) -> Result:
        """Appends what the statement's query gave: to the partition named, else by the key, else to one chosen at
        random.
        """
        topic = await self._catalog.get(statement.topic)
        given = _given(statement, rows)
        if not rows.num_rows:
            return Result("INSERT INTO TOPIC")
        columns = Columns(given["payload"], given.get("key"), given.get("ts"), None, ())
        groups = [
            Group(topic=topic.name, partition=int(partition), records=_taken(columns, places))
            for partition, places in _dealt(topic, given, rows.num_rows, self._log.runtime.random().randrange)
        ]
        results = await self._appender.append(groups)
        failed = [result for result in results if isinstance(result, LlogError)]
        appended = [result for result in results if isinstance(result, AppendResult)]
        if failed:
            raise PartlyAppended(len(appended), list(results), failed[0]) if appended else failed[0]
        table = pa.table(
            {
                "partition": pa.array([each.partition for each in appended], pa.int32()),
                "first_offset": [each.start_offset for each in appended],
                "last_offset": [each.end_offset for each in appended],
            }
        )
        return Result("INSERT INTO TOPIC", table, rows.num_rows)


def start_of(start: sql.StartAt) -> Start:
    assert start.value is None or isinstance(start.value, int)  # bound by now
    return Start(start.kind.value, start.value)


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a topic as the catalog names them. What was given as null is taken back."""
    made: dict[str, Any] = {}
    convert: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "retention_seconds": ("retention_ms", lambda seconds: int(seconds * 1000)),
        "retention_max_bytes": ("retention_bytes", int),
        "cleanup": ("cleanup", Cleanup),
        "delete_retention_seconds": ("delete_retention_ms", lambda seconds: int(seconds * 1000)),
    }
    for option, (name, conversion) in convert.items():
        if option in options:
            made[name] = None if options[option] is None else conversion(options[option])
    return made


def _positions(topic: str, group: str, committed: dict[int, int]) -> pa.Table:
    partitions = sorted(committed)
    return pa.table(
        {
            "topic": pa.repeat(topic, len(partitions)),
            "group": pa.repeat(group, len(partitions)),
            "partition": pa.array(partitions, pa.int32()),
            "next_offset": pa.array([committed[each] for each in partitions], pa.int64()),
        }
    )


def _given(statement: sql.InsertTopic, rows: pa.Table) -> dict[str, Any]:
    """The columns by what they are, in their types."""
    names = statement.columns or _UNNAMED.get(rows.num_columns, ())
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown or len(names) != rows.num_columns or "payload" not in names or len(set(names)) != len(names):
        raise SqlError(
            f"INSERT INTO TOPIC has {rows.num_columns} values for the columns ({', '.join(names)})",
            hint="a topic takes payload, and key, partition and ts if you like: INSERT INTO TOPIC t (key, payload) "
            "VALUES (…)",
        )
    found = {}
    for name, column in zip(names, rows.columns, strict=True):
        try:
            if name == "ts" and pa.types.is_string(column.type):
                column = pa.chunked_array(
                    [[None if each is None else time_ms(each) for each in column.to_pylist()]], pa.int64()
                )
            if _COLUMNS[name] == pa.binary():
                column = column if pa.types.is_binary(column.type) else column.cast(pa.string())
            is_exact = not pa.types.is_timestamp(column.type)  # records have times in whole milliseconds
            cast = column.cast(_COLUMNS[name], safe=is_exact).combine_chunks()
        except InvalidArgument as error:
            raise SqlError(f"column ts of INSERT INTO TOPIC {error}") from error
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SqlError(
                f"column {name} of INSERT INTO TOPIC has values of type {column.type}: {error}",
                hint="make it text: …::JSON" if pa.types.is_nested(column.type) else "",
            ) from error
        found[name] = cast.cast(pa.int64()) if name == "ts" else cast
    return found


def _dealt(topic: Topic, given: dict[str, Any], count: int, choose: Callable[[int], int]) -> list[tuple[int, Any]]:
    """Partitions and the places of their rows, each in order."""
    partitions = np.full(count, -1)
    if "key" in given:
        partitions = partitions_for_keys(given["key"], topic.partitions)
    partitions[partitions < 0] = choose(topic.partitions)
    if "partition" in given:
        named = given["partition"]
        partitions = pc.coalesce(named, pa.array(partitions)).to_numpy()
    return [(int(each), np.flatnonzero(partitions == each)) for each in np.unique(partitions)]


def _taken(columns: Columns, places: Any) -> Columns:
    rows = pa.array(places)
    return columns._replace(
        values=columns.values.take(rows),
        keys=None if columns.keys is None else columns.keys.take(rows),
        timestamps=None if columns.timestamps is None else columns.timestamps.take(rows),
    )
