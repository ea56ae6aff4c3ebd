"""Blobs in an object store (S3 and what speaks it, Google Cloud Storage, Azure), over obstore.

Reads are retried by obstore. Creates are retried here, because after a lost answer the next attempt may meet this
writer's own blob: only who counts the attempts knows when to look instead of reporting `BlobExists`.
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

from llog.errors import BlobExists, BlobNotFound, ConfigurationError, InvalidArgument, OutcomeUnknown, StoreUnavailable
from llog.stores.blob_rules import NAME_BYTES_MAX, PAGE, check_name, check_prefix, check_range, lost, too_short
from llog.stores.blobs import BlobInfo, Buffer
from llog.stores.counting import OperationCounts, counted
from llog.stores.object.answers import FAILURES, Failure, Limits, Place, merged, without_none
from llog.stores.object.listing import Page, ordered

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")
Views = list[memoryview]

COALESCE_GAP_BYTES = 256 * 1024
REQUIRED_SECONDS = 10.0
"""How often puts look whether the blob that is required is still there."""
_S3_CREDENTIALS = (
    "LLOG_S3_ACCESS_KEY_ID and LLOG_S3_SECRET_ACCESS_KEY (or AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY) and the region"
)
_user_pid: int | None = None  # the process in which obstore's threads run: it has one set of them, whatever the store


class _Slots(NamedTuple):
    puts: asyncio.Semaphore
    others: asyncio.Semaphore


class _Opened(NamedTuple):
    creates: ObjectStore
    others: ObjectStore


class ObjectBlobStore:
    """`BlobStore` on a bucket. Made by `s3`, `gcs` or `azure`; nothing is contacted before the first call."""

    def __init__(
        self, place: Place, open_store: Callable[[ClientConfig, RetryConfig], ObjectStore], limits: Limits
    ) -> None:
        self.uri = place.uri
        self.counts = OperationCounts()
        check_prefix(place.prefix)
        self._place = place
        self._open = open_store
        self._limits = limits
        self._opened: _Opened | None = None
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
        """What is None comes from the usual AWS_* variables or the instance. Plain HTTP only if the endpoint says
        so.
        """
        config = without_none(
            endpoint=endpoint,
            region=region,
            access_key_id=access_key_id,
            secret_access_key=secret_access_key,
            session_token=session_token,
        )
        http = bool(endpoint and endpoint.startswith("http://")) if allow_http is None else allow_http
        return cls(
            Place("s3", bucket, prefix.strip("/"), endpoint, _S3_CREDENTIALS),
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
        """`application_credentials` is a file's path. What is None comes from the GOOGLE_* variables or the
        instance.
        """
        config = without_none(
            base_url=endpoint,
            service_account_key=service_account_key,
            application_credentials=application_credentials,
        )
        return cls(
            Place("gs", bucket, prefix.strip("/"), endpoint, "GOOGLE_APPLICATION_CREDENTIALS"),
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
        """What is None comes from the AZURE_STORAGE_* variables or the instance."""
        config = without_none(account_name=account, endpoint=endpoint, account_key=account_key, sas_key=sas_key)
        return cls(
            Place(
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
        self._check(name)
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        with counted(self.counts, "put") as call:
            call.size = sum(map(len, views))
            async with self._at_once().puts:
                if self._required is not None and time.monotonic() - self._required_seen_at > REQUIRED_SECONDS:
                    await self.check()
                await self._create(name, views)

    async def get(self, name: str) -> Buffer:
        self._check(name)
        with counted(self.counts, "get") as call:
            data = await self._ask(name, lambda: _whole(self._store(), name))
            call.size = len(data)
            return data

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return (await self.get_ranges(name, [(offset, length)]))[0]

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        # obstore's own get_ranges panics on a range beyond the end, so ranges are merged here.
        self._check(name)
        for offset, length in ranges:
            check_range(name, offset, length)
        if any(length == 0 for _, length in ranges):
            await self._check_ranges(name, ranges)
        runs = merged(ranges, COALESCE_GAP_BYTES)
        fetched = await asyncio.gather(*(self._fetch(name, run.start, run.end, ranges) for run in runs))
        found: list[Buffer] = [b""] * len(ranges)
        for run, data in zip(runs, fetched, strict=True):
            for index in run.members:
                offset, length = ranges[index]
                found[index] = data[offset - run.start : offset - run.start + length]
        return found

    async def head(self, name: str) -> BlobInfo | None:
        self._check(name)
        with counted(self.counts, "head"):
            try:
                meta = await self._ask(name, lambda: obstore.head_async(self._store(), name))
            except BlobNotFound:
                meta = None
        if meta is None:
            if not self._bucket_seen:
                # An answer to HEAD has no body to say that it is the bucket that is missing: ask what does.
                await self.pages(name, None)()
            return None
        return _info(meta)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        check_prefix(prefix)
        gathered: Page = []
        async for found in ordered(self, prefix[: prefix.rfind("/") + 1], prefix, start_after, PAGE):
            gathered += found
            while len(gathered) >= PAGE:
                yield gathered[:PAGE]
                del gathered[:PAGE]
        if gathered:
            yield gathered

    async def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self._check(name)
        for start in range(0, len(names), PAGE):
            with counted(self.counts, "delete"):
                chunk = list(names[start : start + PAGE])
                try:
                    await self._delete(chunk)
                except BlobNotFound:
                    # Some stores stop at the first that is not there.
                    await asyncio.gather(*(self._delete_one(name) for name in chunk))

    def require(self, name: str) -> None:
        self._required = check_name(name)
        self._required_seen_at = time.monotonic()

    async def check(self) -> None:
        found = await self.head(self._required or "any")
        if found is None and self._required is not None:
            raise lost(self.uri, self._required)
        self._required_seen_at = time.monotonic()

    async def close(self) -> None:
        self._opened = None

    async def _create(self, name: str, views: Views) -> None:
        failure: Failure | None = None
        sent = lost = False  # an earlier attempt reached the store; one of them was never answered
        for attempt in range(self._limits.attempts):
            if attempt:
                await asyncio.sleep(self._limits.backoff(attempt) * self._random.uniform(0.5, 1.0))
            try:
                await obstore.put_async(
                    self._store(creating=True), name, views or b"", mode="create", use_multipart=False
                )
            except AlreadyExistsError:
                if not sent:
                    raise self._exists(name) from None
                if await self._settled(name, views):
                    return
            except FAILURES as error:
                failure = Failure.of(error)
                if failure.is_refusal:
                    break
                sent = sent or failure.is_sent
                lost = lost or failure.is_lost
            else:
                self._bucket_seen = True
                return
        if sent and await self._settled(name, views):
            return
        if lost or failure is None:
            raise OutcomeUnknown(
                f"the answers to the put of blob {name!r} in {self._place.described} were lost, and it is not "
                "there yet: "
                "it may still appear; write it again under another name"
            )
        raise self._unavailable(failure)

    async def _settled(self, name: str, views: Views) -> bool:
        """True if these bytes are there, False if nothing is; `BlobExists` if others are."""
        try:
            info = await self.head(name)
            if info is None:
                return False
            if info.size != sum(map(len, views)):
                raise self._exists(name)
            data = memoryview(await self.get(name))
        except BlobNotFound:
            return False
        except StoreUnavailable as error:
            raise OutcomeUnknown(
                f"the put of blob {name!r} may have happened, and looking failed, too: {error}"
            ) from None
        position = 0
        for view in views:
            if data[position : position + len(view)] != view:
                raise self._exists(name)
            position += len(view)
        return True

    async def _fetch(self, name: str, start: int, end: int, ranges: Sequence[tuple[int, int]]) -> memoryview:
        with counted(self.counts, "get") as call:
            try:
                data = await self._ask(
                    name, lambda: obstore.get_range_async(self._store(), name, start=start, end=end), ranged=True
                )
            except _BeyondEnd:
                data = None
            call.size = len(data or b"")
        if data is None or len(data) != end - start:
            await self._check_ranges(name, ranges)
            raise StoreUnavailable(
                f"{self._place.described} answered bytes {start} to {end} of blob {name!r} with another range: "
                "the server does not keep to ranges; use another one"
            )
        return memoryview(data)

    async def _check_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        info = await self.head(name)
        if info is None:
            raise self._not_found(name)
        for offset, length in ranges:
            if offset + length > info.size:
                raise too_short(name, offset, length, info.size)

    def pages(self, directory: str, offset: str | None) -> Callable[[], Awaitable[Page]]:
        stream = obstore.list(self._store(), directory or None, offset=offset, chunk_size=PAGE)

        async def following() -> Sequence[obstore.ObjectMeta]:
            async for page in stream:
                return page
            return ()

        async def read() -> Page:
            with counted(self.counts, "list"):
                return [_info(meta) for meta in await self._ask(directory, following, listing=True)]

        return read

    async def children(self, directory: str) -> dict[str, BlobInfo | None]:
        with counted(self.counts, "list"):
            found = await self._ask(
                directory, lambda: obstore.list_with_delimiter_async(self._store(), directory or None), listing=True
            )
        children: dict[str, BlobInfo | None] = {info.name: info for info in map(_info, found["objects"])}
        return children | {path.rstrip("/") + "/": None for path in found["common_prefixes"]}

    async def _delete(self, names: Sequence[str]) -> None:
        await self._ask(", ".join(names[:3]), lambda: obstore.delete_async(self._store(), names))

    async def _delete_one(self, name: str) -> None:
        try:
            await self._delete([name])
        except BlobNotFound:
            pass

    async def _ask(
        self, name: str, call: Callable[[], Awaitable[T]], *, ranged: bool = False, listing: bool = False
    ) -> T:
        """Everything but creates. What obstore says is never passed on: it can hold signed addresses."""
        async with self._at_once().others:
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
            raise self._not_found(name)
        raise self._unavailable(failure)

    def _check(self, name: str) -> None:
        check_name(name)
        if len(self._place.key(name).encode()) > NAME_BYTES_MAX:
            raise InvalidArgument(
                f"the blob name {name!r} is too long below {self.uri}: together at most {NAME_BYTES_MAX} bytes"
            )

    def _store(self, *, creating: bool = False) -> ObjectStore:
        """Opened on first use, so that what is made before a fork works after it. Once used, a fork would hang."""
        global _user_pid
        if _user_pid not in (None, os.getpid()):
            raise StoreUnavailable(
                f"{self.uri} cannot be used in this process: it was forked from one (pid {_user_pid}) that already "
                "used "
                "an object store. Fork before the first use, or start processes with 'spawn'"
            )
        if self._opened is None:
            client = self._limits.client()
            try:
                self._opened = _Opened(self._open(client, {"max_retries": 0}), self._open(client, self._limits.retry()))
            except FAILURES:
                raise ConfigurationError(
                    f"cannot open {self._place.described}: check its address, and {self._place.settings}"
                ) from None
            _user_pid = os.getpid()
        return self._opened.creates if creating else self._opened.others

    def _at_once(self) -> _Slots:
        """Semaphores belong to an event loop, and a process may run several."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = _Slots(asyncio.Semaphore(self._limits.puts), asyncio.Semaphore(self._limits.others))
        return self._slots[loop]

    def _exists(self, name: str) -> BlobExists:
        return BlobExists(f"blob {name!r} is already in {self.uri}: blobs are immutable, choose another name")

    def _not_found(self, name: str) -> BlobNotFound:
        return BlobNotFound(f"blob {name!r} is not in {self.uri}: it was never put, or has been deleted")

    def _unavailable(self, failure: Failure) -> StoreUnavailable:
        return StoreUnavailable(failure.explain(self._place))


class _BeyondEnd(Exception):
    """A range starts at or after the end of the blob."""


async def _whole(store: ObjectStore, name: str) -> memoryview:
    return memoryview(await (await obstore.get_async(store, name)).bytes_async())


def _info(meta: obstore.ObjectMeta) -> BlobInfo:
    return BlobInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000))
