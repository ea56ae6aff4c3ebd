"""Connections to Oxia's servers: one for each address, made when it is needed, and replaced when nothing comes back on
it.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import msgspec

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else it prints every failed handshake; what failed is in our errors

import grpc
from grpc.aio import Channel, insecure_channel, secure_channel

from llog.errors import ConfigurationError, StoreUnavailable
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub

SILENCE_SECONDS: Final = 10.0
"""A connection on which calls have waited for as long, and nothing came back, may be dead without having been closed.
"""
_TOKEN_SECONDS: Final = 10.0
"""A token's file is read again after as long: tokens of Kubernetes change every hour."""

_LAST_EVENTS_SECONDS: Final = 0.02


class Security(msgspec.Struct, frozen=True):
    """How servers are reached: encrypted or not, and with which token."""

    tls: bool = False
    ca_file: str | None = None
    """The certificates that TLS trusts; the system's without it."""
    token: str | None = None
    token_file: str | None = None

    def __repr__(self) -> str:
        return f"Security(tls={self.tls})"

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for a connection that is not encrypted."""
        if not self.tls:
            return None
        roots = None if self.ca_file is None else _read("LLOG_OXIA_CA_FILE", self.ca_file)
        return grpc.ssl_channel_credentials(root_certificates=roots)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The header that shows the token, if there is one."""
        token = self.token
        if self.token_file is not None:
            token = _read("LLOG_OXIA_TOKEN_FILE", self.token_file).decode(errors="replace").strip()
        return () if token is None else (("authorization", f"Bearer {token}"),)


class Channels:
    def __init__(self, security: Security, identity: str) -> None:
        self._security = security
        self._credentials = security.credentials()
        self._options = (
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.min_reconnect_backoff_ms", 3000),  # how long one attempt to connect may take
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.primary_user_agent", identity),
        )
        self._channels: dict[str, _Connection] = {}
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._token: tuple[tuple[str, str], ...] = security.metadata()
        self._token_s = time.monotonic()

    def stub(self, address: str) -> OxiaClientStub:
        if self._is_closed:
            raise StoreUnavailable("this metadata store is closed: open another one")
        connection = self._channels.get(address)
        if connection is None:
            connection = self._channels[address] = _Connection(self._channel(address))
        return connection.stub

    def metadata(self, *pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        """These headers and the one that shows the token, if there is one."""
        now = time.monotonic()
        if self._security.token_file is not None and now - self._token_s > _TOKEN_SECONDS:
            self._token, self._token_s = self._security.metadata(), now
        return (*pairs, *self._token)

    def heard(self, address: str) -> None:
        """Something came back from this server."""
        if connection := self._channels.get(address):
            connection.doubted_s = None

    def doubt(self, address: str) -> None:
        """A call to this server waits: connect anew if none has got an answer for long. Calls on the old connection are
        cancelled.
        """
        connection = self._channels.get(address)
        if connection is None:
            return
        now = time.monotonic()
        if connection.doubted_s is None:
            connection.doubted_s = now
        elif now - connection.doubted_s > SILENCE_SECONDS:
            del self._channels[address]
            task = asyncio.ensure_future(connection.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self._is_closed = True
        channels, self._channels = self._channels, {}
        await asyncio.gather(
            *self._closing, *(each.channel.close() for each in channels.values()), return_exceptions=True
        )
        # What was cancelled still comes back from gRPC's thread, which complains aloud if this event loop has been
        # closed by then.
        await asyncio.sleep(_LAST_EVENTS_SECONDS)

    def _channel(self, address: str) -> Channel:
        if self._credentials is None:
            return insecure_channel(address, options=self._options)
        return secure_channel(address, self._credentials, options=self._options)


class _Connection:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.stub = OxiaClientStub(channel)
        self.doubted_s: float | None = None
        """When the first call began to wait of those that have had no answer since."""


def _read(variable: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{variable} is {path}, which cannot be read ({error.strerror})") from error
