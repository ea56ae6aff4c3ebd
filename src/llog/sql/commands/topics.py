"""CREATE, DROP and CLEAR TOPIC, and ALTER TOPIC … SET, on topics of every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from llog.errors import SqlError, TopicExists, TopicNotFound
from llog.log.catalog import ROCKSDB
from llog.log.records import Cleanup
from llog.model import TimestampType, TopicPartition
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.parse.clauses import TOPIC_OPTIONS, Check
from llog.sql.parse.parameters import Params
from llog.sql.parse.statements import Parameter
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.sql.session import DatabaseSession

_FIXED: Final = ("engine", "timestamp_type")
"""Options that cannot be changed."""


class CreateTopic(msgspec.Struct, frozen=True, kw_only=True):
    OPTIONS: ClassVar[Mapping[str, Check]] = TOPIC_OPTIONS
    topic: str
    if_not_exists: bool = False
    partitions: int | Parameter = 1
    options: dict[str, Any] = {}


class SetTopic(msgspec.Struct, frozen=True, kw_only=True):
    OPTIONS: ClassVar[Mapping[str, Check]] = TOPIC_OPTIONS
    topic: str
    options: dict[str, Any]


class DropTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    if_exists: bool = False


class ClearTopic(msgspec.Struct, frozen=True, kw_only=True):
    """Removes every record. The next offset stays."""

    topic: str


def parse_altered_topic(stream: TokenStream) -> str:
    """Read `ALTER TOPIC t`, and return the topic's name."""
    stream.expect("ALTER", "TOPIC")
    return stream.topic()


def _parse_create(stream: TokenStream) -> CreateTopic:
    stream.expect("CREATE", "TOPIC")
    if_not_exists = stream.accept("IF", "NOT", "EXISTS")
    topic = stream.topic()
    clauses = stream.clauses({"PARTITIONS": stream.clause, "WITH": lambda _: stream.options(TOPIC_OPTIONS)})
    return CreateTopic(
        topic=topic,
        if_not_exists=if_not_exists,
        partitions=clauses.get("PARTITIONS", 1),
        options=clauses.get("WITH", {}),
    )


def _parse_set(stream: TokenStream) -> SetTopic:
    topic = parse_altered_topic(stream)
    stream.expect("SET")
    return SetTopic(topic=topic, options=stream.options(TOPIC_OPTIONS))


def _parse_drop(stream: TokenStream) -> DropTopic:
    stream.expect("DROP", "TOPIC")
    if_exists = stream.accept("IF", "EXISTS")
    return DropTopic(topic=stream.topic(), if_exists=if_exists)


def _parse_clear(stream: TokenStream) -> ClearTopic:
    stream.expect("CLEAR", "TOPIC")
    return ClearTopic(topic=stream.topic())


async def _run_create(session: DatabaseSession, statement: CreateTopic, _: Params) -> Result:
    assert isinstance(statement.partitions, int)  # bound
    try:
        await session.database.catalog.create(
            statement.topic,
            statement.partitions,
            engine=statement.options.get("engine", ROCKSDB),
            timestamp_type=TimestampType(statement.options.get("timestamp_type", TimestampType.CREATE)),
            **_catalog_options(statement.options),
        )
    except TopicExists:
        if not statement.if_not_exists:
            raise
    return Result("CREATE TOPIC")


async def _run_set(session: DatabaseSession, statement: SetTopic, _: Params) -> Result:
    for option in _FIXED:
        if option in statement.options:
            raise SqlError(f"{option} of a topic cannot be changed", hint="create another topic and copy the records")
    await session.database.catalog.set_options(statement.topic, **_catalog_options(statement.options))
    return Result("ALTER TOPIC")


async def _run_drop(session: DatabaseSession, statement: DropTopic, _: Params) -> Result:
    database = session.database
    try:
        topic = await database.catalog.get(statement.topic)
        await database.catalog.delete(statement.topic)
    except TopicNotFound:
        if not statement.if_exists:
            raise
    else:
        if database.open_tables is not None:
            await database.open_tables.sources.forget(topic)
    return Result("DROP TOPIC")


async def _run_clear(session: DatabaseSession, statement: ClearTopic, _: Params) -> Result:
    database = session.database
    topic = await database.catalog.get(statement.topic)
    removed = 0
    for partition in range(topic.partitions):
        tp = TopicPartition(topic.name, partition)
        removed += (await database.appender.trim(tp, (await database.reader.bounds(tp)).next_offset)).records
    return Result("CLEAR TOPIC", changed=removed)


def _catalog_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that can change, under the catalog's names and in its units. NULL unsets an option."""
    conversions: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "retention_seconds": ("retention_ms", lambda seconds: int(seconds * 1000)),
        "retention_max_bytes": ("retention_bytes", int),
        "cleanup": ("cleanup", Cleanup),
        "delete_retention_seconds": ("delete_retention_ms", lambda seconds: int(seconds * 1000)),
    }
    return {
        name: None if options[option] is None else convert(options[option])
        for option, (name, convert) in conversions.items()
        if option in options
    }


CREATE_TOPIC: Final = Command(
    statement=CreateTopic,
    begins=("CREATE TOPIC",),
    parse=_parse_create,
    run=_run_create,
    usages=(
        Usage(
            Section.TOPICS,
            "CREATE TOPIC [IF NOT EXISTS] t [PARTITIONS n] [WITH (…)]",
            "The options are `engine` (`rocksdb`, the default, `object` or `disk`), `retention_seconds`, "
            "`retention_max_bytes`, `cleanup` (`delete` or `compact`), `delete_retention_seconds`, `timestamp_type` "
            "(`create` or `append`).",
        ),
    ),
    changes_names=True,
)
SET_TOPIC: Final = Command(
    statement=SetTopic,
    begins=("ALTER TOPIC",),
    action="SET",
    parse=_parse_set,
    run=_run_set,
    usages=(
        Usage(
            Section.TOPICS,
            "ALTER TOPIC t SET (…)",
            "The same options, except `engine` and `timestamp_type`. `NULL` removes a retention limit.",
        ),
    ),
)
DROP_TOPIC: Final = Command(
    statement=DropTopic,
    begins=("DROP TOPIC",),
    parse=_parse_drop,
    run=_run_drop,
    usages=(Usage(Section.TOPICS, "DROP TOPIC [IF EXISTS] t"),),
    changes_names=True,
)
CLEAR_TOPIC: Final = Command(
    statement=ClearTopic,
    begins=("CLEAR TOPIC",),
    parse=_parse_clear,
    run=_run_clear,
    usages=(Usage(Section.TOPICS, "CLEAR TOPIC t", "Removes all records. Offsets continue where they were."),),
)
COMMANDS: Final = (CREATE_TOPIC, SET_TOPIC, DROP_TOPIC, CLEAR_TOPIC)
