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
from llog.sql.parse.token_stream import Cursor

_STARTS: Final = tuple(kind.name for kind in StartKind)
_SETTLED: Final = ("APPENDED", "MISSING")
_ACK: Final = ("GROUP", "MEMBER", "PARTITION", "UPTO")


def own_statement(cursor: Cursor) -> Statement | None:
    """The statement, read to its end; None if it is not llog's own."""
    first = cursor.token.upper
    second = "TOPIC" if cursor.ahead().upper == "TOPIC" and (first, "TOPIC") in _READERS else ""
    read = _READERS.get((first, second))
    if read is None:
        return None
    cursor.at += 2 if second else 1
    statement = read(cursor)
    cursor.end()
    return statement


def _create(cursor: Cursor) -> Statement:
    if_not_exists = cursor.accept("IF", "NOT", "EXISTS")
    topic = cursor.topic()
    found = _clauses(cursor, {"PARTITIONS": _value, "WITH": lambda c, _: c.options(TOPIC_OPTIONS)})
    return CreateTopic(
        topic=topic, if_not_exists=if_not_exists, partitions=found.get("PARTITIONS", 1), options=found.get("WITH", {})
    )


def _drop(cursor: Cursor) -> Statement:
    if_exists = cursor.accept("IF", "EXISTS")
    return DropTopic(topic=cursor.topic(), if_exists=if_exists)


def _clear(cursor: Cursor) -> Statement:
    return ClearTopic(topic=cursor.topic())


def _alter(cursor: Cursor) -> Statement:
    topic = cursor.topic()
    if cursor.accept("SET"):
        return SetTopic(topic=topic, options=cursor.options(TOPIC_OPTIONS))
    if cursor.accept("DROP"):
        cursor.expect("SOURCE")
        table = cursor.table()
        return DropSource(topic=topic, table=table, ops=_ops(cursor) if cursor.accept("ON") else ())
    if cursor.accept("SETTLE"):
        return _settle(cursor, topic)
    if not cursor.accept("ADD"):
        raise cursor.expected("ADD SOURCE, DROP SOURCE, SET or SETTLE OUTBOX", ("ADD", "DROP", "SET", "SETTLE"))
    cursor.expect("SOURCE")
    table = cursor.table()
    if not cursor.accept("ON"):
        raise cursor.expected("ON INSERT, ON UPDATE or ON DELETE", ("ON",))
    ops = _ops(cursor)
    found = _clauses(
        cursor, {"WHERE": _where, "PARTITION": _partition_by, "WITH": lambda c, _: c.options(SOURCE_OPTIONS)}
    )
    return AddSource(
        topic=topic,
        table=table,
        ops=ops,
        where=found.get("WHERE"),
        partition_by=found.get("PARTITION"),
        options=found.get("WITH", {}),
    )


def _settle(cursor: Cursor, topic: str) -> SettleOutbox:
    cursor.expect("OUTBOX", "PARTITION")
    partition = cursor.clause("PARTITION")
    cursor.expect("AS")
    if cursor.token.upper not in _SETTLED:
        raise cursor.expected("APPENDED or MISSING", _SETTLED)
    return SettleOutbox(topic=topic, partition=partition, appended=cursor.take().upper == "APPENDED")


def _ops(cursor: Cursor) -> tuple[Op, ...]:
    found: list[Op] = []
    while True:
        names = tuple(op.name for op in Op)
        if cursor.token.upper not in names:
            raise cursor.expected("INSERT, UPDATE or DELETE", names)
        op = Op[cursor.take().upper]
        if op in found:
            raise cursor.error(f"{op.name} is named twice", token=cursor.tokens[cursor.at - 1])
        found.append(op)
        if not cursor.accept(","):
            return tuple(sorted(found))


def _where(cursor: Cursor, _: str) -> str:
    """Up to WITH ( or PARTITION BY outside of all brackets."""
    ends = (("WITH", "("), ("PARTITION", "BY"))
    return _expression(cursor, "WHERE", lambda: (cursor.token.upper, cursor.ahead().upper) in ends)


def _partition_by(cursor: Cursor, _: str) -> str:
    cursor.expect("BY")
    if cursor.token.upper != "(":
        raise cursor.expected("( and an expression", hint="write PARTITION BY (user_id)")
    cursor.take()
    text = _expression(cursor, "PARTITION BY", lambda: cursor.token.upper == ")")
    cursor.expect(")")
    return text


def _expression(cursor: Cursor, clause: str, ends: Callable[[], bool]) -> str:
    """SQL as written, without comments, up to where it ends outside of all brackets. It is kept, so it cannot have
    parameters.
    """
    first, depth = cursor.at, 0
    last: Token | None = None
    while cursor.token.kind is not Kind.END and (depth or not ends()):
        last = cursor.take()
        if last.kind is Kind.PARAMETER:
            raise cursor.error(f"{clause} of a source cannot have parameters: it is kept", "write the value", last)
        depth += (last.upper in ("(", "[", "{")) - (last.upper in (")", "]", "}"))
    if last is None:
        raise cursor.expected(f"the expression of {clause}")
    text = render(cursor, {}, first, cursor.at).text
    check_expression(text, clause, several=clause != "WHERE")
    return text


