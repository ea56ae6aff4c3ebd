"""The access log, ids of requests, and traces that a real collector receives."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.broker.serving import Served
from tests.broker.test_process import LIMIT_S, LLOG, Running

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


def test_every_request_is_a_line_of_json_with_its_ids(tmp_path: Path) -> None:
    environment = {"LLOG_ACCESS_LOG": "on", "LLOG_LOG_FORMAT": "json"}
    broker = Running(tmp_path, "serve", environment=environment)
    answer = broker.client.get("/topics", headers={"x-request-id": "r-1", "traceparent": TRACEPARENT})
    assert answer.headers["x-request-id"] == "r-1"
    given = broker.client.get("/nope", headers={"x-request-id": "not one"}).headers["x-request-id"]
    assert given != "not one"
    broker.process.terminate()
    assert broker.process.wait(LIMIT_S) == 0
    lines = [json.loads(line) for line in broker.errors.splitlines()]
    found = [line for line in lines if line["logger"] == "llog.access"]
    first = {"request_id": "r-1", "trace_id": TRACE, "span_id": SPAN, "method": "GET", "path": "/topics", "status": 200}
    assert found[0].items() >= first.items()
    assert found[1].items() >= {"request_id": given, "path": "/nope", "status": 404}.items()
    assert found[0]["duration_ms"] > 0


def test_a_broker_logs_no_requests_unless_it_is_told_to(tmp_path: Path) -> None:
    broker = Running(tmp_path, "serve")
    assert "x-request-id" not in broker.client.get("/topics").headers
    broker.process.terminate()
    assert broker.process.wait(LIMIT_S) == 0
    assert "GET" not in broker.errors


def test_a_level_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LLOG, "serve", "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "LLOG_LOG_LEVEL": "loud"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "LLOG_LOG_LEVEL is 'loud': it must be debug, info, warning or error" in done.stderr


async def test_a_bug_is_logged_under_the_id_that_the_client_gets(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("llog.broker.fetcher.Fetcher.fetch", fail)
    item = {"topic": "t", "partition": 0, "fetch_offset": 1}
    headers = {"x-request-id": "r-2"}
    with caplog.at_level(logging.ERROR, logger="llog"):
        response = await served.client.post("/consume", json={"topic_partitions": [item]}, headers=headers)
    assert response.status_code == 500
    assert response.json()["request_id"] == "r-2"
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "planted" not in response.text


class _Collector(ThreadingHTTPServer):
    """Takes traces as a collector of OpenTelemetry does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        assert isinstance(self.server, _Collector)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[_Collector]:
    server = _Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_trace_goes_from_the_caller_to_the_flush_and_the_stores(collector: _Collector) -> None:
    served = Served(otel_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces")
    item = {"topic": "t", "partition": 0, "records": ["x"]}
    body = {"topic_partitions": [item]}
    await asyncio.gather(
        served.client.post("/produce", json=body, headers={"traceparent": TRACEPARENT}),
        served.client.post("/produce", json=body),
    )
    await served.close()
    spans = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE}
    request = spans["POST"]
    assert request.parent_span_id.hex() == SPAN
    assert {"flush", "blobs put", "meta put_many"} <= spans.keys()
    assert all(span.parent_span_id == request.span_id for name, span in spans.items() if name != "POST")
    requests = [span for span in collector.spans if span.name == "POST"]
    assert len({span.trace_id for span in requests}) == 2, "a request without a caller begins a trace"


def test_nothing_of_opentelemetry_is_loaded_while_traces_are_off() -> None:
    program = "import llog.broker.app, sys; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([LLOG[0], "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
