"""Options of the data source, named and meant as those of Spark's `kafka` source and sink.

All are checked here, before any task starts. `kafka.*` options are ignored with one warning, so that a job moves by one word; any other
option that is unknown is an error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from llog.config import Settings, load_settings
from llog.errors import ConfigurationError, InvalidArgument
from llog.model import TopicPartition, check_topic_name
from llog.partition.sink import check_sink
from llog.units import parse_duration_ms, parse_size

T = TypeVar("T")

EARLIEST: Final = -2
LATEST: Final = -1

STORE_OPTIONS: Final = frozenset({"meta", "blobs"})
_SELECTIONS: Final = ("subscribe", "subscribepattern", "assign")
_STARTS: Final = ("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp")
_ENDS: Final = ("endingoffsets", "endingtimestamp", "endingoffsetsbytimestamp")
_READ: Final = frozenset(
    {*_SELECTIONS, *_STARTS, "failondataloss", "minpartitions", "maxpartitionbytes", "includeheaders"}
) | {"startingoffsetsbytimestampstrategy"}
_BATCH_READ: Final = _READ | {*_ENDS}
_STREAM_READ: Final = _READ | {
    "maxoffsetspertrigger",
    "minoffsetspertrigger",
    "maxtriggerdelay",
    "maxbytespertrigger",
    "groupidforcommit",
}
_WRITE: Final = frozenset(
    {"topic", "includeheaders", "createtopicpartitions", "writeid", "uploadbytes", "checkpointlocation"}
)
_RELATIVE: Final = re.compile(r"-(\d+\s*(?:ms|s|m|h|d|w))")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which partitions are read: exactly one of these is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[TopicPartition, ...] = ()


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where reading starts or ends: an offset or a time for each partition, or one rule for all of them."""

    everywhere: int | None = None
    """EARLIEST or LATEST."""
    offsets: dict[str, int] = {}
    """`{topic}/{partition}` → offset, EARLIEST or LATEST."""
    timestamp_ms: int | None = None
    ago_ms: int | None = None
    """So long before now."""
    timestamps: dict[str, int] = {}
    latest_if_missing: bool = False
    """What a start by time does where no record is that young: read from the end on, instead of failing."""


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    selection: Selection
    start: Position
    end: Position
    fail_on_data_loss: bool = True
    min_partitions: int = 1
    partition_bytes_max: int = 128 << 20
    include_headers: bool = False
    offsets_per_trigger_max: int | None = None
    offsets_per_trigger_min: int | None = None
    trigger_delay_ms_max: int = 15 * 60_000
    bytes_per_trigger_max: int | None = None
    group: str | None = None


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    topic: str | None = None
    create_topic_partitions: int | None = None
    write_id: str | None = None
    upload_bytes: int = 64 << 20


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    given = _known(options, _STREAM_READ if streaming else _BATCH_READ, "stream" if streaming else "batch read")
    start_default = LATEST if streaming else EARLIEST
    start = _position(given, _STARTS, start_default, forbidden=None if streaming else LATEST)
    end = _position(given, _ENDS, LATEST, forbidden=EARLIEST) if not streaming else Position(everywhere=LATEST)
    group = given.get("groupidforcommit")
    return ReadOptions(
        settings=_settings(given),
        selection=_selection(given),
        start=start,
        end=end,
        fail_on_data_loss=_flag(given, "failondataloss", True),
        min_partitions=_count(given, "minpartitions") or 1,
        partition_bytes_max=_size(given, "maxpartitionbytes") or 128 << 20,
        include_headers=_flag(given, "includeheaders", False),
        offsets_per_trigger_max=_count(given, "maxoffsetspertrigger"),
        offsets_per_trigger_min=_count(given, "minoffsetspertrigger"),
        trigger_delay_ms_max=_duration(given, "maxtriggerdelay", 15 * 60_000),
        bytes_per_trigger_max=_size(given, "maxbytespertrigger"),
        group=None if group is None else check_sink(group),
    )


