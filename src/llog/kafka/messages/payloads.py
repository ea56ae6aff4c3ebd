"""What consumers exchange through their group's coordinator: subscriptions and assignments, each behind its version."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

from llog.kafka import wire
from llog.kafka.messages.codec import UNREADABLE, compiled, malformed
from llog.kafka.messages.consumer_protocol import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from llog.kafka.messages.schema import Message
from llog.kafka.wire import Buffer, MalformedMessage

CONSUMER_PROTOCOL_HIGHEST: Final = 3
_VERSION: Final = Struct(">h")


def decode_subscription(data: Buffer) -> ConsumerProtocolSubscription:
    """Return what a member of a group of type `consumer` wants: the metadata of its JoinGroup."""
    message: ConsumerProtocolSubscription = _decode(ConsumerProtocolSubscription, data)
    return message


def encode_subscription(message: ConsumerProtocolSubscription, version: int = CONSUMER_PROTOCOL_HIGHEST) -> bytes:
    return _encode(message, version)


def decode_assignment(data: Buffer) -> ConsumerProtocolAssignment:
    """Return what the leader of a group of type `consumer` gave a member: the assignment of a SyncGroup."""
    message: ConsumerProtocolAssignment = _decode(ConsumerProtocolAssignment, data)
    return message


def encode_assignment(message: ConsumerProtocolAssignment, version: int = CONSUMER_PROTOCOL_HIGHEST) -> bytes:
    return _encode(message, version)


def _decode(message: type[Message], data: Buffer) -> Any:
    view = memoryview(data)
    try:
        (version,) = _VERSION.unpack_from(view)
        if version < 0:
            raise MalformedMessage(f"version {version} does not exist")
        # A newer version only adds fields behind those that are known.
        read = compiled(message, min(version, CONSUMER_PROTOCOL_HIGHEST), False).read
        return read(view, _VERSION.size)[0]
    except UNREADABLE as error:
        raise malformed(f"a {message.__name__}", view, error) from None


def _encode(message: Message, version: int) -> bytes:
    if not 0 <= version <= CONSUMER_PROTOCOL_HIGHEST:
        raise ValueError(f"the consumer protocol has versions 0 to {CONSUMER_PROTOCOL_HIGHEST}, not {version}")
    out = bytearray(_VERSION.pack(version))
    splices: wire.Splices = []
    compiled(type(message), version, False).write(out, splices, message)
    return b"".join(wire.pieces(out, splices))
