"""The metadata store on Oxia.

All keys of a partition are on one shard, which the hash of their prefix chooses. Ranges beyond one partition ask all
shards. An object belongs to the event loop and the process that first use it. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from llog.errors import (
    OutcomeUnknown,
    StaleReads,
    StoreUnavailable,
    StoreUnreachable,
    VersionMismatch,
    WrongStore,
)
from llog.stores.counting import OperationCounts, measure_answer
from llog.stores.diagnosis import Diagnosis
from llog.stores.event_watches import EventWatch
from llog.stores.meta import (
    ABSENT,
    MetaEntry,
    Put,
    check_bounds,
    check_puts,
    check_size,
    entries_size,
    entry_size,
    partition_prefix,
    version_mismatch,
)
from llog.stores.oxia.blocking_lookup import has_key
from llog.stores.oxia.channels import Channels, Security
from llog.stores.oxia.client import Clients, ShardClient
from llog.stores.oxia.cluster import Cluster
from llog.stores.oxia.diagnosis import diagnose
from llog.stores.oxia.keys import ECHO, encode, partition_of
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.reads import entry_of, scan_entries, scan_keys
from llog.stores.oxia.refusals import store_closed

OPERATION_SECONDS: Final = 30.0
"""The deadline of every call. The election of a leader after the loss of a node can take this long."""
OPEN_SECONDS: Final = 10.0
CHECK_SECONDS: Final = 3.0


class OxiaMetaStore:
    """`connect` checks that the servers are what the settings say. Without it, the first call connects."""

    def __init__(
        self,
        servers: Sequence[str],
        namespace: str,
        *,
        session_timeout_ms: int = 10_000,
        identity: str | None = None,
        security: Security | None = None,
        seconds: float = OPERATION_SECONDS,
    ) -> None:
        self.counts = OperationCounts()
        self._servers = tuple(servers)
        self._namespace = namespace
        self._session_timeout_ms = session_timeout_ms
        self._identity = identity or f"llog-{socket.gethostname()}-{os.getpid()}"
        self._security = security or Security()
        self._seconds = seconds
        self._clients: Clients | None = None
        self._is_closed = False
        self._pid = os.getpid()

    async def connect(self) -> OxiaMetaStore:
        """Check that the address leads to an Oxia namespace that llog can use, and return this store.

        Raises `ConfigurationError` or `WrongStore`, or `StoreUnreachable` if no server answers, and closes the store.
        """
        try:
            clients = self._start_clients()
            await clients.cluster.wait_until_known(OPEN_SECONDS)
            async with _deadline(OPEN_SECONDS, f"the Oxia at {','.join(self._servers)} did not answer"):
                if await clients.of_partition(None)[0].sorts_naturally():
                    raise WrongStore(
                        f"the namespace {self._namespace!r} of the Oxia at {','.join(self._servers)} has natural key "
                        "sorting, in which Oxia loses track of ephemeral keys: create a namespace with "
                        "keySorting: hierarchical, and name that"
                    )
        except BaseException as error:
            await self.close()
            if isinstance(error, StoreUnavailable):
                raise StoreUnreachable(str(error)) from error
            raise
        return self

    def has_key(self, key: str) -> bool:
        """Return whether the key exists. Blocks, and needs no event loop. Raises what `connect` raises."""
        return has_key(self._servers, self._namespace, key, security=self._security, seconds=OPEN_SECONDS)

    # --- reads

    async def get(self, key: str) -> MetaEntry | None:
        check_size(key)
        return await measure_answer(self.counts, "get", self._get(key), entry_size)

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        for key in keys:
            check_size(key)
        return await measure_answer(self.counts, "get_many", self._get_many(keys), entries_size)

    async def floor(self, key: str) -> MetaEntry | None:
        check_bounds(key)
        return await measure_answer(
            self.counts, "floor", self._nearest(key, proto.KeyComparisonType.FLOOR, max), entry_size
        )

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        for key in keys:
            check_bounds(key)
        found = self._get_many(keys, proto.KeyComparisonType.FLOOR)
        return await measure_answer(self.counts, "floor_many", found, entries_size)

    async def ceiling(self, key: str) -> MetaEntry | None:
        check_bounds(key)
        return await measure_answer(
            self.counts, "ceiling", self._nearest(key, proto.KeyComparisonType.CEILING, min), entry_size
        )

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        check_bounds(start, end, limit)
        return await measure_answer(self.counts, "range", self._range(start, end, limit), entries_size)

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        check_bounds(start, end, limit)
        return await measure_answer(self.counts, "keys", self._keys(start, end, limit), lambda _: 0)

    async def begin_reads(self) -> OxiaReads:
        clients = await self._ready_clients()
        async with _deadline(self._seconds, "Oxia's shards took no write"):
            while True:
                all_writes = [client.writes for client in clients.of_partition(None)]
                if all(writes.is_established for writes in all_writes):
                    return OxiaReads(clients, self.check_open)
                await asyncio.gather(*(writes.wait_until_established() for writes in all_writes))

    # --- writes

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        check_size(key, value)
        put = self._put_ephemeral(key, value, expected) if ephemeral else self._put(key, value, expected)
        return await measure_answer(self.counts, "put", put, lambda _: len(value))

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        size = check_puts(puts)
        return await measure_answer(self.counts, "put_many", self._put_many(puts), lambda _: size)

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        check_size(key)
        return await measure_answer(self.counts, "delete", self._delete(key, expected), lambda _: 0)

    async def delete_range(self, start: str, end: str) -> None:
        check_bounds(start, end)
        await measure_answer(self.counts, "delete_range", self._delete_range(start, end), lambda _: 0)

    # --- the rest

    def watch(self, prefix: str) -> EventWatch:
        check_bounds(prefix)
        watch = self._start_clients().watch(prefix)
        self.counts.add("watch", 0, 0.0)
        return watch

    async def check(self) -> None:
        clients = self._start_clients()
        await clients.cluster.wait_until_known(CHECK_SECONDS)
        async with _deadline(CHECK_SECONDS, f"the Oxia at {','.join(self._servers)} did not answer"):
            lookups = [client.lookups for client in clients.of_partition(None)]
            await asyncio.gather(*(each.submit([proto.GetRequest(key=ECHO)]) for each in lookups))

    async def diagnose(self, now_ms: Callable[[], int]) -> list[Diagnosis]:
        return await diagnose((await self._ready_clients()).of_partition(None), self._namespace, now_ms)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._clients is not None:
                await self._clients.close()

    def check_open(self) -> None:
        if self._is_closed:
            raise store_closed()
        if os.getpid() != self._pid:
            raise StoreUnavailable("this metadata store was opened by another process, before a fork: open another one")

    def _start_clients(self) -> Clients:
        self.check_open()
        if self._clients is None:
            self._clients = Clients(
                Cluster(self._servers, self._namespace, Channels(self._security, self._identity)),
                session_timeout_ms=self._session_timeout_ms,
                identity=self._identity,
                seconds=self._seconds,
                check_open=self.check_open,
            )
        return self._clients

    async def _ready_clients(self) -> Clients:
        """Return the clients once the shards are known.

        If they are known already, this does not yield to the event loop, so that writes keep the order of their calls.
        """
        clients = self._start_clients()
        if not clients.cluster.shards:
            await clients.cluster.wait_until_known(self._seconds)
            self.check_open()
        return clients

    # --- how each call is done

    async def _get(self, key: str) -> MetaEntry | None:
        clients = await self._ready_clients()
        stored = encode(key)
        request = proto.GetRequest(key=stored, include_value=True)
        (answer,) = await clients.of_key(key).lookups.submit([request])
        return entry_of(answer, stored)

    async def _get_many(
        self, keys: Sequence[str], comparison: Any = proto.KeyComparisonType.EQUAL
    ) -> list[MetaEntry | None]:
        clients = await self._ready_clients()
        indexes_by_client: dict[ShardClient, list[int]] = {}
        for index, key in enumerate(keys):
            indexes_by_client.setdefault(clients.of_key(key), []).append(index)
        stored = [encode(key) for key in keys]
        entries: list[MetaEntry | None] = [None] * len(keys)
        answers_by_client = await asyncio.gather(
            *(
                client.lookups.submit(
                    [
                        proto.GetRequest(key=stored[index], include_value=True, comparison_type=comparison)
                        for index in indexes
                    ]
                )
                for client, indexes in indexes_by_client.items()
            )
        )
        for indexes, answers in zip(indexes_by_client.values(), answers_by_client, strict=True):
            for index, answer in zip(indexes, answers, strict=True):
                entries[index] = entry_of(answer, stored[index])
        return entries

    async def _nearest(self, key: str, comparison: Any, choose: Callable[..., MetaEntry]) -> MetaEntry | None:
        clients = await self._ready_clients()
        found = await self._lookup(clients.of_partition(partition_prefix(key)), encode(key), comparison)
        return choose(found, key=lambda entry: entry.key) if found else None

    async def _lookup(
        self, clients: Sequence[ShardClient], stored: str, comparison: Any, *, values: bool = True
    ) -> list[MetaEntry]:
        request = proto.GetRequest(key=stored, include_value=values, comparison_type=comparison)
        answers = await asyncio.gather(*(client.lookups.submit([request]) for client in clients))
        return [entry for (answer,) in answers if (entry := entry_of(answer, stored)) is not None]

    async def _range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        clients = await self._ready_clients()
        if start >= end:
            return []
        shards = [client.shard for client in clients.of_partition(partition_of(start, end))]
        return await scan_entries(clients.cluster, shards, encode(start), encode(end), limit, self._seconds)

    async def _keys(self, start: str, end: str, limit: int) -> list[str]:
        clients = await self._ready_clients()
        if start >= end:
            return []
        shard_clients = clients.of_partition(partition_of(start, end))
        if limit == 1:
            found = await self._lookup(shard_clients, encode(start), proto.KeyComparisonType.CEILING, values=False)
            lowest = min((entry.key for entry in found), default=end)
            return [lowest] if lowest < end else []
        shards = [client.shard for client in shard_clients]
        return await scan_keys(clients.cluster, shards, encode(start), encode(end), limit, self._seconds)

    async def _put(self, key: str, value: bytes, expected: int | None) -> int:
        clients = await self._ready_clients()
        call = proto.WriteRequest()
        _add_put(call, key, value, expected, partition_prefix(key))
        (answer,) = await _await_answers(clients.of_key(key).writes.submit(call))
        return _new_version(answer, key, expected)

    async def _put_ephemeral(self, key: str, value: bytes, expected: int | None) -> int:
        client = (await self._ready_clients()).of_key(key)
        for _ in range(2):
            number = client.session.number
            if number is None:
                number = await client.session.ensure_open()
            call = proto.WriteRequest()
            request = _add_put(call, key, value, expected, partition_prefix(key))
            request.session_id = number
            request.client_identity = self._identity
            (answer,) = await _await_answers(client.writes.submit(call))
            if answer.status != proto.SESSION_DOES_NOT_EXIST:
                return _new_version(answer, key, expected)
            client.session.forget(number)
        raise StoreUnavailable(f"Oxia ended the session of {key!r} twice in a row: raise LLOG_SESSION_TIMEOUT_MS")

    async def _put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        clients = await self._ready_clients()
        calls: defaultdict[ShardClient, _ShardPuts] = defaultdict(_ShardPuts)
        prefix: str | None = None
        for index, put in enumerate(puts):
            if prefix is None or not put.key.startswith(prefix):  # the puts of one partition are mostly neighbours
                prefix = partition_prefix(put.key)
                shard_puts = calls[clients.of_routing_key(prefix or encode(put.key))]
            shard_puts.indexes.append(index)
            shard_puts.size += 3 * len(put.key) + len(put.value)  # stored key, partition key, and protobuf's overhead
            _add_put(shard_puts.call, put.key, put.value, put.expected, prefix)
        results: list[int | VersionMismatch] = [ABSENT] * len(puts)
        answers = await _await_answers(
            [future for client, each in calls.items() for future in _submit(client, each.call, each.size)]
        )
        for index, answer in zip([index for each in calls.values() for index in each.indexes], answers, strict=True):
            put = puts[index]
            try:
                results[index] = _new_version(answer, put.key, put.expected)
            except VersionMismatch as error:
                results[index] = error
        return results

    async def _delete(self, key: str, expected: int | None) -> bool:
        client = (await self._ready_clients()).of_key(key)
        if expected != ABSENT:
            request = proto.DeleteRequest(
                key=encode(key), expected_version_id=expected, partition_key=partition_prefix(key)
            )
            (answer,) = await _await_answers(client.writes.submit(proto.WriteRequest(deletes=[request])))
            if answer.status != proto.UNEXPECTED_VERSION_ID:
                return bool(answer.status == proto.OK)
        assert expected is not None
        # Oxia answers alike for a key that does not exist and for one with another version.
        found = await self._get(key)
        if found is None:
            return False
        raise version_mismatch(key, expected, found.version)

    async def _delete_range(self, start: str, end: str) -> None:
        clients = await self._ready_clients()
        if start >= end:
            return
        request = proto.DeleteRangeRequest(start_inclusive=encode(start), end_exclusive=encode(end))
        shard_clients = clients.of_partition(partition_of(start, end))
        calls = [(client, proto.WriteRequest(delete_ranges=[request])) for client in shard_clients]
        await _await_answers([future for client, call in calls for future in _submit(client, call)])


class OxiaReads:
    """Confirms reads by a write that the same leader acknowledges, on a stream established before the reads."""

    def __init__(self, clients: Clients, check_open: Callable[[], None]) -> None:
        self._clients = clients
        self._check_open = check_open
        self._initial_states = {shard: (shard.generation, shard.answers) for shard in clients.cluster.shards.values()}

    async def confirm(self) -> None:
        self._check_open()
        if set(self._clients.cluster.shards.values()) != self._initial_states.keys():
            raise StaleReads("Oxia's shards have changed since the reads began: read again")
        shards = [shard for shard, (_, answers) in self._initial_states.items() if shard.answers != answers]
        echoes = (self._clients.of_shard(shard).writes.echo() for shard in shards)
        results = await asyncio.gather(*echoes, return_exceptions=True)
        for shard in shards:
            if shard.generation != self._initial_states[shard][0]:
                raise StaleReads(
                    f"Oxia's shard {shard.number} may have got another leader since the reads began: read again"
                )
        for result in results:
            if isinstance(result, OutcomeUnknown):
                raise StoreUnavailable(str(result)) from result
            if isinstance(result, BaseException):
                raise result


class _ShardPuts:
    """The part of a `put_many` that goes to one shard."""

    def __init__(self) -> None:
        self.call = proto.WriteRequest()
        self.size = 0
        self.indexes: list[int] = []
        """The positions of these puts in the `put_many`."""


def _add_put(
    call: proto.WriteRequest, key: str, value: bytes, expected: int | None, prefix: str | None
) -> proto.PutRequest:
    put: proto.PutRequest = call.puts.add(
        key=encode(key), value=value, expected_version_id=expected, partition_key=prefix
    )
    return put


def _new_version(answer: proto.PutResponse, key: str, expected: int | None) -> int:
    if answer.status == proto.OK:
        return answer.version.version_id
    if answer.status == proto.UNEXPECTED_VERSION_ID and expected is not None:
        raise version_mismatch(key, expected, None)
    raise StoreUnavailable(f"Oxia refused to put {key!r} with the status {answer.status}: nothing was changed")


def _submit(client: ShardClient, call: proto.WriteRequest, size: int | None = None) -> list[asyncio.Future[list[Any]]]:
    """Queue a call for one shard of several. A refusal becomes its answer, since other shards may accept theirs."""
    try:
        return client.writes.submit(call, size)
    except StoreUnavailable as error:
        refusal: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        refusal.set_exception(error)
        return [refusal]


async def _await_answers(futures: Sequence[asyncio.Future[list[Any]]]) -> list[Any]:
    """Return the answers of all futures, in order. If only some of them fail, raise `OutcomeUnknown`."""
    if len(futures) == 1:
        return await futures[0]
    results = await asyncio.gather(*futures, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return [answer for result in results if not isinstance(result, BaseException) for answer in result]
    other = next((error for error in errors if not isinstance(error, StoreUnavailable)), None)
    if other is None and len(errors) < len(results):
        raise OutcomeUnknown(
            f"{len(results) - len(errors)} of {len(results)} parts were written. The others: {errors[0]}"
        )
    raise other or errors[0]


@asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Raise `StoreUnavailable` if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise StoreUnavailable(f"{what} within {seconds:g} s: check that Oxia runs and can be reached") from None
