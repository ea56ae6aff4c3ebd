"""Durations, sizes, times and bytes as people write them: one grammar for settings, options and messages."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from llog.errors import InvalidArgument

_DURATIONS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SIZES: Final = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_BASE64URL: Final = re.compile(r"[A-Za-z0-9_-]*", re.ASCII)
_MAX: Final = (1 << 63) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_duration_ms(text: str) -> int:
    """Parse `500ms`, `10s`, `10m`, `1.5h`, `7d`, `2w` or a bare number of milliseconds, or raise `InvalidArgument`."""
    return _parse(text, _DURATIONS_MS, "ms", "a duration", "500ms, 10s, 15m, 1h or 7d")


def parse_size(text: str) -> int:
    """Parse `64MiB`, `1.5GiB`, `10MB` or a bare number of bytes, or raise `InvalidArgument`."""
    return _parse(text, _SIZES, "b", "a size", "4096, 512KiB, 64MiB or 10GiB")


def epoch_ms(moment: datetime) -> int:
    """Return whole milliseconds since 1970. A moment without a time zone is taken as UTC."""
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)


def bytes_to_json(data: bytes | None) -> str | dict[str, str] | None:
    """Return bytes as llog writes them in JSON: text where they are UTF-8, else `{"base64": …}`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def parse_base64url(text: str) -> bytes:
    """Decode base64url, with or without its padding, or raise `InvalidArgument`."""
    digits = text.rstrip("=")
    if not _BASE64URL.fullmatch(digits) or len(digits) % 4 == 1:
        raise InvalidArgument(f"{text[:40]!r} is not base64url: use A-Z, a-z, 0-9, '-' and '_' only")
    return base64.urlsafe_b64decode(digits + "=" * (-len(digits) % 4))


def format_size(size: int) -> str:
    """Return three significant digits with a binary unit: `1.5 MiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def format_duration_ms(duration_ms: int) -> str:
    """Return the duration in the largest unit, up to days, that divides it: `7d`, `90m`, `1500ms`.

    `parse_duration_ms` reads it back.
    """
    for unit in ("d", "h", "m", "s"):
        if duration_ms and duration_ms % _DURATIONS_MS[unit] == 0:
            return f"{duration_ms // _DURATIONS_MS[unit]}{unit}"
    return f"{duration_ms}ms"


def _parse(text: str, units: dict[str, int], bare: str, what: str, examples: str) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    factor = units.get(match[2].lower() or bare) if match else None
    if match is None or factor is None:
        raise InvalidArgument(f"{text[:40]!r} is not {what}: write it like {examples}")
    value = int(match[1]) * factor if match[1].isdigit() else round(float(match[1]) * factor)
    if value > _MAX:
        raise InvalidArgument(f"{text[:40]!r} is too large for {what}")
    return value
