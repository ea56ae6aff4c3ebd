"""Consumer groups when a member or the broker is killed: nothing is lost, and nothing comes again that was
acknowledged.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import llog
from llog.client import Connection, Error
from llog.client.consumer import Consumer
from llog.errors import LlogError
from tests.broker.test_process import Running, running

_LIMIT_S = 60
_RECORDS = 400
_PARTITIONS = 2
_TOPIC = f"""
CREATE TOPIC app.jobs PARTITIONS {_PARTITIONS} WITH (engine = '%s');
INSERT INTO TOPIC app.jobs (key, payload) SELECT 'key-' || i, 'job ' || i FROM range({_RECORDS}) t(i);
"""

# Takes two batches, acknowledges the first, and keeps the second.
_HOLDER = """
import os, sys
import llog
url, directory, visibility_ms = sys.argv[1:]
connection = llog.connect(url) if url else llog.connect(data_dir=directory)
options = {"group": "g", "member": "holder", "auto_ack": False, "batch": 50, "visibility_ms": int(visibility_ms)}
consumer = connection.consumer("app.jobs", **options)
for verb in ("acked", "held"):
    batch = consumer.poll(30)
    if verb == "acked":
        consumer.ack_all()
    for message in batch:
        os.write(1, b"%s %d %d %d\\n" % (verb.encode(), message.partition, message.offset, message.attempt))
os.write(1, b"ready\\n")
sys.stdin.read()
"""

# Acknowledges everything that it gets, until nothing came for half a minute.
_WORKER = """
import os, sys
import llog
url, directory = sys.argv[1:]
connection = llog.connect(url) if url else llog.connect(data_dir=directory)
consumer = connection.consumer("app.jobs", group="g", member="worker", auto_ack=False, batch=30, timeout=30)
os.write(1, b"ready\\n")
sys.stdin.readline()
for message in consumer:
    consumer.ack(message)
    os.write(1, b"acked %d %d %d\\n" % (message.partition, message.offset, message.attempt))
"""

Place = tuple[int, int]
"""Partition and offset."""


class Delivery(NamedTuple):
    verb: str
    place: Place
    attempt: int


def delivery(line: bytes) -> Delivery:
    verb, partition, offset, attempt = line.split()
    return Delivery(verb.decode(), (int(partition), int(offset)), int(attempt))


@contextmanager
def member(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Until it is ready, or has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line == b"ready\n":
            return
        yield line


def kill_a_member_that_holds_claims(url: str, directory: Path, places: set[Place]) -> None:
    where = url, str(directory)
    with member(_WORKER, *where) as worker, member(_HOLDER, *where, "4000") as holder:
        assert list(lines(worker)) == []
        deliveries = [delivery(line) for line in lines(holder)]
        os.kill(holder.pid, signal.SIGKILL)
        assert holder.wait() == -signal.SIGKILL
        acknowledged = {each.place for each in deliveries if each.verb == "acked"}
        held = {each.place for each in deliveries if each.verb == "held"}
        assert len(deliveries) == len(acknowledged | held) == 100
        assert {each.attempt for each in deliveries} == {1}
        assert worker.stdin is not None
        worker.stdin.write(b"go\n")
        worker.stdin.flush()
        wanted = _RECORDS - len(acknowledged)
        done = [delivery(line) for _, line in zip(range(wanted), lines(worker), strict=False)]
    rest = places - acknowledged
    assert Counter(each.place for each in done) == Counter(rest)
    assert {each.place: each.attempt for each in done} == {place: 2 if place in held else 1 for place in rest}


def filled(connection: Connection, engine: str) -> set[Place]:
    """Makes the topic; where its records are."""
    connection.execute(_TOPIC % engine)
    places = set(connection.execute('SELECT partition, "offset" FROM TOPIC app.jobs').fetchall())
    assert len(places) == _RECORDS
    return places


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lag(connection: Connection) -> int:
    """Records that are not acknowledged."""
    query = "SELECT sum(lag) FROM system.topic_offsets WHERE \"group\" = 'g'"
    [(found,)] = connection.execute(query).fetchall()
    return int(found)


def check_all_done(connection: Connection) -> None:
    query = "SELECT sum(outstanding), sum(lag), count(*) FROM system.topic_offsets WHERE \"group\" = 'g'"
    assert connection.execute(query).fetchone() == (0, 0, _PARTITIONS)
    assert connection.execute("CONSUME FROM app.jobs GROUP 'g' MEMBER 'late' LIMIT 10").fetchall() == []


@pytest.mark.parametrize("engine", ["rocksdb", "object"])
def test_what_a_killed_member_held_comes_to_another_one_through_the_broker(tmp_path: Path, engine: str) -> None:
    with running(tmp_path, "serve") as broker:
        url = str(broker.client.base_url)
        with llog.connect(url) as connection:
            kill_a_member_that_holds_claims(url, tmp_path, filled(connection, engine))
            check_all_done(connection)


def test_what_a_killed_process_held_comes_to_another_process_without_a_broker(tmp_path: Path) -> None:
    with llog.connect(data_dir=tmp_path) as connection:
        places = filled(connection, "object")
    kill_a_member_that_holds_claims("", tmp_path, places)
    with llog.connect(data_dir=tmp_path) as connection:
        check_all_done(connection)


class Brokers:
    """A broker that can be killed, and started again at another port."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._up = threading.Event()
        self._start()

    def _start(self) -> None:
        self._running: Running = self._stack.enter_context(running(self._directory, "serve"))
        self.url = str(self._running.client.base_url)
        self._up.set()

    def restart(self) -> None:
        self._up.clear()
        assert self._running.end(signal.SIGKILL) == -signal.SIGKILL
        self._start()

    def connect(self) -> Connection:
        """To the one that runs, once there is one."""
        assert self._up.wait(60)
        return llog.connect(self.url)


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with ExitStack() as stack:
        yield Brokers(tmp_path, stack)


