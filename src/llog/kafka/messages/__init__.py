"""The messages of the Kafka protocol, one module per API, and how they are read and written.

The modules of the APIs, `consumer_protocol` and `registry` are generated: `devtools/kafka_messages.py` has the command.
"""

from __future__ import annotations

from llog.kafka.messages.frames import (
    RequestHeader,
    decode_header,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from llog.kafka.messages.payloads import (
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from llog.kafka.messages.registry import APIS
from llog.kafka.messages.schema import Api, Message

__all__ = [
    "APIS",
    "Api",
    "Message",
    "RequestHeader",
    "decode_assignment",
    "decode_header",
    "decode_request",
    "decode_response",
    "decode_subscription",
    "encode_assignment",
    "encode_request",
    "encode_response",
    "encode_subscription",
]
