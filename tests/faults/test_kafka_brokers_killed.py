"""Three brokers that serve Kafka clients, killed again and again under idempotent producers and a consumer group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from devtools.servers.listening import free_ports
from devtools.servers.weed import S3Server
from llog.log.catalog import Catalog
from llog.log.opening import opened_log
from tests.faults.chaos import Chaos
from tests.faults.cluster import Cluster, Metadata, many_machines, one_machine
from tests.faults.kafka_load import KafkaLoad
from tests.faults.load import PARTITIONS, TOPIC

_BROKERS = 3
_ROUNDS = 2
_UP_S = 1.5
"""How long all brokers are up at least before the next one dies, so that leaders and coordinators have moved back."""
_COOPERATIVE = {"partition.assignment.strategy": "cooperative-sticky"}


@asynccontextmanager
async def kafka_suffering(
    stores: Mapping[str, str], directory: Path, members: Sequence[Mapping[str, Any]] = ({}, {}, {})
) -> AsyncIterator[tuple[Cluster, KafkaLoad, Chaos]]:
    """Three brokers with load by Kafka clients on them; in the end all must be as the clients were told."""
    cluster = Cluster(stores, directory)
    ports = free_ports(_BROKERS)
    for port in ports:
        cluster.add_broker(LLOG_KAFKA_PORT=str(port))
    async with opened_log(cluster.settings) as log:
        await Catalog(log).create(TOPIC, PARTITIONS)
    history = directory / "history.jsonl"
    bootstrap = ",".join(f"127.0.0.1:{port}" for port in ports)
    async with cluster, KafkaLoad(bootstrap, history, members=members) as load:
        try:
            chaos = Chaos(cluster, load)
            await load.more(100)
            yield cluster, load, chaos
            await load.more(200)
            await load.finish(cluster.settings)
            await cluster.check(history)
            assert cluster.has_kept_up()
        except BaseException:
            for process in cluster.processes:
                print(f"{process.name} said in its last life:\n{process.output[-3000:]}")
            raise
        finally:
            print(load.report())


async def kill_one_after_the_other(cluster: Cluster, chaos: Chaos) -> None:
    """Each broker dies several times, so that leaders of every partition and the group's coordinator are among them."""
    for broker in cluster.brokers * _ROUNDS:
        await chaos.kill(broker)()
        await asyncio.sleep(_UP_S)


async def test_kafka_clients_lose_and_double_nothing_when_brokers_die(
    metadata: Metadata, s3_server: S3Server, tmp_path: Path
) -> None:
    async with kafka_suffering(many_machines(metadata, s3_server), tmp_path) as (cluster, _, chaos):
        await kill_one_after_the_other(cluster, chaos)


async def test_kafka_clients_lose_and_double_nothing_when_the_brokers_of_one_machine_die(tmp_path: Path) -> None:
    async with kafka_suffering(one_machine(tmp_path), tmp_path) as (cluster, _, chaos):
        await kill_one_after_the_other(cluster, chaos)


async def test_kafka_clients_lose_and_double_nothing_when_brokers_sleep_and_the_metadata_server_restarts(
    metadata: Metadata, s3_server: S3Server, tmp_path: Path
) -> None:
    async with kafka_suffering(many_machines(metadata, s3_server), tmp_path) as (cluster, load, chaos):
        await chaos.run([chaos.pause(broker) for broker in cluster.brokers])
        await chaos.kill_server("the metadata server", metadata.server, down_s=2)()
        await load.more(100)
        unknown = [each for each in load.consumption.failures if "UNKNOWN_TOPIC" in each]
        assert not unknown, "consumers were told that the topic is gone"


async def test_a_kafka_group_skips_nothing_when_members_come_while_its_coordinator_dies(tmp_path: Path) -> None:
    static = {"group.instance.id": "static"}
    members = ({**_COOPERATIVE, **static}, _COOPERATIVE)
    async with kafka_suffering(one_machine(tmp_path), tmp_path, members) as (cluster, load, chaos):
        for broker in cluster.brokers:  # the coordinator is one of them
            chaos.say(f"kill {broker.name} while two members come")
            load.add_member(_COOPERATIVE)
            broker.kill()
            load.add_member(_COOPERATIVE)
            await chaos.more()
            await broker.come_up()
        chaos.say("restart the static member")
        await load.end_member(0)
        load.add_member({**_COOPERATIVE, **static})
        await chaos.more()
