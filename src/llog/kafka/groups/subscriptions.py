"""The topics that a consumer's metadata names: the one part of it that a broker may have to read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from llog.kafka.groups.membership import MemberView
from llog.kafka.messages import decode_subscription
from llog.kafka.wire import MalformedMessage

CONSUMER: Final = "consumer"
"""The protocol type of consumers. Other programs, such as Kafka Connect, use groups for purposes of their own."""


def subscribed_topics(members: Iterable[MemberView]) -> frozenset[str] | None:
    """Return the topics to which these consumers subscribe; None if a member's metadata cannot be read."""
    try:
        return frozenset(topic for member in members for topic in decode_subscription(member.metadata).topics)
    except MalformedMessage:
        return None
