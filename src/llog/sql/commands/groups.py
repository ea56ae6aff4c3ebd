"""CONSUME, ACK and RESET CONSUMER GROUP, on topics of every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import pyarrow as pa

from llog.groups.acks import ack_warnings, committed_offsets
from llog.groups.options import ConsumeOptions, Start
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.parse.clauses import CONSUME_OPTIONS, Check, duration_ms
from llog.sql.parse.parameters import Params
from llog.sql.parse.statements import Parameter, StartAt, StartKind
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result
from llog.sql.topic_tables import as_text

if TYPE_CHECKING:
    from llog.sql.session import DatabaseSession

_STARTS: Final = tuple(kind.name for kind in StartKind)
_ACK_CLAUSES: Final = ("GROUP", "MEMBER", "PARTITION", "UPTO")
_CALL_FIELDS: Final = {"visibility": "visibility_ms"}
"""Options of CONSUME whose field of `ConsumeOptions` has another name."""


class Consume(msgspec.Struct, frozen=True, kw_only=True):
    OPTIONS: ClassVar[Mapping[str, Check]] = CONSUME_OPTIONS
    topic: str
    group: str | Parameter | None = None
    member: str | Parameter | None = None
    partition: int | Parameter | None = None
    start: StartAt | None = None
    limit: int | Parameter | None = None
    wait: str | int | Parameter | None = None
    """A duration as written ('5 seconds', '500ms') or in ms."""
    options: dict[str, Any] = {}


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    group: str | Parameter
    member: str | Parameter | None = None
    upto: tuple[tuple[int | Parameter | None, int | Parameter], ...]
    """(partition, offset) pairs; the partition is None if the statement does not name one."""


class ResetGroup(msgspec.Struct, frozen=True, kw_only=True):
    group: str | Parameter
    topic: str
    partition: int | Parameter | None = None
    start: StartAt


def _parse_consume(stream: TokenStream) -> Consume:
    stream.expect("CONSUME")
    if not stream.accept("FROM"):
        raise stream.expected("FROM and a topic", ("FROM",), "write CONSUME FROM topic GROUP 'name'")
    if stream.is_name(1):
        stream.accept("TOPIC")
    topic = stream.topic()
    clauses = stream.clauses(
        {
            "GROUP": stream.clause,
            "MEMBER": stream.clause,
            "PARTITION": stream.clause,
            "FROM": lambda _: _parse_start(stream),
            "LIMIT": stream.clause,
            "WAIT": lambda _: _parse_wait(stream),
            "WITH": lambda _: stream.options(CONSUME_OPTIONS),
        }
    )
    for clause in ("MEMBER", "WITH"):
        if clause in clauses and "GROUP" not in clauses:
            raise stream.error(f"{clause} needs a group", "add GROUP 'name'")
    return Consume(
        topic=topic,
        group=clauses.get("GROUP"),
        member=clauses.get("MEMBER"),
        partition=clauses.get("PARTITION"),
        start=clauses.get("FROM"),
        limit=clauses.get("LIMIT"),
        wait=clauses.get("WAIT"),
        options=clauses.get("WITH", {}),
    )


def _parse_wait(stream: TokenStream) -> Any:
    """Parse `'5 seconds'`, `500` (ms) or `INTERVAL '5 seconds'`."""
    stream.accept("INTERVAL")
    token = stream.token
    return stream.check_value("WAIT", stream.scalar("a duration like '5 seconds'"), duration_ms, token)


def _parse_start(stream: TokenStream) -> StartAt:
    if stream.token.upper not in _STARTS:
        raise stream.expected("LATEST, EARLIEST, OFFSET n, AFTER n or TIMESTAMP ts", _STARTS)
    word = stream.take().upper
    kind = StartKind[word]
    if kind in (StartKind.LATEST, StartKind.EARLIEST):
        return StartAt(kind)
    return StartAt(kind, stream.clause(word))


def _parse_ack(stream: TokenStream) -> Ack:
    stream.expect("ACK")
    if stream.is_name(1) and stream.ahead(1).upper not in _ACK_CLAUSES:
        stream.accept("TOPIC")
    topic = stream.topic()
    clauses = stream.clauses(
        {
            "GROUP": stream.clause,
            "MEMBER": stream.clause,
            "PARTITION": stream.clause,
            "UPTO": lambda _: _parse_upto(stream),
        }
    )
    if "GROUP" not in clauses:
        raise stream.expected("GROUP", hint="an ACK belongs to a consumer group: add GROUP 'name'")
    if "UPTO" not in clauses:
        raise stream.expected("UPTO OFFSET", hint="add UPTO OFFSET n, the last offset that was processed")
    upto = clauses["UPTO"]
    if "PARTITION" in clauses:
        if upto[0][0] is not None:
            raise stream.error("PARTITION is named both before UPTO and in it", "name it in one place")
        upto = ((clauses["PARTITION"], upto[0][1]),)
    return Ack(topic=topic, group=clauses["GROUP"], member=clauses.get("MEMBER"), upto=upto)


def _parse_upto(stream: TokenStream) -> tuple[tuple[Any, Any], ...]:
    if stream.accept("OFFSET"):
        return ((None, stream.clause("OFFSET")),)
    if not stream.accept("("):
        raise stream.expected("OFFSET n or (PARTITION p OFFSET n, …)", ("OFFSET",))
    offsets: dict[Any, Any] = {}
    while True:
        stream.expect("PARTITION")
        token = stream.token
        partition = stream.clause("PARTITION")
        stream.expect("OFFSET")
        if partition in offsets:
            raise stream.error("this partition is named twice", token=token)
        offsets[partition] = stream.clause("OFFSET")
        if not stream.accept(","):
            stream.expect(")")
            return tuple(offsets.items())


def _parse_reset(stream: TokenStream) -> ResetGroup:
    stream.expect("RESET", "CONSUMER", "GROUP")
    group = stream.clause("GROUP")
    stream.expect("ON")
    if stream.is_name(1) and stream.ahead(1).upper not in ("TO", "PARTITION"):
        stream.accept("TOPIC")
    topic = stream.topic()
    partition = stream.clause("PARTITION") if stream.accept("PARTITION") else None
    stream.expect("TO")
    start = _parse_start(stream)
    if start.kind is StartKind.AFTER:
        raise stream.error("RESET goes to EARLIEST, LATEST, OFFSET n or TIMESTAMP ts", "write OFFSET n + 1")
    return ResetGroup(group=group, topic=topic, partition=partition, start=start)


async def _run_consume(session: DatabaseSession, statement: Consume, _: Params) -> Result:
    fields = {
        "group": statement.group,
        "partition": statement.partition,
        "start": None if statement.start is None else _bound_start(statement.start),
        "limit": statement.limit,
        "wait_ms": statement.wait,
        **{_CALL_FIELDS.get(name, name): value for name, value in statement.options.items()},
    }
    options = msgspec.convert(
        {
            "topic": statement.topic,
            "member": session.member if statement.member is None else statement.member,
            **{name: value for name, value in fields.items() if value is not None},
        },
        ConsumeOptions,
        from_attributes=True,
    )
    dispatcher = session.database.dispatcher
    try:
        named = dispatcher.name_member(options)
        messages = await dispatcher.consume(named)
    except BaseException:
        session.change_member()  # the old name may hold claims on messages that the caller never got
        raise
    return Result("CONSUME", as_text(messages), member=None if named is options else named.member)


async def _run_ack(session: DatabaseSession, statement: Ack, _: Params) -> Result:
    upto: dict[int | None, int] = dict(statement.upto)  # type: ignore[arg-type]  # bound by now
    group = str(statement.group)
    member = session.member if statement.member is None else str(statement.member)
    acked = await session.database.dispatcher.ack(statement.topic, group, upto, member)
    table = _positions(statement.topic, group, committed_offsets(acked))
    return Result("ACK", table, warnings=ack_warnings(statement.topic, acked))


async def _run_reset(session: DatabaseSession, statement: ResetGroup, _: Params) -> Result:
    partition = statement.partition
    assert partition is None or isinstance(partition, int)  # bound
    group = str(statement.group)
    start = _bound_start(statement.start)
    moved = await session.database.dispatcher.reset(group, statement.topic, start, partition)
    return Result("RESET CONSUMER GROUP", _positions(statement.topic, group, moved))


def _bound_start(start: StartAt) -> Start:
    assert start.value is None or isinstance(start.value, int)  # bound
    return Start(start.kind.value, start.value)


def _positions(topic: str, group: str, next_offsets: dict[int, int]) -> pa.Table:
    partitions = sorted(next_offsets)
    return pa.table(
        {
            "topic": pa.repeat(topic, len(partitions)),
            "group": pa.repeat(group, len(partitions)),
            "partition": pa.array(partitions, pa.int32()),
            "next_offset": pa.array([next_offsets[each] for each in partitions], pa.int64()),
        }
    )


CONSUME: Final = Command(
    statement=Consume,
    begins=("CONSUME",),
    parse=_parse_consume,
    run=_run_consume,
    usages=(
        Usage(
            Section.GROUPS,
            "CONSUME FROM t [GROUP 'g'] [MEMBER 'm'] [PARTITION p] "
            "[FROM LATEST | EARLIEST | OFFSET n | AFTER n | TIMESTAMP ts] [LIMIT k] [WAIT '5s'] [WITH (…)]",
            "The options are `visibility`, `max_attempts`, `dead_letter` and `mode`.",
        ),
    ),
    changes_names=True,
)
ACK: Final = Command(
    statement=Ack,
    begins=("ACK",),
    parse=_parse_ack,
    run=_run_ack,
    usages=(
        Usage(
            Section.GROUPS,
            "ACK t GROUP 'g' [MEMBER 'm'] [PARTITION p] UPTO OFFSET n",
            "Acknowledges up to and including the offset. A topic with several partitions needs `PARTITION`.",
        ),
        Usage(
            Section.GROUPS,
            "ACK t GROUP 'g' UPTO (PARTITION 0 OFFSET a, PARTITION 1 OFFSET b)",
            "Acknowledges several partitions.",
        ),
    ),
)
RESET_GROUP: Final = Command(
    statement=ResetGroup,
    begins=("RESET",),
    parse=_parse_reset,
    run=_run_reset,
    usages=(
        Usage(
            Section.GROUPS,
            "RESET CONSUMER GROUP 'g' ON t [PARTITION p] TO EARLIEST | LATEST | OFFSET n | TIMESTAMP ts",
            "Moves the group's position and drops its claims.",
        ),
    ),
    changes_names=True,
)
COMMANDS: Final = (CONSUME, ACK, RESET_GROUP)
