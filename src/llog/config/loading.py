"""Loads settings.

A value comes from the first of: an explicit override, the environment variable `LLOG_…`, the TOML file, a variable of
AWS or PostgreSQL, the default. An unknown name or a malformed value is an error at once: a mistyped setting that is
ignored would be noticed too late.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llog.base.secret import Secret
from llog.base.units import parse_duration_ms, parse_size
from llog.config.declaration import PREFIX, Setting, check
from llog.config.locations import NO_BLOBS, superseded_fields
from llog.config.settings import SETTINGS, Settings
from llog.errors import ConfigurationError, InvalidArgument

CONFIG_VARIABLE: Final = "LLOG_CONFIG"
CONFIG_FILE: Final = "llog.toml"
_NOT_SETTINGS: Final = (CONFIG_VARIABLE, "LLOG_REQUIRE_SERVERS", "LLOG_HYPOTHESIS_PROFILE")
_NOT_SETTINGS_PREFIX: Final = "LLOG_TEST_"
# The variables that Kubernetes sets in every pod for a Service whose name begins with "llog".
_SERVICE_VARIABLE: Final = re.compile(
    r"LLOG_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")
_CREDENTIALS: Final = ("s3_access_key_id", "s3_secret_access_key", "s3_session_token")


def load_settings(
    overrides: Mapping[str, str | int | Secret | None] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Settings:
    """Return the settings of this process.

    `overrides` maps field names to values; None does not override. `environment` is `os.environ` by default.
    `config_file` takes precedence over the file that LLOG_CONFIG names, and that over `llog.toml` in the current
    directory.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = _from_file(config_file, environment)
    values |= _from_environment(environment)
    for field, value in (overrides or {}).items():
        if field not in SETTINGS:
            raise ConfigurationError(f"there is no setting {field!r}: {_suggestion(field)}")
        if value is not None:
            values[field] = _parse(SETTINGS[field], value, SETTINGS[field].variable)
    for field in superseded_fields({field for field, value in (overrides or {}).items() if value is not None}):
        values.pop(field, None)
    is_in_s3 = any(field.startswith("s3_") for field in values)
    if is_in_s3 and not {"blobs", "s3_bucket"} & values.keys() and not str(values.get("keyed")).startswith("s3:"):
        values["blobs"] = NO_BLOBS  # in a local directory, records would silently miss S3
    settings = Settings(**(_fallbacks(values, environment) | values))
    _check_s3(settings, values)
    _check_postgres(settings, values)
    return settings


def load_client_name(environment: Mapping[str, str] | None = None) -> str:
    """Return `Settings.client_name`, the name of this process in its requests to a broker.

    No other setting is read: a client of a broker opens no log, so a mistake in a log's settings must not stop it.
    """
    environment = os.environ if environment is None else environment
    setting = SETTINGS["client_identifier"]
    given = environment.get(setting.variable) or _from_file(None, environment).get(setting.field)
    return Settings(client_identifier=given).client_name


def _from_file(config_file: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    named = config_file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    path = named or Path(CONFIG_FILE)
    if named is None and not path.is_file():
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"the configuration file {path} cannot be read ({error.strerror}): check --config or {CONFIG_VARIABLE}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the configuration file {path} is not valid TOML: {error}") from error
    unknown = next((key for key in found if key not in SETTINGS), None)
    if unknown is not None:
        raise ConfigurationError(
            f"the configuration file {path} has an unknown key {unknown!r}: {_suggestion(unknown)}"
        )
    return {key: _parse(SETTINGS[key], value, f"{key} in {path}") for key, value in found.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or _is_no_setting(variable, text):
            continue
        field = variable.removeprefix(PREFIX).lower()
        if field not in SETTINGS or SETTINGS[field].variable != variable:
            raise ConfigurationError(f"the environment has an unknown variable {variable}: {_suggestion(field)}")
        if text:
            values[field] = _parse(SETTINGS[field], text, variable)
    return values


def _is_no_setting(variable: str, text: str) -> bool:
    if variable in _NOT_SETTINGS or variable.startswith(_NOT_SETTINGS_PREFIX):
        return True
    is_service_port = variable.endswith("_PORT") and _SERVICE_ADDRESS.match(text) is not None
    return is_service_port or _SERVICE_VARIABLE.fullmatch(variable) is not None


def _check_s3(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse settings of S3 if no store is in S3: records would silently go elsewhere."""
    field = next((field for field in given if field.startswith("s3_")), None)
    if field is not None and not settings.uses_s3:
        raise ConfigurationError(
            f"{SETTINGS[field].variable} is set, but LLOG_BLOBS is {settings.blobs}: name the bucket with "
            f"LLOG_BLOBS=s3://bucket/prefix (or LLOG_KEYED), or unset {SETTINGS[field].variable}"
        )


def _check_postgres(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse a password for PostgreSQL if the metadata is elsewhere: the log's order would silently be kept there."""
    field = next((field for field in given if field.startswith("postgres_")), None)
    if field is not None and not settings.uses_postgres:
        raise ConfigurationError(
            f"{SETTINGS[field].variable} is set, but LLOG_META is {settings.meta}: name the database with "
            f"LLOG_META=postgresql://user@host:port/database, or unset {SETTINGS[field].variable}"
        )


def _fallbacks(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return values from the variables of AWS and PostgreSQL for settings that have no value of their own.

    The S3 credentials are taken together or not at all: a key and a secret from different places would not match.
    """
    found: dict[str, Any] = {}
    for setting in SETTINGS.values():
        text = next((environment[name] for name in setting.fallbacks if environment.get(name)), None)
        if text is not None and setting.field not in values:
            found[setting.field] = _parse(setting, text, setting.fallbacks[0])
    if "postgres_password_file" in values:
        found.pop("postgres_password", None)
    own = any(field in values for field in _CREDENTIALS)
    if own or any(field not in found for field in _CREDENTIALS[:2]):
        found = {field: value for field, value in found.items() if field not in _CREDENTIALS}
    return found


def _parse(setting: Setting, value: object, source: str) -> str | int | float | Secret:
    """Return the typed value; the `ConfigurationError` for a malformed one names its `source`."""
    shown = "a value that is not shown" if setting.kind is Secret else repr(value)[:80]
    try:
        if setting.kind is int and isinstance(value, str):
            value = _parse_number(setting, value)
        if setting.kind is float and isinstance(value, str | int) and not isinstance(value, bool):
            value = _parse_decimal(value)
    except InvalidArgument as error:
        raise ConfigurationError(f"{source} is {shown}: it must be {setting.accepts}") from error
    if setting.kind is Secret and isinstance(value, str):
        value = Secret(value)
    check(setting, value, source)
    assert isinstance(value, str | int | float | Secret)
    return value


def _parse_decimal(given: str | int) -> float:
    try:
        return float(given)
    except ValueError:
        raise InvalidArgument(f"{str(given)[:40]!r} is not a number") from None


def _parse_number(setting: Setting, text: str) -> int:
    if setting.unit == "duration":
        return parse_duration_ms(text)
    if setting.unit == "size":
        return parse_size(text)
    if not text.strip().isdecimal():
        raise InvalidArgument(f"{text[:40]!r} is not a whole number")
    return int(text)


def _suggestion(unknown: str) -> str:
    """Return the names of the two most similar settings, for the error about an unknown one."""
    from difflib import get_close_matches

    nearest = get_close_matches(unknown.lower(), SETTINGS, n=2, cutoff=0.0)
    names = " or ".join(f"{name} ({SETTINGS[name].variable})" for name in nearest)
    return f"did you mean {names}? docs/configuration.md lists all settings"
