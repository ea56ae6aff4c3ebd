"""llog's own statements, from tokens to data. Clauses after a topic's name may stand in any order, each at most
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llog.cdc.events import Op
from llog.sql.parse.clauses import CONSUME_OPTIONS, SOURCE_OPTIONS, TOPIC_OPTIONS, duration_ms
from llog.sql.parse.lexer import Kind, Token
from llog.sql.parse.renderer import render
from llog.sql.parse.statements import (
    Ack,
    AddSource,
    Begin,
    ClearTopic,
    Commit,
    Consume,
    CreateTopic,
    Describe,
    DropSource,
    DropTopic,
    ResetGroup,
    Rollback,
    SettleOutbox,
    SetTopic,
    Show,
    Shown,
    StartAt,
    StartKind,
    Statement,
)
from llog.sql.parse.table_statements import check_expression
from llog.sql.parse.token_stream import TokenStream

_STARTS: Final = tuple(kind.name for kind in StartKind)
_SETTLED: Final = ("APPENDED", "MISSING")
_ACK: Final = ("GROUP", "MEMBER", "PARTITION", "UPTO")


def own_statement(stream: TokenStream) -> Statement | None:
    """The statement, read to its end; None if it is not llog's own."""
    first = stream.token.upper
    second = "TOPIC" if stream.ahead().upper == "TOPIC" and (first, "TOPIC") in _READERS else ""
    read = _READERS.get((first, second))
    if read is None:
        return None
    stream.at += 2 if second else 1
    statement = read(stream)
    stream.end()
    return statement


def _create(stream: TokenStream) -> Statement:
    if_not_exists = stream.accept("IF", "NOT", "EXISTS")
    topic = stream.topic()
    found = _clauses(stream, {"PARTITIONS": _value, "WITH": lambda c, _: c.options(TOPIC_OPTIONS)})
    return CreateTopic(
        topic=topic, if_not_exists=if_not_exists, partitions=found.get("PARTITIONS", 1), options=found.get("WITH", {})
    )


def _drop(stream: TokenStream) -> Statement:
    if_exists = stream.accept("IF", "EXISTS")
    return DropTopic(topic=stream.topic(), if_exists=if_exists)


def _clear(stream: TokenStream) -> Statement:
    return ClearTopic(topic=stream.topic())


def _alter(stream: TokenStream) -> Statement:
    topic = stream.topic()
    if stream.accept("SET"):
        return SetTopic(topic=topic, options=stream.options(TOPIC_OPTIONS))
    if stream.accept("DROP"):
        stream.expect("SOURCE")
        table = stream.table()
        return DropSource(topic=topic, table=table, ops=_ops(stream) if stream.accept("ON") else ())
    if stream.accept("SETTLE"):
        return _settle(stream, topic)
    if not stream.accept("ADD"):
        raise stream.expected("ADD SOURCE, DROP SOURCE, SET or SETTLE OUTBOX", ("ADD", "DROP", "SET", "SETTLE"))
    stream.expect("SOURCE")
    table = stream.table()
    if not stream.accept("ON"):
        raise stream.expected("ON INSERT, ON UPDATE or ON DELETE", ("ON",))
    ops = _ops(stream)
    found = _clauses(
        stream, {"WHERE": _where, "PARTITION": _partition_by, "WITH": lambda c, _: c.options(SOURCE_OPTIONS)}
    )
    return AddSource(
        topic=topic,
        table=table,
        ops=ops,
        where=found.get("WHERE"),
        partition_by=found.get("PARTITION"),
        options=found.get("WITH", {}),
    )


def _settle(stream: TokenStream, topic: str) -> SettleOutbox:
    stream.expect("OUTBOX", "PARTITION")
    partition = stream.clause("PARTITION")
    stream.expect("AS")
    if stream.token.upper not in _SETTLED:
        raise stream.expected("APPENDED or MISSING", _SETTLED)
    return SettleOutbox(topic=topic, partition=partition, appended=stream.take().upper == "APPENDED")


