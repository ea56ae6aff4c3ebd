"""A log on a metadata server and a bucket, set up and used by the commands that its documentation gives."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from devtools.docs import example_environment
from devtools.servers.oxia import OxiaServer
from devtools.servers.postgres import PostgresServer
from devtools.servers.weed import S3Server
from llog.config.loading import load_settings
from llog.log.opening import opened_log

LLOG = [sys.executable, "-m", "llog.cli.main"]
LIMIT_S = 300
AWS = {
    "LLOG_S3_REGION_NAME": "AWS_DEFAULT_REGION",
    "LLOG_S3_ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID",
    "LLOG_S3_SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY",
}
PYTHON_EXAMPLE = """
from llog import LeaderlessLogCompactor, LeaderlessLogReader, LeaderlessLogWriter, SharedAppendGroup

writer = LeaderlessLogWriter.from_env()
writer.initialize_partition("orders", 0)
writer.append_shared(
    [SharedAppendGroup(topic="orders", partition=0, payloads=[b"a", b"b", b"c"])]
)
reader = LeaderlessLogReader.from_env()
print(reader.read_offset("orders", 0, 1).payload)
compactor = LeaderlessLogCompactor.from_env()
print(compactor.compact_once("orders", 0))
writer.close()
reader.close()
compactor.close()
"""
PRODUCE = """curl -X POST http://127.0.0.1:8080/produce \\
-H 'content-type: application/json' \\
-d '{
"topic_partitions": [
{
"topic": "orders",
"partition": 0,
"records": ["alpha", "beta"]
},
{
"topic": "orders",
"partition": 1,
"records": [{"base64": "AAE="}]
}
]
}'"""
CONSUME = """curl -X POST http://127.0.0.1:8080/consume \\
-H 'content-type: application/json' \\
-d '{
"topic_partitions": [
{
"topic": "orders",
"partition": 0,
"fetch_offset": 1,
"partition_max_bytes": 1048576
},
{
"topic": "orders",
"partition": 1,
"fetch_offset": 1
}
],
"max_wait_ms": 250,
"min_bytes": 1,
"max_bytes": 4194304
}'"""


@pytest.fixture(params=["sqlite", "postgres", "oxia"])
def meta(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The settings of a metadata store."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.environment("set_up")
    if request.param == "oxia":
        oxia: OxiaServer = request.getfixturevalue("oxia")
        return {"LLOG_OXIA_SERVICE_ADDRESS": ",".join(oxia.addresses), "LLOG_OXIA_NAMESPACE": oxia.namespace}
    return {"LLOG_META": f"sqlite://{tmp_path}/meta.sqlite"}


@pytest.fixture
def environment(meta: dict[str, str], s3_server: S3Server, tmp_path: Path) -> dict[str, str]:
    """The settings of a log of its own, in stores that other tests use, too."""
    s3_server.create_bucket("set-up")
    return {
        **meta,
        "LLOG_S3_BUCKET": "set-up",
        "LLOG_ROOT_PREFIX": tmp_path.name,
        "LLOG_CLIENT_IDENTIFIER": "broker-1",
        "LLOG_KAFKA_PORT": "0",
        "LLOG_S3_ENDPOINT_URL": s3_server.endpoint,
        "LLOG_S3_REGION_NAME": s3_server.region,
        "LLOG_S3_ACCESS_KEY_ID": s3_server.access_key,
        "LLOG_S3_SECRET_ACCESS_KEY": s3_server.secret_key,
    }


def _machine() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("LLOG_", "AWS_"))}


