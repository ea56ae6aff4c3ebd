"""What `llog doctor` checks in a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llog.stores.diagnosis import Diagnosis, judge_clock
from llog.stores.postgres.reader import Reader

_SERVER: Final = """
SELECT current_setting('server_version'), extract(epoch FROM clock_timestamp())::float8 * 1000, current_setting('fsync'),
    (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'), current_setting('synchronous_standby_names'),
    (SELECT count(*) FROM pg_stat_replication)
"""  # noqa: E501


async def diagnose(reader: Reader, now_ms: Callable[[], int]) -> list[Diagnosis]:
    await reader.revision()  # so that the next answer does not wait for a connection
    before = now_ms()
    ((version, server_ms, fsync, synchronous_commit, synchronous, standbys),) = await reader.rows(_SERVER)
    after = now_ms()
    return [
        Diagnosis("version", f"PostgreSQL {version}"),
        judge_clock(server_ms - (before + after) / 2),
        _judge_durability(fsync, synchronous_commit),
        _judge_standbys(synchronous if synchronous_commit != "local" else "", standbys),
    ]


def _judge_durability(fsync: str, synchronous_commit: str) -> Diagnosis:
    """Judge the server's defaults. llog turns on synchronous_commit for its sessions, but cannot turn on fsync."""
    if fsync != "on":
        detail = "fsync is off: a power cut loses acknowledged records, or the database. Set fsync = on"
    elif synchronous_commit == "off":
        detail = (
            "synchronous_commit is off by default: llog turns it on for its own sessions, but proxies may undo that. "
            "Set synchronous_commit = on"
        )
    else:
        return Diagnosis("commits are durable", f"fsync on, synchronous_commit {synchronous_commit}")
    return Diagnosis("commits are durable", detail, "warning")


def _judge_standbys(synchronous: str, standbys: int) -> Diagnosis:
    if standbys and not synchronous:
        lost = (
            f"{standbys} standbys, and commits wait for none of them: acknowledged records are lost if one takes over"
        )
        advice = "set synchronous_standby_names, and synchronous_commit to on"
        return Diagnosis("standbys have every commit", f"{lost}: {advice}", "warning")
    return Diagnosis("standbys have every commit", f"synchronous: {synchronous}" if synchronous else "no standbys")
