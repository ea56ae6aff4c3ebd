from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llog.cdc.events import Op
from llog.errors import SqlError
from llog.sql.commands.groups import Ack, Consume, ResetGroup
from llog.sql.commands.insert_topic import InsertTopic
from llog.sql.commands.outbox import SettleOutbox
from llog.sql.commands.show import Describe, Listing, Show
from llog.sql.commands.sources import AddSource, DropSource
from llog.sql.commands.topics import ClearTopic, CreateTopic, DropTopic, SetTopic
from llog.sql.commands.transactions import Begin, Commit, Rollback
from llog.sql.parse.parameters import bind, parameters_of, split_params
from llog.sql.parse.statements import Parameter, StartAt, StartKind, Statement, TableStatement
from llog.sql.parser import parse, prepare

T = "app.new_messages"


def one(sql: str) -> Statement:
    (statement,) = parse(sql)
    return statement


def refused(sql: str) -> SqlError:
    with pytest.raises(SqlError) as caught:
        parse(sql)
    return caught.value


def consume(kind: StartKind, value: int | None = None, partition: int | None = None) -> Consume:
    return Consume(topic=T, group="ai-service", start=StartAt(kind, value), limit=100, partition=partition)


def route(partition_by: str | None = None, **options: str) -> AddSource:
    return AddSource(topic=T, table="chat.messages", ops=(Op.INSERT,), partition_by=partition_by, options=options)


DOCUMENTED = [
    ("CREATE TOPIC app.new_messages;", CreateTopic(topic=T)),
    ("CREATE TOPIC app.new_messages\nPARTITIONS 8;", CreateTopic(topic=T, partitions=8)),
    (
        "ALTER TOPIC app.new_messages\nADD SOURCE chat.messages\nON INSERT\nWITH (payload = 'key');",
        route(payload="key"),
    ),
    (
        "ALTER TOPIC app.new_messages\nADD SOURCE chat.messages\nON INSERT\nWITH (payload = 'full');",
        route(payload="full"),
    ),
    (
        "ALTER TOPIC app.new_messages\nADD SOURCE chat.messages\nON INSERT\nPARTITION BY (user_id)\nWITH (payload "
        "= 'key');",
        route("user_id", payload="key"),
    ),
    (
        "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nFROM LATEST\nLIMIT 100;",
        consume(StartKind.LATEST),
    ),
    (
        "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nFROM EARLIEST\nLIMIT 100;",
        consume(StartKind.EARLIEST),
    ),
    (
        "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nFROM OFFSET 12345\nLIMIT 100;",
        consume(StartKind.OFFSET, 12345),
    ),
    (
        "CONSUME FROM app.new_messages\nGROUP 'ai-service'\nPARTITION 3\nFROM OFFSET 120\nLIMIT 100;",
        consume(StartKind.OFFSET, 120, 3),
    ),
    (
        "ACK app.new_messages\nGROUP 'ai-service'\nPARTITION 3\nUPTO OFFSET 220;",
        Ack(topic=T, group="ai-service", upto=((3, 220),)),
    ),
    (
        "ACK app.new_messages\nGROUP 'ai-service'\nUPTO (\n  PARTITION 0 OFFSET 991,\n  PARTITION 1 OFFSET 410\n);",
        Ack(topic=T, group="ai-service", upto=((0, 991), (1, 410))),
    ),
    ("CREATE TOPIC app.new_messages PARTITIONS 4;", CreateTopic(topic=T, partitions=4)),
    (
        "ALTER TOPIC app.new_messages\nADD SOURCE chat.messages\nON INSERT\nPARTITION BY (user_id);",
        route("user_id"),
    ),
    (
        "ACK app.new_messages\nGROUP 'ai-service'\nPARTITION 2\nUPTO OFFSET 551;",
        Ack(topic=T, group="ai-service", upto=((2, 551),)),
    ),
]


@pytest.mark.parametrize(("sql", "expected"), DOCUMENTED)
def test_every_documented_example_parses_as_written(sql: str, expected: Statement) -> None:
    assert one(sql) == expected
    assert one(sql.lower()) == expected