def _ran(command: list[str], environment: dict[str, str], directory: Path) -> str:
    ran = subprocess.run(
        command,
        env=_machine() | environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@contextmanager
def _broker(shell: str, environment: dict[str, str], directory: Path) -> Iterator[str]:
    """The address of a broker that a shell becomes."""
    errors = directory / f"stderr-{time.monotonic_ns()}"
    with errors.open("wb") as written:
        process = subprocess.Popen(
            ["bash", "-c", shell], cwd=directory, env=_machine() | environment, stderr=written, stdin=subprocess.DEVNULL
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(r"listening on (\S+) as broker-1\n", errors.read_text())) is None:
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.kill()
        process.wait()


def _asked(command: str, address: str) -> list[dict[str, Any]]:
    """What the broker answers to an example, by partition; the same request by other means where there is no curl."""
    command = command.replace("http://127.0.0.1:8080", address)
    if shutil.which("curl"):
        ran = subprocess.run(["bash", "-c", command], capture_output=True, timeout=LIMIT_S, check=True)
        answer = ran.stdout
    else:
        _, _, _, _, url, _, header, _, body = shlex.split(command)
        name, _, value = header.partition(": ")
        answer = httpx.post(url, headers={name: value}, content=body, timeout=LIMIT_S).content
    found: list[dict[str, Any]] = msgspec.json.decode(answer)["topic_partitions"]
    return found


def test_the_python_example_runs(environment: dict[str, str], tmp_path: Path) -> None:
    for name, fallback in AWS.items():
        environment[fallback] = environment.pop(name)
    first, second = _ran([sys.executable, "-c", PYTHON_EXAMPLE], environment, tmp_path).splitlines()
    assert first == "b'a'"
    assert second.startswith("CompactionResult(")
    without_bucket = {name: value for name, value in environment.items() if name != "LLOG_S3_BUCKET"}
    assert _ran([*LLOG, "consume", "orders", "--from", "earliest"], without_bucket, tmp_path).split() == ["a", "b", "c"]
    for shows in (["topics", "list"], ["topics", "describe", "orders"], ["inspect", "orders"]):
        assert "orders" in _ran([*LLOG, *shows], without_bucket, tmp_path)
    assert _ran([*LLOG, "verify"], environment, tmp_path)


def test_a_broker_set_up_by_the_example_file_answers_the_examples(environment: dict[str, str], tmp_path: Path) -> None:
    adjusted = []
    for line in example_environment().splitlines():
        name = line.removeprefix("#").partition("=")[0]
        adjusted.append(f"{name}={shlex.quote(environment.pop(name))}" if name in environment else line)
    assert environment == {}, "the example does not name them"
    (tmp_path / ".env.example").write_text("\n".join(adjusted))
    loaded = "cp .env.example .env && set -a && source .env && set +a"
    with _broker(f"{loaded} && exec {shlex.join(LLOG)} serve --role both --port 0", {}, tmp_path) as address:
        produced = _asked(PRODUCE, address)
        assert [(each["partition"], each["start_offset"], each["end_offset"]) for each in produced] == [
            (0, 1, 2),
            (1, 1, 1),
        ]
        _check_consumed(_asked(CONSUME, address))
    # In a process of its own, which has nothing in memory, and without a bucket.
    shell = f"{loaded} && unset LLOG_S3_BUCKET && exec {shlex.join(LLOG)} serve --role read --port 0"
    with _broker(shell, {}, tmp_path) as address:
        _check_consumed(_asked(CONSUME, address))


def _check_consumed(consumed: list[dict[str, Any]]) -> None:
    assert [[record["payload"] for record in each["records"]] for each in consumed] == [["alpha", "beta"], ["\x00\x01"]]
    assert [(each["high_watermark"], each["next_fetch_offset"]) for each in consumed] == [(2, 3), (1, 2)]


async def test_a_database_shows_who_is_connected(postgres: PostgresServer, tmp_path: Path) -> None:
    environment = postgres.environment("who") | {
        "LLOG_BLOBS": f"file://{tmp_path}",
        "LLOG_CLIENT_IDENTIFIER": "b" * 100,
    }
    async with opened_log(load_settings(environment=environment)):
        names = postgres.sql("SELECT DISTINCT application_name FROM pg_stat_activity").split()
    assert "b" * 63 in names


@pytest.mark.parametrize("meta", ["postgres"], indirect=True)
@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["compact"], ["produce", "orders"]])
def test_what_writes_is_told_to_name_a_bucket(environment: dict[str, str], tmp_path: Path, command: list[str]) -> None:
    _ran([*LLOG, "topics", "create", "orders"], environment, tmp_path)
    del environment["LLOG_S3_BUCKET"]
    ran = subprocess.run(
        [*LLOG, *command],
        env=_machine() | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 2
    assert "LLOG_S3_BUCKET" in ran.stderr
    assert "LLOG_BLOBS" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
