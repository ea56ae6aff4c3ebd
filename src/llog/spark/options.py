"""The options of the data source, with the names and meanings of Spark's `kafka` source and sink.

All are checked here, before any task starts. Options of Kafka without a counterpart are ignored with one warning, so
that a job moves to llog by changing one word; any other unknown option is an error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final, TypeVar

import msgspec

from llog.base.units import parse_duration_ms, parse_size
from llog.config import SETTINGS, Settings
from llog.config.loading import load_settings
from llog.config.locations import superseded_fields
from llog.engines.object.sink import check_sink
from llog.errors import ConfigurationError, InvalidArgument
from llog.groups.records import check_group_name
from llog.log.opening import addresses
from llog.model import TopicPartition, check_topic_name
from llog.transport import check_url

T = TypeVar("T")

EARLIEST: Final = -2
LATEST: Final = -1

_STORES: Final = ("meta", "blobs")
_SELECTIONS: Final = ("subscribe", "subscribePattern", "assign")
_STARTS: Final = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
_ENDS: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_READ: Final = (
    *_STORES,
    "broker",
    *_SELECTIONS,
    *_STARTS,
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "minPartitions",
    "maxPartitionBytes",
    "includeHeaders",
)
_STREAM_ONLY: Final = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "maxBytesPerTrigger",
    "groupIdForCommit",
)
_WRITE: Final = (
    *_STORES,
    "topic",
    "includeHeaders",
    "createTopicPartitions",
    "writeId",
    "uploadBytes",
    "checkpointLocation",
)
_KAFKAS: Final = re.compile(
    r"(kafka|kafkaConsumer|fetchOffset)\..*|groupIdPrefix|maxRecordsPerPartition", re.IGNORECASE
)
"""Options of Kafka's clients, and of how Spark uses them."""
UPLOAD_BYTES_MAX: Final = 512 << 20
"""Well below the 2 GiB that an Arrow column of bytes can hold."""
_RELATIVE: Final = re.compile(r"-(\d+\s*(?:ms|s|m|h|d|w))")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The partitions to read: exactly one of these fields is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[TopicPartition, ...] = ()


class OffsetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where reading starts or ends: an offset or a time for each partition, or one rule for all of them."""

    everywhere: int | None = None
    """EARLIEST or LATEST."""
    offsets: dict[str, int] = {}
    """`{topic}/{partition}` → offset, EARLIEST or LATEST."""
    timestamp_ms: int | None = None
    ago_ms: int | None = None
    """A time before now."""
    timestamps: dict[str, int] = {}
    latest_if_missing: bool = False
    """Whether a start by time begins at the end, instead of failing, if no record is that recent."""


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    selection: Selection
    start: OffsetSpec
    end: OffsetSpec
    fail_on_data_loss: bool = True
    min_partitions: int = 1
    partition_bytes_max: int = 128 << 20
    include_headers: bool = False
    offsets_per_trigger_max: int | None = None
    offsets_per_trigger_min: int | None = None
    trigger_delay_ms_max: int = 15 * 60_000
    bytes_per_trigger_max: int | None = None
    group: str | None = None
    broker: str | None = None
    """The address of the broker to read through."""


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    topic: str | None = None
    create_topic_partitions: int | None = None
    write_id: str | None = None
    upload_bytes: int = 64 << 20


def read_options(
    options: Mapping[str, str], *, streaming: bool | None, settings: Settings | None = None
) -> ReadOptions:
    """Return the checked options of a read. With `streaming` None, options of batch reads and of streams are accepted.

    `settings` are those of this process by default; the options take precedence over them.
    """
    kinds = {True: (*_READ, *_STREAM_ONLY), False: (*_READ, *_ENDS), None: (*_READ, *_ENDS, *_STREAM_ONLY)}
    given = _by_documented_name(
        options, kinds[streaming], {True: "stream", False: "batch read", None: "read"}[streaming]
    )
    for name in (*_STORES, "maxBytesPerTrigger", "groupIdForCommit"):
        if "broker" in given and name in given:
            raise ConfigurationError(f"option {name} is not for a read through a broker: leave it or broker out")
    start_default, start_forbidden = (EARLIEST, LATEST) if streaming is False else (LATEST, None)
    return ReadOptions(
        settings=_settings(given, settings),
        selection=_selection(given),
        start=_offset_spec(given, _STARTS, start_default, forbidden=start_forbidden),
        end=_offset_spec(given, _ENDS, LATEST, forbidden=EARLIEST),
        fail_on_data_loss=_flag(given, "failOnDataLoss", True),
        min_partitions=_count(given, "minPartitions") or 1,
        partition_bytes_max=_size(given, "maxPartitionBytes") or 128 << 20,
        include_headers=_flag(given, "includeHeaders", False),
        offsets_per_trigger_max=_count(given, "maxOffsetsPerTrigger"),
        offsets_per_trigger_min=_count(given, "minOffsetsPerTrigger"),
        trigger_delay_ms_max=_quantity(given, "maxTriggerDelay", parse_duration_ms) or 15 * 60_000,
        bytes_per_trigger_max=_size(given, "maxBytesPerTrigger"),
        group=_name(given, "groupIdForCommit", check_group_name),
        broker=_name(given, "broker", check_url),
    )


def write_options(options: Mapping[str, str], *, streaming: bool, settings: Settings | None = None) -> WriteOptions:
    """Return the checked options of a write. `settings` are as for a read."""
    given = _by_documented_name(options, _WRITE, "stream write" if streaming else "batch write")
    if streaming and "writeId" in given:
        raise ConfigurationError("option writeId is for batch writes: a stream is exactly once by its checkpoint")
    upload_bytes = _size(given, "uploadBytes") or 64 << 20
    if upload_bytes > UPLOAD_BYTES_MAX:
        raise ConfigurationError(f"option uploadBytes is {upload_bytes}, over its limit of {UPLOAD_BYTES_MAX}")
    return WriteOptions(
        settings=_settings(given, settings),
        topic=_name(given, "topic", check_topic_name),
        create_topic_partitions=_count(given, "createTopicPartitions"),
        write_id=_name(given, "writeId", lambda name: check_sink(f"write-{name}").removeprefix("write-")),
        upload_bytes=upload_bytes,
    )


def warn_of_ignored(names: Iterable[str], *, stacklevel: int = 2) -> None:
    """Issue one warning that names all ignored options. `stacklevel` is that of `warnings.warn`."""
    ignored = sorted(name for name in names if _is_ignored(name))
    if ignored:
        warnings.warn(
            f"llog ignores the options {', '.join(ignored)}: there is no Kafka broker in the path",
            stacklevel=stacklevel,
        )


def _is_ignored(name: str) -> bool:
    return _KAFKAS.fullmatch(name) is not None


def _by_documented_name(options: Mapping[str, str], names: Sequence[str], what: str) -> dict[str, str]:
    """Return the options under their documented names: Spark passes them in lower case. Raise for an unknown one."""
    spelled = {name.lower(): name for name in names}
    unknown = sorted(name for name in options if name.lower() not in spelled and not _is_ignored(name))
    if unknown:
        elsewhere = [name for name in (*_READ, *_ENDS, *_STREAM_ONLY, *_WRITE) if name.lower() == unknown[0].lower()]
        if elsewhere:
            raise ConfigurationError(f"option {elsewhere[0]} is not for a {what} of llog: leave it out")
        near = get_close_matches(unknown[0].lower(), spelled, 1)
        hint = f" (did you mean {spelled[near[0]]}?)" if near else ""
        raise ConfigurationError(
            f"option {unknown[0]!r} is unknown for a {what} of llog{hint}. Known are: {', '.join(sorted(names))}"
        )
    return {spelled[name.lower()]: value for name, value in options.items() if not _is_ignored(name)}


def _with_stores(settings: Settings, stores: Mapping[str, str]) -> Settings:
    defaults = {field: SETTINGS[field].default for field in superseded_fields(stores)}
    return msgspec.structs.replace(settings, **defaults, **stores)


def _settings(given: Mapping[str, str], settings: Settings | None) -> Settings:
    stores = {name: given[name] for name in _STORES if name in given}
    settings = load_settings(stores) if settings is None else _with_stores(settings, stores)
    if "broker" not in given and addresses(settings)[0].scheme == "memory":
        raise ConfigurationError(
            f"the log at {settings.meta} lives in one process, and Spark runs in several: name another by the "
            "options meta and blobs"
        )
    return settings


def _selection(given: Mapping[str, str]) -> Selection:
    chosen = [name for name in _SELECTIONS if given.get(name)]
    if len(chosen) != 1:
        raise ConfigurationError("give exactly one of the options subscribe, subscribePattern and assign")
    value = given[chosen[0]]
    if chosen[0] == "subscribe":
        names = dict.fromkeys(filter(None, (name.strip() for name in value.split(","))))
        if not names:
            raise ConfigurationError("option subscribe names no topic")
        return Selection(topics=tuple(_parse_option("subscribe", name, check_topic_name) for name in names))
    if chosen[0] == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigurationError(
                f"option subscribePattern is not a regular expression: {value!r}: {error}"
            ) from error
        return Selection(pattern=value)
    partitions = _json(given, chosen[0], dict[str, list[int]])
    assigned = [
        TopicPartition(_parse_option("assign", topic, check_topic_name), p)
        for topic, ps in partitions.items()
        for p in ps
    ]
    if not assigned or any(tp.partition < 0 for tp in assigned):
        raise ConfigurationError(f'option assign must look like {{"topic": [0, 1]}}: {value[:200]!r}')
    return Selection(assigned=tuple(sorted(set(assigned))))


def _offset_spec(
    given: Mapping[str, str], names: tuple[str, ...], default: int, *, forbidden: int | None
) -> OffsetSpec:
    """Return where to start or end: by one timestamp for all, else timestamps by partition, else offsets."""
    by_offset, by_time, by_times = names
    strategy = given.get("startingOffsetsByTimestampStrategy", "error").lower()
    if strategy not in ("error", "latest"):
        raise ConfigurationError(f"option startingOffsetsByTimestampStrategy must be error or latest: {strategy!r}")
    latest_if_missing = strategy == "latest"
    if by_time in given:
        return _time(by_time, given[by_time], latest_if_missing)
    if by_times in given:
        return OffsetSpec(timestamps=_by_partition(given, by_times, 0), latest_if_missing=latest_if_missing)
    value = given.get(by_offset)
    if value is None:
        return OffsetSpec(everywhere=default)
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        everywhere = EARLIEST if word == "earliest" else LATEST
        if everywhere == forbidden:
            raise ConfigurationError(f"option {by_offset} cannot be {word!r} in a batch read")
        return OffsetSpec(everywhere=everywhere)
    if _RELATIVE.fullmatch(word):
        return _time(by_offset, word, latest_if_missing)
    offsets = _by_partition(given, by_offset, EARLIEST)
    if forbidden is not None and forbidden in offsets.values():
        raise ConfigurationError(f"option {by_offset} cannot have the offset {forbidden} in a batch read")
    return OffsetSpec(offsets=offsets)


def _time(name: str, value: str, latest_if_missing: bool) -> OffsetSpec:
    relative = _RELATIVE.fullmatch(value.strip().lower())
    if relative:
        return OffsetSpec(ago_ms=parse_duration_ms(relative[1]))
    if not value.strip().isdecimal():
        raise ConfigurationError(f"option {name} must be ms since 1970, or a time ago such as -10m: {value!r}")
    return OffsetSpec(timestamp_ms=int(value), latest_if_missing=latest_if_missing)


def _by_partition(given: Mapping[str, str], name: str, lowest: int) -> dict[str, int]:
    found = {}
    for topic, partitions in _json(given, name, dict[str, dict[str, int]]).items():
        for partition, number in partitions.items():
            if not partition.isdecimal() or number < lowest:
                raise ConfigurationError(
                    f'option {name} of topic {topic!r} has {{"{partition}": {number}}}: write a partition from 0 and a '
                    f"number from {lowest}"
                )
            found[str(TopicPartition(_parse_option(name, topic, check_topic_name), int(partition)))] = number
    if not found:
        raise ConfigurationError(f"option {name} names no partition: {given[name][:200]!r}")
    return found


def _json(given: Mapping[str, str], name: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(given[name], type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
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
    if not value.strip().isdecimal() or int(value) < 1:
        raise ConfigurationError(f"option {name} must be a whole number above 0: {value!r}")
    return int(value)


def _size(given: Mapping[str, str], name: str) -> int | None:
    return _quantity(given, name, parse_size)


def _quantity(given: Mapping[str, str], name: str, parse: Callable[[str], int]) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    parsed = _parse_option(name, value, parse)
    if parsed < 1:
        raise ConfigurationError(f"option {name} must be above 0: {value!r}")
    return parsed


def _name(given: Mapping[str, str], name: str, check: Callable[[str], str]) -> str | None:
    return None if name not in given else _parse_option(name, given[name], check)


def _parse_option(name: str, value: str, check: Callable[[str], T]) -> T:
    try:
        return check(value)
    except (InvalidArgument, ConfigurationError) as error:
        raise ConfigurationError(f"option {name}: {error}") from error
