"""ALTER TOPIC … ADD SOURCE and DROP SOURCE, which choose the changes of tables that become events of a topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from llog.batch.event_headers import Op
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.commands.topics import parse_altered_topic
from llog.sql.parse.clauses import SOURCE_OPTIONS, Check
from llog.sql.parse.lexer import Kind, Token
from llog.sql.parse.parameters import Params
from llog.sql.parse.renderer import render
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.sql.session import DatabaseSession

_OPS: Final = tuple(op.name for op in Op)


class AddSource(msgspec.Struct, frozen=True, kw_only=True):
    OPTIONS: ClassVar[Mapping[str, Check]] = SOURCE_OPTIONS
    topic: str
    table: str
    ops: tuple[Op, ...]
    where: str | None = None
    """An SQL expression as written."""
    partition_by: str | None = None
    """SQL as written: one expression, or several with commas."""
    options: dict[str, Any] = {}


class DropSource(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    table: str
    ops: tuple[Op, ...] = ()
    """Empty for all ops."""


def _parse_add(stream: TokenStream) -> AddSource:
    topic = parse_altered_topic(stream)
    stream.expect("ADD", "SOURCE")
    table = stream.table()
    if not stream.accept("ON"):
        raise stream.expected("ON INSERT, ON UPDATE or ON DELETE", ("ON",))
    ops = _parse_ops(stream)
    clauses = stream.clauses(
        {
            "WHERE": lambda _: _parse_where(stream),
            "PARTITION": lambda _: _parse_partition_by(stream),
            "WITH": lambda _: stream.options(SOURCE_OPTIONS),
        }
    )
    return AddSource(
        topic=topic,
        table=table,
        ops=ops,
        where=clauses.get("WHERE"),
        partition_by=clauses.get("PARTITION"),
        options=clauses.get("WITH", {}),
    )


def _parse_drop(stream: TokenStream) -> DropSource:
    topic = parse_altered_topic(stream)
    stream.expect("DROP", "SOURCE")
    table = stream.table()
    return DropSource(topic=topic, table=table, ops=_parse_ops(stream) if stream.accept("ON") else ())


def _parse_ops(stream: TokenStream) -> tuple[Op, ...]:
    ops: list[Op] = []
    while True:
        if stream.token.upper not in _OPS:
            raise stream.expected("INSERT, UPDATE or DELETE", _OPS)
        op = Op[stream.take().upper]
        if op in ops:
            raise stream.error(f"{op.name} is named twice", token=stream.tokens[stream.at - 1])
        ops.append(op)
        if not stream.accept(","):
            return tuple(sorted(ops))


def _parse_where(stream: TokenStream) -> str:
    """Parse an expression that ends before WITH ( or PARTITION BY outside of all brackets."""
    ends = (("WITH", "("), ("PARTITION", "BY"))
    return _parse_expression(stream, "WHERE", lambda: (stream.token.upper, stream.ahead().upper) in ends)


def _parse_partition_by(stream: TokenStream) -> str:
    stream.expect("BY")
    if stream.token.upper != "(":
        raise stream.expected("( and an expression", hint="write PARTITION BY (user_id)")
    stream.take()
    text = _parse_expression(stream, "PARTITION BY", lambda: stream.token.upper == ")")
    stream.expect(")")
    return text


def _parse_expression(stream: TokenStream, clause: str, ends: Callable[[], bool]) -> str:
    """Return SQL, without comments, up to where `ends` outside of all brackets.

    The expression is stored with the route, so it cannot have parameters.
    """
    from llog.sql.parse.table_statements import check_expression  # loads sqlglot and DuckDB

    first, depth = stream.at, 0
    last: Token | None = None
    while stream.token.kind is not Kind.END and (depth or not ends()):
        last = stream.take()
        if last.kind is Kind.PARAMETER:
            raise stream.error(
                f"{clause} of a source cannot have parameters, since it is stored", "write the value", last
            )
        depth += (last.upper in ("(", "[", "{")) - (last.upper in (")", "]", "}"))
    if last is None:
        raise stream.expected(f"the expression of {clause}")
    text = render(stream, {}, first, stream.at).text
    check_expression(text, clause, several=clause != "WHERE")
    return text


async def _run_add(session: DatabaseSession, statement: AddSource, _: Params) -> Result:
    await (await session.database.sources()).add(statement)
    return Result("ALTER TOPIC")


async def _run_drop(session: DatabaseSession, statement: DropSource, _: Params) -> Result:
    await (await session.database.sources()).drop(statement)
    return Result("ALTER TOPIC")


ADD_SOURCE: Final = Command(
    statement=AddSource,
    begins=("ALTER TOPIC",),
    action="ADD SOURCE",
    parse=_parse_add,
    run=_run_add,
    usages=(
        Usage(
            Section.TOPICS,
            "ALTER TOPIC t ADD SOURCE table ON INSERT, UPDATE, DELETE [WHERE expr] [PARTITION BY (expr)] "
            "[WITH (payload = 'key', preview = 40)]",
            "Turns changes of the table into events of the topic ([topics.md](topics.md)). Adding a source again "
            "replaces its routes.",
        ),
    ),
)
DROP_SOURCE: Final = Command(
    statement=DropSource,
    begins=("ALTER TOPIC",),
    action="DROP SOURCE",
    parse=_parse_drop,
    run=_run_drop,
    usages=(Usage(Section.TOPICS, "ALTER TOPIC t DROP SOURCE table [ON …]", "Without `ON`, drops all its routes."),),
)
COMMANDS: Final = (ADD_SOURCE, DROP_SOURCE)
