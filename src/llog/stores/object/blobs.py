"""Blobs in an object store (S3 and what speaks it, Google Cloud Storage, Azure), over obstore.

obstore retries reads. Puts are retried here, because after a lost answer the next attempt may meet this writer's own
blob: only the code that counts the attempts knows when to compare the bytes instead of raising `BlobExists`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import AzureStore, GCSStore, S3Store

from llog.errors import BlobNotFound, ConfigurationError, InvalidArgument, OutcomeUnknown, StoreUnavailable
from llog.stores.blob_ranges import coalesce, part_of
from llog.stores.blob_rules import (
    NAME_BYTES_MAX,
    PAGE,
    blob_exists,
    blob_not_found,
    blob_too_short,
    check_name,
    check_prefix,
    check_range,
    required_blob_missing,
)
from llog.stores.blobs import BlobInfo, Buffer
from llog.stores.counting import OperationCounts, measure
from llog.stores.object.failures import FAILURES, Failure
from llog.stores.object.listing import Page, list_in_order
from llog.stores.object.requests import BucketLocation, Limits

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")
Views = list[memoryview]  # in the class below, `list` is a method

REQUIRED_SECONDS = 10.0
"""How often puts check that the required blob still exists."""
_S3_CREDENTIALS = (
    "LLOG_S3_ACCESS_KEY_ID and LLOG_S3_SECRET_ACCESS_KEY (or AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY) and the region"
)
_obstore_pid: int | None = None
"""The process in which obstore's threads run: all stores share one set of them."""


class _Slots(NamedTuple):
    puts: asyncio.Semaphore
    others: asyncio.Semaphore


class _Clients(NamedTuple):
    puts: ObjectStore
    """Never retries."""
    others: ObjectStore


