from __future__ import annotations

from decimal import Decimal
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llog.errors import SqlError
from llog.sql.commands.topics import CreateTopic
from llog.sql.parse.parameters import bind
from llog.sql.parse.statements import Parameter, TableStatement
from llog.sql.parser import parse


def one(sql: str) -> TableStatement:
    (statement,) = parse(sql)
    assert isinstance(statement, TableStatement)
    return statement


def refused(sql: str) -> str:
    with pytest.raises(SqlError) as caught:
        parse(sql)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sql", "kind", "target", "tables"),
    [
        ("CREATE TABLE Chat.M (id INT PRIMARY KEY)", "CREATE TABLE", "chat.m", {"chat.m"}),
        ("DROP TABLE IF EXISTS m", "DROP TABLE", "main.m", {"main.m"}),
        ("INSERT INTO t SELECT * FROM u", "INSERT", "main.t", {"main.t", "main.u"}),
        ("UPDATE t AS q SET a = 1 FROM s.u WHERE u.x = q.x", "UPDATE", "main.t", {"main.t", "s.u"}),
        ("DELETE FROM t USING u WHERE t.a = u.a", "DELETE", "main.t", {"main.t", "main.u"}),
        ("TRUNCATE TABLE S.T", "DELETE", "s.t", {"s.t"}),
        ("SELECT 1", "SELECT", None, set()),
        ("VALUES (1), (2)", "SELECT", None, set()),
        ("FROM t", "SELECT", None, {"main.t"}),
        ("(SELECT a FROM t) EXCEPT (SELECT b FROM u)", "SELECT", None, {"main.t", "main.u"}),
        ("SELECT * FROM range(3) r, unnest([1]) u, t", "SELECT", None, {"main.t"}),
        ("SELECT (SELECT max(a) FROM t) WHERE EXISTS (FROM u)", "SELECT", None, {"main.t", "main.u"}),
        ("WITH c AS (SELECT * FROM t) INSERT INTO c SELECT * FROM c", "INSERT", "main.c", {"main.c", "main.t"}),
    ],
)
def test_kind_target_and_tables_are_found(sql: str, kind: str, target: str | None, tables: set[str]) -> None:
    statement = one(sql)
    assert (statement.kind, statement.target, set(statement.tables)) == (kind, target, tables)


def test_names_of_a_with_are_no_tables_where_they_are_visible() -> None:
    assert one("WITH a AS (SELECT 1), b AS (FROM a) SELECT * FROM b, (SELECT * FROM a)").tables == ()
    assert one("WITH t AS (SELECT * FROM t) SELECT * FROM t").tables == ("main.t",)
    assert one("WITH RECURSIVE t AS (SELECT 1 UNION ALL SELECT * FROM t) SELECT * FROM t").tables == ()
    assert one("SELECT * FROM (WITH x AS (SELECT 1) FROM x), x").tables == ("main.x",)
    assert one("WITH x AS (SELECT 1) SELECT * FROM s.x").tables == ("s.x",)


def test_topics_are_replaced_wherever_a_table_can_stand() -> None:
    statement = one(
        'WITH c AS (SELECT * FROM TOPIC a.b) SELECT * FROM c, TOPIC "x-y" z JOIN TOPIC d ON true '
        "WHERE EXISTS (SELECT 1 FROM (TOPIC e.f AS g))"
    )
    assert list(statement.topics.values()) == ["a.b", "x-y", "d", "e.f"]
    assert statement.tables == ()
    assert 'FROM topic_1 AS "b"' in statement.sql


def test_words_that_only_look_like_a_topic_are_left_alone() -> None:
    sql = (
        "SELECT 'FROM TOPIC x', \"FROM TOPIC y\", a topic, topic b FROM main.topic AS t WHERE a IS DISTINCT FROM topic"
    )
    assert one(sql).sql == sql
    assert one(sql).topics == {}
    assert one("SELECT * FROM topic WHERE 'system.topics' = \"system.topics\"").tables == ("main.topic",)
    assert one("SELECT topic_1 FROM TOPIC x").topics == {"topic_1_": "x"}


def test_system_tables_are_replaced() -> None:
    statement = one(
        "SELECT topics.name, r.x FROM system.topics JOIN System.Routes r ON true WHERE 'system.partitions' = ''"
    )
    assert statement.system == {"system_topics": "topics", "system_routes": "routes"}
    assert statement.tables == ()
    assert "FROM system_topics AS topics JOIN system_routes r" in " ".join(statement.sql.split())
    assert "system.topic_offsets" in refused("SELECT * FROM system.secrets")
    assert "cannot be changed" in refused("INSERT INTO system.topics VALUES (1)")


