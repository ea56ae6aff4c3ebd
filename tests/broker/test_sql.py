"""`POST /sql` and what belongs to it: bodies, answers, limits, and how statements end. The database is a stand-in."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pyarrow as pa
import pytest

from llog.broker.routes import sql as under_test
from llog.errors import MissingExtra
from llog.sql.wire import results_from
from tests.broker.serving import Served
from tests.sql_stand_in import StandIn

ARROW = "application/vnd.apache.arrow.stream"


class WithSql(Served):
    def __init__(self, database: StandIn, **settings: Any) -> None:
        super().__init__(**settings)
        self.database = database
        self.opened = 0

    async def sql(self, statement: str, code: int = 200, **asked: Any) -> Any:
        response = await self.client.post("/sql", json={"sql": statement, **asked})
        assert response.status_code == code, response.text
        return response.json()

    async def rows(self, statement: str, **asked: Any) -> list[Any]:
        found: list[Any] = (await self.sql(statement, **asked))["results"][-1]["rows"]
        return found


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()

    async def opened(*_: Any, **__: Any) -> StandIn:
        return made

    monkeypatch.setattr(under_test, "open_database", opened)
    return made


@pytest.fixture
async def served(database: StandIn) -> AsyncIterator[WithSql]:
    served = WithSql(database, sql_answer_max_bytes=100_000)
    yield served
    await served.close()


async def test_statements_are_answered_in_order_with_their_columns_and_what_they_changed(served: WithSql) -> None:
    found = await served.sql(
        "CREATE TABLE t (id INTEGER, name VARCHAR); INSERT INTO t VALUES (1, 'a;b'), (2, NULL); SELECT * FROM t "
        "ORDER BY id"
    )
    created, inserted, selected = found["results"]
    assert created == {"kind": "CREATE", "columns": [], "rows": [], "changed": 0}
    assert (inserted["kind"], inserted["changed"]) == ("INSERT", 2)
    assert selected["columns"] == [{"name": "id", "type": "INTEGER"}, {"name": "name", "type": "VARCHAR"}]
    assert selected["rows"] == [[1, "a;b"], [2, None]]
    assert found["ms"] >= 0


@pytest.mark.parametrize(
    ("expression", "kind", "value"),
    [
        ("9223372036854775807", "BIGINT", 9223372036854775807),
        ("1.50::DECIMAL(5,2)", "DECIMAL(5,2)", "1.50"),
        ("sum(7)", "HUGEINT", 7),
        ("170141183460469231731687303715884105727", "HUGEINT", "170141183460469231731687303715884105727"),
        ("'nan'::DOUBLE", "DOUBLE", None),
        ("TIMESTAMP '2026-01-31 12:00:00.5'", "TIMESTAMP", "2026-01-31T12:00:00.500000"),
        ("TIMESTAMPTZ '2026-01-31 12:00:00+01'", "TIMESTAMP WITH TIME ZONE", "2026-01-31T11:00:00.000000Z"),
        ("DATE '2026-01-31'", "DATE", "2026-01-31"),
        ("'text'::BLOB", "BLOB", "text"),
        ("'\\xFF'::BLOB", "BLOB", {"base64": "/w=="}),
        ("[1.5, NULL]", "DECIMAL(2,1)[]", ["1.5", None]),
        ("{'a': [true]}", "STRUCT(a BOOLEAN[])", {"a": [True]}),
        ("MAP {1: 'x'}", "MAP(INTEGER, VARCHAR)", {"1": "x"}),
        ("INTERVAL '1 month 2 days'", "INTERVAL", "1 months 2 days"),
    ],
)
async def test_every_type_has_its_json(served: WithSql, expression: str, kind: str, value: Any) -> None:
    result = (await served.sql(f"SELECT {expression} AS v"))["results"][0]
    assert (result["columns"], result["rows"]) == ([{"name": "v", "type": kind}], [[value]])


async def test_parameters_are_values_and_never_sql(served: WithSql) -> None:
    evil = "'); DROP TABLE t; --"
    assert await served.rows("SELECT ? AS v", params=[evil]) == [[evil]]
    assert await served.rows("SELECT $a + $b AS v", params={"a": 1, "b": 2}) == [[3]]
    assert await served.rows("SELECT ? AS v", params=[{"base64": base64.b64encode(b"\xff").decode()}]) == [
        [{"base64": "/w=="}]
    ]
    assert await served.rows("SELECT ? AS v", params=[{"timestamp": "2026-01-31T12:00:00"}]) == [
        ["2026-01-31T12:00:00.000000"]
    ]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ([{"base64": "?"}], "not a valid base64"),
        ([{"timestamp": "yesterday"}], "not a valid timestamp"),
        ([{"a": 1, "b": 2}], "a, b"),
        ([[1]], "json"),
        ("x", "params"),
    ],
)
async def test_a_parameter_that_is_none_is_refused_by_name(served: WithSql, params: Any, said: str) -> None:
    found = await served.sql("SELECT ?", 400, params=params)
    assert found["code"] == "invalid_argument"
    assert said in found["detail"]


async def test_many_rows_of_parameters_are_one_statement(served: WithSql) -> None:
    await served.sql("CREATE TABLE t (id INTEGER)")
    found = await served.sql("INSERT INTO t VALUES (?)", rows=[[1], [2], [3]])
    assert found["results"][0]["changed"] == 3
    assert await served.rows("SELECT sum(id) FROM t") == [[6]]
    assert "rows" in (await served.sql("INSERT INTO t VALUES (?)", 400, rows=[[1]], params=[1]))["detail"]


async def test_a_body_may_be_sql_alone_but_not_from_a_web_page(served: WithSql) -> None:
    for kind in ("application/sql", "text/plain; charset=utf-8"):
        response = await served.client.post("/sql", content="SELECT 'ü' AS v", headers={"content-type": kind})
        assert response.json()["results"][0]["rows"] == [["ü"]]
    for header in ("origin", "sec-fetch-site"):
        headers = {"content-type": "text/plain", header: "http://evil.example"}
        response = await served.client.post("/sql", content="SELECT 1", headers=headers)
        assert (response.status_code, response.json()["code"]) == (400, "invalid_argument")
    response = await served.client.post("/sql", content=b"\xff", headers={"content-type": "application/sql"})
    assert "UTF-8" in response.json()["detail"]
    response = await served.client.post("/sql", data={"sql": "SELECT 1"})
    assert "application/sql" in response.json()["detail"]


async def test_the_last_rows_come_as_arrow_if_that_is_accepted(served: WithSql) -> None:
    asked = {"sql": "SELECT 1 AS a; SELECT 2 AS b; BEGIN; COMMIT"}
    response = await served.client.post("/sql", json=asked, headers={"accept": ARROW})
    assert response.headers["content-type"] == ARROW
    with pa.ipc.open_stream(response.content) as reader:
        assert reader.read_all().to_pylist() == [{"b": 2}]
    response = await served.client.post("/sql", json=asked, headers={"accept": f"{ARROW}; results=all"})
    found = results_from(response.content)
    assert [each.kind for each in found] == ["SELECT", "SELECT", "BEGIN", "COMMIT"]
    assert [None if each.table is None else each.table.to_pylist() for each in found] == [
        [{"a": 1}],
        [{"b": 2}],
        None,
        None,
    ]


async def test_arrow_rows_are_inserted(served: WithSql) -> None:
    await served.sql("CREATE TABLE t (id BIGINT, name VARCHAR)")
    rows = pa.table({"id": list(range(1000)), "name": ["x"] * 1000})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    body, headers = sink.getvalue().to_pybytes(), {"content-type": ARROW}
    response = await served.client.post("/sql/insert?table=t", content=body, headers=headers)
    assert response.json()["results"][0]["changed"] == 1000
    assert await served.rows("SELECT count(*), sum(id) FROM t") == [[1000, 499500]]
    response = await served.client.post("/sql/insert?table=t", content=body[:-100], headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_argument")
    response = await served.client.post("/sql/insert", content=body, headers=headers)
    assert "table" in response.json()["detail"]


async def test_a_transaction_that_is_left_open_is_rolled_back_and_an_error(served: WithSql) -> None:
    found = await served.sql("BEGIN; SELECT 1", 400)
    assert "rolled back" in found["detail"]
    assert served.database.sessions[-1].closed
    await served.sql("BEGIN; SELECT 1; COMMIT")


async def test_rows_beyond_the_limit_are_refused_with_the_setting(served: WithSql) -> None:
    found = await served.sql("SELECT range FROM range(20000)", 422)
    assert found["code"] == "result_too_large"
    assert "LLOG_SQL_ANSWER_MAX_BYTES" in found["detail"]


async def test_a_body_beyond_the_limit_is_refused(database: StandIn) -> None:
    served = WithSql(database, request_max_bytes=1024)
    assert (await served.sql("SELECT 1 --" + "x" * 2000, 413))["code"] == "request_too_large"
    assert database.sessions == []
    await served.close()


async def test_a_request_without_end_is_cancelled_when_its_time_is_over(database: StandIn) -> None:
    served = WithSql(database, sql_timeout_ms=100)
    found = await served.sql("WAIT", 422)
    assert found["code"] == "statement_timeout"
    assert "LLOG_SQL_TIMEOUT_MS" in found["detail"]
    assert database.cancelled.is_set()
    assert database.sessions[-1].closed
    await served.close()


async def test_a_waiting_request_ends_when_the_broker_stops(served: WithSql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_STOP_GRACE_S", 0.01)
    asked = asyncio.ensure_future(served.sql("WAIT", 503))
    await served.database.waiting.wait()
    served.broker.stopping.set()
    assert (await asked)["code"] == "outcome_unknown"
    assert served.database.cancelled.is_set()


async def test_a_waiting_request_ends_when_the_client_goes(served: WithSql) -> None:
    """Below HTTP, for the client of the other tests does not go."""
    gone = asyncio.Event()
    body = [{"type": "http.request", "body": b"WAIT", "more_body": False}]

    async def receive() -> Any:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    headers = [(b"host", b"localhost"), (b"content-type", b"application/sql")]
    scope = {"type": "http", "method": "POST", "path": "/sql", "query_string": b"", "headers": headers}
    asked = asyncio.ensure_future(served.broker.app()(scope, receive, send))
    await served.database.waiting.wait()
    gone.set()
    await asked
    assert served.database.cancelled.is_set()
    assert served.database.sessions[-1].closed


async def test_the_member_is_the_one_that_the_request_names(served: WithSql) -> None:
    await served.sql("SELECT 1", member="me")
    await served.sql("SELECT 1")
    assert [each.member for each in served.database.sessions] == ["me", ""]


async def test_names_are_told_for_completion(served: WithSql) -> None:
    found = (await served.client.post("/sql/names")).json()
    assert found == {"tables": {"chat.messages": ["id", "text"]}, "topics": ["app.events"], "groups": ["ai"]}


@pytest.mark.parametrize("role", ["read", "write"])
async def test_only_a_broker_that_does_all_answers_sql(database: StandIn, role: str) -> None:
    served = WithSql(database, role=role)
    for path in ("/sql", "/sql/insert?table=t", "/sql/names"):
        response = await served.client.post(path, json={"sql": "SELECT 1"})
        assert (response.status_code, response.json()["code"]) == (421, "wrong_role")
        assert "LLOG_ROLE" in response.json()["detail"]
    assert database.sessions == []
    await served.close()


async def test_without_the_extra_the_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(*_: Any, **__: Any) -> None:
        raise MissingExtra("SQL needs duckdb: pip install 'leaderless-log[sql]'")

    monkeypatch.setattr(under_test, "open_database", missing)
    served = Served()
    response: httpx.Response = await served.client.post("/sql", json={"sql": "SELECT 1"})
    assert (response.status_code, response.json()["code"]) == (501, "missing_extra")
    await served.close()


async def test_the_database_is_opened_once_and_closed_with_the_broker(
    served: WithSql, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    async def counted(*_: Any, **__: Any) -> StandIn:
        opened.append(1)
        return served.database

    monkeypatch.setattr(under_test, "open_database", counted)
    await asyncio.gather(*(served.sql("SELECT 1") for _ in range(3)))
    assert len(opened) == 1
    await served.broker.close()
    assert served.database.closed
