"""A process that is killed while it changes a table with routes: rows and events agree, whenever that was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llog
from llog.client import Connection
from llog.model import partition_for_key
from tests.broker.test_process import running
from tests.faults.topics_plan import SETUP, SPAN, Change, Row, Statement, Unit, ends, plan

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 120
_SEED = 8
_WRITERS = 2
_CHANGES = 5_000
"""Of each writer."""
_KILLS = 6

Told = dict[str, Any]


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


class Progress:
    """What the writers said, over all of their lives."""

    def __init__(self, plans: list[list[Unit]]) -> None:
        self.ends = [ends(units) for units in plans]
        self.acknowledged = [0] * len(plans)
        """Changes of units that were acknowledged."""
        self.ended = False

    @property
    def units(self) -> int:
        return sum(each.index(done) for each, done in zip(self.ends, self.acknowledged, strict=True))

    def hear(self, line: bytes) -> None:
        match line.split():
            case [b"from", writer, count]:
                self.check_restart(int(writer), int(count))
            case [b"end"]:
                self.ended = True
            case [writer, unit]:
                number = int(writer)
                self.acknowledged[number] = max(self.acknowledged[number], self.ends[number][int(unit)])
            case other:
                raise AssertionError(f"half of a unit, or a line of another kind: {other}")

    def check_restart(self, writer: int, count: int) -> None:
        """All that was acknowledged is there, and of the rest at most the one unit that was under way, as a whole."""
        acknowledged = self.acknowledged[writer]
        following = [end for end in self.ends[writer] if end > acknowledged][:1]
        assert count in [acknowledged, *following], (writer, count, acknowledged)
        self.acknowledged[writer] = count


def live(directory: Path, progress: Progress, kill_after: int, delay_s: float) -> None:
    """One life of the process: it is killed `delay_s` after it said so many lines, or at its end."""
    with started("-m", "tests.faults.topics_plan", *map(str, (directory, _SEED, _WRITERS, _CHANGES))) as process:
        assert process.stdout is not None
        lines = 0
        while lines < kill_after and not progress.ended:
            line = process.stdout.readline()
            assert line, f"the writer ended by itself: {process.wait()}"
            progress.hear(line)
            lines += 1
        time.sleep(delay_s)
        os.kill(process.pid, signal.SIGKILL)
        for line in process.stdout.readlines():
            progress.hear(line)
        assert process.wait() == -signal.SIGKILL


def told(connection: Connection, topic: str) -> list[Told]:
    rows: list[Told] = (
        connection.execute(f'SELECT * FROM TOPIC {topic} ORDER BY partition, "offset"').arrow().to_pylist()
    )
    return rows


def wait_for_count(connection: Connection, topic: str, count: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while connection.execute(f"SELECT payload FROM TOPIC {topic}").rowcount < count:
        assert time.monotonic() < deadline, f"{topic} does not get its events"
        time.sleep(0.05)


def check_order(events: list[Told], partitions: int) -> dict[int, list[Told]]:
    """Offsets are dense and message ids grow, in every partition; the events of each."""
    found = {number: [event for event in events if event["partition"] == number] for number in range(partitions)}
    assert sum(map(len, found.values())) == len(events)
    for each in found.values():
        assert [event["offset"] for event in each] == list(range(1, len(each) + 1))
        ids = [event["message_id"] for event in each]
        assert ids == sorted(set(ids))
    return found


def row_of(payload: str) -> Row:
    return Row(**json.loads(payload))


def check_units(events: list[Told], plans: list[list[Unit]]) -> list[Change]:
    """The events of a topic with payload `full` are those of the plans, unit by unit, none between those of another
    one; as changes.
    """
    changes = [Change(event["op"], row_of(event["payload"])) for event in events]
    assert [event["key"] for event in events] == [str(change.row.id) for change in changes]
    units = [iter([unit for unit in each if unit.size]) for each in plans]
    position = 0
    while position < len(changes):
        for chunk in next(units[changes[position].row.id // SPAN]).chunks:
            found = changes[position : position + len(chunk)]
            assert Counter(found) == Counter(chunk)
            position += len(chunk)
    assert [next(each, None) for each in units] == [None] * len(plans)
    return changes


def replayed(changes: list[Change]) -> tuple[dict[int, Row], list[Told]]:
    """The table that the changes leave, and what a topic with payload `diff` tells of them."""
    table: dict[int, Row] = {}
    diffs: list[Told] = []
    for op, row in changes:
        before = table.get(row.id)
        assert (before is None) == (op == "INSERT")
        if op == "DELETE":
            assert table.pop(row.id) == row
            payload: Told = {"id": row.id}
        else:
            table[row.id] = row
            old = {} if before is None else before._asdict()
            payload = {
                name: v for name, v in row._asdict().items() if name == "id" or name not in old or old[name] != v
            }
        diffs.append({"op": op, "key": str(row.id), "payload": payload})
    return table, diffs


def shown(event: Told) -> Told:
    return {"op": event["op"], "key": event["key"], "payload": json.loads(event["payload"])}


def check_agreement(connection: Connection, plans: list[list[Unit]]) -> None:
    """The table and its three topics, which have everything, tell the same story: that of the plans."""
    whole, keys, diffs = (told(connection, f"app.{name}") for name in ("whole", "keys", "diffs"))
    check_order(whole, 1)
    changes = check_units(whole, plans)
    table, expected_diffs = replayed(changes)
    rows = connection.execute("SELECT * FROM app.rows ORDER BY id").fetchall()
    assert [Row(*row) for row in rows] == [table[each] for each in sorted(table)]

    passing = [change for change in changes if change.row.n is not None and change.row.n % 3 == 0]
    assert 0 < len(passing) < len(changes)
    for number, events in check_order(keys, 3).items():
        expected = [
            {"op": op, "key": str(row.id), "payload": {"id": row.id}}
            for op, row in passing
            if partition_for_key(row.tenant.encode(), 3) == number
        ]
        assert [shown(event) for event in events] == expected

    for number, events in check_order(diffs, 2).items():
        expected = [diff for diff in expected_diffs if partition_for_key(diff["key"].encode(), 2) == number]
        assert [shown(event) for event in events] == expected

    ids = [event["message_id"] for event in (*whole, *keys, *diffs)]
    assert len(set(ids)) == len(ids)


def test_rows_and_events_of_three_routes_agree_when_their_writer_is_killed_again_and_again(tmp_path: Path) -> None:
    with llog.connect(data_dir=tmp_path) as connection:
        connection.execute(SETUP)
    plans = [plan(_SEED, writer, _CHANGES) for writer in range(_WRITERS)]
    total = sum(map(len, plans))
    progress, rng = Progress(plans), random.Random(_SEED)
    live(tmp_path, progress, kill_after=_WRITERS, delay_s=0.02)  # while it takes up the work
    for kill in range(1, _KILLS):
        wanted = total * kill // _KILLS - progress.units
        live(tmp_path, progress, kill_after=max(wanted, 1), delay_s=rng.uniform(0, 0.05))
    live(tmp_path, progress, kill_after=10 * total, delay_s=0)
    assert progress.ended
    assert progress.acknowledged == [each[-1] for each in progress.ends]

    with llog.connect(data_dir=tmp_path) as connection:
        wait_for_count(connection, "app.diffs", sum(progress.acknowledged))
    # Opened again, the relay takes up what was under way once more; what it would double comes before these.
    last = tuple(Change("INSERT", Row(_WRITERS * SPAN + number, "ann", number, None)) for number in range(16))
    with llog.connect(data_dir=tmp_path) as connection:
        connection.insert("app.rows", [change.row._asdict() for change in last])
        wait_for_count(connection, "app.diffs", sum(progress.acknowledged) + len(last))
        check_agreement(connection, [*plans, [_inserted(last)]])


def _inserted(changes: tuple[Change, ...]) -> Unit:
    return Unit("alone", (Statement("arrow", "", [], tuple((change,) for change in changes)),))


# Its blobs cannot be written, so that what it says it has done is in the outbox when it is killed.
_HOLDER = """
import os, sys
from pathlib import Path
import llog
blobs = Path(sys.argv[1], "blobs")
connection = llog.connect(data_dir=sys.argv[1])
connection.execute("CREATE TABLE app.t (id BIGINT PRIMARY KEY)")
connection.execute("CREATE TOPIC app.relayed PARTITIONS 2 WITH (engine = 'object')")
connection.execute("ALTER TOPIC app.relayed ADD SOURCE app.t ON INSERT WITH (payload = 'full')")
if blobs.exists():
    blobs.rename(blobs.with_name("aside"))