class ObjectBlobStore:
    """`BlobStore` on a bucket, made by `s3`, `gcs` or `azure`. The first call of a method contacts the server."""

    def __init__(
        self, location: BucketLocation, open_store: Callable[[ClientConfig, RetryConfig], ObjectStore], limits: Limits
    ) -> None:
        self.uri = location.uri
        self.counts = OperationCounts()
        check_prefix(location.prefix)
        self._location = location
        self._open = open_store
        self._limits = limits
        self._clients: _Clients | None = None
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, _Slots] = WeakKeyDictionary()
        self._random = random.Random()
        self._bucket_seen = False
        self._required: str | None = None
        self._required_seen_at = 0.0

    @classmethod
    def s3(
        cls,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        allow_http: bool | None = None,
        limits: Limits = Limits(),  # noqa: B008 (immutable)
    ) -> ObjectBlobStore:
        """Open a bucket of S3 or of a server that speaks its protocol.

        An argument that is None is taken from the AWS_* variables or the instance. Without `allow_http`, only an
        endpoint that begins with http:// is reached over plain HTTP.
        """
        config = _without_none(
            endpoint=endpoint,
            region=region,
            access_key_id=access_key_id,
            secret_access_key=secret_access_key,
            session_token=session_token,
        )
        http = bool(endpoint and endpoint.startswith("http://")) if allow_http is None else allow_http
        return cls(
            BucketLocation("s3", bucket, prefix.strip("/"), endpoint, _S3_CREDENTIALS),
            lambda client, retry: S3Store(
                bucket,
                prefix=prefix.strip("/") or None,
                config=config,  # type: ignore[arg-type]
                client_options={**client, "allow_http": http},
                retry_config=retry,
            ),
            limits,
        )

    @classmethod
    def gcs(
        cls,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        service_account_key: str | None = None,
        application_credentials: str | None = None,
        limits: Limits = Limits(),  # noqa: B008 (immutable)
    ) -> ObjectBlobStore:
        """Open a bucket of Google Cloud Storage. `application_credentials` is the path of a file.

        An argument that is None is taken from the GOOGLE_* variables or the instance.
        """
        config = _without_none(
            base_url=endpoint,
            service_account_key=service_account_key,
            application_credentials=application_credentials,
        )
        return cls(
            BucketLocation("gs", bucket, prefix.strip("/"), endpoint, "GOOGLE_APPLICATION_CREDENTIALS"),
            lambda client, retry: GCSStore(
                bucket,
                prefix=prefix.strip("/") or None,
                config=config,  # type: ignore[arg-type]
                client_options={**client, "allow_http": bool(endpoint and endpoint.startswith("http://"))},
                retry_config=retry,
            ),
            limits,
        )

    @classmethod
    def azure(
        cls,
        container: str,
        prefix: str = "",
        *,
        account: str | None = None,
        endpoint: str | None = None,
        account_key: str | None = None,
        sas_key: str | None = None,
        limits: Limits = Limits(),  # noqa: B008 (immutable)
    ) -> ObjectBlobStore:
        """Open a container of Azure Blob Storage.

        An argument that is None is taken from the AZURE_STORAGE_* variables or the instance.
        """
        config = _without_none(account_name=account, endpoint=endpoint, account_key=account_key, sas_key=sas_key)
        return cls(
            BucketLocation(
                "az", container, prefix.strip("/"), endpoint, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
            ),
            lambda client, retry: AzureStore(
                container,
                prefix=prefix.strip("/") or None,
                config=config,  # type: ignore[arg-type]
                client_options={**client, "allow_http": bool(endpoint and endpoint.startswith("http://"))},
                retry_config=retry,
            ),
            limits,
        )

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._check_name(name)
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        with measure(self.counts, "put") as call:
            call.size = sum(map(len, views))
            async with self._loop_slots().puts:
                if self._required is not None and time.monotonic() - self._required_seen_at > REQUIRED_SECONDS:
                    await self.check()
                await self._put(name, views)

    async def get(self, name: str) -> Buffer:
        self._check_name(name)
        with measure(self.counts, "get") as call:
            data = await self._request(name, lambda: _get_blob(self._store(), name))
            call.size = len(data)
            return data

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return (await self.get_ranges(name, [(offset, length)]))[0]

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        # obstore's own get_ranges panics on a range beyond the end, so ranges are joined here.
        self._check_name(name)
        for offset, length in ranges:
            check_range(name, offset, length)
        if any(length == 0 for _, length in ranges):
            await self._check_ranges(name, ranges)
        coalesced = coalesce(ranges)
        fetched = await asyncio.gather(*(self._fetch(name, each.start, each.end, ranges) for each in coalesced))
        results: list[Buffer] = [b""] * len(ranges)
        for each, data in zip(coalesced, fetched, strict=True):
            for index in each.members:
                offset, length = ranges[index]
                results[index] = part_of(data, offset - each.start, length)
        return results

    async def head(self, name: str) -> BlobInfo | None:
        self._check_name(name)
        with measure(self.counts, "head"):
            try:
                meta = await self._request(name, lambda: obstore.head_async(self._store(), name))
            except BlobNotFound:
                meta = None
        if meta is None:
            if not self._bucket_seen:
                # An answer to HEAD has no body to say that the bucket is missing. A listing has one.
                await self.open_listing(name, None)()
            return None
        return _blob_info(meta)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        check_prefix(prefix)
        gathered: Page = []
        async for found in list_in_order(self, prefix[: prefix.rfind("/") + 1], prefix, start_after, PAGE):
            gathered += found
            while len(gathered) >= PAGE:
                yield gathered[:PAGE]
                del gathered[:PAGE]
        if gathered:
            yield gathered

    async def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self._check_name(name)
        for start in range(0, len(names), PAGE):
            with measure(self.counts, "delete"):
                chunk = list(names[start : start + PAGE])
                try:
                    await self._delete(chunk)
                except BlobNotFound:
                    # Some stores stop at the first name that does not exist.
                    await asyncio.gather(*(self._delete_one(name) for name in chunk))

    async def remove_unfinished_puts(self, before_ms: int) -> int:
        """Return 0: a put is one request, which leaves nothing behind."""
        return 0

    def require(self, name: str) -> None:
        self._required = check_name(name)
        self._required_seen_at = time.monotonic()

    async def check(self) -> None:
        found = await self.head(self._required or "any")
        if found is None and self._required is not None:
            raise required_blob_missing(self.uri, self._required)
        self._required_seen_at = time.monotonic()

    async def close(self) -> None:
        self._clients = None

    async def _put(self, name: str, views: Views) -> None:
        failure: Failure | None = None
        may_have_happened = may_still_happen = False  # of all attempts so far
        for attempt in range(self._limits.attempts):
            if attempt:
                await asyncio.sleep(self._limits.backoff(attempt) * self._random.uniform(0.5, 1.0))
            try:
                await obstore.put_async(
                    self._store(for_put=True), name, views or b"", mode="create", use_multipart=False
                )
            except AlreadyExistsError:
                if not may_have_happened:
                    raise blob_exists(name, self.uri) from None
                if await self._is_stored(name, views):
                    return
            except FAILURES as error:
                failure = Failure.of(error)
                if failure.is_refusal:
                    break
                may_have_happened = may_have_happened or failure.may_have_happened
                may_still_happen = may_still_happen or failure.may_still_happen
            else:
                self._bucket_seen = True
                return
        if may_have_happened and await self._is_stored(name, views):
            return
        if may_still_happen or failure is None:
            raise OutcomeUnknown(
                f"the answers to the put of blob {name!r} in {self._location.description} were lost, and the blob does "
                "not exist yet: it may still appear; put the bytes again under another name"
            )
        raise self._unavailable(failure)

    async def _is_stored(self, name: str, views: Views) -> bool:
        """Return whether the blob exists with these bytes; raise `BlobExists` if it has others."""
        try:
            info = await self.head(name)
            if info is None:
                return False
            if info.size != sum(map(len, views)):
                raise blob_exists(name, self.uri)
            data = memoryview(await self.get(name))
        except BlobNotFound:
            return False
        except StoreUnavailable as error:
            raise OutcomeUnknown(
                f"the put of blob {name!r} may have happened, and looking for the blob failed: {error}"
            ) from None
        position = 0
        for view in views:
            if data[position : position + len(view)] != view:
                raise blob_exists(name, self.uri)
            position += len(view)
        return True

    async def _fetch(self, name: str, start: int, end: int, ranges: Sequence[tuple[int, int]]) -> memoryview:
        with measure(self.counts, "range_get") as call:
            try:
                data = await self._request(
                    name, lambda: obstore.get_range_async(self._store(), name, start=start, end=end), ranged=True
                )
            except _BeyondEnd:
                data = None
            call.size = len(data or b"")
        if data is None or len(data) != end - start:
            await self._check_ranges(name, ranges)
            raise StoreUnavailable(
                f"{self._location.description} answered a request for bytes {start} to {end} of blob {name!r} with "
                "another range: use a server that supports ranges"
            )
        return memoryview(data)

    async def _check_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        info = await self.head(name)
        if info is None:
            raise blob_not_found(name, self.uri)
        for offset, length in ranges:
            if offset + length > info.size:
                raise blob_too_short(name, offset, length, info.size)

    def open_listing(self, directory: str, offset: str | None) -> Callable[[], Awaitable[Page]]:
        stream = obstore.list(self._store(), directory or None, offset=offset, chunk_size=PAGE)

        async def next_page() -> Sequence[obstore.ObjectMeta]:
            async for page in stream:
                return page
            return ()

        async def read() -> Page:
            with measure(self.counts, "list"):
                return [_blob_info(meta) for meta in await self._request(directory, next_page, listing=True)]

        return read

    async def children(self, directory: str) -> dict[str, BlobInfo | None]:
        with measure(self.counts, "list"):
            found = await self._request(
                directory, lambda: obstore.list_with_delimiter_async(self._store(), directory or None), listing=True
            )
        children: dict[str, BlobInfo | None] = {info.name: info for info in map(_blob_info, found["objects"])}
        return children | {path.rstrip("/") + "/": None for path in found["common_prefixes"]}

    async def _delete(self, names: Sequence[str]) -> None:
        await self._request(", ".join(names[:3]), lambda: obstore.delete_async(self._store(), names))

    async def _delete_one(self, name: str) -> None:
        try:
            await self._delete([name])
        except BlobNotFound:
            pass

    async def _request(
        self, name: str, call: Callable[[], Awaitable[T]], *, ranged: bool = False, listing: bool = False
    ) -> T:
        """Make a request that is not a put. The error never repeats obstore's text, which may hold signed addresses."""
        async with self._loop_slots().others:
            try:
                answer = await call()
            except FAILURES as error:
                failure = Failure.of(error)
            else:
                self._bucket_seen = True
                return answer
        if ranged and failure.status == 416:
            raise _BeyondEnd
        if failure.is_missing_blob and not listing:
            raise blob_not_found(name, self.uri)
        raise self._unavailable(failure)

    def _check_name(self, name: str) -> None:
        check_name(name)
        if len(self._location.key(name).encode()) > NAME_BYTES_MAX:
            raise InvalidArgument(
                f"the blob name {name!r} is too long below {self.uri}: together they may have {NAME_BYTES_MAX} bytes"
            )

    def _store(self, *, for_put: bool = False) -> ObjectStore:
        """Return the client of obstore, which the first use opens.

        A store that was made but not used before a fork works after it. A client that was used would hang.
        """
        global _obstore_pid
        if _obstore_pid not in (None, os.getpid()):
            raise StoreUnavailable(
                f"{self.uri} cannot be used in this process: it was forked from a process (pid {_obstore_pid}) that "
                "had used an object store. Fork before the first use, or start processes with 'spawn'"
            )
        if self._clients is None:
            config = self._limits.client_config()
            try:
                self._clients = _Clients(
                    self._open(config, {"max_retries": 0}), self._open(config, self._limits.retry_config())
                )
            except FAILURES:
                raise ConfigurationError(
                    f"cannot open {self._location.description}: check its address and "
                    f"{self._location.credential_settings}"
                ) from None
            _obstore_pid = os.getpid()
        return self._clients.puts if for_put else self._clients.others

    def _loop_slots(self) -> _Slots:
        """Return the semaphores of this event loop: a process may run several loops."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = _Slots(asyncio.Semaphore(self._limits.puts), asyncio.Semaphore(self._limits.others))
        return self._slots[loop]

    def _unavailable(self, failure: Failure) -> StoreUnavailable:
        return StoreUnavailable(failure.explain(self._location))


class _BeyondEnd(Exception):
    """A range starts at or after the end of the blob."""


async def _get_blob(store: ObjectStore, name: str) -> memoryview:
    return memoryview(await (await obstore.get_async(store, name)).bytes_async())


def _blob_info(meta: obstore.ObjectMeta) -> BlobInfo:
    return BlobInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000))


def _without_none(**settings: str | None) -> dict[str, str]:
    return {key: value for key, value in settings.items() if value is not None}
