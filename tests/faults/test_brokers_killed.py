"""Brokers, two compactors and a collector on shared stores, killed and paused again and again under load."""

from __future__ import annotations

from pathlib import Path

from devtools.servers.weed import S3Server
from tests.faults.chaos import suffering
from tests.faults.cluster import Cluster, Metadata, many_machines, one_machine


async def test_nothing_is_lost_or_doubled_when_brokers_compactors_and_collectors_die_and_sleep(
    metadata: Metadata, s3_server: S3Server, tmp_path: Path
) -> None:
    cluster = Cluster(many_machines(metadata, s3_server), tmp_path)
    for _ in range(3):
        cluster.add_broker()
    for kind in ("compactor", "compactor", "collector"):
        cluster.add_upkeep(kind)
    async with suffering(cluster, tmp_path) as chaos:
        kills = [chaos.kill(process) for process in (*cluster.brokers, *cluster.processes)]
        pauses = [chaos.pause(process) for process in (cluster.brokers[0], *cluster.upkeep[1:])]
        await chaos.run([*kills, *pauses])


async def test_nothing_is_lost_or_doubled_when_the_processes_of_one_machine_die(tmp_path: Path) -> None:
    cluster = Cluster(one_machine(tmp_path), tmp_path)
    for inline_max_bytes in ("16KiB", "16KiB", "0"):
        cluster.add_broker(LLOG_INLINE_MAX_BYTES=inline_max_bytes)
    for kind in ("compactor", "compactor", "collector"):
        cluster.add_upkeep(kind)
    async with suffering(cluster, tmp_path) as chaos:
        await chaos.run([chaos.kill(process) for process in (*cluster.brokers, *cluster.upkeep[1:])])
