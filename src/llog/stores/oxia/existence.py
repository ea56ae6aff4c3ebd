"""A look at one key without an event loop. (The asyncio of gRPC wants one event loop per process, and the caller may
have it.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import grpc

from llog.errors import StoreUnavailable, StoreUnreachable
from llog.stores.meta import partition_prefix
from llog.stores.oxia.channels import Security
from llog.stores.oxia.keys import encode, hash_of
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub
from llog.stores.oxia.refusals import describe, final, no_shard

_ATTEMPT_SECONDS = 2.0
_PAUSE_SECONDS = 0.2


def has_key(servers: Sequence[str], namespace: str, key: str, *, security: Security, seconds: float) -> bool:
    """Whether the key is there. Raises as `OxiaMetaStore.connect` does."""
    deadline = time.monotonic() + seconds
    while True:
        for server in servers:
            try:
                return _has_key(server, namespace, key, security)
            except (grpc.RpcError, StoreUnavailable) as error:
                if found := final(error, server, namespace):
                    raise found from error
                refusal: Exception = error
            if time.monotonic() > deadline:
                if isinstance(refusal, StoreUnavailable):
                    raise StoreUnreachable(str(refusal)) from refusal
                raise StoreUnreachable(
                    f"no Oxia answers at {','.join(servers)} ({describe(refusal)}): check that it runs and has a "
                    "leader for every shard"
                ) from refusal
        time.sleep(_PAUSE_SECONDS)


def _has_key(server: str, namespace: str, key: str, security: Security) -> bool:
    metadata = security.metadata()
    with _channel(server, security) as channel:
        request = proto.ShardAssignmentsRequest(namespace=namespace)
        found = next(OxiaClientStub(channel).GetShardAssignments(request, timeout=_ATTEMPT_SECONDS, metadata=metadata))
    shard = _shard_of(hash_of(partition_prefix(key) or encode(key)), found.namespaces[namespace].assignments)
    with _channel(shard.leader or server, security) as channel:
        read = proto.ReadRequest(shard=shard.shard, gets=[proto.GetRequest(key=encode(key))])
        answer = next(OxiaClientStub(channel).Read(read, timeout=_ATTEMPT_SECONDS, metadata=metadata))
        return bool(answer.gets[0].status == proto.Status.OK)


def _shard_of(number: int, assignments: Iterable[proto.ShardAssignment]) -> proto.ShardAssignment:
    for each in assignments:
        if each.int32_hash_range.min_hash_inclusive <= number <= each.int32_hash_range.max_hash_inclusive:
            return each
    raise no_shard(number)


def _channel(address: str, security: Security) -> grpc.Channel:
    credentials = security.credentials()
    if credentials is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, credentials)
