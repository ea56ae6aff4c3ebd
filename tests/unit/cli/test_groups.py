"""`llog groups`, on topics of every engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

from llog.cli.main import main
from llog.config.loading import load_settings
from llog.engines.rocksdb.engine import rocksdb_of
from llog.engines.rocksdb.topics import require_rocks
from llog.engines.routing import EngineAppender
from llog.groups.groups import Groups
from llog.groups.records import GroupMode
from llog.log.engine import AppendGroup
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.model import Record, TopicPartition

Llog = Callable[..., Result]
R = TypeVar("R")
ENGINES = ("object", "disk", "rocksdb")


@pytest.fixture
def llog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Llog:
    """With a topic of three records on each engine, named after it."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(main, arguments, input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    for engine in ENGINES:
        run("topics", "create", engine, "--engine", engine)
        run("produce", engine, stdin="1\n2\n3\n")
    return run


def _in_log(operation: Callable[[Log], Awaitable[R]]) -> R:
    async def opened() -> R:
        async with opened_log(load_settings({})) as log:
            return await operation(log)

    return asyncio.run(opened())


def _json(result: Result) -> Any:
    return json.loads(result.stdout)


def test_a_group_is_listed_over_all_engines(llog: Llog) -> None:
    for engine in ENGINES:
        assert llog("consume", engine, "--group", "g", "--max", "2").stdout == "1\n2\n"
    [group] = _json(llog("groups", "list", "--json"))
    assert group == {
        "group": "g",
        "topics": ["disk", "object", "rocksdb"],
        "partitions": 3,
        "lag": 3,
        "outstanding": 0,
        "members": [],
    }
    assert "disk, object, rocksdb" in llog("groups", "list").stdout
    assert llog("groups", "reset", "g", "rocksdb", "--to", "earliest").stdout == "group g is at offset 1 of rocksdb/0\n"
    assert [each["lag"] for each in _json(llog("groups", "describe", "g", "--json"))] == [1, 1, 3]


@pytest.mark.parametrize("engine", ENGINES)
def test_claims_and_their_holders_are_shown_and_keep_a_group_from_being_deleted(llog: Llog, engine: str) -> None:
    async def claim(log: Log) -> None:
        group = await Groups(log).partition("g", TopicPartition(engine, 0))
        await group.begin(1)
        await group.claim("worker-1", limit=2, visibility_ms=600_000)
        await group.claim("", limit=1, visibility_ms=0)

    _in_log(claim)
    [share] = _json(llog("groups", "describe", "g", "--json"))
    assert (share["offset"], share["lag"], share["outstanding"], share["expired"]) == (1, 3, 3, 1)
    assert (share["mode"], share["holders"]) == ("claimed", ["", "worker-1"])
    assert "(no name), worker-1" in llog("groups", "describe", "g").stdout
    assert _json(llog("groups", "list", "--json"))[0]["members"] == ["", "worker-1"]
    assert llog("consume", engine, "--group", "g").stdout == "3\n", "what worker-1 holds is printed, too"
    assert "has the mode claimed" in llog("consume", engine, "--group", "g", "--mode", "assigned", code=2).stderr

    assert "needs --yes" in llog("groups", "delete", "g", code=2).stderr
    assert "in use by 'worker-1'" in llog("groups", "delete", "g", "--yes", code=2).stderr
    assert llog("groups", "delete", "g", "--yes", "--force").stdout == "deleted group g: 1 position\n"
    assert _json(llog("groups", "list", "--json")) == []
    assert "there is no group 'g'" in llog("groups", "delete", "g", "--yes", code=2).stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_a_member_that_prints_shares_a_topic_as_its_group_does(llog: Llog, engine: str) -> None:
    assert llog("consume", engine, "--group", "a", "--mode", "assigned", "--max", "1").stdout == "1\n"
    assert _json(llog("groups", "describe", "a", "--json"))[0]["mode"] == "assigned"
    assert llog("consume", engine, "--group", "a", "--max", "1").stdout == "2\n"
    assert "has the mode assigned" in llog("consume", engine, "--group", "a", "--mode", "claimed", code=2).stderr
    assert llog("consume", engine, "--group", "a", "--format", "kv").stdout == "\t3\n"
    assert _json(llog("groups", "list", "--json"))[0]["members"] == [], "one that has ended has not left"
    assert llog("consume", engine, "--group", "late", "--from", "3").stdout == "3\n"
    assert llog("consume", engine, "--group", "later", "--from", "latest").stdout == ""
    record = Record(payload=b"4", headers=(("trace", b"x"),))
    _in_log(lambda log: EngineAppender(log).append([AppendGroup(topic=engine, partition=0, records=[record])]))
    shown = llog("consume", engine, "--group", "later", "--from", "earliest", "--format", "json").stdout
    assert (json.loads(shown)["value"], json.loads(shown)["headers"]) == ("4", [["trace", "x"]])
    assert "name it with --group" in llog("consume", engine, "--mode", "assigned", code=2).stderr


def test_a_group_is_deleted_on_one_topic(llog: Llog) -> None:
    for engine in ENGINES:
        llog("consume", engine, "--group", "g")
    assert (
        llog("groups", "delete", "g", "--topic", "disk", "--yes").stdout
        == "deleted group g on topic disk: 1 position\n"
    )
    assert _json(llog("groups", "list", "--json"))[0]["topics"] == ["object", "rocksdb"]


@pytest.mark.parametrize("engine", ENGINES)
def test_members_without_a_position_are_shown(llog: Llog, engine: str) -> None:
    _in_log(lambda log: Groups(log).join("g", engine, "worker-1", session_ms=600_000))
    [group] = _json(llog("groups", "list", "--json"))
    assert (group["members"], group["partitions"], group["lag"]) == (["worker-1"], 1, 0)
    [share] = _json(llog("groups", "describe", "g", "--json"))
    assert (share["offset"], share["lag"], share["next_offset"], share["assigned_to"]) == (None, None, 4, "worker-1")
    assert share["mode"] == GroupMode.ASSIGNED
    assert "worker-1" in llog("groups", "describe", "g").stdout


def test_what_another_process_owns_is_told_and_the_other_groups_are_listed(llog: Llog) -> None:
    for engine in ENGINES:
        llog("consume", engine, "--group", f"of-{engine}")

    async def owned(log: Log) -> None:
        await (await require_rocks(log, rocksdb_of(log).rocks, "this")).open()
        listed = await asyncio.to_thread(llog, "groups", "list", "--json")
        assert [each["group"] for each in _json(listed)] == ["of-disk", "of-object"]
        assert "not shown: the tables and the topics of engine 'rocksdb' in" in listed.stderr
        assert f"process {os.getpid()}" in listed.stderr
        for command in (["describe", "of-rocksdb"], ["reset", "of-rocksdb", "rocksdb", "--to", "1"]):
            result = await asyncio.to_thread(CliRunner().invoke, main, ["groups", *command])
            assert result.exit_code != 0
            assert f"process {os.getpid()}" in result.stderr
        for group in ("of-disk", "of-rocksdb"):
            refused = await asyncio.to_thread(llog, "groups", "delete", group, "--yes", code=1)
            assert f"process {os.getpid()}" in refused.stderr
        deleted = await asyncio.to_thread(llog, "groups", "delete", "of-disk", "--topic", "disk", "--yes")
        assert deleted.stdout == "deleted group of-disk on topic disk: 1 position\n"

    _in_log(owned)
    assert [each["group"] for each in _json(llog("groups", "list", "--json"))] == ["of-object", "of-rocksdb"]
