"""What is PostgreSQL's own among the metadata stores: who gets in, who waits for whom, and what is told of it."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from click.testing import CliRunner

from devtools.servers.postgres import PostgresServer
from llog.cli.doctor import Finding, examine
from llog.cli.main import main
from llog.config import Secret, Settings
from llog.config.loading import load_settings
from llog.errors import ConfigurationError, StoreUnavailable, VersionMismatch
from llog.log.catalog import Catalog
from llog.log.opening import open_log, opened_log
from llog.stores.diagnosis import judge_clock
from llog.stores.meta import ABSENT, Put
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.store import PostgresMetaStore
from llog.stores.postgres.watches import Watches
from llog.stores.postgres.writer import NOTICE_BYTES_MAX, NOTICES_MAX, _notices, delete_range_operation, put_operation
from tests.conformance.conftest import Open


@pytest.fixture
def settings(postgres: PostgresServer, schema: str, tmp_path: Path) -> Settings:
    return Settings(
        blobs=f"file://{tmp_path}/blobs", meta=postgres.url(schema), postgres_password=Secret(postgres.password)
    )


# --- writers beside one another


async def test_writers_of_opposite_key_orders_wait_for_one_another_and_do_not_deadlock(
    open_store: Open, postgres: PostgresServer
) -> None:
    one, other = open_store(), open_store()
    keys = [f"k/{number:03}" for number in range(200)]
    for round_ in range(10):
        value = b"%d" % round_
        results = await asyncio.gather(
            one.put_many([Put(key, value) for key in keys]), other.put_many([Put(key, value) for key in reversed(keys)])
        )
        assert all(isinstance(result, int) for each in results for result in each)
    assert "deadlock detected" not in postgres.log.read_text()


_INCREMENT = """
import asyncio, sys
from llog.errors import VersionMismatch
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.store import PostgresMetaStore
async def main():
    store = PostgresMetaStore(PostgresAddress.parse(sys.argv[1]), password=sys.argv[2])
    done = 0
    while done < 50:
        entry = await store.get("n")
        try:
            await store.put("n", b"%d" % (int(entry.value) + 1), expected=entry.version)
            done += 1
        except VersionMismatch:
            pass
    await store.close()
asyncio.run(main())
"""


async def test_two_processes_that_increment_one_key_lose_nothing(
    open_store: Open, postgres: PostgresServer, schema: str
) -> None:
    store = open_store()
    await store.put("n", b"0")
    command = [sys.executable, "-c", _INCREMENT, postgres.url(schema), postgres.password]
    children = [await asyncio.create_subprocess_exec(*command) for _ in range(2)]
    assert [await child.wait() for child in children] == [0, 0]
    found = await store.get("n")
    assert found is not None
    assert found.value == b"100"


async def test_callers_that_come_together_share_a_commit(open_store: Open, postgres: PostgresServer) -> None:
    store = open_store()
    await store.put("a", b"")
    count = "SELECT pg_stat_force_next_flush(); SELECT xact_commit FROM pg_stat_database WHERE datname = 'llog'"
    before = int(postgres.sql(count).split()[-1])
    await asyncio.gather(*(store.put(f"k/{number}", b"") for number in range(500)))
    await store.close()  # so that what its connections did is counted
    assert int(postgres.sql(count).split()[-1]) - before < 100


async def test_versions_that_nothing_can_have_match_nothing(open_store: Open) -> None:
    store = open_store()
    await store.put("a", b"")
    for expected in (-2, -3, -100, 1 << 62, (1 << 63) - 1, 1 << 80):
        with pytest.raises(VersionMismatch):
            await store.put("a", b"", expected=expected)
        with pytest.raises(VersionMismatch):
            await store.delete("a", expected=expected)


# --- sessions and watches


async def test_sessions_end_by_the_servers_clock(
    open_store: Open, postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    await store.put("claim", b"", ephemeral=True)
    left = float(postgres.sql(f"SELECT extract(epoch FROM expires - now()) FROM {schema}.llog_sessions"))
    assert 0 < left <= 60
    postgres.sql(f"UPDATE {schema}.llog_sessions SET expires = now() - interval '1 second'")
    assert await store.get("claim") is None
    await store.put("claim", b"", expected=ABSENT, ephemeral=True)
    assert await store.get("claim") is not None


async def test_a_watch_sleeps_through_changes_elsewhere(open_store: Open) -> None:
    store, other = open_store(), open_store()
    watch = store.watch("w/")
    await anext(watch)
    await watch.confirm()  # it listens from now on
    watch.take()
    await other.put_many([Put(f"elsewhere/{number}", b"") for number in range(100)])
    heard = store.watch("elsewhere/")
    await heard.confirm()
    assert watch.take() == frozenset()
    await other.put("w/1", b"")
    async with asyncio.timeout(20):
        await anext(watch)


async def test_the_poll_finds_what_no_notification_told(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watches, "_on_notification", lambda *_: None)  # as behind a proxy that pools transactions
    store, other = open_store(), open_store()
    watch = store.watch("w/")
    await anext(watch)
    for number in range(3):
        waiting = asyncio.ensure_future(anext(watch))
        await other.put(f"w/{number}", b"")
        async with asyncio.timeout(20):
            await waiting
    await other.put("w/last", b"")
    async with asyncio.timeout(20):
        await watch.confirm()
        await anext(watch)


def test_notices_name_the_keys_or_none_if_there_are_too_many() -> None:
    assert _notices(
        [put_operation("a", b"", None), put_operation('"é\x00', b"", None), put_operation("a", b"", None)]
    ) == ['["a","\\"\\u00e9\\u0000"]']
    assert _notices([delete_range_operation("a", "b")]) is None
    assert _notices([put_operation("\x01" * 2000, b"", None)]) is None
    some = _notices([put_operation(f"{number:0100}", b"", None) for number in range(500)])
    assert some is not None
    assert 1 < len(some) <= NOTICES_MAX
    assert all(len(each) < 7900 for each in some)
    assert (
        _notices(
            [put_operation(f"{number:0100}", b"", None) for number in range(NOTICE_BYTES_MAX * NOTICES_MAX // 100)]
        )
        is None
    )


# --- processes and event loops


_FORK = """
import asyncio, os, sys
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.store import PostgresMetaStore
store = PostgresMetaStore(PostgresAddress.parse(sys.argv[1]), password=sys.argv[2])

