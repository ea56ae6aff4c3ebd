"""Topics on disk through the broker: produced, consumed and waited for as any other, by the one process that owns
them.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.broker.test_process import LIMIT_S, Running, running


def _make(server: Running, **asked: object) -> None:
    response = server.client.post("/topics", json={"name": "t", "engine": "disk", **asked})
    assert response.status_code == 201, response.text


def _arrow(server: Running, offset: int, **asked: object) -> tuple[pa.Table, Any]:
    query: dict[str, Any] = {"offset": offset, **asked}
    response = server.client.get(
        "/topics/t/partitions/0/records", params=query, headers={"accept": "application/vnd.apache.arrow.stream"}
    )
    assert response.status_code == 200, response.text
    return pa.ipc.open_stream(response.content).read_all(), response.headers


def test_records_go_in_and_come_out_and_are_there_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as server:
        _make(server)
        assert server.produce("a", "b")["end_offset"] == 2
        sink = pa.BufferOutputStream()
        table = pa.table({"value": pa.array([b"c"]), "key": pa.array([b"k"])})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        kind = {"content-type": "application/vnd.apache.arrow.stream"}
        posted = server.client.post(
            "/topics/t/partitions/0/records", content=sink.getvalue().to_pybytes(), headers=kind
        )
        assert posted.json()["start_offset"] == 3
        assert [each["payload"] for each in server.consume(2)] == ["b", "c"]
        found, headers = _arrow(server, 1)
        assert found["value"].to_pylist() == [b"a", b"b", b"c"]
        assert headers["llog-next-offset"] == "4"
        described = server.client.get("/topics/t").json()
        assert described["engine"] == "disk"
        assert described["bounds"] == [{"partition": 0, "log_start_offset": 1, "next_offset": 4}]
        assert server.end() == 0
    with running(tmp_path, "serve") as server:
        assert server.produce("d")["start_offset"] == 4
        assert [each["payload"] for each in server.consume()] == ["a", "b", "c", "d"]


def test_a_topic_says_how_it_is_cleaned_up(tmp_path: Path) -> None:
    asked = {"cleanup": "compact", "delete_retention_ms": 5}
    with running(tmp_path, "serve") as server:
        _make(server, **asked)
        assert server.client.get("/topics/t").json().items() >= asked.items()
        assert server.client.get("/topics").json()["topics"][0].items() >= asked.items()


def test_without_forwarding_another_broker_reads_and_waits_but_its_produce_is_refused_with_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLOG_BROKER_FORWARD_TIMEOUT_MS", "0")
    with running(tmp_path, "serve") as owner, running(tmp_path, "serve") as other:
        _make(owner)
        owner.produce("a")
        refused = other.produce("b")["error"]
        assert refused["code"] == "log_owned"
        assert str(owner.process.pid) in refused["detail"]
        kind = {"content-type": "application/vnd.apache.arrow.stream"}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("value", pa.binary())])) as writer:
            writer.write_batch(pa.record_batch({"value": pa.array([b"c"])}))
        whole = other.client.post("/topics/t/partitions/0/records", content=sink.getvalue().to_pybytes(), headers=kind)
        assert (whole.status_code, whole.json()["code"]) == (421, "log_owned")
        address = str(owner.client.base_url).rstrip("/")
        assert whole.headers["llog-owner"] == whole.json()["owner"] == refused["owner"] == address
        assert [each["payload"] for each in other.consume()] == ["a"]
        found: list[Any] = []
        waiter = threading.Thread(target=lambda: found.extend(other.consume(2, max_wait_ms=60_000)))
        waiter.start()
        owner.produce("c")
        waiter.join(LIMIT_S)
        assert [each["payload"] for each in found] == ["c"]
        assert owner.end() == 0
        assert other.produce("d")["start_offset"] == 3, "the owner is gone"


def test_a_topic_that_was_deleted_and_created_again_shows_nothing_old(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as server, running(tmp_path, "serve", "--role", "read") as reader:
        _make(server)
        server.produce("old", "older")
        assert len(reader.consume()) == 2
        assert server.client.delete("/topics/t").status_code == 204
        _make(server)
        assert server.produce("new")["start_offset"] == 1
        for each in (server, reader):
            assert [found["payload"] for found in each.consume()] == ["new"]


def test_a_long_topic_is_paged_through_once(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as server:
        _make(server)
        for n in range(20):
            server.produce(*(f"{n}-{i}" for i in range(50)))
        offset, values = 1, []
        while offset <= 1000:
            table, headers = _arrow(server, offset, max_bytes=3000)
            values += table["value"].to_pylist()
            offset = int(headers["llog-next-fetch-offset"])
        assert values == [f"{n}-{i}".encode() for n in range(20) for i in range(50)]
