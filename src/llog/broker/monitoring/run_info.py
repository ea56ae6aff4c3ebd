"""What LLOG_RUN_INFO says about a run, such as a load test, as metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from llog.errors import ConfigurationError
from llog.metrics.families import Family, Sample, gauge

RUN_INFO: Final = gauge(
    "llog_run_info",
    "Always 1. What LLOG_RUN_INFO says about this run, such as a load test.",
    "name",
    "text",
    across="max",
)
RUN_SHAPE: Final = gauge(
    "llog_run_shape", "The numbers in LLOG_RUN_INFO, such as the clients of a load test.", "name", across="max"
)
FAMILIES: Final[tuple[Family, ...]] = (RUN_INFO, RUN_SHAPE)

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NAMES_MAX: Final = 20
_VALUE_MAX: Final = 200


def parse_run_info(text: str | None) -> dict[str, str]:
    """Return the names and values of LLOG_RUN_INFO; `ConfigurationError` says what is wrong with it."""
    found: dict[str, str] = {}
    for each in filter(None, map(str.strip, (text or "").split(","))):
        name, equals, value = each.partition("=")
        if not equals or not _NAME.fullmatch(name) or len(value) > _VALUE_MAX or len(found) == _NAMES_MAX:
            raise ConfigurationError(
                f"LLOG_RUN_INFO has {each[:80]!r}: write up to {_NAMES_MAX} name=value with commas between them, names "
                f"of lower-case letters, digits and '_', and values of up to {_VALUE_MAX} characters"
            )
        found[name] = value
    return found


def run_samples(run: dict[str, str]) -> Iterator[Sample]:
    """Yield every name with its value, and the numbers among the values."""
    for name, text in run.items():
        yield RUN_INFO.sample(1, name, text)
        try:
            number = float(text)
        except ValueError:
            continue
        if math.isfinite(number):
            yield RUN_SHAPE.sample(number, name)