def _ops(stream: TokenStream) -> tuple[Op, ...]:
    found: list[Op] = []
    while True:
        names = tuple(op.name for op in Op)
        if stream.token.upper not in names:
            raise stream.expected("INSERT, UPDATE or DELETE", names)
        op = Op[stream.take().upper]
        if op in found:
            raise stream.error(f"{op.name} is named twice", token=stream.tokens[stream.at - 1])
        found.append(op)
        if not stream.accept(","):
            return tuple(sorted(found))


def _where(stream: TokenStream, _: str) -> str:
    """Up to WITH ( or PARTITION BY outside of all brackets."""
    ends = (("WITH", "("), ("PARTITION", "BY"))
    return _expression(stream, "WHERE", lambda: (stream.token.upper, stream.ahead().upper) in ends)


def _partition_by(stream: TokenStream, _: str) -> str:
    stream.expect("BY")
    if stream.token.upper != "(":
        raise stream.expected("( and an expression", hint="write PARTITION BY (user_id)")
    stream.take()
    text = _expression(stream, "PARTITION BY", lambda: stream.token.upper == ")")
    stream.expect(")")
    return text


def _expression(stream: TokenStream, clause: str, ends: Callable[[], bool]) -> str:
    """SQL as written, without comments, up to where it ends outside of all brackets. It is kept, so it cannot have
    parameters.
    """
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


def _consume(stream: TokenStream) -> Statement:
    if not stream.accept("FROM"):
        raise stream.expected("FROM and a topic", ("FROM",), "write CONSUME FROM topic GROUP 'name'")
    stream.accept("TOPIC") if stream.is_name(1) else None
    topic = stream.topic()
    found = _clauses(
        stream,
        {
            "GROUP": _value,
            "MEMBER": _value,
            "PARTITION": _value,
            "FROM": _start,
            "LIMIT": _value,
            "WAIT": _wait,
            "WITH": lambda c, _: c.options(CONSUME_OPTIONS),
        },
    )
    for clause in ("MEMBER", "WITH"):
        if clause in found and "GROUP" not in found:
            raise stream.error(f"{clause} needs a group", "add GROUP 'name'")
    return Consume(
        topic=topic,
        group=found.get("GROUP"),
        member=found.get("MEMBER"),
        partition=found.get("PARTITION"),
        start=found.get("FROM"),
        limit=found.get("LIMIT"),
        wait=found.get("WAIT"),
        options=found.get("WITH", {}),
    )


def _ack(stream: TokenStream) -> Statement:
    stream.accept("TOPIC") if stream.is_name(1) and stream.ahead(1).upper not in _ACK else None
    topic = stream.topic()
    found = _clauses(stream, {"GROUP": _value, "MEMBER": _value, "PARTITION": _value, "UPTO": _upto})
    if "GROUP" not in found:
        raise stream.expected("GROUP", hint="an ACK belongs to a consumer group: add GROUP 'name'")
    if "UPTO" not in found:
        raise stream.expected("UPTO OFFSET", hint="add UPTO OFFSET n, the last offset that is done")
    upto = found["UPTO"]
    if "PARTITION" in found:
        if upto[0][0] is not None:
            raise stream.error("PARTITION is named before UPTO and in it", "name it in one place")
        upto = ((found["PARTITION"], upto[0][1]),)
    return Ack(topic=topic, group=found["GROUP"], member=found.get("MEMBER"), upto=upto)


def _upto(stream: TokenStream, _: str) -> tuple[tuple[Any, Any], ...]:
    if stream.accept("OFFSET"):
        return ((None, stream.clause("OFFSET")),)
    if not stream.accept("("):
        raise stream.expected("OFFSET n or (PARTITION p OFFSET n, …)", ("OFFSET",))
    found: dict[Any, Any] = {}
    while True:
        stream.expect("PARTITION")
        token = stream.token
        partition = stream.clause("PARTITION")
        stream.expect("OFFSET")
        if partition in found:
            raise stream.error("this partition is named twice", token=token)
        found[partition] = stream.clause("OFFSET")
        if not stream.accept(","):
            stream.expect(")")
            return tuple(found.items())


