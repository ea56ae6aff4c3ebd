"""Three brokers, two compactors and a collector on shared stores, killed and paused again and again under load."""

from __future__ import annotations

from pathlib import Path

from devtools.servers.weed import S3Server
from tests.faults.chaos import suffering
from tests.faults.cluster import Cluster, Metadata


async def test_nothing_is_lost_or_doubled_when_brokers_compactors_and_collectors_die_and_sleep(
    metadata: Metadata, s3_server: S3Server, tmp_path: Path
) -> None:
    cluster = Cluster(metadata, s3_server, tmp_path)
    for _ in range(3):
        cluster.add_broker()
    for kind in ("compactor", "compactor", "collector"):
        cluster.add_upkeep(kind)
    async with suffering(cluster, tmp_path) as chaos:
        kills = [chaos.kill(process) for process in (*cluster.brokers, *cluster.processes)]
        pauses = [chaos.pause(process) for process in (cluster.brokers[0], *cluster.upkeep[1:])]
        await chaos.run([*kills, *pauses])
