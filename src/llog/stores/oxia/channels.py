"""Connections to Oxia's servers: one for each address, made on first use and replaced when it falls silent."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

import msgspec

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC prints every failed handshake otherwise; our errors report it

import grpc
from grpc.aio import Channel, insecure_channel, secure_channel

from llog.errors import ConfigurationError
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub
from llog.stores.oxia.refusals import store_closed

SILENCE_SECONDS: Final = 10.0
"""A connection on which calls have waited this long without any answer may be dead without having been closed."""
_TOKEN_SECONDS: Final = 10.0
"""How often a token's file is read again: tokens of Kubernetes change every hour."""

_LAST_EVENTS_SECONDS: Final = 0.02


class Security(msgspec.Struct, frozen=True):
    """Whether connections are encrypted, and which token they show."""

    tls: bool = False
    ca_file: str | None = None
    """The certificates that TLS trusts; None for those of the system."""
    token: str | None = None
    token_file: str | None = None

    def __repr__(self) -> str:
        return f"Security(tls={self.tls})"

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of an encrypted connection, or None if connections are not encrypted."""
        if not self.tls:
            return None
        roots = None if self.ca_file is None else _read_file("LLOG_OXIA_CA_FILE", self.ca_file)
        return grpc.ssl_channel_credentials(root_certificates=roots)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the header with the token, if a token is set."""
        token = self.token
        if self.token_file is not None:
            token = _read_file("LLOG_OXIA_TOKEN_FILE", self.token_file).decode(errors="replace").strip()
        return () if token is None else (("authorization", f"Bearer {token}"),)


class Channels:
    """The connections of one store, by the address of the server."""

    def __init__(self, security: Security, identity: str) -> None:
        self._security = security
        self._credentials = security.credentials()
        self._options = (
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.min_reconnect_backoff_ms", 3000),  # the time limit of one attempt to connect
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.primary_user_agent", identity),
        )
        self._channels: dict[str, _Connection] = {}
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self._token: tuple[tuple[str, str], ...] = security.metadata()
        self._token_s = time.monotonic()

    def stub(self, address: str) -> OxiaClientStub:
        """Return the stub of the connection to this server, which the first call makes."""
        if self._is_closed:
            raise store_closed()
        connection = self._channels.get(address)
        if connection is None:
            connection = self._channels[address] = _Connection(self._open_channel(address))
        return connection.stub

    def metadata(self, *pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        """Return these headers, and the one with the token if a token is set."""
        now = time.monotonic()
        if self._security.token_file is not None and now - self._token_s > _TOKEN_SECONDS:
            self._token, self._token_s = self._security.metadata(), now
        return (*pairs, *self._token)

    def note_answer(self, address: str) -> None:
        """Note that this server answers."""
        if connection := self._channels.get(address):
            connection.silent_since_s = None

    def replace_if_silent(self, address: str) -> None:
        """Note that a call to this server waits; drop its connection if calls have waited for SILENCE_SECONDS.

        Calls on the dropped connection are cancelled.
        """
        connection = self._channels.get(address)
        if connection is None:
            return
        now = time.monotonic()
        if connection.silent_since_s is None:
            connection.silent_since_s = now
        elif now - connection.silent_since_s > SILENCE_SECONDS:
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
        # gRPC's thread still reports the cancelled calls, and prints an error if this event loop is closed by then.
        await asyncio.sleep(_LAST_EVENTS_SECONDS)

    def _open_channel(self, address: str) -> Channel:
        if self._credentials is None:
            return insecure_channel(address, options=self._options)
        return secure_channel(address, self._credentials, options=self._options)


class _Connection:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.stub = OxiaClientStub(channel)
        self.silent_since_s: float | None = None
        """When the first call began to wait since the last answer; None if no call waits."""


def _read_file(variable: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{variable} is {path}, which cannot be read ({error.strerror}): check the path and its permissions"
        ) from error
