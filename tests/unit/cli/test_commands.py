"""The commands of `llog`, run in this process on a log in a directory of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llog.cli.main import COMMANDS, main
from llog.config import Settings
from llog.config.loading import load_settings
from llog.engines.object import clocks
from llog.log import opening, pins
from llog.log.keys import LOG_FORMAT, WAL, PartitionKeys
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.log.records import IndexEntry, LogFormat, decode, encode
from llog.runtime import SystemRuntime, stamp_of, uuid7

Llog = Callable[..., Result]


@pytest.fixture
def llog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Llog:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str | bytes | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(main, arguments, input=stdin)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


def _json(result: Result) -> Any:
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", [*COMMANDS, "topics create", "topics describe", "groups reset"])
def test_every_command_explains_itself_whatever_the_environment(
    llog: Llog, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLOG_NONSENSE", "1")
    assert len(llog(*command.split(), "--help").stdout.splitlines()) > 4


def test_the_list_of_commands_is_the_help(llog: Llog) -> None:
    text = llog("--help").stdout
    assert all(f"\n  {command} " in text for command in COMMANDS)


def test_a_log_of_a_format_that_this_version_does_not_know_is_refused(llog: Llog, tmp_path: Path) -> None:
    llog("topics", "create", "t")

    async def upgrade() -> None:
        async with opened_log(load_settings()) as log:
            await log.meta.put(LOG_FORMAT, encode(LogFormat(number=3, needs="0.7.0")))

    asyncio.run(upgrade())
    for command in (["topics", "list"], ["produce", "t"], ["collect"], ["verify"]):
        refused = llog(*command, stdin="one\n", code=2)
        assert refused.stdout == ""
        assert refused.stderr == (
            f"llog: LLOG_META is sqlite://{tmp_path}/llog-data/meta.sqlite: the log has format 3, and this version "
            "of llog "
            "knows the formats up to 2: use llog 0.7.0 or later\n"
        )


def test_lines_are_produced_and_consumed(llog: Llog) -> None:
    produced = llog("produce", "t", stdin="one\ntwo\n\nlast without an end")
    assert produced.stdout == ""
    assert "appended 4 records" in produced.stderr
    assert llog("consume", "t").stdout == "one\ntwo\n\nlast without an end\n"
    assert llog("consume", "t", "--max", "1").stdout == "one\n"
    assert llog("consume", "t", "--from", "3").stdout == "\nlast without an end\n"
    assert llog("consume", "t", "--from", "latest").stdout == ""


def test_files_are_produced_in_order_and_their_last_lines_are_not_joined(llog: Llog, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n2")
    (tmp_path / "b").write_bytes(b"3\n")
    llog("produce", "t", "a", "b")
    assert llog("consume", "t").stdout == "1\n2\n3\n"


def test_keys_choose_the_partition_and_keep_their_order(llog: Llog) -> None:
    lines = [f"k{number % 7}={number}" for number in range(50)]
    llog("produce", "t", "--partitions", "4", "--key-separator", "=", stdin="\n".join(lines))
    records = [json.loads(line) for line in llog("consume", "t", "--format", "json").stdout.splitlines()]
    assert len({record["partition"] for record in records}) > 1
    by_key: dict[str, list[int]] = {}
    places: dict[str, set[int]] = {}
    for record in records:
        by_key.setdefault(record["key"], []).append(int(record["value"]))
        places.setdefault(record["key"], set()).add(record["partition"])
    assert by_key == {f"k{k}": list(range(k, 50, 7)) for k in range(7)}
    assert all(len(partitions) == 1 for partitions in places.values())
    assert sorted(llog("consume", "t", "--format", "kv").stdout.splitlines())[0] == "k0\t0"


def test_a_line_without_a_key_is_refused(llog: Llog) -> None:
    failed = llog("produce", "t", "--key-separator", "=", stdin="no key here\n", code=2)
    assert "llog: the line 'no key here' has no key" in failed.stderr
    assert "appended 0 records" in failed.stderr


def test_a_partition_that_is_asked_for_gets_the_records(llog: Llog) -> None:
    llog("topics", "create", "t", "--partitions", "3")
    llog("produce", "t", "--partition", "2", stdin="x\n")
    assert llog("consume", "t", "--partition", "2").stdout == "x\n"
    assert llog("consume", "t", "--partition", "0").stdout == ""
    assert "has no partition 3" in llog("produce", "t", "--partition", "3", stdin="x\n", code=2).stderr


def test_bytes_that_are_no_text_are_shown_as_base64(llog: Llog) -> None:
    llog("produce", "t", stdin=b"\xff\xfe\n")
    assert json.loads(llog("consume", "t", "--format", "json").stdout)["value"] == {"base64": "//4="}


def test_dispatcher_starts_at_a_time(llog: Llog) -> None:
    llog("produce", "t", stdin="x\n")
    assert llog("consume", "t", "--from", "2001-01-01").stdout == "x\n"
    assert llog("consume", "t", "--from", "2999-01-01T00:00:00+02:00").stdout == ""
    assert "is not a position" in llog("consume", "t", "--from", "yesterday", code=2).stderr


def test_an_offset_out_of_bounds_is_bad_input(llog: Llog) -> None:
    llog("produce", "t", stdin="x\n")
    assert "the next offset is 2" in llog("consume", "t", "--from", "9", code=2).stderr


def test_a_group_goes_on_where_it_stopped(llog: Llog) -> None:
    llog("produce", "t", stdin="1\n2\n3\n")
    assert llog("consume", "t", "--group", "g", "--max", "2").stdout == "1\n2\n"
    assert [(each["group"], each["lag"]) for each in _json(llog("groups", "list", "--json"))] == [("g", 1)]
    assert llog("consume", "t", "--group", "g").stdout == "3\n"
    assert llog("consume", "t", "--group", "g").stdout == ""
    assert llog("groups", "reset", "g", "t", "--to", "2").stdout == "group g is at offset 2 of t/0\n"
    assert _json(llog("groups", "describe", "g", "--json"))[0]["lag"] == 2
    assert llog("consume", "t", "--group", "g").stdout == "2\n3\n"
    assert "t " in llog("groups", "describe", "g").stdout
    assert "there is no group 'h'" in llog("groups", "describe", "h", code=2).stderr


def test_a_topic_is_fenced_and_unfenced(llog: Llog) -> None:
    llog("topics", "create", "t", "--partitions", "2")
    assert llog("topics", "fence", "t").stdout == "fenced 2 partitions of t\n"
    assert "fenced" in llog("produce", "t", "--partition", "0", stdin="x\n", code=1).stderr
    assert "t/1: fenced" in llog("inspect", "t", "--partition", "1").stdout.lower()
    assert llog("topics", "unfence", "t", "--partition", "0").stdout == "unfenced t/0\n"
    llog("produce", "t", "--partition", "0", stdin="x\n")
    assert "fenced" in llog("produce", "t", "--partition", "1", stdin="x\n", code=1).stderr
    assert "no partition 2" in llog("topics", "fence", "t", "--partition", "2", code=2).stderr
    assert "there is no topic 'u'" in llog("topics", "fence", "u", code=2).stderr


def test_topics_are_created_listed_described_changed_and_deleted(llog: Llog) -> None:
    llog("topics", "create", "t", "--partitions", "2", "--retention", "7d", "--retention-bytes", "10GiB")
    (topic,) = _json(llog("topics", "list", "--json"))
    assert (topic["partitions"], topic["retention_ms"], topic["retention_bytes"]) == (2, 7 * 86_400_000, 10 << 30)
    assert "7d" in llog("topics", "list").stdout
    assert "already exists" in llog("topics", "create", "t", code=2).stderr
    assert llog("topics", "add-partitions", "t", "3").stdout == "topic t has 3 partitions\n"
    assert "cannot become fewer" in llog("topics", "add-partitions", "t", "1", code=2).stderr
    llog("topics", "set-retention", "t", "--retention", "1h")
    described = _json(llog("topics", "describe", "t", "--json"))
    assert (described["retention_ms"], described["retention_bytes"], len(described["bounds"])) == (3_600_000, None, 3)
    assert "retention 1h" in llog("topics", "describe", "t").stdout
    assert "--yes" in llog("topics", "delete", "t", code=2).stderr
    llog("topics", "delete", "t", "--yes")
    assert _json(llog("topics", "list", "--json")) == []
    assert "there is no topic 't'" in llog("topics", "describe", "t", code=2).stderr


def test_compacted_blobs_are_collected_and_every_record_stays(llog: Llog, tmp_path: Path) -> None:
    for number in range(4):
        llog("produce", "t", stdin=f"{number}\n")
    (run,) = _json(llog("compact", "t", "--json"))
    assert (run["start_offset"], run["entries"], run["error"]) == (1, run["records"], None)
    collected = _json(llog("collect", "--grace", "0s", "--json"))
    assert collected["deleted"] == run["entries"]
    assert llog("consume", "t").stdout == "0\n1\n2\n3\n"
    assert "nothing to compact" in llog("compact").stderr
    assert "deleted 0 blobs" in llog("collect").stdout


class Readers:
    """A clock that runs while a command sleeps; what readers do meanwhile is `during_sleep`."""

    def __init__(self, during_sleep: Callable[[Log], Awaitable[None]]) -> None:
        self._system = SystemRuntime()
        self._slept_ms = 0
        self._during_sleep = during_sleep

    def now_ms(self) -> int:
        return self._system.now_ms() + self._slept_ms

    def random(self) -> Random:
        return self._system.random()

    async def sleep(self, seconds: float) -> None:
        self._slept_ms += 60_000
        async with opened_log(load_settings(), runtime=self) as log:
            await self._during_sleep(log)


def collect_beside(llog: Llog, monkeypatch: pytest.MonkeyPatch, during_sleep: Callable[[Log], Awaitable[None]]) -> Any:
    monkeypatch.setattr(opening, "SystemRuntime", lambda: Readers(during_sleep))
    return _json(llog("collect", "--grace", "0s", "--json"))


async def pin_anew() -> str:
    async with opened_log(load_settings()) as log:
        return await pins.pin(log, "reader")


def test_collecting_waits_for_the_readers_of_now_and_not_for_those_that_come_after(
    llog: Llog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        llog("produce", "t", stdin=f"{number}\n")
    entries = _json(llog("compact", "t", "--json"))[0]["entries"]
    held = [asyncio.run(pin_anew())]

    async def next_batch(log: Log) -> None:
        held.append(await pins.pin(log, "reader"))
        await pins.release(log, held[-2])

    collected = collect_beside(llog, monkeypatch, next_batch)
    assert (collected["deleted"], collected["waiting"]) == (entries, 0)
    assert collected["deleted_bytes"] > 0
    assert len(held) == 2


def test_collecting_gives_up_on_a_reader_that_does_not_end(llog: Llog, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        llog("produce", "t", stdin=f"{number}\n")
    entries = _json(llog("compact", "t", "--json"))[0]["entries"]
    held = asyncio.run(pin_anew())

    async def read_on(log: Log) -> None:
        assert await pins.renew(log, held)

    collected = collect_beside(llog, monkeypatch, read_on)
    assert (collected["deleted"], collected["waiting"]) == (0, entries)


def test_retention_drops_what_a_topic_need_not_keep(llog: Llog) -> None:
    llog("topics", "create", "kept")
    llog("topics", "create", "t", "--retention-bytes", "0B")
    llog("produce", "t", stdin="x\n")
    llog("produce", "kept", stdin="y\n")
    (result,) = _json(llog("retain", "--json"))
    assert (result["topic"], result["records"], result["new_start"]) == ("t", 1, 2)
    assert llog("consume", "t").stdout == ""
    assert llog("consume", "kept").stdout == "y\n"


def test_verify_finds_a_damaged_blob(llog: Llog, tmp_path: Path) -> None:
    llog("produce", "t", stdin="something to damage\n")
    assert _json(llog("verify", "--json"))["healthy"] is True
    assert "0 of 1 blobs" in llog("verify", "t", "--orphans").stdout
    (blob,) = (tmp_path / "llog-data/blobs/llog/wal-shared").iterdir()
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[data.index(b"something")] ^= 1
    blob.write_bytes(data)
    damaged = llog("verify", "t", code=1)
    assert "DAMAGED" in damaged.stdout
    assert "t/0 offsets 1 to 1: corrupt" in damaged.stderr
    assert _json(llog("verify", "--json", code=1))["healthy"] is False
    assert "damaged" in llog("consume", "t", code=1).stderr


def test_verify_goes_on_past_a_control_record_that_is_damaged_or_gone(llog: Llog, tmp_path: Path) -> None:
    for topic in ("a", "b", "c"):
        llog("produce", topic, stdin="x\n")

    async def damage() -> None:
        async with opened_log(Settings(data_dir=str(tmp_path / "llog-data"))) as log:
            await log.meta.put(PartitionKeys("a", 0).control, b"{")
            assert await log.meta.delete(PartitionKeys("b", 0).control)

    asyncio.run(damage())
    result = llog("verify", code=1)
    assert "a/0: control: metadata key" in result.stderr
    assert "b/0: control: partition b/0 has no control record" in result.stderr
    assert [line.split()[-1] for line in result.stdout.splitlines()[1:]] == ["DAMAGED", "DAMAGED", "ok"]


def test_verify_finds_a_damaged_header_although_all_records_can_be_read(llog: Llog, tmp_path: Path) -> None:
    llog("produce", "t", stdin="whole\n")
    (blob,) = (tmp_path / "llog-data/blobs/llog/wal-shared").iterdir()
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[data.index(b"timestamp_max")] ^= 1
    blob.write_bytes(data)
    assert llog("consume", "t").stdout == "whole\n"
    report = _json(llog("verify", "--json", code=1))["partitions"][0]
    assert [problem["kind"] for problem in report["problems"]] == ["header"]
    assert report["records"] == 1


def test_repair_shows_what_it_would_do_and_does_it_when_told(llog: Llog, tmp_path: Path) -> None:
    for line in ("first\n", "second\n", "third\n", "fourth\n"):
        llog("produce", "t", stdin=line)
    assert "no index has a gap" in llog("repair", "index").stdout

    async def lose() -> None:
        async with opened_log(Settings(data_dir=str(tmp_path / "llog-data"))) as log:
            assert await log.meta.delete(PartitionKeys("t", 0).entry(2))

    asyncio.run(lose())
    assert "t/0 offsets 2 to 2: gap" in llog("verify", code=1).stderr
    assert "t/0 offsets 2 to 2" in llog("collect", "--grace", "0s").stderr
    shown = llog("repair", "index", "t", code=1)
    assert "only candidate" in shown.stdout
    assert "nothing was changed" in shown.stderr
    assert "gap" in llog("verify", code=1).stderr
    told = _json(llog("repair", "index", "--json", "--apply"))
    assert told["entries_put"] == 1
    assert told["partitions"][0]["entries"][0]["proof"] == "only candidate"
    assert llog("consume", "t").stdout.split() == ["first", "second", "third", "fourth"]
    llog("verify")
    assert "no index has a gap" in llog("repair", "index", "--apply").stdout


def test_repair_lists_what_it_cannot_decide(llog: Llog, tmp_path: Path) -> None:
    for line in ("first\n", "second\n", "third\n"):
        llog("produce", "t", stdin=line)

    async def lose() -> None:
        async with opened_log(Settings(data_dir=str(tmp_path / "llog-data"))) as log:
            keys = PartitionKeys("t", 0)
            found = await log.meta.get(keys.entry(2))
            assert found is not None
            blob = decode(IndexEntry, found.value, found.key).data_uri
            twin = WAL + uuid7(stamp_of(blob) or 0, log.runtime.random())
            await log.blobs.put(twin, [await log.blobs.get(blob)])
            await log.meta.delete(keys.entry(2))

    asyncio.run(lose())
    shown = llog("repair", "index", "--apply", code=1)
    assert "t/0 offsets 2 to 2 cannot be decided: several candidates fit" in shown.stdout
    assert shown.stdout.count("1 records, from offset 2 on") == 2


def test_repair_of_a_topic_without_an_index_says_so(llog: Llog) -> None:
    llog("topics", "create", "t", "--engine", "disk")
    assert "not of engine 'object'" in llog("repair", "index", "t", code=2).stderr


def test_a_clock_that_was_far_ahead_is_repaired_and_blobs_are_collected_again(
    llog: Llog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ahead() -> int:
        return time.time_ns() // 1_000_000 + 400 * 86_400_000

    def produce_and_compact() -> None:
        for _ in range(3):
            llog("produce", "t", stdin="x\n")
        llog("compact", "t")

    with monkeypatch.context() as jump:
        jump.setattr(SystemRuntime, "now_ms", lambda self: ahead())
        jump.setattr(clocks, "store_time_ms", _store_time(ahead))  # a local directory has the machine's clock
        produce_and_compact()
        assert _json(llog("collect", "--grace", "0s", "--json"))["deleted"] > 0
    produce_and_compact()
    assert _json(llog("collect", "--grace", "0s", "--json"))["deleted"] == 0

    shown = llog("repair", "clock")
    assert "t/0" in shown.stdout
    assert "nothing was changed" in shown.stderr
    assert _json(llog("repair", "clock", "--json"))["applied"] is False
    assert "repaired" in llog("repair", "clock", "--apply").stderr
    assert "there is nothing to repair" in llog("repair", "clock").stdout
    assert _json(llog("collect", "--grace", "0s", "--json"))["deleted"] > 0
    assert llog("consume", "t").stdout == "x\n" * 6


def _store_time(now_ms: Callable[[], int]) -> Callable[[Log], Awaitable[int]]:
    async def store_time_ms(log: Log) -> int:
        return now_ms()

    return store_time_ms


def test_inspect_shows_how_records_are_stored(llog: Llog) -> None:
    for number in range(3):
        llog("produce", "t", stdin=f"{number}\n")
    (partition,) = _json(llog("inspect", "t", "--json"))
    assert partition["control"]["log_state"] == "OPEN"
    assert partition["control"]["sequence_counter"] == 4
    name = partition["entries"][0]["entry"]["data_uri"]
    assert name in llog("inspect", "t", "--partition", "0").stdout
    assert "--from-offset 2" in llog("inspect", "t", "--entries", "1").stdout
    assert _json(llog("inspect", "--blob", name))["shared"]["partitions"][0]["topic"] == "t"
    assert "TOPIC or a --blob" in llog("inspect", code=2).stderr


def test_the_doctor_passes_an_embedded_log_and_leaves_nothing_behind(llog: Llog, tmp_path: Path) -> None:
    report = _json(llog("doctor", "--json"))
    assert all(check["ok"] for check in report["checks"])
    assert len(report["checks"]) > 10
    assert "FAILED" not in llog("doctor").stdout
    blobs = tmp_path / "llog-data/blobs"
    left = [str(path.relative_to(blobs)) for path in blobs.rglob("*") if path.is_file()]
    assert [name for name in left if "doctor" in name] == []


def test_options_go_before_the_environment_and_name_other_stores(
    llog: Llog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLOG_DATA_DIR", str(tmp_path / "environment"))
    llog("topics", "create", "t")
    llog("--data-dir", "other", "topics", "create", "u")
    (tmp_path / "settings.toml").write_text(f'data_dir = "{tmp_path}/environment"\n')
    monkeypatch.delenv("LLOG_DATA_DIR")
    (topic,) = _json(llog("--config", "settings.toml", "topics", "list", "--json"))
    assert topic["name"] == "t"
    named = ("--meta", f"sqlite://{tmp_path}/other/meta.sqlite", "--blobs", f"file://{tmp_path}/other/blobs")
    assert _json(llog(*named, "topics", "list", "--json"))[0]["name"] == "u"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--meta", "oxia://host", "topics", "list"), "Oxia"),
        (("--config", "missing.toml", "topics", "list"), "missing.toml"),
        (("consume", "nothing"), "there is no topic 'nothing'"),
        (("topics", "create", "a/b"), "topic name"),
        (("verify", "--partition", "0"), "--partition needs a TOPIC"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(llog: Llog, arguments: tuple[str, ...], named: str) -> None:
    llog("topics", "create", "something")
    failed = llog(*arguments, code=2)
    assert failed.stdout == ""
    assert failed.stderr.startswith("llog: ")
    assert failed.stderr.count("\n") == 1
    assert named in failed.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("topics", "list"),
        ("topics", "describe", "t"),
        ("topics", "delete", "t", "--yes"),
        ("consume", "t"),
        ("groups", "list"),
        ("inspect", "t"),
        ("verify",),
        ("compact",),
        ("retain",),
        ("collect",),
    ],
    ids=" ".join,
)
def test_only_what_writes_makes_a_log(llog: Llog, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    before = sorted(tmp_path.rglob("*"))
    failed = llog(*arguments, code=2)
    assert "there is no log" in failed.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_what_makes_a_log_says_so_once(llog: Llog) -> None:
    assert "this is a new log" in llog("topics", "create", "t").stderr
    assert "this is a new log" not in llog("topics", "create", "u").stderr
    assert "this is a new log" in llog("--data-dir", "another", "produce", "t", stdin="a\n").stderr


def test_a_malformed_duration_is_explained(llog: Llog) -> None:
    assert "7d" in llog("topics", "create", "t", "--retention", "soon", code=2).stderr
