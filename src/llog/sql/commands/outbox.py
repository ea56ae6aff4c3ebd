"""ALTER TOPIC … SETTLE OUTBOX, which decides whether events are in their topic where llog cannot know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from llog.errors import SqlError
from llog.log.catalog import check_partition
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.commands.topics import parse_altered_topic
from llog.sql.parse.parameters import Params
from llog.sql.parse.statements import Parameter
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.sql.session import DatabaseSession

_OUTCOMES: Final = ("APPENDED", "MISSING")


class SettleOutbox(msgspec.Struct, frozen=True, kw_only=True):
    """`is_appended` is whether the events that wait for this decision are in the topic."""

    topic: str
    partition: int | Parameter
    is_appended: bool


def _parse(stream: TokenStream) -> SettleOutbox:
    topic = parse_altered_topic(stream)
    stream.expect("SETTLE", "OUTBOX", "PARTITION")
    partition = stream.clause("PARTITION")
    stream.expect("AS")
    if stream.token.upper not in _OUTCOMES:
        raise stream.expected(" or ".join(_OUTCOMES), _OUTCOMES)
    return SettleOutbox(topic=topic, partition=partition, is_appended=stream.take().upper == "APPENDED")


async def _run(session: DatabaseSession, statement: SettleOutbox, _: Params) -> Result:
    opened = await session.database.require_tables()
    topic = await session.database.catalog.get(statement.topic)
    assert isinstance(statement.partition, int)  # bound
    check_partition(topic, statement.partition)
    if not await opened.relay.decide(topic.directory, statement.partition, appended=statement.is_appended):
        raise SqlError(
            f"no events for partition {statement.partition} of topic {topic.name!r} wait to be settled",
            hint="the column problem of SHOW ROUTES names the topics with such events",
        )
    opened.relay.poke()
    return Result("ALTER TOPIC")


SETTLE_OUTBOX: Final = Command(
    statement=SettleOutbox,
    begins=("ALTER TOPIC",),
    action="SETTLE OUTBOX",
    parse=_parse,
    run=_run,
    usages=(
        Usage(
            Section.TOPICS,
            "ALTER TOPIC t SETTLE OUTBOX PARTITION p AS APPENDED | MISSING",
            "Decides whether events for a topic of another engine were appended, where llog itself cannot know. "
            "`SHOW ROUTES` shows such a `problem`.",
        ),
    ),
)
COMMANDS: Final = (SETTLE_OUTBOX,)