blobs.write_bytes(b"")
connection.executemany("INSERT INTO app.t VALUES (?)", [(number,) for number in range(500)])
os.write(1, b"%d relayed\\n" % connection.execute("SELECT payload FROM TOPIC app.relayed").rowcount)
sys.stdin.read()
"""


def test_a_broker_relays_what_a_killed_process_left_in_the_outbox_without_being_asked_any_sql(tmp_path: Path) -> None:
    data = tmp_path / "llog-data"
    with started("-c", _HOLDER, str(data)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0 relayed\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (data / "blobs").unlink()
    if (data / "aside").exists():
        (data / "aside").rename(data / "blobs")
    with running(tmp_path, "serve") as broker:
        wanted = [{"topic": "app.relayed", "partition": number, "fetch_offset": 1} for number in range(2)]
        deadline = time.monotonic() + 30
        while True:
            answer = broker.client.post("/consume", json={"topic_partitions": wanted, "max_bytes": 1 << 20})
            assert answer.status_code == 200, answer.text
            found = [record for each in answer.json()["topic_partitions"] for record in each["records"]]
            if len(found) >= 500:
                break
            assert time.monotonic() < deadline, f"{len(found)} events of 500 came: {broker.errors}"
            time.sleep(0.1)
    with llog.connect(data_dir=data) as connection:
        events = told(connection, "app.relayed")
    check_order(events, 2)
    assert sorted(json.loads(event["payload"])["id"] for event in events) == list(range(500))
