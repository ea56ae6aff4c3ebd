"""What a member may ask for when it joins, how members agree on a protocol, and what consumers subscribe to: pure
functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups.membership import AssignmentProtocol, JoinRequest, Member, MemberView
from llog.kafka.messages import decode_subscription
from llog.kafka.wire import MalformedMessage

CONSUMER: Final = "consumer"
"""The protocol type of consumers. Other programs, such as Kafka Connect, use groups for purposes of their own."""
SESSION_MS_MIN: Final = 1_000
SESSION_MS_MAX: Final = 1_800_000
PROTOCOLS_MAX: Final = 64
MEMBER_METADATA_BYTES_MAX: Final = 1 << 20
GROUP_METADATA_BYTES_MAX: Final = 16 << 20
NAME_MAX: Final = 255
"""The most characters of an instance id, and of the client id in a member's id."""


def check_join(request: JoinRequest, protocol_type: str, others: Collection[Member]) -> ErrorCode:
    """Return why this request cannot join these members, whose group has this protocol type; or no error."""
    if not SESSION_MS_MIN <= request.session_timeout_ms <= SESSION_MS_MAX:
        return ErrorCode.INVALID_SESSION_TIMEOUT
    if len(request.member.instance_id or "") > NAME_MAX or len(request.protocols) > PROTOCOLS_MAX:
        return ErrorCode.INVALID_REQUEST
    size = _size(request.protocols)
    if size > MEMBER_METADATA_BYTES_MAX:
        return ErrorCode.INVALID_REQUEST
    if size + sum(_size(each.protocols) for each in others) > GROUP_METADATA_BYTES_MAX:
        return ErrorCode.GROUP_MAX_SIZE_REACHED
    common = _names(request.protocols).intersection(*(_names(each.protocols) for each in others))
    if not request.protocol_type or not common or (others and request.protocol_type != protocol_type):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    return ErrorCode.NONE


def elect_protocol(members: Collection[Member]) -> str:
    """Return the protocol that most members prefer, of those that all of them know."""
    first, *others = (_names(each.protocols) for each in members)
    candidates = first.intersection(*others)
    return Counter(member.vote(candidates) for member in members).most_common(1)[0][0]


def subscribed_topics(members: Iterable[MemberView]) -> frozenset[str] | None:
    """Return the topics to which these consumers subscribe; None if a member's metadata cannot be read."""
    try:
        return frozenset(topic for member in members for topic in decode_subscription(member.metadata).topics)
    except MalformedMessage:
        return None


def _size(protocols: tuple[AssignmentProtocol, ...]) -> int:
    return sum(len(each.name) + len(each.metadata) for each in protocols)


def _names(protocols: tuple[AssignmentProtocol, ...]) -> frozenset[str]:
    return frozenset(each.name for each in protocols)
