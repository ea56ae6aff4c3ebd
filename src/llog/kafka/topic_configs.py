"""The options of topics under Kafka's names, and what of Kafka's configuration means nothing here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from llog.errors import ConfigurationError
from llog.log.catalog import OBJECT
from llog.log.records import DELETE_RETENTION_MS, Cleanup, Topic
from llog.model import TimestampType

ENGINE: Final = "llog.engine"
"""Names the engine of a topic that is created."""
RETENTION_MS: Final = "retention.ms"
RETENTION_BYTES: Final = "retention.bytes"
CLEANUP: Final = "cleanup.policy"
DELETE_RETENTION: Final = "delete.retention.ms"
TIMESTAMPS: Final = "message.timestamp.type"

_UNLIMITED: Final = "-1"
_TIMESTAMP_TYPES: Final = {"CreateTime": TimestampType.CREATE, "LogAppendTime": TimestampType.APPEND}
_TIMESTAMP_NAMES: Final = {value: name for name, value in _TIMESTAMP_TYPES.items()}
_STRING, _LONG, _LIST = 2, 5, 7
CONFIG_TYPES: Final = MappingProxyType(
    {
        CLEANUP: _LIST,
        DELETE_RETENTION: _LONG,
        ENGINE: _STRING,
        RETENTION_BYTES: _LONG,
        RETENTION_MS: _LONG,
        TIMESTAMPS: _STRING,
    }
)
"""The numbers by which Kafka names the types of the options."""
_FIXED: Final = frozenset({ENGINE, TIMESTAMPS})
"""What only the creation of a topic decides."""

IGNORED: Final = frozenset(
    {
        "compression.type",
        "file.delete.delay.ms",
        "flush.messages",
        "flush.ms",
        "follower.replication.throttled.replicas",
        "index.interval.bytes",
        "leader.replication.throttled.replicas",
        "local.retention.bytes",
        "local.retention.ms",
        "max.compaction.lag.ms",
        "max.message.bytes",
        "message.downconversion.enable",
        "message.timestamp.after.max.ms",
        "message.timestamp.before.max.ms",
        "min.cleanable.dirty.ratio",
        "min.compaction.lag.ms",
        "min.insync.replicas",
        "preallocate",
        "remote.storage.enable",
        "segment.bytes",
        "segment.index.bytes",
        "segment.jitter.ms",
        "segment.ms",
        "unclean.leader.election.enable",
    }
)
"""What clients set as a matter of routine and llog has no use for: there are no segments or replicas to tune."""


def show_configs(topic: Topic) -> dict[str, str]:
    """Return the options of a topic, as Kafka's tools show them."""
    return {
        CLEANUP: topic.cleanup.value,
        DELETE_RETENTION: str(topic.delete_retention_ms),
        ENGINE: topic.engine,
        TIMESTAMPS: _TIMESTAMP_NAMES[topic.timestamp_type],
        RETENTION_BYTES: _UNLIMITED if topic.retention_bytes is None else str(topic.retention_bytes),
        RETENTION_MS: _UNLIMITED if topic.retention_ms is None else str(topic.retention_ms),
    }


def default_configs() -> dict[str, str]:
    return show_configs(Topic(name="", partitions=1, directory="", engine=OBJECT))


def is_fixed(name: str) -> bool:
    """Return whether the option of an existing topic cannot be changed."""
    return name in _FIXED


def options_of(configs: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the arguments of `Catalog.create` for these options; raise `ConfigurationError` for one that is wrong."""
    options: dict[str, Any] = {}
    for name, text in configs.items():
        if text is None or name in IGNORED:
            continue
        if name == ENGINE:
            options["engine"] = text
        elif name == TIMESTAMPS:
            options["timestamp_type"] = _pick(name, text, _TIMESTAMP_TYPES)
        else:
            options |= _changeable(name, text)
    return options


def changes_of(configs: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the arguments of `Catalog.set_options` for these options; None sets an option back to its default."""
    changes: dict[str, Any] = {}
    for name, text in configs.items():
        if name in IGNORED:
            continue
        if name in _FIXED:
            raise ConfigurationError(f"{name} of a topic cannot be changed: only its creation sets it")
        changes |= _changeable(name, default_configs().get(name, "") if text is None else text)
    return changes


def all_changeable() -> Iterable[str]:
    return (name for name in default_configs() if name not in _FIXED)


def _changeable(name: str, text: str) -> dict[str, Any]:
    if name in (RETENTION_MS, RETENTION_BYTES):
        return {name.replace(".", "_"): None if text == _UNLIMITED else _number(name, text)}
    if name == DELETE_RETENTION:
        return {"delete_retention_ms": _number(name, text) if text else DELETE_RETENTION_MS}
    if name == CLEANUP:
        return {"cleanup": _pick(name, text, {each.value: each for each in Cleanup})}
    known = ", ".join(sorted(default_configs()))
    raise ConfigurationError(f"there is no option {name[:80]!r} of topics: there are {known}")


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise ConfigurationError(f"{name} is {text[:40]!r}: it must be a whole number, or -1 for no limit")
    return int(text)


def _pick(name: str, text: str, values: Mapping[str, Any]) -> Any:
    if text not in values:
        raise ConfigurationError(f"{name} is {text[:40]!r}: it must be one of {', '.join(values)}")
    return values[text]
