"""What every suite shares: hypothesis profiles, and real servers under one rule for when they cannot be had."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

from devtools.servers.oxia import OxiaMissing, OxiaServer, oxia_server
from devtools.servers.postgres import PostgresServer, postgres_server
from devtools.servers.weed import S3Server, ServerError, weed_server
from llog.sql.workers.process import zygote

# A suite that a shell has started in the background ignores SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A JVM of Spark lives for seconds here: what the optimising compiler costs is never earned back.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")

# Most tests append little and look at the blobs. Tests of inline appends, and the processes of `faults`, do without.
os.environ.setdefault("LLOG_INLINE_MAX_BYTES", "0")

# Brokers of tests that run at the same time cannot all have Kafka's port. Tests of Kafka clients choose a free one.
os.environ.setdefault("LLOG_KAFKA_PORT", "0")

settings.register_profile("default", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("LLOG_HYPOTHESIS_PROFILE", "default"))


def unavailable(reason: str) -> NoReturn:
    """Skip on a machine that lacks something; fail where LLOG_REQUIRE_SERVERS=1 says that everything must be there."""
    if os.environ.get("LLOG_REQUIRE_SERVERS") == "1":
        pytest.fail(f"{reason} (LLOG_REQUIRE_SERVERS=1, so this is a failure)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def warm_zygote() -> Iterator[None]:
    """Once one test has started the process that workers for SQL are forked from, the next ones find it."""
    zygote.hold()
    yield
    zygote.release()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real S3 server for the whole run; take a bucket of your own from `create_bucket`."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(weed_server(tmp_path_factory.mktemp("weed")))
        except ServerError as error:
            unavailable(str(error))
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One real PostgreSQL server for the whole run; take a schema of your own. Whoever stops it starts one with
    `postgres_server`.
    """
    with ExitStack() as stack:
        try:
            server = stack.enter_context(postgres_server())
        except ServerError as error:
            unavailable(str(error))
        yield server


@pytest.fixture(scope="session")
def oxia(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OxiaServer]:
    """One real Oxia with four shards for the whole run, emptied by `wipe`; skips where none can be had, in CI, too."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(oxia_server(tmp_path_factory.mktemp("oxia"), shards=4))
        except OxiaMissing as error:
            pytest.skip(str(error))
        yield server
