"""Parses the addresses of a log's stores, and decides which of several settings names a store."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final
from urllib.parse import quote

from llog.errors import ConfigurationError
from llog.stores.addresses import Address, redact
from llog.stores.oxia.adapter import OXIA_NAMESPACE, OXIA_SCHEMES, check_servers
from llog.stores.registry import BLOBS, parse_blobs, parse_meta

NO_BLOBS: Final = "none"
"""The value of LLOG_BLOBS for readers without a blob store of their own."""
_KEYED_SCHEMES: Final = {scheme: BLOBS[scheme] for scheme in ("file", "s3", "memory")}
_ROOT_PREFIX_MAX: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


def parse_address(field: str, url: str) -> Address:
    """Return the parts of the URL in the setting `field`; `ConfigurationError` names the setting if it is malformed."""
    variable = f"LLOG_{field.upper()}"
    if field == "meta":
        return parse_meta(variable, url)
    return parse_blobs(variable, url, _KEYED_SCHEMES if field == "keyed" else BLOBS)


def superseded_fields(given: Collection[str]) -> set[str]:
    """Return the other fields that name the same stores as the given ones, which take their place."""
    others = {"meta": {"oxia_service_address", "oxia_namespace", "oxia_session_timeout_ms"}, "blobs": {"s3_bucket"}}
    return set().union(*(others.get(field, set()) for field in given)) - set(given)


def meta_url(meta: str, servers: str | None, namespace: str, directory: Path) -> str:
    """Return LLOG_META, else the servers of LLOG_OXIA_SERVICE_ADDRESS, else a file in the directory.

    Raises `ConfigurationError` if two of them contradict each other.
    """
    default = f"sqlite://{quote(str(directory / 'meta.sqlite'))}"
    if servers is not None:
        default = f"oxia://{check_servers('LLOG_OXIA_SERVICE_ADDRESS', servers)}/{namespace}"
    address = parse_address("meta", meta or default)
    url, is_oxia = address.url, address.scheme in OXIA_SCHEMES
    if servers is not None and not (is_oxia and {*address.authority.split(",")} == {*servers.split(",")}):
        raise ConfigurationError(
            f"LLOG_META is {redact(url)} and LLOG_OXIA_SERVICE_ADDRESS is {servers}: they name two metadata stores. "
            "Unset one"
        )
    if namespace != OXIA_NAMESPACE and not (is_oxia and address.path == namespace):
        raise ConfigurationError(
            f"LLOG_META is {redact(url)} and LLOG_OXIA_NAMESPACE is {namespace!r}: they contradict. Name the "
            "namespace in one of them"
        )
    return url


def blobs_url(blobs: str, bucket: str | None, directory: Path, *, is_local: bool) -> str:
    """Return LLOG_BLOBS, else the bucket LLOG_S3_BUCKET, else a directory if the metadata is local, else `NO_BLOBS`.

    Raises `ConfigurationError` if two of them contradict each other.
    """
    if bucket is not None and not _NAME.fullmatch(bucket):
        raise ConfigurationError(
            f"LLOG_S3_BUCKET is {bucket[:80]!r}: write the name of a bucket, without s3:// or a path"
        )
    if not blobs:
        local = f"file://{quote(str(directory / 'blobs'))}" if is_local else NO_BLOBS
        return local if bucket is None else f"s3://{bucket}"
    url = blobs if blobs == NO_BLOBS else parse_address("blobs", blobs).url
    if bucket is not None and not f"{url}/".startswith(f"s3://{bucket}/"):
        raise ConfigurationError(
            f"LLOG_BLOBS is {redact(url)} and LLOG_S3_BUCKET is {bucket}: they name two blob stores. Unset one"
        )
    return url


def normalize_prefix(text: str) -> str:
    """Return LLOG_ROOT_PREFIX without slashes around it and without a final `llog`, which every name gets anyway.

    Raises `ConfigurationError` if the prefix is malformed.
    """
    parts = text.strip("/").split("/") if text.strip("/") else []
    if parts[-1:] == ["llog"]:
        parts = parts[:-1]
    for part in parts:
        # `llog` and `partitions` have a meaning in keys: a log with such a prefix would lie within another log.
        if not _NAME.fullmatch(part) or part in (".", "..", "llog", "partitions") or len(text) > _ROOT_PREFIX_MAX:
            raise ConfigurationError(
                f"LLOG_ROOT_PREFIX is {text[:80]!r}: write up to {_ROOT_PREFIX_MAX} letters, digits, '.', '_' and "
                "'-', with '/' between parts, none of which is '.', '..', 'llog' or 'partitions'"
            )
    return "/".join(parts)
