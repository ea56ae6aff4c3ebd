"""The OpenAPI document names every route, and requests that are made from it are answered as it says."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from starlette.routing import Route

from llog.broker.http.arrow import MEDIA_TYPE
from tests.broker.serving import Served
from tests.broker.test_process import LIMIT_S, running

EXAMPLES: Final = 8
TOPICS: Final = {"stream": "object", "files": "disk", "rows": "rocksdb"}
_LIMITS: Final = {"partitions": 4, "max_wait_ms": 1, "wait_ms": 1}
"""What would make a valid request slow."""
_EVENTS: Final = "text/event-stream"


def _as_bytes(_: Any, value: Any) -> bytes:
    """Bodies that are no JSON are sent as they come: what arrives there may be anything."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


schemathesis.serializer(MEDIA_TYPE, "application/sql")(_as_bytes)


async def document(served: Served) -> dict[str, Any]:
    response = await served.client.get("/openapi.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


async def test_every_route_of_a_broker_is_in_the_document(served: Served) -> None:
    described = {
        (path, method.upper()) for path, methods in (await document(served))["paths"].items() for method in methods
    }
    served_routes = {
        (route.path, method)
        for route in served.broker.app().routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == served_routes


async def test_every_operation_has_a_name_a_summary_and_what_it_answers(served: Served) -> None:
    found = await document(served)
    assert found["openapi"].startswith("3.1.")
    operations = [each for methods in found["paths"].values() for each in methods.values()]
    ids = [each["operationId"] for each in operations]
    assert len(set(ids)) == len(ids)
    for each in operations:
        assert each["summary"]
        assert set(each["responses"]) > {"default"}
    schemas = found["components"]["schemas"]
    references = re.findall(r'"#/components/schemas/(\w+)"', (await served.client.get("/openapi.json")).text)
    assert set(references) == set(schemas)


async def test_the_page_of_docs_names_every_route_and_needs_no_network(served: Served) -> None:
    response = await served.client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    for path in (await document(served))["paths"]:
        assert f"<code>{path}</code>" in response.text
    assert "<script" not in response.text
    assert set(re.findall(r"https?://[^/'\s]+", response.text)) == {"http://127.0.0.1:8080"}
    assert set(re.findall(r"(?:src|href)='([^'#]*)", response.text)) <= {"", "openapi.json"}
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_no_request_that_the_document_allows_or_forbids_is_a_failure_of_the_broker(tmp_path: Path) -> None:
    with running(tmp_path, "serve", environment={"LLOG_KEYED": "file://./keyed"}) as server:
        address = str(server.client.base_url).rstrip("/")
        for name, engine in TOPICS.items():
            made = server.client.post("/topics", json={"name": name, "engine": engine, "partitions": 3})
            assert made.status_code == 201, made.text
            server.client.post(f"/topics/{name}/records", json={"records": [{"value": {"n": n}} for n in range(9)]})
        server.client.post("/keyed/append", json={"records": [{"key": "k", "value": "v"}]})
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        statuses: dict[str, set[int]] = {}
        with requests.Session() as session:
            for found in schema.get_all_operations():
                operation = found.ok()
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    cases = operation.as_strategy(generation_mode=mode)
                    statuses.setdefault(operation.label, set()).update(_try_examples(cases, session, address))
        assert len(statuses) > 40
        assert sum(min(each) < 300 for each in statuses.values()) > 25, statuses
        assert server.client.get("/health").json() == {"status": "ok"}
        assert "Traceback" not in server.errors
        assert server.end() == 0


def _try_examples(cases: Any, session: requests.Session, address: str) -> set[int]:
    """Send requests, and return the statuses of their answers."""
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, name=st.sampled_from([None, *TOPICS]))
    def try_example(case: Case, name: str | None) -> None:
        if name is not None and case.method != "DELETE" and "name" in (case.path_parameters or {}):
            case.path_parameters["name"] = name
        for place in (case.query, case.body):
            if isinstance(place, dict):
                place.update({field: most for field, most in _LIMITS.items() if _exceeds(place.get(field), most)})
        statuses.add(_send(case, session, address))

    with suppress(Unsatisfiable):  # a route without parameters has nothing that could be wrong
        try_example()
    return statuses


def _exceeds(value: object, most: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > most


def _send(case: Case, session: requests.Session, address: str) -> int:
    response = session.request(**case.as_transport_kwargs(base_url=address), stream=True, timeout=LIMIT_S)
    try:
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if not response.headers.get("content-type", "").startswith(_EVENTS):
            case.validate_response(
                response, checks=(not_a_server_error, response_schema_conformance, content_type_conformance)
            )
    finally:
        response.close()
    status: int = response.status_code
    return status