def test_text_for_duckdb_is_the_text_as_written() -> None:
    sql = "SELECT len(a) AS \"X y\", e'a\\n', x'ff', $$it's$$, a::INT, b->>'$.c' FROM s.t ORDER BY ALL LIMIT 10"
    assert one(sql).sql == sql
    assert (
        one("SELECT a -- x\n, b /* y */ FROM T WHERE c = :c AND d = :d").sql
        == "SELECT a\n, b FROM main.T WHERE c = $c AND d = $d "
    )
    assert one("SELECT ?, ?").sql == "SELECT $1 , $2 "


QUERIES = [
    "SELECT a.i, count(*) FILTER (WHERE b.s > 'k') FROM a JOIN b USING (i) GROUP BY ALL ORDER BY 1",
    "SELECT i, sum(i) OVER (PARTITION BY i % 2 ORDER BY i ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) FROM a ORDER BY i",
    "WITH a AS (SELECT i + 1 AS i FROM a) SELECT * FROM a UNION ALL SELECT i FROM main.a ORDER BY 1",
    "SELECT [x * 2 FOR x IN [1, 2]], {'k': i}.k, list_transform([i], lambda x: x + 1) FROM a WHERE i IN "
    "(SELECT i FROM b) ORDER BY i",
    "SELECT a.* EXCLUDE (i), b.s[1:2], b.s LIKE '%k' FROM a, b WHERE a.i = b.i ORDER BY ALL",
    "FROM b SELECT s, CASE i WHEN 1 THEN 'one' ELSE 'it''s' END AS w QUALIFY row_number() OVER (ORDER BY i) < 3",
]


@pytest.mark.parametrize("sql", QUERIES)
def test_duckdb_answers_the_same_for_the_text_that_is_made(sql: str) -> None:
    connection = duckdb.connect()
    connection.execute("CREATE TABLE a AS SELECT i::INT AS i, i AS j FROM range(5) r(i)")
    connection.execute("CREATE TABLE b AS SELECT i::INT AS i, 'k' || i AS s FROM range(1, 4) r(i)")
    made = connection.execute(one(sql).sql)
    names = [column[0] for column in made.description]
    rows = made.fetchall()
    asked = connection.execute(sql)
    assert [column[0] for column in asked.description] == names
    assert asked.fetchall() == rows


def test_plain_rows_are_values() -> None:
    statement = one("INSERT INTO T (A, b) VALUES (1, 'it''s'), (-2.50, NULL), (1e3, TRUE), (x'00ff', e'\\t'), (?, +7)")
    assert statement.columns == ("a", "b")
    assert statement.values == (
        (1, "it's"),
        (Decimal("-2.50"), None),
        (1000.0, True),
        (b"\x00\xff", "\t"),
        (Parameter(0), 7),
    )
    assert statement.sql.startswith("INSERT INTO main.T (A, b) VALUES")
    bound = bind(statement, ["'); DROP TABLE t; --"])
    assert isinstance(bound, TableStatement)
    assert bound.sql == statement.sql
    assert bound.values is not None
    assert bound.values[4] == ("'); DROP TABLE t; --", 7)


@pytest.mark.parametrize(
    "row", ["1 + 1", "now()", "DEFAULT", "DATE '2020-01-01'", "(SELECT 1)", "[1]", "1e999", "'1'::INT", "9" * 60, "a"]
)
def test_rows_that_need_duckdb_are_no_values(row: str) -> None:
    assert one(f"INSERT INTO t VALUES ({row})").values is None


def test_rows_of_different_widths_are_refused() -> None:
    assert "2 values, but 1" in refused("INSERT INTO t VALUES (1), (1, 2)")
    assert "1 values, but 2" in refused("INSERT INTO t (a, b) VALUES (1)")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(-(10**37), 10**37),
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
            st.booleans(),
            st.none(),
            st.decimals(-(10**15), 10**15, places=4, allow_nan=False),
            st.binary(),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_literals_are_the_values_that_duckdb_reads(row: list[Any]) -> None:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return "'" + value.replace("'", "''") + "'"
        if isinstance(value, bytes):
            return f"x'{value.hex()}'"
        return "NULL" if value is None else str(value)

    text = "(" + ", ".join(map(written, row)) + ")"
    assert one(f"INSERT INTO t VALUES {text}").values == (tuple(row),)
    if all(not isinstance(value, str) or value.isprintable() for value in row):
        assert duckdb.execute(f"VALUES {text}").fetchall() == [tuple(row)]


