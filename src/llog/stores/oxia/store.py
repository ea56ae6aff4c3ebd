"""The metadata store on Oxia: the keys of a partition on one shard, by the hash of its prefix; ranges beyond it ask all
shards.

An object belongs to the event loop and the process that first use it. Every call has a deadline.
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
from llog.stores.counting import OperationCounts, counted_answer
from llog.stores.diagnosis import Diagnosis
from llog.stores.meta import ABSENT, Entry, Put, check, check_bounds, checked_size, mismatch, partition_prefix
from llog.stores.oxia.channels import Channels, Security
from llog.stores.oxia.client import Clients, ShardClient
from llog.stores.oxia.cluster import Cluster
from llog.stores.oxia.diagnosis import diagnose
from llog.stores.oxia.existence import has_key
from llog.stores.oxia.keys import ECHO, encode, partition_of
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.reads import entry_of, scan_entries, scan_keys
from llog.stores.oxia.watches import OxiaWatch

OPERATION_SECONDS: Final = 30.0
"""An election after a node was lost can take as long."""
OPEN_SECONDS: Final = 10.0
CHECK_SECONDS: Final = 3.0


class OxiaMetaStore:
    """`connected` finds out whether the servers are what the settings say; without it, the first call connects."""

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

    async def connected(self) -> OxiaMetaStore:
        """This store, once a server has shown that it is what the address says.

        Raises `ConfigurationError`, `WrongStore`, or `StoreUnreachable` if nobody answers; the store is closed then.
        """
        try:
            clients = self._start()
            await clients.cluster.ready(OPEN_SECONDS)
            async with _deadline(OPEN_SECONDS, f"the Oxia at {','.join(self._servers)} did not answer"):
                if await clients.of_partition(None)[0].sorts_naturally():
                    raise WrongStore(
                        f"the namespace {self._namespace!r} of the Oxia at {','.join(self._servers)} has natural "
                        "key sorting, in which "
                        "Oxia has lost track of ephemeral keys: create a namespace with keySorting: hierarchical "
                        "and name that"
                    )
        except BaseException as error:
            await self.close()
            if isinstance(error, StoreUnavailable):
                raise StoreUnreachable(str(error)) from error
            raise
        return self

    def has_key(self, key: str) -> bool:
        """Look for one key, blocking and without an event loop. Raises as `connected` does."""
        return has_key(self._servers, self._namespace, key, security=self._security, seconds=OPEN_SECONDS)

    # --- reads

    async def get(self, key: str) -> Entry | None:
        check(key)
        return await counted_answer(self.counts, "get", self._get(key), _entry_size)

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        for key in keys:
            check(key)
        return await counted_answer(
            self.counts, "get_many", self._get_many(keys), lambda found: sum(map(_entry_size, found))
        )

    async def floor(self, key: str) -> Entry | None:
        check_bounds(key)
        return await counted_answer(
            self.counts, "floor", self._nearest(key, proto.KeyComparisonType.FLOOR, max), _entry_size
        )

    async def ceiling(self, key: str) -> Entry | None:
        check_bounds(key)
        return await counted_answer(
            self.counts, "ceiling", self._nearest(key, proto.KeyComparisonType.CEILING, min), _entry_size
        )

    async def range(self, start: str, end: str, limit: int) -> list[Entry]:
        check_bounds(start, end, limit)
        return await counted_answer(
            self.counts, "range", self._range(start, end, limit), lambda entries: sum(map(_entry_size, entries))
        )

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        check_bounds(start, end, limit)
        return await counted_answer(self.counts, "keys", self._keys(start, end, limit), lambda _: 0)

    async def begin_reads(self) -> OxiaReads:
        clients = await self._ready()
        async with _deadline(self._seconds, "Oxia's shards took no write"):
            while True:
                all_writes = [client.writes for client in clients.of_partition(None)]
                if all(writes.is_established for writes in all_writes):
                    return OxiaReads(clients, self.check_open)
                await asyncio.gather(*(writes.established() for writes in all_writes))

    # --- writes

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        check(key, value)
        put = self._put_ephemeral(key, value, expected) if ephemeral else self._put(key, value, expected)
        return await counted_answer(self.counts, "put", put, lambda _: len(value))

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        size = checked_size(puts)
        return await counted_answer(self.counts, "put_many", self._put_many(puts), lambda _: size)

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        check(key)
        return await counted_answer(self.counts, "delete", self._delete(key, expected), lambda _: 0)

    async def delete_range(self, start: str, end: str) -> None:
        check_bounds(start, end)
        await counted_answer(self.counts, "delete_range", self._delete_range(start, end), lambda _: 0)

    # --- the rest

    def watch(self, prefix: str) -> OxiaWatch:
        check_bounds(prefix)
        watch = self._start().watch(prefix)
        self.counts.add("watch", 0, 0.0)
        return watch

    async def check(self) -> None:
        clients = self._start()
        await clients.cluster.ready(CHECK_SECONDS)
        async with _deadline(CHECK_SECONDS, f"the Oxia at {','.join(self._servers)} did not answer"):
            lookups = [client.lookups for client in clients.of_partition(None)]
            await asyncio.gather(*(each.submit([proto.GetRequest(key=ECHO)]) for each in lookups))

    async def diagnose(self, now_ms: Callable[[], int]) -> list[Diagnosis]:
        return await diagnose((await self._ready()).of_partition(None), self._namespace, now_ms)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._clients is not None:
                await self._clients.close()

    def check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("this metadata store is closed: open another one")
        if os.getpid() != self._pid:
            raise StoreUnavailable("this metadata store was opened by another process, before a fork: open another one")

    def _start(self) -> Clients:
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

    async def _ready(self) -> Clients:
        """With shards. If they are known, there is no turn of the event loop, so that writes keep the order of their
        calls.
        """
        clients = self._start()
        if not clients.cluster.shards:
            await clients.cluster.ready(self._seconds)
            self.check_open()
        return clients

    # --- how each call is done

    async def _get(self, key: str) -> Entry | None:
        clients = await self._ready()
        stored = encode(key)
        request = proto.GetRequest(key=stored, include_value=True)
        (answer,) = await clients.of_key(key).lookups.submit([request])
        return entry_of(answer, stored)

    async def _get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        clients = await self._ready()
        places: dict[ShardClient, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(clients.of_key(key), []).append(place)
        stored = [encode(key) for key in keys]
        found: list[Entry | None] = [None] * len(keys)
        answers = await asyncio.gather(
            *(
                client.lookups.submit([proto.GetRequest(key=stored[place], include_value=True) for place in mine])
                for client, mine in places.items()
            )
        )
        for mine, of_client in zip(places.values(), answers, strict=True):
            for place, answer in zip(mine, of_client, strict=True):
                found[place] = entry_of(answer, stored[place])
        return found

    async def _nearest(self, key: str, comparison: Any, choose: Callable[..., Entry]) -> Entry | None:
        clients = await self._ready()
        found = await self._lookup(clients.of_partition(partition_prefix(key)), encode(key), comparison)
        return choose(found, key=lambda entry: entry.key) if found else None

    async def _lookup(
        self, clients: Sequence[ShardClient], stored: str, comparison: Any, *, values: bool = True
    ) -> list[Entry]:
        request = proto.GetRequest(key=stored, include_value=values, comparison_type=comparison)
        answers = await asyncio.gather(*(client.lookups.submit([request]) for client in clients))
        return [entry for (answer,) in answers if (entry := entry_of(answer, stored)) is not None]

    async def _range(self, start: str, end: str, limit: int) -> list[Entry]:
        clients = await self._ready()
        if start >= end:
            return []
        shards = [client.shard for client in clients.of_partition(partition_of(start, end))]
        return await scan_entries(clients.cluster, shards, encode(start), encode(end), limit, self._seconds)

    async def _keys(self, start: str, end: str, limit: int) -> list[str]:
        clients = await self._ready()
        if start >= end:
            return []
        asked = clients.of_partition(partition_of(start, end))
        if limit == 1:
            found = await self._lookup(asked, encode(start), proto.KeyComparisonType.CEILING, values=False)
            lowest = min((entry.key for entry in found), default=end)
            return [lowest] if lowest < end else []
        shards = [client.shard for client in asked]
        return await scan_keys(clients.cluster, shards, encode(start), encode(end), limit, self._seconds)

    async def _put(self, key: str, value: bytes, expected: int | None) -> int:
        clients = await self._ready()
        call = proto.WriteRequest()
        _add_put(call, key, value, expected, partition_prefix(key))
        (answer,) = await _answers(clients.of_key(key).writes.submit(call))
        return _version(answer, key, expected)

    async def _put_ephemeral(self, key: str, value: bytes, expected: int | None) -> int:
        client = (await self._ready()).of_key(key)
        for _ in range(2):
            number = client.session.number
            if number is None:
                number = await client.session.opened()
            call = proto.WriteRequest()
            request = _add_put(call, key, value, expected, partition_prefix(key))
            request.session_id = number
            request.client_identity = self._identity
            (answer,) = await _answers(client.writes.submit(call))
            if answer.status != proto.SESSION_DOES_NOT_EXIST:
                return _version(answer, key, expected)
            client.session.lost(number)
        raise StoreUnavailable(f"Oxia ended the session of {key!r} twice at once: raise LLOG_SESSION_TIMEOUT_MS")

    async def _put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        clients = await self._ready()
        calls: defaultdict[ShardClient, _Puts] = defaultdict(_Puts)
        prefix: str | None = None
        for place, put in enumerate(puts):
            if prefix is None or not put.key.startswith(prefix):  # those of one partition mostly stand together
                prefix = partition_prefix(put.key)
                mine = calls[clients.of_routed(prefix or encode(put.key))]
            mine.places.append(place)
            mine.size += 3 * len(put.key) + len(put.value)  # as stored, of the partition, and what protobuf adds
            _add_put(mine.call, put.key, put.value, put.expected, prefix)
        results: list[int | VersionMismatch] = [ABSENT] * len(puts)
        answers = await _answers(
            [future for client, mine in calls.items() for future in _submit(client, mine.call, mine.size)]
        )
        for place, answer in zip([place for mine in calls.values() for place in mine.places], answers, strict=True):
            put = puts[place]
            try:
                results[place] = _version(answer, put.key, put.expected)
            except VersionMismatch as error:
                results[place] = error
        return results

    async def _delete(self, key: str, expected: int | None) -> bool:
        client = (await self._ready()).of_key(key)
        if expected != ABSENT:
            request = proto.DeleteRequest(
                key=encode(key), expected_version_id=expected, partition_key=partition_prefix(key)
            )
            (answer,) = await _answers(client.writes.submit(proto.WriteRequest(deletes=[request])))
            if answer.status != proto.UNEXPECTED_VERSION_ID:
                return bool(answer.status == proto.OK)
        assert expected is not None
        # Oxia says the same of a key that is not there as of one with another version.
        found = await self._get(key)
        if found is None:
            return False
        raise mismatch(key, expected, found.version)

    async def _delete_range(self, start: str, end: str) -> None:
        clients = await self._ready()
        if start >= end:
            return
        request = proto.DeleteRangeRequest(start_inclusive=encode(start), end_exclusive=encode(end))
        asked: list[ShardClient] = clients.of_partition(partition_of(start, end))
        calls = [(client, proto.WriteRequest(delete_ranges=[request])) for client in asked]
        await _answers([future for client, call in calls for future in _submit(client, call)])


class OxiaReads:
    """Vouches for reads by a write that the same leader acknowledges, on a stream that has been there since before the
    reads.
    """

    def __init__(self, clients: Clients, check_open: Callable[[], None]) -> None:
        self._clients = clients
        self._check_open = check_open
        self._began = {shard: (shard.generation, shard.answers) for shard in clients.cluster.shards.values()}

    async def confirm(self) -> None:
        self._check_open()
        if set(self._clients.cluster.shards.values()) != self._began.keys():
            raise StaleReads("Oxia's shards were changed since the reads began: read again")
        asked = [shard for shard, (_, answers) in self._began.items() if shard.answers != answers]
        echoes = (self._clients.of_shard(shard).writes.echo() for shard in asked)
        results = await asyncio.gather(*echoes, return_exceptions=True)
        for shard in asked:
            if shard.generation != self._began[shard][0]:
                raise StaleReads(
                    f"Oxia's shard {shard.number} may have got another leader since the reads began: read again"
                )
        for result in results:
            if isinstance(result, OutcomeUnknown):
                raise StoreUnavailable(str(result)) from result
            if isinstance(result, BaseException):
                raise result


class _Puts:
    """The part of a `put_many` that goes to one shard."""

    def __init__(self) -> None:
        self.call = proto.WriteRequest()
        self.size = 0
        self.places: list[int] = []
        """Of its puts among those of all shards."""


def _add_put(
    call: proto.WriteRequest, key: str, value: bytes, expected: int | None, prefix: str | None
) -> proto.PutRequest:
    put: proto.PutRequest = call.puts.add(
        key=encode(key), value=value, expected_version_id=expected, partition_key=prefix
    )
    return put


def _version(answer: proto.PutResponse, key: str, expected: int | None) -> int:
    if answer.status == proto.OK:
        return answer.version.version_id
    if answer.status == proto.UNEXPECTED_VERSION_ID and expected is not None:
        raise mismatch(key, expected, None)
    raise StoreUnavailable(f"Oxia refused to put {key!r} with the status {answer.status}: nothing was changed")


def _submit(client: ShardClient, call: proto.WriteRequest, size: int | None = None) -> list[asyncio.Future[list[Any]]]:
    """Queue a call for one shard of several; a refusal is its answer, since others may have theirs."""
    try:
        return client.writes.submit(call, size)
    except StoreUnavailable as error:
        refused: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        refused.set_exception(error)
        return [refused]


async def _answers(futures: Sequence[asyncio.Future[list[Any]]]) -> list[Any]:
    """The answers of all, one after the other. If only some of them failed, the outcome of the whole is not known."""
    if len(futures) == 1:
        return await futures[0]
    results = await asyncio.gather(*futures, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return [answer for result in results if not isinstance(result, BaseException) for answer in result]
    foreign = next((error for error in errors if not isinstance(error, StoreUnavailable)), None)
    if foreign is None and len(errors) < len(results):
        raise OutcomeUnknown(f"{len(results) - len(errors)} of {len(results)} parts were written: {errors[0]}")
    raise foreign or errors[0]


@asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises `StoreUnavailable` if what is within takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise StoreUnavailable(f"{what} within {seconds:g} s: check that Oxia runs and can be reached") from None


def _entry_size(entry: Entry | None) -> int:
    return 0 if entry is None else len(entry.value)
