"""Reads the declarations of settings (type, bounds, unit, default and description), and checks values against them.

A setting is a field of a `Struct`, `Annotated` with msgspec's `Meta`: `description`, `ge` and `le`, and in `extra` its
`unit` (duration or size), its `default` as the docs show it, and its `fallbacks`, which are variables of other
programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec

from llog.base.secret import Secret
from llog.base.units import format_duration_ms, format_size
from llog.errors import ConfigurationError
from llog.stores.addresses import redact

PREFIX: Final = "LLOG_"
# Examples in error messages. For every setting, at least one of them is within its bounds.
_DURATION_EXAMPLES_MS: Final = (500, 10_000, 3_600_000)
_SIZE_EXAMPLES: Final = (64 << 10, 64 << 20, 1 << 30)


class Setting(NamedTuple):
    """The declaration of one setting, read from its field."""

    field: str
    kind: type
    """str, int, float or Secret."""
    choices: tuple[str, ...]
    optional: bool
    default: object
    doc: str
    low: float | None
    high: float | None
    unit: str | None
    fallbacks: tuple[str, ...]
    default_doc: str | None

    @property
    def variable(self) -> str:
        return PREFIX + self.field.upper()

    @property
    def accepts(self) -> str:
        """The values that the setting accepts, in words, for an error message."""
        if self.choices:
            return " or ".join((", ".join(self.choices[:-1]), self.choices[-1]))
        if self.kind not in (int, float):
            return "text"
        what = {
            "duration": f"a duration such as {self._examples(_DURATION_EXAMPLES_MS)}",
            "size": f"a size such as {self._examples(_SIZE_EXAMPLES)}",
            None: "a whole number" if self.kind is int else "a number such as 0.02",
        }
        bounds = [
            f"from {self.format(self.low)}" if self.low is not None else "",
            f"to {self.format(self.high)}" if self.high is not None else "",
        ]
        within = " ".join(filter(None, bounds))
        return f"{what[self.unit]}, {within}" if within else what[self.unit]

    def _examples(self, values: Sequence[int]) -> str:
        """Return the values that are within the bounds, as a user would write them."""
        low, high = self.low or 0, math.inf if self.high is None else self.high
        return " or ".join(self.format(value) for value in values if low <= value <= high)

    def format(self, value: float) -> str:
        """Return the value as a user would write it, with its unit."""
        if self.unit == "duration":
            return format_duration_ms(int(value))
        return format_size(int(value)).replace(" ", "") if self.unit == "size" else str(value)


def declarations(settings: type[msgspec.Struct]) -> dict[str, Setting]:
    """Return the declarations of all fields, by name and in their order."""
    hints = get_type_hints(settings, include_extras=True)
    return {info.name: _declaration(info, hints[info.name]) for info in msgspec.structs.fields(settings)}


def _declaration(info: msgspec.structs.FieldInfo, annotated: Any) -> Setting:
    kind, meta = get_args(annotated)
    alternatives = [each for each in get_args(kind) if each is not type(None)]
    choices: tuple[str, ...] = ()
    if get_origin(kind) is Literal:
        choices, plain = tuple(alternatives), str
    else:
        plain = alternatives[0] if alternatives else kind
    extra = meta.extra or {}
    return Setting(
        field=info.name,
        kind=plain,
        choices=choices,
        optional=not choices and bool(alternatives),
        default=info.default,
        doc=meta.description,
        low=meta.ge,
        high=meta.le,
        unit=extra.get("unit"),
        fallbacks=extra.get("fallbacks", ()),
        default_doc=extra.get("default"),
    )


def check(setting: Setting, value: object, source: str | None = None) -> None:
    """Raise `ConfigurationError` unless the value has the type and the bounds of its declaration.

    `source` names where the value came from, if that was not the setting's own variable.
    """
    if value is None and setting.optional:
        return
    fits = isinstance(value, setting.kind) and not isinstance(value, bool)
    if fits and isinstance(value, int | float):
        fits = (setting.low is None or value >= setting.low) and (setting.high is None or value <= setting.high)
    if fits and setting.choices:
        fits = value in setting.choices
    if not fits:
        given = "a value that is not shown" if setting.kind is Secret else repr(value)[:80]
        raise ConfigurationError(f"{source or setting.variable} is {given}: it must be {setting.accepts}")
    if setting.field in ("s3_endpoint_url", "broker_advertised_address", "otel_endpoint") and not _is_http(str(value)):
        raise ConfigurationError(
            f"{source or setting.variable} is {redact(str(value))!r}: it must be http://host:port or https://host:port"
        )


def _is_http(url: str) -> bool:
    """Whether the URL is the address of an HTTP server, without credentials."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in url
    except ValueError:  # the port is not a number
        return False
