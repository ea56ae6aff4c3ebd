"""Requests of any API and version, sent by hand."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from llog.kafka.messages import APIS, Message, decode_response, encode_request
from tests.broker.test_process import LIMIT_S
from tests.kafka.serving import KafkaBroker


class Client:
    """A connection on which any bytes can be sent."""

    def __init__(self, broker: KafkaBroker) -> None:
        host, port = broker.bootstrap.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=LIMIT_S)

    def ask(self, key: int, version: int, message: Message) -> Message:
        self.socket.sendall(b"".join(encode_request(APIS[key], version, 7, "test", message)))
        return self.answer(key, version)

    def answer(self, key: int, version: int) -> Message:
        (size,) = struct.unpack(">i", self._read(4))
        correlation, response = decode_response(APIS[key], version, memoryview(self._read(size)))
        assert correlation == 7
        assert isinstance(response, Message)
        return response

    def is_closed(self) -> bool:
        """Whether the broker closes the connection without an answer."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the broker closed the connection"
            data += more
        return data


@contextmanager
def connected(broker: KafkaBroker) -> Iterator[Client]:
    client = Client(broker)
    try:
        yield client
    finally:
        client.socket.close()
