"""The servers of both stores are killed, away for a while, and paused, under three brokers and their load."""

from __future__ import annotations

from pathlib import Path

from devtools.servers.weed import Weed
from tests.faults.chaos import suffering
from tests.faults.cluster import Cluster, Metadata, many_machines


async def test_nothing_is_lost_or_doubled_when_the_stores_go_away_and_come_back(
    metadata: Metadata, weed: Weed, tmp_path: Path
) -> None:
    cluster = Cluster(many_machines(metadata, weed.server), tmp_path)
    for _ in range(3):
        cluster.add_broker()
    for kind in ("compactor", "compactor", "collector"):
        cluster.add_upkeep(kind)
    async with suffering(cluster, tmp_path) as chaos:
        await chaos.run(
            [
                chaos.kill_server("the metadata server", metadata.server),
                chaos.kill_server("the metadata server", metadata.server, down_s=3),
                chaos.pause_server("the metadata server", metadata.server, 4),
                chaos.kill_server("the S3 server", weed, down_s=10),
                chaos.pause_server("the S3 server", weed, 5),
            ]
        )