async def child():
    assert (await store.get("a")).value == b"parent"
    await store.put("b", b"child", ephemeral=True)
    await store.close()

async def parent():
    await store.put("a", b"parent")
    await store.put("held", b"", ephemeral=True)
    watch = store.watch("b")
    await anext(watch)
    pid = os.fork()
    if pid == 0:
        asyncio.events._set_running_loop(None)
        asyncio.run(child())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert await store.get("b") is None
    assert await store.get("held") is not None
    await store.put("a", b"parent again")
    await watch.confirm()
    await store.close()

asyncio.run(parent())
"""


def test_the_child_of_a_fork_has_connections_and_a_session_of_its_own(postgres: PostgresServer, schema: str) -> None:
    command = [sys.executable, "-c", _FORK, postgres.url(schema), postgres.password]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_store_belongs_to_one_event_loop(postgres: PostgresServer, schema: str) -> None:
    store = PostgresMetaStore(PostgresAddress.parse(postgres.url(schema)), password=postgres.password)
    with asyncio.Runner() as one, asyncio.Runner() as other:
        one.run(store.put("a", b""))
        with pytest.raises(StoreUnavailable, match="another event loop"):
            other.run(store.get("a"))
        one.run(store.close())


async def test_settings_carry_the_way_in_to_another_process(settings: Settings) -> None:
    async with opened_log(settings) as log:
        await Catalog(log).create("t")
    for carried in (pickle.loads(pickle.dumps(settings)), load_settings(environment=settings.as_environment())):
        assert carried == settings
        async with opened_log(carried) as log:
            assert [topic.name for topic in await Catalog(log).topics()] == ["t"]


# --- who gets in


async def test_a_password_is_read_from_its_file_for_every_connection(
    settings: Settings, postgres: PostgresServer, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("not yet\n")
    changed = msgspec.structs.replace(settings, postgres_password=None, postgres_password_file=str(file))
    with pytest.raises(ConfigurationError, match="LLOG_POSTGRES_PASSWORD_FILE"):
        await open_log(changed)
    file.write_text(f"{postgres.password}\n")
    async with opened_log(changed) as log:
        assert await log.meta.keys("", "z", 10)
    file.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        await open_log(changed)


async def test_postgresqls_own_password_file_is_looked_at(
    settings: Settings, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text(f"*:*:*:{postgres.user}:{postgres.password}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    async with opened_log(msgspec.structs.replace(settings, postgres_password=None)) as log:
        await log.meta.check()


async def test_a_unix_socket_is_a_host(
    settings: Settings, postgres: PostgresServer, schema: str, tmp_path: Path
) -> None:
    meta = f"postgresql://llog@/llog?schema={schema}&host={postgres.directory}&port={postgres.port}"
    async with opened_log(msgspec.structs.replace(settings, meta=meta)) as log:
        await log.meta.check()


async def test_a_user_without_any_privilege_but_its_schema_is_enough(
    settings: Settings, postgres: PostgresServer, schema: str, tmp_path: Path
) -> None:
    role = f"r_{uuid4().hex}"
    postgres.sql(f"CREATE ROLE {role} LOGIN PASSWORD '{postgres.password}'")
    meta = settings.meta.replace("llog@", f"{role}@")
    own = msgspec.structs.replace(settings, meta=meta)
    with pytest.raises(ConfigurationError, match="GRANT"):
        await open_log(own)
    postgres.sql(f"CREATE SCHEMA {schema} AUTHORIZATION {role}")
    async with opened_log(own) as log:
        await Catalog(log).create("t")
        await (await log.meta.begin_reads()).confirm()


def _run(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    clean: dict[str, str | None] = {name: None for name in os.environ if name.startswith(("LLOG_", "PG"))}
    result = CliRunner().invoke(main, arguments, env=clean | environment)
    return result.exit_code, result.stderr


WRONG: dict[str, tuple[Callable[[dict[str, str]], dict[str, str]], str]] = {
    "password": (lambda now: now | {"LLOG_POSTGRES_PASSWORD": "hunter2"}, "check LLOG_POSTGRES_PASSWORD"),
    "no password": (lambda now: {"LLOG_META": now["LLOG_META"]}, "check LLOG_POSTGRES_PASSWORD"),
    "database": (lambda now: now | {"LLOG_META": now["LLOG_META"].replace("/llog?", "/none?")}, "CREATE DATABASE"),
    "port": (lambda now: now | {"LLOG_META": "postgresql://llog@127.0.0.1:1/llog"}, "check the host and the port"),
    "host": (lambda now: now | {"LLOG_META": "postgresql://llog@no-host.invalid/llog"}, "check the host and the port"),
    "tls": (lambda now: now | {"LLOG_META": now["LLOG_META"] + "&sslmode=require"}, "sslmode"),
    "certificate": (
        lambda now: now | {"LLOG_META": now["LLOG_META"] + "&sslmode=verify-full&sslrootcert=/none"},
        "sslrootcert",
    ),
    "password in the address": (
        lambda now: now | {"LLOG_META": now["LLOG_META"].replace("llog@", "llog:hunter2@")},
        "LLOG_POSTGRES_PASSWORD",
    ),
}


@pytest.mark.parametrize("command", [("topics", "list"), ("topics", "create", "t")])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_one_line_with_the_setting_and_the_remedy(
    wrong: str, command: tuple[str, ...], postgres: PostgresServer, schema: str, tmp_path: Path
) -> None:
    change, remedy = WRONG[wrong]
    code, said = _run(change(postgres.environment(schema)) | {"LLOG_BLOBS": f"file://{tmp_path}/blobs"}, *command)
    assert code == 2, said
    assert said.count("\n") == 1
    assert "LLOG_META is " in said
    assert remedy in said
    assert "hunter2" not in said
    assert postgres.password not in said


def test_reading_a_log_that_is_not_there_makes_none(postgres: PostgresServer, schema: str, tmp_path: Path) -> None:
    environment = postgres.environment(schema) | {"LLOG_BLOBS": f"file://{tmp_path}/blobs"}
    code, said = _run(environment, "topics", "list")
    assert (code, "there is no log" in said) == (2, True)
    assert postgres.sql(f"SELECT count(*) FROM pg_namespace WHERE nspname = '{schema}'") == "0"
    assert "this is a new log" in _run(environment, "topics", "create", "t")[1]
    assert _run(environment, "topics", "list")[0] == 0


async def test_a_schema_of_a_newer_version_is_refused(
    settings: Settings, postgres: PostgresServer, schema: str, tmp_path: Path
) -> None:
    async with opened_log(settings):
        pass
    postgres.sql(f"UPDATE {schema}.llog_state SET format = 99")
    environment = postgres.environment(schema) | {"LLOG_BLOBS": f"file://{tmp_path}/blobs"}
    code, said = await asyncio.to_thread(_run, environment, "topics", "list")
    assert code == 2
    assert "LLOG_META is " in said
    assert "format 99, made by a newer llog; this one knows 1: upgrade llog" in said


async def test_a_database_that_takes_no_writes_is_refused(settings: Settings, postgres: PostgresServer) -> None:
    name = f"d_{uuid4().hex}"
    postgres.sql(f"CREATE DATABASE {name}")
    postgres.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    meta = settings.meta.replace("/llog?", f"/{name}?")
    with pytest.raises(ConfigurationError, match=r"LLOG_META is .* is read-only"):
        await open_log(msgspec.structs.replace(settings, meta=meta))


async def test_a_schema_that_was_dropped_is_not_made_again(
    open_store: Open, postgres: PostgresServer, schema: str
) -> None:
    store = open_store()
    await store.put("a", b"")
    postgres.sql(f"DROP SCHEMA {schema} CASCADE")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.put("a", b"")
        with pytest.raises(StoreUnavailable):
            await store.get("a")
    assert postgres.sql(f"SELECT count(*) FROM pg_namespace WHERE nspname = '{schema}'") == "0"


async def test_the_password_is_shown_nowhere(
    settings: Settings, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("asyncio").setLevel(logging.DEBUG)
    errors: list[str] = []

    async def failing(call: Awaitable[object]) -> None:
        with pytest.raises(StoreUnavailable) as caught:
            await call
        errors.append("".join(str(each) + repr(each) for each in (caught.value, caught.value.__cause__)))

    async with opened_log(settings) as log:
        await log.meta.put("a", b"")
        assert postgres.password not in repr(log.meta) + repr(settings) + str(vars(log.meta))
        postgres.sql(f"DROP SCHEMA {PostgresAddress.parse(settings.meta).schema} CASCADE")
        await failing(log.meta.put("a", b""))
        await failing(log.meta.get("a"))
    assert postgres.password not in "".join(errors) + caplog.text


# --- the doctor


async def _diagnose(settings: Settings) -> dict[str, Finding]:
    async with opened_log(settings) as log:
        return {finding.check: finding for finding in await examine(log) if finding.store == "meta"}


async def test_the_doctor_shows_version_clock_latency_and_durability(settings: Settings) -> None:
    for prefix in ("", "root"):
        found = await _diagnose(msgspec.structs.replace(settings, root_prefix=prefix))
        assert [finding for finding in found.values() if not finding.ok or finding.warning] == []
        assert found["version"].detail.startswith("PostgreSQL 1")
        assert found["compare and swap"].detail.endswith(" ms")
        assert found["its clock is near ours"].detail.endswith(" s")
        assert found["commits are durable"].detail == "fsync on, synchronous_commit on"


async def test_the_doctor_warns_of_commits_that_are_not_durable_and_llog_makes_its_own_so(
    settings: Settings, postgres: PostgresServer
) -> None:
    name = f"d_{uuid4().hex}"
    postgres.sql(f"CREATE DATABASE {name}")
    postgres.sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
    other = msgspec.structs.replace(settings, meta=settings.meta.replace("/llog?", f"/{name}?"))
    found = await _diagnose(other)
    assert found["commits are durable"].ok
    assert found["commits are durable"].warning
    assert "synchronous_commit is off" in found["commits are durable"].detail
    store = PostgresMetaStore(PostgresAddress.parse(other.meta), password=postgres.password)
    assert await store._process_state().reader.rows("SHOW synchronous_commit") == [("on",)]
    await store.close()
    postgres.sql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf()")
    try:
        async with asyncio.timeout(60):
            while "Set fsync = on" not in found["commits are durable"].detail:  # a reload takes its time
                found = await _diagnose(other)
        assert found["commits are durable"].warning
    finally:
        postgres.sql("ALTER SYSTEM RESET fsync; SELECT pg_reload_conf()")


def test_a_clock_that_is_far_off_is_warned_of() -> None:
    assert judge_clock(1500).verdict == "ok"
    assert judge_clock(-61_000) == (
        "its clock is near ours",
        "-61.0 s: set the clock of this machine or of the server",
        "warning",
    )
