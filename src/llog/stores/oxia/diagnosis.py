"""What `llog doctor` checks in an Oxia cluster. Oxia does not report its version to clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from llog.stores.diagnosis import Diagnosis, judge_clock
from llog.stores.oxia.client import ShardClient
from llog.stores.oxia.keys import ECHO
from llog.stores.oxia.proto import client_pb2 as proto

_EPHEMERAL: Final = "#llog-doctor"
"""An ephemeral key that is not the log's."""
_REMEDY: Final = "Use a namespace with keySorting: hierarchical"
_VANISH_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.1


async def diagnose(clients: Sequence[ShardClient], namespace: str, now_ms: Callable[[], int]) -> list[Diagnosis]:
    """Check the shards, the clock of the first shard's leader, and what depends on the namespace's sorting."""
    servers = {client.shard.leader for client in clients}
    return [
        Diagnosis("its shards have leaders", f"{len(clients)} shards, led by {len(servers - {''})} servers"),
        judge_clock(await _clock_skew_ms(clients[0], now_ms)),
        await _check_sorting(clients[0], namespace),
        await _check_ephemeral_keys(clients[0]),
    ]


async def _clock_skew_ms(client: ShardClient, now_ms: Callable[[], int]) -> float:
    await client.writes.echo()  # so that the next answer does not wait for a connection
    before = now_ms()
    (future,) = client.writes.submit(proto.WriteRequest(puts=[proto.PutRequest(key=ECHO)]))
    (answer,) = await future
    return float(answer.version.modified_timestamp - (before + now_ms()) / 2)


async def _check_sorting(client: ShardClient, namespace: str) -> Diagnosis:
    check = "its keys sort hierarchically"
    if await client.sorts_naturally():
        detail = f"namespace {namespace} has natural sorting, which Oxia handles badly. {_REMEDY}"
        return Diagnosis(check, detail, "failed")
    return Diagnosis(check, f"namespace {namespace}")


async def _check_ephemeral_keys(client: ShardClient) -> Diagnosis:
    check = "ephemeral keys vanish with their session"
    session = client.new_session()
    put = proto.PutRequest(key=_EPHEMERAL, session_id=await session.ensure_open())
    (future,) = client.writes.submit(proto.WriteRequest(puts=[put]))
    await future
    await session.close(_VANISH_SECONDS)
    for _ in range(int(_VANISH_SECONDS / _PAUSE_SECONDS)):
        (found,) = await client.lookups.submit([proto.GetRequest(key=_EPHEMERAL)])
        if found.status != proto.Status.OK:
            return Diagnosis(check, "")
        await asyncio.sleep(_PAUSE_SECONDS)
    (future,) = client.writes.submit(proto.WriteRequest(deletes=[proto.DeleteRequest(key=_EPHEMERAL)]))
    await future
    return Diagnosis(check, f"one stayed: claims of dead processes would never end. {_REMEDY}", "failed")
