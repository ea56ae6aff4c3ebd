"""Addresses of PostgreSQL databases in LLOG_META: how they are parsed, checked, and written in one normal form."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

DEFAULT_PORT: Final = 5432
DEFAULT_SCHEMA: Final = "llog"
TLS_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_PARAMETERS: Final = ("schema", "sslmode", "sslrootcert", "sslcert", "sslkey", "host", "port")
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?")


class PostgresAddress(msgspec.Struct, frozen=True):
    """`postgresql://user@host:port/database?schema=…`, with commas between several hosts.

    A host may be the directory of a Unix socket. The address has no password, because errors and logs show it.
    """

    user: str
    hosts: tuple[tuple[str, int], ...]
    database: str
    schema: str = DEFAULT_SCHEMA
    tls: tuple[tuple[str, str], ...] = ()
    """The parameters `sslmode`, `sslrootcert`, `sslcert` and `sslkey`, as far as the address has them."""

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Return the address of a URL, or raise a `ValueError` that says what to write instead.

        The message repeats no part of the address that could be secret.
        """
        rest, _, query = url.partition("://")[2].partition("?")
        authority, _, path = rest.partition("/")
        user, has_user, hosts = authority.rpartition("@")
        if ":" in user:
            raise ValueError(
                "it contains a password, and errors and logs show addresses. Leave the password out, and set "
                "LLOG_POSTGRES_PASSWORD or LLOG_POSTGRES_PASSWORD_FILE"
            )
        if not has_user or not user or not path or "/" in path:
            raise ValueError("write postgresql://user@host:port/database?schema=name")
        parameters = _parse_parameters(query)
        port = _parse_port(parameters.pop("port", str(DEFAULT_PORT)))
        hosts = hosts or parameters.pop("host", "")
        if "host" in parameters or not hosts:
            raise ValueError("name the host once: before the database, or as ?host=/directory of a Unix socket")
        schema = parameters.pop("schema", DEFAULT_SCHEMA)
        if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
            raise ValueError(
                f"the schema is {schema[:60]!r}: write up to 48 of a-z, 0-9 and _, not beginning with a digit or pg_"
            )
        if parameters.get("sslmode", "prefer") not in TLS_MODES:
            raise ValueError(f"sslmode is {parameters['sslmode'][:40]!r}: write one of {', '.join(TLS_MODES)}")
        return cls(
            unquote(user),
            tuple(_parse_host(unquote(each), port) for each in hosts.split(",")),
            unquote(path),
            schema,
            tuple(sorted(parameters.items())),
        )

    @property
    def host_list(self) -> str:
        """The hosts and their ports as text, with commas between them."""
        return ",".join(_format_host(host, port) for host, port in self.hosts)

    def __str__(self) -> str:
        parameters: dict[str, str] = {"schema": self.schema} | dict(self.tls)
        hosts = self.host_list
        if self.hosts[0][0].startswith("/"):
            parameters |= {"host": self.hosts[0][0], "port": str(self.hosts[0][1])}
            hosts = ""
        return f"postgresql://{quote(self.user)}@{hosts}/{quote(self.database)}?{urlencode(parameters, safe='/')}"


def _parse_parameters(query: str) -> dict[str, str]:
    try:
        parameters = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        raise ValueError("write the parameters after the '?' as name=value, with & between them") from None
    unknown = next((name for name in parameters if name not in _PARAMETERS), None)
    if unknown is not None:
        raise ValueError(f"the parameter {unknown[:40]!r} is unknown: write one of {', '.join(_PARAMETERS)}")
    return parameters


def _parse_host(text: str, port: int) -> tuple[str, int]:
    if text.startswith("/"):
        return text, port
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError("write each host as host or host:port, with commas between several hosts")
    return found[1].strip("[]"), _parse_port(found[2]) if found[2] else port


def _parse_port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise ValueError(f"the port is {text[:10]!r}: write a number from 1 to 65535")
    return int(text)


def _format_host(host: str, port: int) -> str:
    if host.startswith("/"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
