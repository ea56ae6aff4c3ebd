"""Several brokers that serve one keyed log: one owns it and writes, and nobody is fenced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from devtools.servers.weed import S3Server
from llog.config.loading import load_settings
from llog.errors import ConfigurationError, LogOwned, WriterFenced, WrongStore
from llog.keyed import StorageConfig, SyncKeyedLog
from llog.keyed.slate import locate, open_database
from tests.broker.test_owners import address, forwarded, until
from tests.broker.test_process import LIMIT_S, LLOG, Running, running

BUCKET = "keyed-owners"
_numbers = count()
Broker = Callable[..., Running]


@pytest.fixture
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The settings of one keyed log: in a directory, or in a bucket with the metadata in SQLite or PostgreSQL."""
    kind = request.param
    environment = {"LLOG_KEYED": f"file://{tmp_path}/keyed", "LLOG_SESSION_TIMEOUT_MS": "3s"}
    if kind != "directory":
        server: S3Server = request.getfixturevalue("s3_server")
        server.create_bucket(BUCKET)
        prefix = f"s3://{BUCKET}/{time.monotonic_ns()}-{next(_numbers)}"
        environment |= {
            "LLOG_KEYED": f"{prefix}/keyed",
            "LLOG_S3_ENDPOINT_URL": server.endpoint,
            "LLOG_S3_REGION_NAME": server.region,
            "LLOG_S3_ACCESS_KEY_ID": server.access_key,
            "LLOG_S3_SECRET_ACCESS_KEY": server.secret_key,
        }
    if kind == "postgres":
        schema = f"keyed_owners_{time.monotonic_ns()}"
        environment |= request.getfixturevalue("postgres").environment(schema) | {"LLOG_BLOBS": f"{prefix}/blobs"}
    return environment


@pytest.fixture
def broker(environment: dict[str, str], tmp_path: Path) -> Iterator[Broker]:
    """Starts brokers of the keyed log."""
    with ExitStack() as stack:

        def started(**settings: str) -> Running:
            return stack.enter_context(running(tmp_path, "serve", environment=environment | settings))

        yield started


def posted(broker: Running, value: str) -> httpx.Response:
    return broker.client.post("/keyed/append", json={"records": [{"key": "k", "value": value}]})


def appended(broker: Running, value: str) -> int:
    response = posted(broker, value)
    assert response.status_code == 200, response.text
    first: int = response.json()["first_sequence"]
    return first


def values(broker: Running) -> list[str]:
    response = broker.client.get("/keyed/scan", params={"key": "k", "limit": 1000})
    assert response.status_code == 200, response.text
    return [record["value"] for record in response.json()["records"]]


def metric(broker: Running, name: str) -> int:
    found: dict[str, Any] = broker.client.get("/metrics").json()
    return int(found[name])


def write(broker: Running, name: str, acknowledged: list[str], stop: threading.Event) -> None:
    for number in range(100_000):
        if stop.is_set():
            return
        try:
            if posted(broker, f"{name}-{number}").status_code == 200:
                acknowledged.append(f"{name}-{number}")
        except httpx.TransportError:
            return  # it was killed