def write_options(options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    given = _known(options, _WRITE, "stream write" if streaming else "batch write")
    topic, write_id = given.get("topic"), given.get("writeid")
    if streaming and write_id is not None:
        raise ConfigurationError("option writeId is for batch writes: a stream is exactly once by its checkpoint")
    return WriteOptions(
        settings=_settings(given),
        topic=None if topic is None else check_topic_name(topic),
        create_topic_partitions=_count(given, "createtopicpartitions"),
        write_id=None if write_id is None else check_sink(write_id),
        upload_bytes=_size(given, "uploadbytes") or 64 << 20,
    )


def _known(options: Mapping[str, str], names: frozenset[str] | set[str], what: str) -> dict[str, str]:
    given = {name.lower(): value for name, value in options.items()}
    ignored = sorted(name for name in given if name.startswith("kafka."))
    if ignored:
        warnings.warn(
            f"llog ignores the options {', '.join(ignored)}: there is no Kafka broker in the path", stacklevel=4
        )
    unknown = sorted(set(given) - names - STORE_OPTIONS - set(ignored))
    if unknown:
        known = ", ".join(sorted(names | STORE_OPTIONS))
        raise ConfigurationError(f"option {unknown[0]!r} is unknown for a {what} of llog. Known are: {known}")
    return {name: value for name, value in given.items() if name not in ignored}


def _settings(given: Mapping[str, str]) -> Settings:
    overrides = {name: given[name] for name in STORE_OPTIONS if name in given}
    return load_settings(overrides)


def _selection(given: Mapping[str, str]) -> Selection:
    chosen = [name for name in _SELECTIONS if given.get(name)]
    if len(chosen) != 1:
        raise ConfigurationError("give exactly one of the options subscribe, subscribePattern and assign")
    value = given[chosen[0]]
    if chosen[0] == "subscribe":
        topics = tuple(dict.fromkeys(check_topic_name(name.strip()) for name in value.split(",") if name.strip()))
        if not topics:
            raise ConfigurationError("option subscribe names no topic")
        return Selection(topics=topics)
    if chosen[0] == "subscribepattern":
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigurationError(
                f"option subscribePattern is not a regular expression: {value!r}: {error}"
            ) from error
        return Selection(pattern=value)
    partitions = _json(given, chosen[0], dict[str, list[int]])
    assigned = [TopicPartition(check_topic_name(topic), p) for topic, ps in partitions.items() for p in ps]
    if not assigned or any(tp.partition < 0 for tp in assigned):
        raise ConfigurationError(f'option assign must look like {{"topic": [0, 1]}}: {value[:200]!r}')
    return Selection(assigned=tuple(sorted(set(assigned))))


def _position(given: Mapping[str, str], names: tuple[str, ...], default: int, *, forbidden: int | None) -> Position:
    """Times win over offsets, as with Kafka: one timestamp for all, then timestamps by partition, then offsets."""
    by_offset, by_time, by_times = names
    strategy = given.get("startingoffsetsbytimestampstrategy", "error").lower()
    if strategy not in ("error", "latest"):
        raise ConfigurationError(f"option startingOffsetsByTimestampStrategy must be error or latest: {strategy!r}")
    latest_if_missing = strategy == "latest"
    if by_time in given:
        return _time(by_time, given[by_time], latest_if_missing)
    if by_times in given:
        times = _by_partition(given, by_times)
        return Position(timestamps=times, latest_if_missing=latest_if_missing)
    value = given.get(by_offset)
    if value is None:
        return Position(everywhere=default)
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        everywhere = EARLIEST if word == "earliest" else LATEST
        if everywhere == forbidden:
            raise ConfigurationError(f"option {by_offset} cannot be {word!r} in a batch read")
        return Position(everywhere=everywhere)
    if _RELATIVE.fullmatch(word):
        return _time(by_offset, word, latest_if_missing)
    offsets = _by_partition(given, by_offset)
    if forbidden is not None and forbidden in offsets.values():
        raise ConfigurationError(f"option {by_offset} cannot have the offset {forbidden} in a batch read")
    return Position(offsets=offsets)


def _time(name: str, value: str, latest_if_missing: bool) -> Position:
    relative = _RELATIVE.fullmatch(value.strip().lower())
    if relative:
        return Position(ago_ms=parse_duration_ms(relative[1]))
    if not value.strip().isdigit():
        raise ConfigurationError(f"option {name} must be ms since 1970, or a time ago such as -10m: {value!r}")
    return Position(timestamp_ms=int(value), latest_if_missing=latest_if_missing)


def _by_partition(given: Mapping[str, str], name: str) -> dict[str, int]:
    nested = _json(given, name, dict[str, dict[str, int]])
    found = {}
    for topic, partitions in nested.items():
        for partition, number in partitions.items():
            if not partition.isdigit() or number < EARLIEST:
                raise ConfigurationError(
                    f"option {name}: {partition!r}: {number} of topic {topic!r} is no partition and offset"
                )
            found[str(TopicPartition(check_topic_name(topic), int(partition)))] = number
    return found


def _json(given: Mapping[str, str], name: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(given[name], type=kind)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"option {name} is not the JSON it should be ({error}): {given[name][:200]!r}"
        ) from error


def _flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if value.strip().lower() not in ("true", "false"):
        raise ConfigurationError(f"option {name} must be true or false: {value!r}")
    return value.strip().lower() == "true"


def _count(given: Mapping[str, str], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not value.strip().isdigit() or int(value) < 1:
        raise ConfigurationError(f"option {name} must be a whole number above 0: {value!r}")
    return int(value)


def _size(given: Mapping[str, str], name: str) -> int | None:
    return _quantity(given, name, parse_size)


def _duration(given: Mapping[str, str], name: str, default: int) -> int:
    return _quantity(given, name, parse_duration_ms) or default


def _quantity(given: Mapping[str, str], name: str, parse: Callable[[str], int]) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        parsed = parse(value)
    except InvalidArgument as error:
        raise ConfigurationError(f"option {name}: {error}") from error
    if parsed < 1:
        raise ConfigurationError(f"option {name} must be above 0: {value!r}")
    return parsed
