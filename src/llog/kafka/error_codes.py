"""Kafka's error codes, and which of them a Kafka client gets for an error of llog."""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType
from typing import Final

from llog.errors import (
    ConfigurationError,
    Contention,
    CorruptBatch,
    GroupConflict,
    IdempotenceUnsupported,
    InvalidArgument,
    InvalidRecord,
    LlogError,
    LogOwned,
    OffsetOutOfRange,
    OldMessageFormat,
    OutcomeUnknown,
    OutOfOrderSequence,
    Overloaded,
    PartitionFenced,
    PartitionNotInitialized,
    PartlyAppended,
    ProducerFenced,
    RecordTooLarge,
    RequestTooLarge,
    StoreUnavailable,
    TopicElsewhere,
    TopicExists,
    UnknownProducer,
    UnsupportedCompression,
    WrongEngine,
    WrongRole,
)


class ErrorCode(IntEnum):
    """The codes that llog answers with, named as Kafka names them."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    INVALID_PRODUCER_EPOCH = 47
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    MEMBER_ID_REQUIRED = 79
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103


_CODES: Final = MappingProxyType(
    {
        OffsetOutOfRange: ErrorCode.OFFSET_OUT_OF_RANGE,
        CorruptBatch: ErrorCode.CORRUPT_MESSAGE,
        OldMessageFormat: ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        UnsupportedCompression: ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        InvalidRecord: ErrorCode.INVALID_RECORD,
        PartitionNotInitialized: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        TopicElsewhere: ErrorCode.NOT_LEADER_OR_FOLLOWER,
        LogOwned: ErrorCode.NOT_LEADER_OR_FOLLOWER,
        PartitionFenced: ErrorCode.POLICY_VIOLATION,
        OutcomeUnknown: ErrorCode.REQUEST_TIMED_OUT,
        StoreUnavailable: ErrorCode.LEADER_NOT_AVAILABLE,
        Contention: ErrorCode.REQUEST_TIMED_OUT,
        PartlyAppended: ErrorCode.REQUEST_TIMED_OUT,
        Overloaded: ErrorCode.REQUEST_TIMED_OUT,
        RecordTooLarge: ErrorCode.MESSAGE_TOO_LARGE,
        RequestTooLarge: ErrorCode.MESSAGE_TOO_LARGE,
        OutOfOrderSequence: ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
        UnknownProducer: ErrorCode.UNKNOWN_PRODUCER_ID,
        ProducerFenced: ErrorCode.INVALID_PRODUCER_EPOCH,
        IdempotenceUnsupported: ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        TopicExists: ErrorCode.TOPIC_ALREADY_EXISTS,
        WrongEngine: ErrorCode.INVALID_REQUEST,
        GroupConflict: ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
        InvalidArgument: ErrorCode.INVALID_REQUEST,
        ConfigurationError: ErrorCode.INVALID_CONFIG,
        WrongRole: ErrorCode.POLICY_VIOLATION,
    }
)


PASSING: Final = (StoreUnavailable, OutcomeUnknown, Contention, Overloaded)
"""Errors after which the same request may succeed a little later."""


def error_code(error: LlogError) -> ErrorCode:
    """Return the code of the error's class, or of the nearest class above it that has one."""
    for each in type(error).__mro__:
        if each in _CODES:
            return _CODES[each]
    return ErrorCode.UNKNOWN_SERVER_ERROR


def topic_error_code(error: LlogError) -> ErrorCode:
    """Return the code of an error about a topic that a request names: what is wrong with its arguments is the name."""
    return ErrorCode.INVALID_TOPIC_EXCEPTION if isinstance(error, InvalidArgument) else error_code(error)
