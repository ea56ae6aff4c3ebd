"""What an object store may answer, and what becomes of it: a small S3 server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from llog.errors import (
    BlobExists,
    BlobNotFound,
    ConfigurationError,
    InvalidArgument,
    LlogError,
    OutcomeUnknown,
    StoreUnavailable,
)
from llog.stores.blob_ranges import coalesce
from llog.stores.object.blobs import ObjectBlobStore
from llog.stores.object.requests import Limits

KEY, SECRET, TOKEN = "AKIDEXAMPLE", "hush-hush-secret", "hush-hush-token"
FAST = Limits(attempts=3, backoff_s=0.01, timeout_s=2.0, retry_s=5.0)


class Scripted:
    """Objects by key, and what to do with the next requests of a method: a status, or one of the words below.

    `drop`: hang up unanswered. `do-drop`: act, then hang up. `do-503`: act, then answer 503. `other-drop`: somebody
    else's bytes get there first. An empty script: behave.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.script: dict[str, list[str]] = {}
        self.always: str | None = None
        self.code = "Scripted"
        self.requests: list[str] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                scripted.requests.append(self.command)
                steps = scripted.script.get(self.command)
                step = steps.pop(0) if steps else scripted.always or "do"
                act, _, then = step.partition("-")
                if act == "other":
                    scripted.objects[self.path] = b"other bytes"
                if act == "do":
                    status, content = scripted.behave(self, body)
                    if not then:
                        return self.answer(status, content)
                if (then or act) == "drop":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return None
                content = f"<Error><Code>{scripted.code}</Code><Message>{SECRET}</Message></Error>".encode()
                return self.answer(int(then or act), content)

            def answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.send_header("last-modified", "Mon, 16 Nov 2026 12:00:00 GMT")
                self.send_header("etag", '"tag"')
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def behave(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        key = request.path
        if request.command == "PUT":
            if key in self.objects and request.headers.get("if-none-match") == "*":
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
            self.objects[key] = body
            return 200, b""
        if key not in self.objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>"
        return 200, self.objects[key]

    def store(self, limits: Limits = FAST) -> ObjectBlobStore:
        return ObjectBlobStore.s3(
            "bucket",
            "pre/",
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=KEY,
            secret_access_key=SECRET,
            session_token=TOKEN,
            limits=limits,
        )


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    thread = threading.Thread(target=scripted.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield scripted
    scripted.server.shutdown()
    thread.join()
    scripted.server.server_close()


def assert_discreet(error: LlogError) -> None:
    text = f"{error!r} {error.__cause__!r} {error.__context__ if not error.__suppress_context__ else ''}"
    assert not any(secret in text for secret in (KEY, SECRET, TOKEN))


async def test_an_overloaded_store_is_asked_again(server: Scripted) -> None:
    server.script["PUT"] = ["503", "429"]
    store = server.store()
    await store.put("a", [b"by", b"tes"])
    assert server.objects == {"/bucket/pre/a": b"bytes"}
    server.script["GET"] = ["503", "429"]
    assert bytes(await store.get("a")) == b"bytes"
    assert store.counts.count == {"put": 1, "get": 1}


@pytest.mark.parametrize("answer", ["409", "412"])
async def test_a_refused_create_is_an_existing_blob_and_is_not_looked_at(server: Scripted, answer: str) -> None:
    server.script["PUT"] = [answer]
    with pytest.raises(BlobExists, match="'a'"):
        await server.store().put("a", [b"bytes"])
    assert server.requests == ["PUT"]


@pytest.mark.parametrize("ending", ["do-drop", "do-503", "do-504"])
async def test_a_create_whose_answer_was_lost_is_settled_by_looking(server: Scripted, ending: str) -> None:
    server.script["PUT"] = [ending]
    await server.store().put("a", [b"by", b"tes"])
    assert server.requests == ["PUT", "PUT", "HEAD", "GET"]
    assert server.objects == {"/bucket/pre/a": b"bytes"}


async def test_a_create_whose_every_answer_was_lost_is_settled_by_looking(server: Scripted) -> None:
    server.script["PUT"] = ["do-drop", "drop", "drop"]
    await server.store().put("a", [b"by", b"tes"])
    assert server.objects == {"/bucket/pre/a": b"bytes"}


@pytest.mark.parametrize("mine", [b"of another size", b"other bytez"])
async def test_a_lost_answer_does_not_claim_the_blob_of_another(server: Scripted, mine: bytes) -> None:
    server.script["PUT"] = ["other-drop"]
    with pytest.raises(BlobExists):
        await server.store().put("a", [mine])
    assert server.objects == {"/bucket/pre/a": b"other bytes"}


async def test_a_create_that_cannot_be_looked_at_has_an_unknown_outcome(server: Scripted) -> None:
    server.always = "drop"
    with pytest.raises(OutcomeUnknown, match="may have happened") as caught:
        await server.store().put("a", [b"bytes"])
    assert_discreet(caught.value)


async def test_an_unanswered_create_that_is_not_there_may_still_appear(server: Scripted) -> None:
    server.script["PUT"] = ["drop"] * 3
    server.objects["/bucket/pre/seen"] = b"x"
    store = server.store()
    await store.get("seen")
    with pytest.raises(OutcomeUnknown, match="may still appear"):
        await store.put("a", [b"bytes"])


async def test_a_create_that_was_answered_with_503_and_is_not_there_did_not_happen(server: Scripted) -> None:
    server.script["PUT"] = ["503"] * 3
    server.objects["/bucket/pre/seen"] = b"x"
    store = server.store()
    await store.get("seen")
    with pytest.raises(StoreUnavailable, match=r"overloaded or down \(HTTP 503 Scripted\): try again later") as caught:
        await store.put("a", [b"bytes"])
    assert "'bucket'" in str(caught.value)
    assert server.endpoint in str(caught.value)
    assert_discreet(caught.value)
    assert store.counts.errors == {"put": 1}


async def test_a_create_that_times_out_is_settled(server: Scripted) -> None:
    deaf = socket.create_server(("127.0.0.1", 0))
    store = ObjectBlobStore.s3(
        "bucket",
        endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}",
        region="us-east-1",
        access_key_id=KEY,
        secret_access_key=SECRET,
        limits=FAST._replace(attempts=1, timeout_s=0.2),
    )
    with pytest.raises(OutcomeUnknown):
        await store.put("a", [b"bytes"])
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await store.get("a")
    deaf.close()


@pytest.mark.parametrize("status", ["401", "403"])
async def test_wrong_credentials_are_named_without_being_told(server: Scripted, status: str) -> None:
    server.always, server.code = status, "InvalidAccessKeyId"
    store = server.store()
    calls: list[Awaitable[object]] = [
        store.put("a", [b"x"]),
        store.get("a"),
        store.get_range("a", 0, 1),
        store.head("a"),
    ]
    calls += [store.delete_many(["a", "b"]), anext(aiter(store.list("")))]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="refused the credentials") as caught:
            await call
        assert "'bucket'" in str(caught.value)
        assert "AWS_SECRET_ACCESS_KEY" in str(caught.value)
        assert_discreet(caught.value)


