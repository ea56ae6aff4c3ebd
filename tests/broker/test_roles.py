"""Roles: a broker that writes, one that reads, and what each refuses."""

from __future__ import annotations

import pytest

from tests.broker.serving import Served

RECORDS = "/topics/t/partitions/0/records"
WRITES = [("POST", "/produce"), ("POST", RECORDS), ("POST", "/topics"), ("DELETE", "/topics/t"), ("PATCH", "/topics/t")]
READS = [
    ("POST", "/consume"),
    ("GET", f"{RECORDS}?offset=1"),
    ("GET", "/topics/t/partitions/0/offset?timestamp_ms=0"),
]


@pytest.mark.parametrize(("role", "refused"), [("read", WRITES), ("write", READS)])
async def test_what_the_other_role_answers_is_refused_by_name_and_does_nothing(
    served: Served, role: str, refused: list[tuple[str, str]]
) -> None:
    await served.produce("t", "a")
    other = Served(beside=served, role=role)
    for verb, path in refused:
        response = await other.client.request(verb, path, json={"name": "made"})
        assert response.status_code == 421, path
        found = response.json()
        assert found["code"] == "wrong_role"
        assert f"the role '{role}'" in found["detail"]
        assert "LLOG_ROLE" in found["detail"]
    assert [each["name"] for each in (await served.client.get("/topics")).json()["topics"]] == ["t"]
    await other.close()


@pytest.mark.parametrize("role", ["both", "all", "read", "write"])
async def test_every_role_tells_its_health_its_metrics_and_what_there_is(served: Served, role: str) -> None:
    await served.produce("t", "a")
    other = Served(beside=served, role=role)
    for path in ("/health", "/metrics", "/metrics/prometheus", "/topics", "/topics/t"):
        assert (await other.client.get(path)).status_code == 200, path
    await other.close()


async def test_a_writer_and_a_reader_make_one_broker_together(served: Served) -> None:
    writer, reader = Served(beside=served, role="write"), Served(beside=served, role="read")
    assert (await writer.produce("t", "a", "b"))["end_offset"] == 2
    assert [each["payload"] for each in (await reader.consume("t", 1))["records"]] == ["a", "b"]
    await writer.close()
    await reader.close()