OTHERS: list[tuple[str, Statement]] = [
    (
        "create topic if not exists t with (engine=disk, retention_seconds=60, retention_max_bytes='1MiB', "
        "cleanup='COMPACT')",
        CreateTopic(
            topic="t",
            if_not_exists=True,
            options={"engine": "disk", "retention_seconds": 60, "retention_max_bytes": 1 << 20, "cleanup": "compact"},
        ),
    ),
    ('DROP TOPIC IF EXISTS "a-b"', DropTopic(topic="a-b", if_exists=True)),
    ("CLEAR TOPIC Ns.T", ClearTopic(topic="Ns.T")),
    ("ALTER TOPIC t SETTLE OUTBOX PARTITION 2 AS MISSING", SettleOutbox(topic="t", partition=2, is_appended=False)),
    ("ALTER TOPIC t SETTLE OUTBOX PARTITION 0 AS APPENDED", SettleOutbox(topic="t", partition=0, is_appended=True)),
    ("ALTER TOPIC t SET (retention_seconds = NULL)", SetTopic(topic="t", options={"retention_seconds": None})),
    ("ALTER TOPIC t DROP SOURCE m", DropSource(topic="t", table="main.m")),
    (
        "ALTER TOPIC t DROP SOURCE M ON DELETE, INSERT",
        DropSource(topic="t", table="main.m", ops=(Op.INSERT, Op.DELETE)),
    ),
    (
        "ALTER TOPIC t ADD SOURCE s.m ON UPDATE, INSERT WITH (preview=9) PARTITION BY (lower(a), b) "
        "WHERE a::timestamp with time zone > now() /* c */ AND b IN (1, 2)",
        AddSource(
            topic="t",
            table="s.m",
            ops=(Op.INSERT, Op.UPDATE),
            where="a::timestamp with time zone > now() AND b IN (1, 2)",
            partition_by="lower(a), b",
            options={"preview": 9},
        ),
    ),
    (
        "CONSUME FROM t LIMIT 5 WAIT '5 seconds' MEMBER 'm' FROM TIMESTAMP '2026-01-31T12:00:00Z' GROUP 'g' "
        "WITH (visibility='60s', max_attempts=5, dead_letter='t.d', mode='assigned')",
        Consume(
            topic="t",
            group="g",
            member="m",
            limit=5,
            wait=5000,
            start=StartAt(StartKind.TIMESTAMP, 1769860800000),
            options={"visibility": 60_000, "max_attempts": 5, "dead_letter": "t.d", "mode": "assigned"},
        ),
    ),
    ("CONSUME FROM t FROM AFTER 7 WAIT '1m'", Consume(topic="t", start=StartAt(StartKind.AFTER, 7), wait=60_000)),
    ("CONSUME FROM t FROM TIMESTAMP 12 WAIT 500", Consume(topic="t", start=StartAt(StartKind.TIMESTAMP, 12), wait=500)),
    ("ACK t UPTO OFFSET 1 MEMBER 'm' GROUP 'g'", Ack(topic="t", group="g", member="m", upto=((None, 1),))),
    (
        "RESET CONSUMER GROUP 'g' ON t PARTITION 1 TO OFFSET 4",
        ResetGroup(group="g", topic="t", partition=1, start=StartAt(StartKind.OFFSET, 4)),
    ),
    ("RESET CONSUMER GROUP 'g' ON t TO LATEST", ResetGroup(group="g", topic="t", start=StartAt(StartKind.LATEST))),
    ("SHOW CONSUMER GROUPS", Show(what=Listing.GROUPS)),
    ("SHOW PARTITIONS", Show(what=Listing.PARTITIONS)),
    ("DESC a.b", Describe(name="a.b")),
    ("DESCRIBE TOPIC a.B", Describe(name="a.B", is_topic=True)),
    ("DESCRIBE TABLE M", Describe(name="main.m")),
]


@pytest.mark.parametrize(("sql", "expected"), OTHERS)
def test_other_statements_give_what_they_say(sql: str, expected: Statement) -> None:
    assert one(sql) == expected


def test_statements_are_split_outside_of_strings_names_and_comments() -> None:
    statements = parse(
        "BEGIN; ; /* ; /* nested; */ */ CLEAR TOPIC \"a\" -- ;\n; INSERT INTO t VALUES (';'); START "
        "TRANSACTION;END;ABORT"
    )
    assert [type(s) for s in statements] == [Begin, ClearTopic, TableStatement, Begin, Commit, Rollback]
    assert parse(" -- nothing\n ;; /* at all */") == []


