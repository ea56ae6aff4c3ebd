"""One connection of a Kafka client: frames in, requests handled side by side, answers in the order of the requests.

A client may send several requests before the first is answered. They begin in the order in which they came, so that the
records of one producer keep their order, and then go on at the same time: a request that waits for a flush does not
keep the next one from joining it. Reading pauses while too much is under way, or while the client does not read its
answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final, cast

from llog.base.units import format_size
from llog.batch.columns import Buffer
from llog.errors import LlogError
from llog.kafka.dispatcher import Dispatcher
from llog.kafka.intake import Intake
from llog.kafka.wire import MalformedMessage

logger: Final = logging.getLogger("llog.kafka")

_SIZE_BYTES: Final = 4
_REQUESTS_MAX: Final = 100
"""Requests of one connection that may be under way."""
_HTTP_METHODS: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"PATC", b"OPTI")

_Answer = asyncio.Task[list[Buffer] | None]


class Connection(asyncio.Protocol):
    """Serves one client until either side closes the connection."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        intake: Intake,
        connections: set[Connection],
        connections_max: int,
        http_address: str,
    ) -> None:
        self._dispatcher = dispatcher
        self._intake = intake
        self._connections = connections
        self._connections_max = connections_max
        self._http_address = http_address
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._chunks: list[bytes] = []
        self._size = 0
        """The bytes in the chunks."""
        self._wanted = _SIZE_BYTES
        """The bytes with which the next frame is complete, as far as is known."""
        self._answers: deque[tuple[_Answer, int, bool]] = deque()
        """The requests under way, each with its size, and whether it ends when the client goes."""
        self._writer: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_paused = False
        self._is_closing = False

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is none of asyncio's
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else ""
        if len(self._connections) >= self._connections_max:
            self.close(f"{self._peer}: {self._connections_max} are open, and no more may be (ulimit -n)")
            return
        self._connections.add(self)
        self._dispatcher.metrics.kafka_connections = len(self._connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._dispatcher.metrics.kafka_connections = len(self._connections)
        self._is_closing = True
        self._may_write.set()
        if self._writer is not None:
            self._writer.cancel()
        for answer, size, may_cancel in self._answers:
            if may_cancel:
                answer.cancel()
            answer.add_done_callback(_forget_result)
            self._intake.release(size)
        self._answers.clear()

    def pause_writing(self) -> None:
        self._may_write.clear()
        self.check_pause()

    def resume_writing(self) -> None:
        self._may_write.set()
        self.check_pause()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._chunks.append(data)
        self._size += len(data)
        if self._size >= self._wanted:
            try:
                self._take_frames()
            except MalformedMessage as error:
                self.close(f"{self._peer}: {error}")

    def close(self, reason: str | None = None) -> None:
        """Close the connection; the client gets no further answer. A reason is logged."""
        if reason is not None and not self._is_closing:
            logger.warning("closed a connection of a Kafka client: %s", reason)
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    async def finish(self) -> None:
        """Take no more requests, answer those that are under way, and close."""
        self._is_closing = True
        if self._writer is not None:
            await asyncio.gather(self._writer, return_exceptions=True)
        self.close()

    # --- frames

    def _take_frames(self) -> None:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        view = memoryview(data)
        position = 0
        while len(data) - position >= _SIZE_BYTES:
            size = int.from_bytes(view[position : position + _SIZE_BYTES], "big", signed=True)
            self._check_size(size, view[position : position + _SIZE_BYTES])
            end = position + _SIZE_BYTES + size
            if end > len(data):
                break
            self._begin(view[position + _SIZE_BYTES : end])
            if self._is_closing:
                return
            position = end
        rest = data[position:] if position else data
        self._chunks = [rest] if rest else []
        self._size = len(rest)
        self._wanted = _SIZE_BYTES
        if len(rest) >= _SIZE_BYTES:
            self._wanted += int.from_bytes(rest[:_SIZE_BYTES], "big")

    def _check_size(self, size: int, start: memoryview) -> None:
        if 0 < size <= self._dispatcher.frame_bytes_max:
            return
        if bytes(start) in _HTTP_METHODS:
            self._refuse_http()
            raise MalformedMessage(f"an HTTP request came to the Kafka port: HTTP is at {self._http_address}")
        raise MalformedMessage(
            f"a frame of {size} bytes: requests have 1 to {format_size(self._dispatcher.frame_bytes_max)} "
            "(LLOG_REQUEST_MAX_BYTES)"
        )

    def _refuse_http(self) -> None:
        body = f"This port speaks the Kafka protocol. HTTP is at {self._http_address}\n".encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n"
        assert self._transport is not None
        self._transport.write(head.encode() + b"connection: close\r\n\r\n" + body)

    # --- requests

    def _begin(self, frame: memoryview) -> None:
        may_cancel, handling = self._dispatcher.begin(frame, self._peer)
        answer = asyncio.get_running_loop().create_task(handling)
        self._intake.hold(len(frame))
        self._answers.append((answer, len(frame), may_cancel))
        self.check_pause()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write_answers())

    async def _write_answers(self) -> None:
        """Write the answers in the order of the requests, until none is under way."""
        assert self._transport is not None
        while self._answers:
            answer, size, _ = self._answers[0]
            try:
                buffers = await asyncio.shield(answer)
            except (MalformedMessage, LlogError) as error:
                self.close(f"{self._peer}: {error}")
                return
            except Exception:
                logger.exception("a request of the Kafka client at %s failed", self._peer)
                self.close()
                return
            self._answers.popleft()
            self._intake.release(size)
            if buffers:
                self._transport.writelines(buffers)
            self.check_pause()
            if not self._may_write.is_set():
                await self._may_write.wait()

    def check_pause(self) -> None:
        """Read from the client only while there is room for what it sends."""
        if self._transport is None or self._transport.is_closing():
            return
        is_full = len(self._answers) >= _REQUESTS_MAX or not self._may_write.is_set()
        if not is_full and self._intake.is_full:
            is_full = True
            self._intake.wait_for_room(self)
        if is_full and not self._is_paused:
            self._transport.pause_reading()
        elif self._is_paused and not is_full:
            self._transport.resume_reading()
        self._is_paused = is_full


def _forget_result(answer: _Answer) -> None:
    """Look at the result of a request whose client has gone, so that asyncio does not call it lost."""
    if not answer.cancelled():
        answer.exception()