@pytest.mark.parametrize("environment", ["directory", "sqlite"], indirect=True)
def test_of_brokers_whose_first_appends_come_at_once_one_owns_and_nobody_is_fenced(broker: Broker) -> None:
    brokers = [broker(), broker()]
    answers: list[tuple[int, httpx.Response]] = []

    def first(number: int) -> None:
        answers.append((number, posted(brokers[number % 2], str(number))))

    threads = [threading.Thread(target=first, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted((number, answer.status_code) for number, answer in answers) == [(number, 200) for number in range(8)]
    assert sorted(answer.json()["first_sequence"] for _, answer in answers) == list(range(8))
    for each in brokers:
        assert sorted(values(each)) == sorted(map(str, range(8))), (
            "what was appended anywhere is read everywhere at once"
        )
        assert metric(each, "llog_keyed_fenced") == 0
    assert sum("is now the writer" in each.errors for each in brokers) == 1
    assert sum(forwarded(each) > 0 for each in brokers) == 1
    owner, other = sorted(brokers, key=forwarded)
    form = other.client.post("/keyed/scan", data={"key": "k"})
    assert form.headers["llog-owner"] == address(owner)
    assert len(form.json()["records"]) == 8
    with other.client.stream("GET", "/keyed/tail?key=k&after=-1") as tail:
        lines = tail.iter_lines()
        while next(lines) != "id: 7":
            pass
        other.process.terminate()
        list(lines)
    assert other.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("environment", ["sqlite", "postgres"], indirect=True)
def test_after_the_owner_was_killed_another_takes_over_with_all_that_was_acknowledged(broker: Broker) -> None:
    owner, other = broker(), broker()
    appended(owner, "first")
    acknowledged, stop = ["first"], threading.Event()
    writers = [
        threading.Thread(target=write, args=(each, name, acknowledged, stop))
        for each, name in ((owner, "direct"), (other, "sent-on"))
    ]
    for writer in writers:
        writer.start()
    until(lambda: len(acknowledged) > 50)
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait(LIMIT_S)
    since = len(acknowledged)
    until(lambda: len(acknowledged) > since + 20)
    stop.set()
    for writer in writers:
        writer.join(LIMIT_S)
    found = values(other)
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found))
    for name in ("direct", "sent-on"):
        order = [value for value in found if value.startswith(name)]
        assert order == sorted(order, key=lambda value: int(value.rpartition("-")[2]))
    assert metric(other, "llog_keyed_fenced") == 0


@pytest.mark.parametrize("environment", ["postgres"], indirect=True)
def test_an_owner_that_was_paused_beyond_its_session_sends_on_what_it_is_asked_for(broker: Broker) -> None:
    paused, other = broker(), broker(LLOG_BROKER_FORWARD_TIMEOUT_MS="2s")
    appended(paused, "before")
    paused.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: posted(other, "meanwhile").status_code == 200)
    finally:
        paused.process.send_signal(signal.SIGCONT)
    until(lambda: posted(paused, "after").status_code == 200)
    assert metric(paused, "llog_keyed_fenced") == metric(other, "llog_keyed_fenced") == 0
    assert appended(other, "last") == appended(paused, "very last") - 1
    found = values(other)
    assert found == values(paused)
    assert [each for each in found if each not in ("meanwhile", "after")] == ["before", "last", "very last"]
    assert forwarded(paused) > 0


@pytest.mark.parametrize("environment", ["directory", "sqlite"], indirect=True)
def test_when_the_owner_stops_another_goes_on_without_a_gap(broker: Broker) -> None:
    owner, other = broker(), broker()
    assert [appended(owner, "a"), appended(other, "b")] == [0, 1]
    assert owner.end() == 0
    until(lambda: posted(other, "c").status_code == 200)
    assert values(other) == ["a", "b", "c"]


def run_append(environment: dict[str, str], directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*LLOG, "keyed", "append", *options, "k\tfrom the command line"]
    settings = {**os.environ, **environment}
    return subprocess.run(command, cwd=directory, env=settings, capture_output=True, text=True, timeout=LIMIT_S)


def elsewhere(environment: dict[str, str], directory: Path) -> dict[str, str]:
    """The settings of a program in another directory, which knows the keyed log and not the metadata store."""
    directory.mkdir()
    return {name: value for name, value in environment.items() if name not in ("LLOG_META", "LLOG_BLOBS")} | {
        "LLOG_DATA_DIR": str(directory)
    }


