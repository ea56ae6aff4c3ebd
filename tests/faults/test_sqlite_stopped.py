"""A process that is stopped while it holds a lock of the SQLite metadata store keeps no other one waiting for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llog.errors import StoreUnavailable
from llog.stores.sqlite import writer as sqlite_writer
from llog.stores.sqlite.store import SqliteMetaStore
from tests.broker.test_process import running

LIMIT_S = 300

_LLOG = """
import asyncio, os, signal, sys
from llog.stores.sqlite.store import SqliteMetaStore
from llog.stores.sqlite.transaction import Transaction
finish = Transaction.finish
def finish_after_a_stop(transaction):
    os.write(1, b"holds the lock\\n")
    os.kill(os.getpid(), signal.SIGSTOP)
    finish(transaction)
async def main():
    store = SqliteMetaStore.open(sys.argv[1])
    Transaction.finish = finish_after_a_stop
    await store.put("stopped", b"")
    Transaction.finish = finish
    await store.close()
asyncio.run(main())
"""

_ANOTHER_PROGRAM = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
os.write(1, b"holds the lock\\n")
os.kill(os.getpid(), signal.SIGSTOP)
connection.execute("COMMIT")
"""


@contextmanager
def stopped(program: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was stopped in the middle of a transaction."""
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds the lock\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield process
    finally:
        process.kill()
        process.communicate()


def resume(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("program", [_LLOG, _ANOTHER_PROGRAM], ids=["llog", "another program"])
async def test_writes_fail_in_time_and_name_the_stopped_process_that_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sqlite_writer, "LOCK_SECONDS", 0.5)
    monkeypatch.setattr(sqlite_writer, "BUSY_SECONDS", 0.5)
    path = tmp_path / "meta.db"
    store = SqliteMetaStore.open(path)
    await store.put("before", b"")
    with stopped(program, path) as process:
        for _ in range(2):
            with pytest.raises(
                StoreUnavailable, match=rf"by process {process.pid} \(.*\), which is stopped.*kill -CONT"
            ):
                async with asyncio.timeout(LIMIT_S):
                    await store.put("meanwhile", b"")
        assert await store.get("before") is not None, "reads wait for no writer"
        resume(process)
    await store.put("after", b"")
    assert (store.counts.count["put"], store.counts.errors["put"]) == (4, 2), "each call counts once"
    expected = ["after", "before", "stopped"] if program is _LLOG else ["after", "before"]
    assert await store.keys("", "z", 10) == expected
    await store.close()


def test_a_broker_answers_503_and_names_the_stopped_process(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as broker:
        broker.produce("before")
        with stopped(_LLOG, tmp_path / "llog-data" / "meta.sqlite") as process:
            item = {"topic": "t", "partition": 0, "records": ["meanwhile"]}
            answer = broker.client.post("/produce", json={"topic_partitions": [item]}, timeout=LIMIT_S)
            assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
            assert f"process {process.pid} " in answer.json()["detail"]
            created = broker.client.post("/topics", json={"name": "u", "partitions": 1}, timeout=LIMIT_S)
            assert (created.status_code, created.json()["code"]) == (503, "store_unavailable")
            assert [record["payload"] for record in broker.consume()] == ["before"]
            resume(process)
        broker.produce("after")
        assert [record["payload"] for record in broker.consume()] == ["before", "after"]