def _consume(cursor: Cursor) -> Statement:
    if not cursor.accept("FROM"):
        raise cursor.expected("FROM and a topic", ("FROM",), "write CONSUME FROM topic GROUP 'name'")
    cursor.accept("TOPIC") if cursor.is_name(1) else None
    topic = cursor.topic()
    found = _clauses(
        cursor,
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
            raise cursor.error(f"{clause} needs a group", "add GROUP 'name'")
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


def _ack(cursor: Cursor) -> Statement:
    cursor.accept("TOPIC") if cursor.is_name(1) and cursor.ahead(1).upper not in _ACK else None
    topic = cursor.topic()
    found = _clauses(cursor, {"GROUP": _value, "MEMBER": _value, "PARTITION": _value, "UPTO": _upto})
    if "GROUP" not in found:
        raise cursor.expected("GROUP", hint="an ACK belongs to a consumer group: add GROUP 'name'")
    if "UPTO" not in found:
        raise cursor.expected("UPTO OFFSET", hint="add UPTO OFFSET n, the last offset that is done")
    upto = found["UPTO"]
    if "PARTITION" in found:
        if upto[0][0] is not None:
            raise cursor.error("PARTITION is named before UPTO and in it", "name it in one place")
        upto = ((found["PARTITION"], upto[0][1]),)
    return Ack(topic=topic, group=found["GROUP"], member=found.get("MEMBER"), upto=upto)


def _upto(cursor: Cursor, _: str) -> tuple[tuple[Any, Any], ...]:
    if cursor.accept("OFFSET"):
        return ((None, cursor.clause("OFFSET")),)
    if not cursor.accept("("):
        raise cursor.expected("OFFSET n or (PARTITION p OFFSET n, …)", ("OFFSET",))
    found: dict[Any, Any] = {}
    while True:
        cursor.expect("PARTITION")
        token = cursor.token
        partition = cursor.clause("PARTITION")
        cursor.expect("OFFSET")
        if partition in found:
            raise cursor.error("this partition is named twice", token=token)
        found[partition] = cursor.clause("OFFSET")
        if not cursor.accept(","):
            cursor.expect(")")
            return tuple(found.items())


def _reset(cursor: Cursor) -> Statement:
    cursor.expect("CONSUMER", "GROUP")
    group = cursor.clause("GROUP")
    cursor.expect("ON")
    cursor.accept("TOPIC") if cursor.is_name(1) and cursor.ahead(1).upper not in ("TO", "PARTITION") else None
    topic = cursor.topic()
    partition = cursor.clause("PARTITION") if cursor.accept("PARTITION") else None
    cursor.expect("TO")
    start = _start(cursor, "")
    if start.kind is StartKind.AFTER:
        raise cursor.error("RESET goes to EARLIEST, LATEST, OFFSET n or TIMESTAMP ts", "write OFFSET n + 1")
    return ResetGroup(group=group, topic=topic, partition=partition, start=start)


def _start(cursor: Cursor, _: str) -> StartAt:
    if cursor.token.upper not in _STARTS:
        raise cursor.expected("LATEST, EARLIEST, OFFSET n, AFTER n or TIMESTAMP ts", _STARTS)
    word = cursor.take().upper
    kind = StartKind[word]
    if kind in (StartKind.LATEST, StartKind.EARLIEST):
        return StartAt(kind)
    return StartAt(kind, cursor.clause(word))


def _show(cursor: Cursor) -> Statement:
    for shown in Shown:
        if cursor.accept(*shown.value.upper().split()):
            return Show(what=shown)
    known = [shown.value.upper() for shown in Shown]
    hint = "write SHOW CONSUMER GROUPS" if cursor.token.upper == "CONSUMER" else ""
    raise cursor.expected(", ".join(known), [*known, "CONSUMER"], hint)


def _describe(cursor: Cursor) -> Statement:
    kind = ""
    if cursor.token.upper in ("TOPIC", "TABLE") and cursor.is_name(1):
        kind = cursor.take().upper
    if kind == "TABLE":
        return Describe(name=cursor.table())
    return Describe(name=cursor.topic(), is_topic=True) if kind else Describe(name=cursor.table_or_topic())


def _begin(cursor: Cursor) -> Statement:
    cursor.accept("TRANSACTION") or cursor.accept("WORK")
    return Begin()


def _start_transaction(cursor: Cursor) -> Statement:
    cursor.expect("TRANSACTION")
    return Begin()


def _commit(cursor: Cursor) -> Statement:
    cursor.accept("TRANSACTION") or cursor.accept("WORK")
    return Commit()


def _rollback(cursor: Cursor) -> Statement:
    cursor.accept("TRANSACTION") or cursor.accept("WORK")
    return Rollback()


def _value(cursor: Cursor, clause: str) -> Any:
    return cursor.clause(clause)


def _wait(cursor: Cursor, clause: str) -> Any:
    """`WAIT '5 seconds'`, `WAIT 500` (ms); `WAIT INTERVAL '5 seconds'` too."""
    cursor.accept("INTERVAL")
    token = cursor.token
    return cursor.checked(clause, cursor.scalar("a duration like '5 seconds'"), duration_ms, token)


def _clauses(cursor: Cursor, readers: dict[str, Callable[[Cursor, str], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while cursor.token.kind is not Kind.END:
        clause = cursor.token.upper
        if clause not in readers:
            raise cursor.expected(f"{', '.join(readers)} or the end", tuple(readers))
        if clause in found:
            raise cursor.error(f"{clause} is given twice")
        cursor.take()
        found[clause] = readers[clause](cursor, clause)
    return found


_READERS: Final[dict[tuple[str, str], Callable[[Cursor], Statement]]] = {
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