@pytest.mark.parametrize(
    ("sql", "line", "column", "said"),
    [
        ("CONSUM FROM t", 1, 1, "did you mean CONSUME?"),
        ("CONSUME FROM t\nGRUOP 'g'", 2, 1, "did you mean GROUP?"),
        ("CONSUME FROM t GROUP g", 1, 22, "put text in single quotes"),
        ("ACK t UPTO OFFSET 1", 1, 20, "add GROUP 'name'"),
        ("ACK t GROUP 'g'", 1, 16, "UPTO OFFSET"),
        ("CREATE TOPIC t WITH (engin='disk')", 1, 22, "did you mean engine?"),
        ("CREATE TOPIC t WITH (zzz=1)", 1, 22, "retention_max_bytes"),
        ("CREATE TOPIC t WITH (engine='dsk')", 1, 29, "'rocksdb'"),
        ("CREATE TOPIC t PARTITIONS 0", 1, 27, "from 1 to"),
        ("CREATE TOPIC my-topic", 1, 16, "double quotes"),
        ("CONSUME FROM t LIMIT 1 LIMIT 2", 1, 24, "twice"),
        ("CONSUME FROM t WAIT 'soon'", 1, 21, "'soon'"),
        ("CONSUME FROM t FROM TIMESTAMP 'noon'", 1, 31, "noon"),
        ("CONSUME FROM t MEMBER 'm'", 1, 26, "GROUP"),
        ("ACK t GROUP 'g' PARTITION 1 UPTO (PARTITION 1 OFFSET 2)", 1, 56, "one place"),
        ("ACK t GROUP 'g' UPTO (PARTITION 1 OFFSET 2, PARTITION 1 OFFSET 3)", 1, 55, "twice"),
        ("SHOW TOPCS", 1, 6, "did you mean TOPICS?"),
        ("ALTER TOPIC t ADD SOURCE m", 1, 27, "ON INSERT"),
        ("ALTER TOPIC t ADD SOURCE m ON INSERT WHERE a = ?", 1, 48, "parameters"),
        ("SELECT 'abc", 1, 8, "unterminated"),
        ("SELECT 1 /* /* */", 1, 10, "unterminated"),
        ("SELECT (1", 1, 10, "ends before"),
        ("SELECT 1)", 1, 9, "closes nothing"),
        ("SELECT a$b", 1, 8, "double quotes"),
        ("DROP TOPIC t now", 1, 14, "end of the statement"),
    ],
)
def test_an_error_says_where_and_what_to_do(sql: str, line: int, column: int, said: str) -> None:
    error = refused(sql)
    assert (error.line, error.column, error.code) == (line, column, "sql")
    assert said in str(error)
    shown = str(error).split("\n")
    assert shown[2].index("^") == 2 + column - 1
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "text",
    ["a IN (SELECT 1)", "a, b", "1) OR (2", "a ORDER BY b", "a UNION SELECT 1", "sum(a) OVER ()", "", "a FROM m"],
)
def test_the_filter_of_a_source_is_one_expression_over_a_row(text: str) -> None:
    refused(f"ALTER TOPIC t ADD SOURCE m ON INSERT WHERE {text}")


def test_values_are_bound_into_their_clauses() -> None:
    statement = one("CONSUME FROM t GROUP ? PARTITION ? FROM TIMESTAMP ? LIMIT ? WAIT ? WITH (max_attempts = ?)")
    assert parameters_of(statement) == (0, 1, 2, 3, 4, 5)
    moment = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    bound = bind(statement, ["g'; DROP TABLE x", 2, moment, 5, "2s", 3])
    assert bound == Consume(
        topic="t",
        group="g'; DROP TABLE x",
        partition=2,
        start=StartAt(StartKind.TIMESTAMP, 1000),
        limit=5,
        wait=2000,
        options={"max_attempts": 3},
    )
    acked = bind(one("ACK t GROUP :g UPTO (PARTITION :p OFFSET :o)"), {"g": "x", "p": 0, "o": 9})
    assert acked == Ack(topic="t", group="x", upto=((0, 9),))


