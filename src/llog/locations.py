"""Where the stores of a log are: addresses taken apart and checked, and which of several settings names a store."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from llog.base.addresses import PostgresAddress
from llog.errors import ConfigurationError

NO_BLOBS: Final = "none"
"""The value of LLOG_BLOBS for readers without a blob store of their own."""
OXIA_SCHEMES: Final = ("oxia", "oxias")
OXIA_NAMESPACE: Final = "default"
_SCHEMES: Final = {
    "meta": ("sqlite", "postgresql", *OXIA_SCHEMES, "memory"),
    "blobs": ("file", "s3", "gs", "az", "memory"),
    "keyed": ("file", "s3", "memory"),
}
_ROOT_PREFIX_MAX: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_HOST_AND_PORT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class Address(NamedTuple):
    """A store's URL, taken apart. `authority` is the bucket, container or name; `path` the file, directory or
    prefix.
    """

    scheme: str
    authority: str
    path: str


def parse_address(field: str, url: str) -> Address:
    """The parts of the URL that the setting `field` is; a `ConfigurationError` that names the setting if it cannot be
    that.
    """
    variable, schemes = f"LLOG_{field.upper()}", _SCHEMES[field]
    scheme, separator, rest = url.partition("://")
    scheme = {"postgres": "postgresql"}.get(scheme, scheme)
    if not separator or scheme not in schemes:
        raise ConfigurationError(
            f"{variable} is {shown(url)!r}: it must start with {' or '.join(f'{each}://' for each in schemes)}"
        )
    if scheme == "postgresql":
        try:
            database = PostgresAddress.parse(url)
        except ValueError as error:
            raise ConfigurationError(f"{variable} is {shown(url)!r}: {error}") from None
        return Address(scheme, database.places, database.database)
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        where = (
            "put them into LLOG_S3_ACCESS_KEY_ID and LLOG_S3_SECRET_ACCESS_KEY" if scheme == "s3" else "leave them out"
        )
        raise ConfigurationError(f"{variable} is {shown(url)!r}, with credentials in it: {where}")
    if scheme not in ("sqlite", "file") and "?" in rest:
        raise ConfigurationError(
            f"{variable} is {url.partition('?')[0]!r} with a '?' after it: an address has no parameters, and "
            "credentials "
            "go into the store's own variables"
        )
    if scheme in ("sqlite", "file"):
        if authority not in ("", ".") or not slash or not path.strip("/"):
            raise ConfigurationError(
                f"{variable} is {url!r}: write {scheme}:///absolute/path or {scheme}://./relative/path"
            )
        located = Path("/" if not authority else ".", unquote(path).lstrip("/")).absolute()
        return Address(scheme, "", str(located))
    if scheme == "memory":
        return Address(scheme, rest, "")
    if scheme in OXIA_SCHEMES:
        namespace = unquote(path.strip("/")) or OXIA_NAMESPACE
        return Address(scheme, _checked_servers(variable, authority), namespace)
    if not authority:
        raise ConfigurationError(f"{variable} is {url!r}, which names no bucket: write {scheme}://bucket/prefix")
    return Address(scheme, authority, path.strip("/"))


def normal_url(field: str, url: str) -> str:
    """The address as it is written everywhere: paths are absolute, defaults are filled in."""
    scheme, authority, path = parse_address(field, url)
    if scheme == "postgresql":
        return str(PostgresAddress.parse(url))
    if scheme in ("sqlite", "file"):
        return f"{scheme}://{quote(path)}"
    return f"{scheme}://{authority}/{path}" if path else f"{scheme}://{authority}"


def superseded(given: Collection[str]) -> set[str]:
    """The fields that name the same stores as these in another way, and mean nothing beside them."""
    others = {"meta": {"oxia_service_address", "oxia_namespace", "oxia_session_timeout_ms"}, "blobs": {"s3_bucket"}}
    return set().union(*(others.get(field, set()) for field in given)) - set(given)


def meta_url(meta: str, servers: str | None, namespace: str, directory: Path) -> str:
    """LLOG_META, else the servers of LLOG_OXIA_SERVICE_ADDRESS, else a file in the directory. `ConfigurationError` if
    two contradict.
    """
    default = f"sqlite://{quote(str(directory / 'meta.sqlite'))}"
    if servers is not None:
        default = f"oxia://{_checked_servers('LLOG_OXIA_SERVICE_ADDRESS', servers)}/{namespace}"
    url = normal_url("meta", meta or default)
    scheme, authority, path = parse_address("meta", url)
    is_oxia = scheme in OXIA_SCHEMES
    if servers is not None and not (is_oxia and {*authority.split(",")} == {*servers.split(",")}):
        raise ConfigurationError(
            f"LLOG_META is {shown(url)} and LLOG_OXIA_SERVICE_ADDRESS is {servers}: they name two metadata stores. "
            "Unset one"
        )
    if namespace != OXIA_NAMESPACE and not (is_oxia and path == namespace):
        raise ConfigurationError(
            f"LLOG_META is {shown(url)} and LLOG_OXIA_NAMESPACE is {namespace!r}: they contradict. Name the "
            "namespace in one of them"
        )
    return url


def blobs_url(blobs: str, bucket: str | None, directory: Path, *, is_local: bool) -> str:
    """LLOG_BLOBS, else the bucket LLOG_S3_BUCKET, else a directory if the metadata is local. `ConfigurationError` if
    two contradict.
    """
    if bucket is not None and not _NAME.fullmatch(bucket):
        raise ConfigurationError(
            f"LLOG_S3_BUCKET is {bucket[:80]!r}: write the name of a bucket, without s3:// or a path"
        )
    if not blobs:
        local = f"file://{quote(str(directory / 'blobs'))}" if is_local else NO_BLOBS
        return local if bucket is None else f"s3://{bucket}"
    url = blobs if blobs == NO_BLOBS else normal_url("blobs", blobs)
    if bucket is not None and not f"{url}/".startswith(f"s3://{bucket}/"):
        raise ConfigurationError(
            f"LLOG_BLOBS is {shown(url)} and LLOG_S3_BUCKET is {bucket}: they name two blob stores. Unset one"
        )
    return url


def checked_prefix(text: str) -> str:
    """LLOG_ROOT_PREFIX without slashes around it and without the `llog` that follows it anyway."""
    parts = text.strip("/").split("/") if text.strip("/") else []
    if parts[-1:] == ["llog"]:
        parts = parts[:-1]
    for part in parts:
        # `llog` and `partitions` have a meaning of their own in keys: a log with such a prefix would lie within another
        # one.
        if not _NAME.fullmatch(part) or part in (".", "..", "llog", "partitions") or len(text) > _ROOT_PREFIX_MAX:
            raise ConfigurationError(
                f"LLOG_ROOT_PREFIX is {text[:80]!r}: write up to {_ROOT_PREFIX_MAX} letters, digits, '.', '_' and "
                "'-', with '/' between "
                "parts, none of which is '.', '..', 'llog' or 'partitions'"
            )
    return "/".join(parts)


def _checked_servers(variable: str, text: str) -> str:
    for server in text.split(","):
        found = _HOST_AND_PORT.fullmatch(server)
        if found is None or not 1 <= int(found[2]) <= 65_535:
            raise ConfigurationError(
                f"{variable} names the Oxia server {server[:80]!r}: write host:port, several with commas between them"
            )
    return text


def shown(url: str) -> str:
    """Without what may be secret in it: credentials before an '@', and parameters."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{separator}***@{rest.rpartition('@')[2]}" if "@" in rest else f"{scheme}{separator}{rest}"
