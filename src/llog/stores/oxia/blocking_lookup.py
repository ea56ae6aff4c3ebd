"""A lookup of one key without an event loop: gRPC's asyncio allows one loop per process, which the caller may run."""

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
from llog.stores.oxia.refusals import describe, no_shard, permanent_error

_ATTEMPT_SECONDS = 2.0
_PAUSE_SECONDS = 0.2


def has_key(servers: Sequence[str], namespace: str, key: str, *, security: Security, seconds: float) -> bool:
    """Return whether the key exists. Raises what `OxiaMetaStore.connect` raises."""
    deadline = time.monotonic() + seconds
    while True:
        for server in servers:
            try:
                return _ask_server(server, namespace, key, security)
            except (grpc.RpcError, StoreUnavailable) as error:
                if permanent := permanent_error(error, server, namespace):
                    raise permanent from error
                refusal: Exception = error
            if time.monotonic() > deadline:
                if isinstance(refusal, StoreUnavailable):
                    raise StoreUnreachable(str(refusal)) from refusal
                raise StoreUnreachable(
                    f"no Oxia answers at {','.join(servers)} ({describe(refusal)}): check that it runs and has a "
                    "leader for every shard"
                ) from refusal
        time.sleep(_PAUSE_SECONDS)


def _ask_server(server: str, namespace: str, key: str, security: Security) -> bool:
    metadata = security.metadata()
    with _open_channel(server, security) as channel:
        request = proto.ShardAssignmentsRequest(namespace=namespace)
        answers = OxiaClientStub(channel).GetShardAssignments(request, timeout=_ATTEMPT_SECONDS, metadata=metadata)
        assignments = next(answers).namespaces[namespace].assignments
    shard = _shard_of(hash_of(partition_prefix(key) or encode(key)), assignments)
    with _open_channel(shard.leader or server, security) as channel:
        read = proto.ReadRequest(shard=shard.shard, gets=[proto.GetRequest(key=encode(key))])
        answer = next(OxiaClientStub(channel).Read(read, timeout=_ATTEMPT_SECONDS, metadata=metadata))
        return bool(answer.gets[0].status == proto.Status.OK)


def _shard_of(number: int, assignments: Iterable[proto.ShardAssignment]) -> proto.ShardAssignment:
    for each in assignments:
        if each.int32_hash_range.min_hash_inclusive <= number <= each.int32_hash_range.max_hash_inclusive:
            return each
    raise no_shard(number)


def _open_channel(address: str, security: Security) -> grpc.Channel:
    credentials = security.credentials()
    if credentials is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, credentials)