@pytest.mark.parametrize("environment", ["directory", "sqlite", "postgres"], indirect=True)
def test_programs_are_refused_with_the_address_of_the_broker_that_owns_the_log(
    broker: Broker, environment: dict[str, str], tmp_path: Path
) -> None:
    owner = broker()
    appended(owner, "a")
    settings = load_settings({"data_dir": str(tmp_path / "llog-data")}, environment=environment)
    with pytest.raises(LogOwned) as refused:
        SyncKeyedLog.open(environment["LLOG_KEYED"], settings=settings)
    assert refused.value.address == address(owner)
    done = run_append(environment, tmp_path)
    assert done.returncode == 1, done.stderr
    assert address(owner) in done.stderr
    assert appended(owner, "c") == 1, "it was not fenced"


@pytest.mark.parametrize("environment", ["sqlite"], indirect=True)
def test_a_program_that_does_not_know_the_metadata_store_fences_nobody(
    broker: Broker, environment: dict[str, str], tmp_path: Path
) -> None:
    owner = broker()
    appended(owner, "a")
    lost = elsewhere(environment, tmp_path / "lost")
    with pytest.raises(ConfigurationError, match=r"LLOG_META.*take_over=True"):
        SyncKeyedLog.open(lost["LLOG_KEYED"], settings=load_settings(environment=lost))
    done = run_append(lost, tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "LLOG_META" in done.stderr
    assert "--take-over" in done.stderr
    assert not list((tmp_path / "lost").iterdir()), "and made no log"
    assert appended(owner, "b") == 1, "it was not fenced"


@pytest.mark.parametrize("environment", ["sqlite"], indirect=True)
def test_a_program_with_the_metadata_store_of_another_log_fences_nobody(
    broker: Broker, environment: dict[str, str], tmp_path: Path
) -> None:
    owner = broker()
    appended(owner, "a")
    other = elsewhere(environment, tmp_path / "other")
    with running(tmp_path, "serve", environment=other) as stranger:
        refused = posted(stranger, "b")
        assert refused.json()["code"] == WrongStore.code, refused.text
    done = run_append(other, tmp_path)
    assert done.returncode != 0
    assert "LLOG_META" in done.stderr
    assert appended(owner, "c") == 1, "it was not fenced"
    done = run_append(other, tmp_path, "--take-over")
    assert done.returncode == 0, done.stderr
    assert posted(owner, "d").json()["code"] == WriterFenced.code
    done = run_append(other, tmp_path)
    assert done.returncode == 0, f"the log belongs to the other metadata store now: {done.stderr}"


@pytest.mark.parametrize("environment", ["postgres"], indirect=True)
def test_a_program_owns_the_log_in_a_bucket_until_it_closes_it(
    broker: Broker, environment: dict[str, str], tmp_path: Path
) -> None:
    other = broker()
    with SyncKeyedLog.open(environment["LLOG_KEYED"], settings=load_settings(environment=environment)) as log:
        assert log.append([(b"k", b"a")]) == 0
        refused = posted(other, "b")
        assert refused.json()["code"] == LogOwned.code
        assert str(os.getpid()) in refused.json()["detail"]
        assert log.append([(b"k", b"c")]) == 1
    assert appended(other, "d") == 2
    assert values(other) == ["a", "c", "d"]


@pytest.mark.parametrize("environment", ["sqlite"], indirect=True)
def test_an_owner_takes_the_log_back_from_a_process_that_opened_it_after_its_lease_had_ended(
    broker: Broker, environment: dict[str, str]
) -> None:
    owner = broker()
    appended(owner, "a")

    async def wake() -> None:
        """Go on as a process does that was paused between taking the lease and opening the log."""
        place = locate(environment["LLOG_KEYED"], load_settings(environment=environment))
        await (await open_database(place, StorageConfig())).close()

    asyncio.run(wake())
    assert posted(owner, "b").json()["code"] == WriterFenced.code
    appended(owner, "c")
    assert metric(owner, "llog_keyed_fenced") == 0
    assert [value for value in values(owner) if value != "b"] == ["a", "c"]