def test_conflicts_and_returning_are_told() -> None:
    statement = one("INSERT INTO t (a, b) VALUES ($1, $2) ON CONFLICT (a) DO UPDATE SET b = excluded.b RETURNING a")
    assert statement.conflict
    assert statement.returning
    assert statement.values == ((Parameter(0), Parameter(1)),)
    for words in ("OR REPLACE", "OR IGNORE"):
        assert one(f"INSERT {words} INTO t VALUES (1)").conflict
    assert not one("INSERT INTO t SELECT 1").conflict
    assert one("DELETE FROM t RETURNING *").returning


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE t (a INT REFERENCES u)",
        "CREATE TABLE t (a INT, FOREIGN KEY (a) REFERENCES u (a))",
        "CREATE TABLE t (a INT, b INT AS (a + 1))",
        "CREATE TABLE t (a INT, b INT GENERATED ALWAYS AS (a + 1))",
        "CREATE TABLE t (a INT UNIQUE)",
        "CREATE TABLE t AS SELECT 1",
        "CREATE TEMP TABLE t (a INT)",
        "CREATE TABLE temp.t (a INT)",
        "CREATE OR REPLACE TABLE t (a INT)",
        "CREATE TABLE t (LIKE u)",
        "CREATE TABLE t (a INT DEFAULT ?)",
        'CREATE TABLE "a/b" (a INT)',
        'CREATE TABLE "a.b" (a INT)',
        "CREATE VIEW v AS SELECT 1",
        "CREATE INDEX i ON t (a)",
        "CREATE MACRO m() AS 1",
        "DROP TABLE a, b",
        "DROP VIEW v",
        "COPY t TO 'x'",
        "ATTACH 'x'",
        "INSTALL x",
        "LOAD x",
        "PRAGMA x",
        "SET x = 1",
        "CALL x()",
        "EXPORT DATABASE 'x'",
        "EXPLAIN SELECT 1",
        "MERGE INTO t USING u ON true WHEN MATCHED THEN DELETE",
        "ALTER TABLE t ADD COLUMN a INT",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM query('SELECT 1')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM a.b.c",
        "SELECT * FROM information_schema.tables",
        "SELECT * INTO x FROM y",
        "DELETE FROM TOPIC t",
        "SELECT 1; COPY t TO 'x'",
        "SELECT 1 2",
        "SELECT * FROM",
        "INSERT INTO t",
    ],
)
def test_everything_else_is_refused(sql: str) -> None:
    assert refused(sql)


def test_a_table_keeps_all_that_it_may_say() -> None:
    sql = (
        "CREATE TABLE IF NOT EXISTS main.t (id BIGINT NOT NULL, j JSON DEFAULT '{}', ts TIMESTAMP WITH TIME ZONE "
        "DEFAULT now(), "
        "d DECIMAL(10, 2) CHECK (d > 0), l INT[], s STRUCT(a INT, b VARCHAR), CONSTRAINT p PRIMARY KEY (id, ts), "
        "CHECK (id > 0))"
    )
    statement = one(sql)
    assert statement.sql == sql
    assert statement.if_exists


@pytest.mark.parametrize(
    ("sql", "line", "column"),
    [
        ("SELECT a,\n  b c d FROM t", 2, 7),
        ("SELECT a FROM t /* long comment */ WHERE 'a' 'b'", 1, 46),
        ("SELECT a FROM t WHERE x = :p AND y 'b'", 1, 36),
    ],
)
def test_a_syntax_error_is_shown_where_it_was_written(sql: str, line: int, column: int) -> None:
    with pytest.raises(SqlError) as caught:
        parse(sql)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_parameters_without_spaces_between_them_can_be_read_again() -> None:
    [statement] = parse("INSERT INTO t VALUES (?,?) ON CONFLICT (a) DO UPDATE SET b = ?")
    assert isinstance(statement, TableStatement)
    assert "($1 ,$2 )" in statement.sql


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("SELECT offset FROM TOPIC a.t", 'SELECT "offset" FROM'),
        ("SELECT max(offset) FROM TOPIC a.t WHERE offset>1", 'max("offset")'),
        ("SELECT 1 FROM TOPIC a.t ORDER BY partition, offset LIMIT 2 OFFSET 3", '"offset" LIMIT 2 OFFSET 3'),
        ("SELECT 1 FROM TOPIC a.t OFFSET 3", "OFFSET 3"),
    ],
)
def test_offset_is_a_column_where_no_clause_can_begin(written: str, given: str) -> None:
    [statement] = parse(written)
    assert isinstance(statement, TableStatement)
    assert given in statement.sql


def test_any_word_may_follow_the_dot_of_a_topic() -> None:
    assert parse("CREATE TOPIC app.full") == [CreateTopic(topic="app.full")]
