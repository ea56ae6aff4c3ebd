"""The allowed values of clauses and options: one check for each, applied to literals and to parameters.

A check returns the value as statements carry it (durations and times in ms), or raises `InvalidArgument`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Final

from llog.base.units import epoch_ms, parse_duration_ms, parse_size
from llog.errors import InvalidArgument
from llog.groups.options import LIMIT_MAX
from llog.model import PARTITIONS_MAX, check_topic_name

Check = Callable[[Any], Any]

OFFSET_MAX: Final = (1 << 63) - 1
_UNITS: Final = {
    "millisecond": "ms",
    "second": "s",
    "sec": "s",
    "minute": "m",
    "min": "m",
    "hour": "h",
    "hr": "h",
    "day": "d",
    "week": "w",
}
_DURATION_IN_WORDS: Final = re.compile(r"\s*([0-9.]+)\s*([A-Za-z]{2,}?)s?\s*", re.ASCII)


def _integer(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"must be a whole number, not {_short_repr(value)}")
        if not low <= value <= high:
            raise InvalidArgument(f"must be from {low} to {high}, not {value}")
        return value

    return check


def _one_of(*words: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in words:
            raise InvalidArgument(f"must be {' or '.join(map(repr, words))}, not {_short_repr(value)}")
        return value.lower()

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"must be non-empty text, not {_short_repr(value)}")
    return value


def _topic(value: Any) -> str:
    return check_topic_name(_text(value))


def duration_ms(value: Any) -> int:
    """Return the ms of `'5 seconds'`, `'500ms'`, `'1m'`, or of a number of ms."""
    if isinstance(value, str):
        words = _DURATION_IN_WORDS.fullmatch(value)
        if words and words[2].lower() in _UNITS:
            value = words[1] + _UNITS[words[2].lower()]
        return parse_duration_ms(value)
    return int(_integer(0, OFFSET_MAX)(value))


def time_ms(value: Any) -> int:
    """Return the ms since 1970 of ISO 8601 text (UTC if it names no zone), of a `datetime`, or of a number of ms."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            raise InvalidArgument(
                f"must be a time like '2026-01-31T12:00:00Z' or ms since 1970, not {_short_repr(value)}"
            ) from None
    if isinstance(value, datetime):
        value = epoch_ms(value)
    return int(_integer(0, OFFSET_MAX)(value))


def _seconds(value: Any) -> int | None:
    return None if value is None else int(_integer(0, OFFSET_MAX // 1000)(value))


def _bytes(value: Any) -> int | None:
    if value is None:
        return None
    return int(_integer(0, OFFSET_MAX)(parse_size(value) if isinstance(value, str) else value))


offset: Final = _integer(0, OFFSET_MAX)
CLAUSES: Final[dict[str, Check]] = {
    "GROUP": _text,
    "MEMBER": _text,
    "PARTITION": _integer(0, PARTITIONS_MAX - 1),
    "PARTITIONS": _integer(1, PARTITIONS_MAX),
    "LIMIT": _integer(1, LIMIT_MAX),
    "WAIT": duration_ms,
    "OFFSET": offset,
    "AFTER": offset,
    "TIMESTAMP": time_ms,
}
TOPIC_OPTIONS: Final[dict[str, Check]] = {
    "engine": _one_of("object", "disk", "rocksdb"),
    "retention_seconds": _seconds,
    "retention_max_bytes": _bytes,
    "cleanup": _one_of("delete", "compact"),
    "delete_retention_seconds": _integer(0, OFFSET_MAX // 1000),
    "timestamp_type": _one_of("create", "append"),
}
SOURCE_OPTIONS: Final[dict[str, Check]] = {"payload": _one_of("key", "full", "diff"), "preview": _integer(0, 10_000)}
CONSUME_OPTIONS: Final[dict[str, Check]] = {
    "visibility": duration_ms,
    "max_attempts": _integer(1, 1_000_000),
    "dead_letter": _topic,
    "mode": _one_of("claimed", "assigned"),
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for a word that resembles a known one, or an empty text."""
    found = difflib.get_close_matches(word[:80], list(known), n=1, cutoff=0.75)
    return f"did you mean {found[0]}?" if found else ""


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
