"""ALTER TOPIC … ADD SOURCE and DROP SOURCE: which changes of which tables become events of which topics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from llog.batch.event_headers import Op
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.commands.topics import altered_topic
from llog.sql.parse.clauses import SOURCE_OPTIONS, Check
from llog.sql.parse.lexer import Kind, Token
from llog.sql.parse.parameters import Params
from llog.sql.parse.renderer import render
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.sql.session import Session

_OPS: Final = tuple(op.name for op in Op)


class AddSource(msgspec.Struct, frozen=True, kw_only=True):
    OPTIONS: ClassVar[Mapping[str, Check]] = SOURCE_OPTIONS
    topic: str
    table: str
    ops: tuple[Op, ...]
    where: str | None = None
    """SQL, as written."""
    partition_by: str | None = None
    """SQL, as written: one expression, or several with commas."""
    options: dict[str, Any] = {}


class DropSource(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    table: str
    ops: tuple[Op, ...] = ()
    """Empty for all of them."""


def _parse_add(stream: TokenStream) -> AddSource:
    topic = altered_topic(stream)
    stream.expect("ADD", "SOURCE")
    table = stream.table()
    if not stream.accept("ON"):
        raise stream.expected("ON INSERT, ON UPDATE or ON DELETE", ("ON",))
    ops = _parse_ops(stream)
    clauses = stream.clauses(
        {
            "WHERE": lambda _: _where(stream),
            "PARTITION": lambda _: _partition_by(stream),
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
    topic = altered_topic(stream)
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


def _where(stream: TokenStream) -> str:
    """Ends before WITH ( or PARTITION BY outside of all brackets."""
    ends = (("WITH", "("), ("PARTITION", "BY"))
    return _expression(stream, "WHERE", lambda: (stream.token.upper, stream.ahead().upper) in ends)


def _partition_by(stream: TokenStream) -> str:
    stream.expect("BY")
    if stream.token.upper != "(":
        raise stream.expected("( and an expression", hint="write PARTITION BY (user_id)")
    stream.take()
    text = _expression(stream, "PARTITION BY", lambda: stream.token.upper == ")")
    stream.expect(")")
    return text


def _expression(stream: TokenStream, clause: str, ends: Callable[[], bool]) -> str:
    """Reads SQL, without comments, up to where it ends outside of all brackets.

    The expression is stored with the route, so it cannot have parameters.
    """
    from llog.sql.parse.table_statements import check_expression  # loads sqlglot and DuckDB

    first, depth = stream.at, 0
    last: Token | None = None
    while stream.token.kind is not Kind.END and (depth or not ends()):
        last = stream.take()
        if last.kind is Kind.PARAMETER:
            raise stream.error(f"{clause} of a source cannot have parameters: it is kept", "write the value", last)
        depth += (last.upper in ("(", "[", "{")) - (last.upper in (")", "]", "}"))
    if last is None:
        raise stream.expected(f"the expression of {clause}")
    text = render(stream, {}, first, stream.at).text
    check_expression(text, clause, several=clause != "WHERE")
    return text


async def _run_add(session: Session, statement: AddSource, _: Params) -> Result:
    await (await session.database.sources()).add(statement)
    return Result("ALTER TOPIC")


async def _run_drop(session: Session, statement: DropSource, _: Params) -> Result:
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
            "adding a source again replaces its route",
        ),
    ),
)
DROP_SOURCE: Final = Command(
    statement=DropSource,
    begins=("ALTER TOPIC",),
    action="DROP SOURCE",
    parse=_parse_drop,
    run=_run_drop,
    usages=(Usage(Section.TOPICS, "ALTER TOPIC t DROP SOURCE table [ON …]"),),
)
COMMANDS: Final = (ADD_SOURCE, DROP_SOURCE)