class Taken(NamedTuple):
    """What a member was given and has not acknowledged."""

    member: str
    places: list[Place]


def taken(connection: Connection, count: int, visibility_ms: int = 600_000) -> Taken:
    consumer = connection.consumer("app.jobs", group="g", auto_ack=False, batch=count, visibility_ms=visibility_ms)
    places = [(each.partition, each.offset) for each in consumer.poll(30)]
    return Taken(consumer.member, places)


def acknowledge(connection: Connection, done: Taken) -> None:
    connection.ack("app.jobs", "g", dict(sorted(done.places)), member=done.member)


@pytest.mark.parametrize("engine", ["rocksdb", "object"])
def test_claims_and_acknowledgements_go_on_after_the_broker_was_killed(brokers: Brokers, engine: str) -> None:
    with brokers.connect() as connection:
        places = filled(connection, engine)
        first, second = taken(connection, 60), taken(connection, 60)
        acknowledge(connection, second)
        given_up = taken(connection, 60, visibility_ms=100)
    brokers.restart()
    rest: list[Taken] = []
    with brokers.connect() as connection:
        acknowledge(connection, first)  # claims that were given out before are as good as ever
        left = places - {*first.places, *second.places}
        while sum(len(each.places) for each in rest) < len(left):
            rest.append(taken(connection, 50))
            assert rest[-1].places, f"{rest} came"
        assert Counter(place for each in rest for place in each.places) == Counter(left)
        assert {*given_up.places} <= left
    brokers.restart()
    with brokers.connect() as connection:
        assert taken_at_once(connection) == []  # all of them are claimed
        for each in rest:
            acknowledge(connection, each)
        check_all_done(connection)
    brokers.restart()
    with brokers.connect() as connection:
        check_all_done(connection)


def taken_at_once(connection: Connection) -> list[Place]:
    return connection.execute("CONSUME FROM app.jobs GROUP 'g' MEMBER 'late' LIMIT 10").fetchall()


class Worker(threading.Thread):
    """Goes on with the next broker when its broker dies, as a new member: what it held under its old name comes
    again.
    """

    def __init__(self, brokers: Brokers, name: str, acknowledged: dict[Place, str]) -> None:
        super().__init__(name=name)
        self._brokers = brokers
        self._acknowledged = acknowledged
        self.seen: set[Place] = set()
        self.again: list[Place] = []
        """Delivered though they had been acknowledged before they were asked for."""
        self.finished = threading.Event()

    def run(self) -> None:
        while not self.finished.is_set():
            try:
                with self._brokers.connect() as connection:
                    self._work(connection.consumer("app.jobs", group="g", auto_ack=False, batch=7, visibility_ms=3_000))
            except (LlogError, Error):
                pass  # its broker is gone: what it had not acknowledged comes again

    def _work(self, consumer: Consumer) -> None:
        while not self.finished.is_set():
            before = set(self._acknowledged)
            batch = consumer.poll(0.2)
            found = {(each.partition, each.offset) for each in batch}
            self.again += found & before
            self.seen |= found
            for message in batch:
                consumer.ack(message)
                self._acknowledged[message.partition, message.offset] = self.name


def _has(acknowledged: dict[Place, str], least: float) -> bool:
    return len(acknowledged) >= least


@pytest.mark.parametrize("engine", ["rocksdb", "object"])
def test_nothing_acknowledged_comes_again_when_the_broker_is_killed_under_its_members(
    brokers: Brokers, engine: str
) -> None:
    with brokers.connect() as connection:
        places = filled(connection, engine)
    acknowledged: dict[Place, str] = {}
    workers = [Worker(brokers, name, acknowledged) for name in ("a", "b")]
    for worker in workers:
        worker.start()
    try:
        for share in (0.2, 0.5):
            wait_until(partial(_has, acknowledged, share * _RECORDS))
            brokers.restart()
        with brokers.connect() as connection:
            wait_until(lambda: lag(connection) == 0)
    finally:
        for worker in workers:
            worker.finished.set()
        for worker in workers:
            worker.join()
    assert [worker.again for worker in workers] == [[], []]
    assert set.union(*(worker.seen for worker in workers)) == places
    with brokers.connect() as connection:
        check_all_done(connection)