async def test_a_missing_bucket_is_not_a_missing_blob(server: Scripted) -> None:
    server.always, server.code = "404", "NoSuchBucket"
    store = server.store()
    calls: list[Awaitable[object]] = [
        store.put("a", [b"x"]),
        store.get("a"),
        store.get_range("a", 0, 1),
        store.head("a"),
    ]
    calls += [store.delete_many(["a", "b"]), anext(aiter(store.list("")))]
    for call in calls:
        with pytest.raises(StoreUnavailable, match=r"'bucket' at .* does not exist .* create it"):
            await call


async def test_a_missing_blob_is_not_a_missing_bucket(server: Scripted) -> None:
    store = server.store()
    await store.put("there", [b"x"])
    with pytest.raises(BlobNotFound):
        await store.get("a")
    assert await store.head("a") is None


async def test_an_address_nobody_listens_at_means_that_nothing_was_changed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://user:{SECRET}@127.0.0.1:{taken.getsockname()[1]}"
    store = ObjectBlobStore.s3(
        "bucket", endpoint=endpoint, region="x", access_key_id=KEY, secret_access_key=SECRET, limits=FAST
    )
    for call in (store.put("a", [b"x"]), store.get("a")):
        with pytest.raises(StoreUnavailable, match=r"at http://127.0.0.1:\d+ cannot be reached \(Connect\)") as caught:
            await call
        assert_discreet(caught.value)


