"""ALTER TOPIC … SETTLE OUTBOX: says whether events whose fate nobody else knows are in their topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from llog.errors import SqlError
from llog.log.catalog import check_partition
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.commands.topics import altered_topic
from llog.sql.parse.parameters import Params
from llog.sql.parse.statements import Parameter
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.sql.session import Session

_OUTCOMES: Final = ("APPENDED", "MISSING")


class SettleOutbox(msgspec.Struct, frozen=True, kw_only=True):
    """`is_appended` says whether the events of the outbox that wait for an answer are in the topic."""

    topic: str
    partition: int | Parameter
    is_appended: bool


def _parse(stream: TokenStream) -> SettleOutbox:
    topic = altered_topic(stream)
    stream.expect("SETTLE", "OUTBOX", "PARTITION")
    partition = stream.clause("PARTITION")
    stream.expect("AS")
    if stream.token.upper not in _OUTCOMES:
        raise stream.expected(" or ".join(_OUTCOMES), _OUTCOMES)
    return SettleOutbox(topic=topic, partition=partition, is_appended=stream.take().upper == "APPENDED")


async def _run(session: Session, statement: SettleOutbox, _: Params) -> Result:
    opened = await session.database.require_tables()
    topic = await session.database.catalog.get(statement.topic)
    assert isinstance(statement.partition, int)  # bound
    check_partition(topic, statement.partition)
    if not await opened.relay.decide(topic.directory, statement.partition, appended=statement.is_appended):
        raise SqlError(
            f"no events for partition {statement.partition} of topic {topic.name!r} wait to be settled",
            hint="SHOW ROUTES has a problem where some do",
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
            "decides whether events for a topic of another engine were appended, where llog itself cannot know; "
            "`SHOW ROUTES` shows the `problem`",
        ),
    ),
)
COMMANDS: Final = (SETTLE_OUTBOX,)