@pytest.mark.parametrize(
    ("sql", "params", "said"),
    [
        ("CONSUME FROM t LIMIT ?", ["5"], "LIMIT ($1): must be a whole number"),
        ("CONSUME FROM t LIMIT ?", [True], "LIMIT"),
        ("CONSUME FROM t LIMIT ?", [0], "LIMIT"),
        ("CONSUME FROM t GROUP $g", {"g": 7}, "GROUP ($g)"),
        ("CREATE TOPIC t WITH (engine = ?)", ["rocks"], "engine ($1)"),
        ("ACK t GROUP 'g' UPTO (PARTITION ? OFFSET 1, PARTITION ? OFFSET 2)", [1, 1], "twice"),
        ("CONSUME FROM t LIMIT ?", [], "has 1 parameters, but 0"),
        ("CONSUME FROM t LIMIT ?", [1, 2], "has 1 parameters, but 2"),
        ("CONSUME FROM t LIMIT $n", {}, "$n has no value"),
        ("CONSUME FROM t LIMIT $n", {"n": 1, "m": 2}, "'m'"),
        ("CONSUME FROM t LIMIT $n", [1], "mapping"),
        ("CONSUME FROM t LIMIT ?", {"n": 1}, "list"),
        ("CLEAR TOPIC t", [1], "has 0 parameters"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_clause(
    sql: str, params: list[object] | dict[str, object], said: str
) -> None:
    with pytest.raises(SqlError) as caught:
        bind(one(sql), params)
    assert said in str(caught.value)


def test_parameters_are_of_one_style_and_without_gaps() -> None:
    assert "use one style only" in str(refused("CONSUME FROM t GROUP ? LIMIT $1"))
    assert "$1 is missing" in str(refused("CONSUME FROM t LIMIT $2"))
    assert "from 1" in str(refused("CONSUME FROM t LIMIT $0"))
    assert "also written" in str(refused("SELECT $a, $A"))


def test_several_statements_share_parameters() -> None:
    statements = parse("CONSUME FROM t LIMIT ?; CLEAR TOPIC t; INSERT INTO t VALUES (?, ?)")
    assert split_params(statements, [1, 2, 3]) == [[1], [], [2, 3]]
    with pytest.raises(SqlError):
        split_params(statements, [1, 2])
    named = parse("CONSUME FROM t LIMIT $n; INSERT INTO t VALUES ($n, $m)")
    assert split_params(named, {"n": 1, "m": 2}) == [{"n": 1}, {"n": 1, "m": 2}]
    with pytest.raises(SqlError):
        split_params(named, {"n": 1, "m": 2, "o": 3})


def test_rows_for_a_topic_come_from_values_or_a_query() -> None:
    plain = one("INSERT INTO TOPIC t (key, payload) VALUES ('a', ?), ('b', ?)")
    assert isinstance(plain, InsertTopic)
    assert (plain.topic, plain.columns) == ("t", ("key", "payload"))
    bound = bind(plain, [b"1", "2"])
    assert isinstance(bound, InsertTopic)
    assert bound.select.values == (("a", b"1"), ("b", "2"))
    query = one("INSERT INTO TOPIC a.b SELECT x FROM u JOIN TOPIC c.d ON true WHERE y = ?")
    assert isinstance(query, InsertTopic)
    assert query.select.tables == ("main.u",)
    assert query.select.topics == {"topic_1": "c.d"}
    assert query.select.parameters == (0,)
    assert isinstance(one("INSERT INTO topic VALUES (1)"), TableStatement)
    assert isinstance(one("INSERT INTO topic (a) SELECT 1"), TableStatement)


def test_short_texts_are_remembered() -> None:
    assert prepare("CLEAR TOPIC t")[0] is prepare("CLEAR TOPIC t")[0]
    long = "CLEAR TOPIC t" + " " * 10_000
    assert prepare(long) == prepare("CLEAR TOPIC t")


@pytest.mark.parametrize(
    "sql",
    [
        "x" * (100 << 20),
        "é" * (9 << 20),
        "(" * 201 + ")" * 201,
        "SELECT " + "CASE WHEN true THEN " * 201 + "1" + " END" * 201,
        "/*" * 100_000,
        "SELECT " + "NOT " * 10_000 + "true",
        "SELECT " + "- " * 10_000 + "1",
        "SELECT a" + "[1]" * 10_000,
        "SELECT 1" + " UNION ALL SELECT 1" * 50_000,
        "SELECT " + "1+" * 10_000 + "1",
        "SELECT 1" + "::int" * 10_000,
        "SELECT " + "f(" * 199 + "1" + ")" * 199,
        "SELECT " + "INTERVAL " * 3000 + "1",
        "SELECT 1 FROM a " + "JOIN a " * 3000,
        "SELECT " + "1," * 600_000 + "1",
    ],
    ids=lambda sql: sql[:20],
)
def test_what_is_too_large_or_too_deep_is_refused(sql: str) -> None:
    refused(sql)


SOUP = (
    "CREATE DROP CLEAR ALTER TOPIC TABLE CONSUME FROM GROUP 'g' PARTITION LIMIT WAIT WITH ( ) , ; . = 1 "
    '2.5 -1 ? $1 $n :n t a.b\n"q" OFFSET UPTO ACK ADD SOURCE ON INSERT UPDATE DELETE WHERE BY SET RESET '
    "CONSUMER TO SHOW DESCRIBE INTO VALUES SELECT * JOIN AS UNION\nALL NULL CASE WHEN THEN END NOT [ ] { "
    "} : :: -> e'\\n' x'ff' $$s$$ -- /* */ \n system.topics INTERVAL BEGIN IF EXISTS PRIMARY KEY "
    "INT\nCHECK DEFAULT RETURNING CONFLICT DO NOTHING EXCEPT WINDOW OVER USING LATERAL CAST 'x' \x00 é 😀 "
    "LATEST TIMESTAMP"
)
WORDS = SOUP.split(" ")

VALID = (
    [sql for sql, _ in DOCUMENTED]
    + [sql for sql, _ in OTHERS]
    + [
        "WITH c AS (SELECT * FROM a) INSERT INTO b (x, y) SELECT * FROM c JOIN TOPIC d.e ON true ON CONFLICT DO "
        "NOTHING RETURNING x",
        "UPDATE t SET a = CASE WHEN b THEN $1 ELSE 2 END FROM u WHERE u.x = t.x",
        "CREATE TABLE t (id BIGINT PRIMARY KEY, b VARCHAR NOT NULL DEFAULT 'x', c DECIMAL(10, 2), CHECK (id > 0))",
        "INSERT INTO t (a, b) VALUES (1, 'x'), (-2.5, NULL), (?, TRUE)",
        "SELECT a, sum(b) OVER (PARTITION BY c ORDER BY d) FROM t, system.topics WHERE x[1:2] = [1] AND {'a': 1}.a "
        "= :n GROUP BY ALL",
    ]
)


def _only_statements_or_an_sql_error(sql: str) -> None:
    try:
        for statement in parse(sql):
            parameters_of(statement)
    except SqlError:
        pass


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=25), st.sampled_from([" ", ""]))
def test_a_soup_of_tokens_gives_statements_or_an_sql_error(words: list[str], between: str) -> None:
    _only_statements_or_an_sql_error(between.join(words))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
@example("$²")
@example("CONSUME FROM t LIMIT $²")
@example("SELECT ²")
@example("SELECT \ud800")
def test_any_text_gives_statements_or_an_sql_error(text: str) -> None:
    _only_statements_or_an_sql_error(text)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_statements_give_statements_or_an_sql_error(data: st.DataObject) -> None:
    sql = data.draw(st.sampled_from(VALID))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(sql)))
        gone = data.draw(st.integers(0, 12))
        sql = sql[:at] + data.draw(st.sampled_from(["", *WORDS, " FROM TOPIC x ", "'", '"'])) + sql[at + gone :]
    _only_statements_or_an_sql_error(sql)


def test_a_parameter_is_told_from_a_slice_a_struct_and_a_cast() -> None:
    statement = one("SELECT x[1:n], x[:n], {'a':b, 'c': :d}, a::int FROM t WHERE z=:q")
    assert parameters_of(statement) == ("d", "q")
    assert one("CONSUME FROM t LIMIT :n") == Consume(topic="t", limit=Parameter("n"))