def _reset(stream: TokenStream) -> Statement:
    stream.expect("CONSUMER", "GROUP")
    group = stream.clause("GROUP")
    stream.expect("ON")
    stream.accept("TOPIC") if stream.is_name(1) and stream.ahead(1).upper not in ("TO", "PARTITION") else None
    topic = stream.topic()
    partition = stream.clause("PARTITION") if stream.accept("PARTITION") else None
    stream.expect("TO")
    start = _start(stream, "")
    if start.kind is StartKind.AFTER:
        raise stream.error("RESET goes to EARLIEST, LATEST, OFFSET n or TIMESTAMP ts", "write OFFSET n + 1")
    return ResetGroup(group=group, topic=topic, partition=partition, start=start)


def _start(stream: TokenStream, _: str) -> StartAt:
    if stream.token.upper not in _STARTS:
        raise stream.expected("LATEST, EARLIEST, OFFSET n, AFTER n or TIMESTAMP ts", _STARTS)
    word = stream.take().upper
    kind = StartKind[word]
    if kind in (StartKind.LATEST, StartKind.EARLIEST):
        return StartAt(kind)
    return StartAt(kind, stream.clause(word))


def _show(stream: TokenStream) -> Statement:
    for shown in Shown:
        if stream.accept(*shown.value.upper().split()):
            return Show(what=shown)
    known = [shown.value.upper() for shown in Shown]
    hint = "write SHOW CONSUMER GROUPS" if stream.token.upper == "CONSUMER" else ""
    raise stream.expected(", ".join(known), [*known, "CONSUMER"], hint)


def _describe(stream: TokenStream) -> Statement:
    kind = ""
    if stream.token.upper in ("TOPIC", "TABLE") and stream.is_name(1):
        kind = stream.take().upper
    if kind == "TABLE":
        return Describe(name=stream.table())
    return Describe(name=stream.topic(), is_topic=True) if kind else Describe(name=stream.table_or_topic())


def _begin(stream: TokenStream) -> Statement:
    stream.accept("TRANSACTION") or stream.accept("WORK")
    return Begin()


def _start_transaction(stream: TokenStream) -> Statement:
    stream.expect("TRANSACTION")
    return Begin()


def _commit(stream: TokenStream) -> Statement:
    stream.accept("TRANSACTION") or stream.accept("WORK")
    return Commit()


def _rollback(stream: TokenStream) -> Statement:
    stream.accept("TRANSACTION") or stream.accept("WORK")
    return Rollback()


def _value(stream: TokenStream, clause: str) -> Any:
    return stream.clause(clause)


def _wait(stream: TokenStream, clause: str) -> Any:
    """`WAIT '5 seconds'`, `WAIT 500` (ms); `WAIT INTERVAL '5 seconds'` too."""
    stream.accept("INTERVAL")
    token = stream.token
    return stream.checked(clause, stream.scalar("a duration like '5 seconds'"), duration_ms, token)


def _clauses(stream: TokenStream, readers: dict[str, Callable[[TokenStream, str], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while stream.token.kind is not Kind.END:
        clause = stream.token.upper
        if clause not in readers:
            raise stream.expected(f"{', '.join(readers)} or the end", tuple(readers))
        if clause in found:
            raise stream.error(f"{clause} is given twice")
        stream.take()
        found[clause] = readers[clause](stream, clause)
    return found


_READERS: Final[dict[tuple[str, str], Callable[[TokenStream], Statement]]] = {
    ("CREATE", "TOPIC"): _create,
    ("DROP", "TOPIC"): _drop,
    ("CLEAR", "TOPIC"): _clear,
    ("ALTER", "TOPIC"): _alter,
    ("CONSUME", ""): _consume,
    ("ACK", ""): _ack,
    ("RESET", ""): _reset,
    ("SHOW", ""): _show,
    ("DESCRIBE", ""): _describe,
    ("DESC", ""): _describe,
    ("BEGIN", ""): _begin,
    ("START", ""): _start_transaction,
    ("COMMIT", ""): _commit,
    ("END", ""): _commit,
    ("ROLLBACK", ""): _rollback,
    ("ABORT", ""): _rollback,
}
FIRST_WORDS: Final = tuple(dict.fromkeys(first for first, _ in _READERS))