async def test_missing_credentials_are_told_so(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    server.always = "404"
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.endpoint)
    store = ObjectBlobStore.s3("bucket", endpoint=server.endpoint, region="x", limits=FAST)
    for call in (store.put("a", [b"x"]), store.get("a")):
        with pytest.raises(StoreUnavailable, match="AWS_ACCESS_KEY_ID"):
            await call


async def test_a_server_that_ignores_ranges_is_found_out(server: Scripted) -> None:
    server.objects["/bucket/pre/a"] = b"0123456789"
    with pytest.raises(StoreUnavailable, match="against its protocol"):
        await server.store().get_range("a", 2, 3)


async def test_a_name_that_is_too_long_with_its_prefix_is_refused(server: Scripted) -> None:
    with pytest.raises(InvalidArgument, match="too long below s3://bucket/pre"):
        await server.store().put("/".join(["x" * 204] * 5), [b"x"])
    assert server.requests == []


async def test_a_malformed_key_is_a_wrong_configuration_and_is_not_told() -> None:
    store = ObjectBlobStore.azure("container", account_key=SECRET, account="account")
    with pytest.raises(ConfigurationError, match="container") as caught:
        await store.get("a")
    assert_discreet(caught.value)


async def test_no_more_requests_run_at_once_than_allowed(server: Scripted) -> None:
    running = most = 0
    lock = threading.Lock()
    behave = server.behave
    both = threading.Semaphore(0)

    def watched(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.acquire(timeout=0.05)
        with lock:
            running -= 1
        return behave(request, body)

    server.behave = watched  # type: ignore[method-assign]
    store = server.store(FAST._replace(puts=2))
    await asyncio.gather(*(store.put(f"{number}", [b"x"]) for number in range(8)))
    assert most == 2
    assert len(server.objects) == 8


def test_one_store_serves_several_event_loops(server: Scripted) -> None:
    store = server.store(FAST._replace(puts=1))

    async def some(first: int) -> None:
        await asyncio.gather(*(store.put(f"{number}", [b"x"]) for number in range(first, first + 4)))

    for first in (0, 4):
        asyncio.run(some(first))
    assert len(server.objects) == 8


def test_a_process_forked_after_use_is_told_so_instead_of_hanging(server: Scripted) -> None:
    store = server.store()
    asyncio.run(store.put("a", [b"x"]))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(server.store().get("a"))
        except StoreUnavailable as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_near_ranges_become_one_request_and_far_ones_do_not() -> None:
    runs = coalesce([(100, 10), (0, 10), (5, 2), (20, 0), (121, 1)], gap=10)
    assert [(run.start, run.end, run.members) for run in runs] == [(0, 10, [1, 2]), (100, 110, [0]), (121, 122, [4])]
    assert [(run.start, run.end) for run in coalesce([(100, 10), (0, 10), (121, 1)], gap=90)] == [(0, 122)]


async def test_requests_carry_the_name_of_the_process() -> None:
    seen: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        seen.extend(line.partition(": ")[2] for line in head.split("\r\n") if line.startswith("user-agent:"))
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = ObjectBlobStore.s3(
            "bucket",
            endpoint=f"http://127.0.0.1:{port}",
            region="us-east-1",
            access_key_id="key",
            secret_access_key="secret",
            limits=Limits(user_agent="broker-1"),
        )
        with pytest.raises(StoreUnavailable, match="does not exist"):
            await store.head("blob")
        await store.close()
    assert {*seen} == {"broker-1"}
