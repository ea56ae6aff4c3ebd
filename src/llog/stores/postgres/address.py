"""Addresses of PostgreSQL databases, as LLOG_META has them: taken apart, checked, and written in one way."""

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
    """`postgresql://user@host:port/database?schema=…`, several hosts with commas between them, or a socket's directory
    as a host.

    There is no password in it: an address is shown in errors and logs.
    """

    user: str
    hosts: tuple[tuple[str, int], ...]
    database: str
    schema: str = DEFAULT_SCHEMA
    tls: tuple[tuple[str, str], ...] = ()
    """`sslmode`, `sslrootcert`, `sslcert` and `sslkey`, as far as they are given."""

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Raises `ValueError` with what to write instead; the message holds no part of the address that could be
        secret.
        """
        rest, _, query = url.partition("://")[2].partition("?")
        authority, _, path = rest.partition("/")
        user, has_user, hosts = authority.rpartition("@")
        if ":" in user:
            raise ValueError(
                "there is a password in it, and addresses are shown. Leave it out, and set LLOG_POSTGRES_PASSWORD or "
                "LLOG_POSTGRES_PASSWORD_FILE"
            )
        if not has_user or not user or not path or "/" in path:
            raise ValueError("write postgresql://user@host:port/database?schema=name")
        parameters = _parameters(query)
        port = _port(parameters.pop("port", str(DEFAULT_PORT)))
        hosts = hosts or parameters.pop("host", "")
        if "host" in parameters or not hosts:
            raise ValueError("name the host once: before the database, or as ?host=/directory of a Unix socket")
        schema = parameters.pop("schema", DEFAULT_SCHEMA)
        if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
            raise ValueError(
                f"the schema {schema[:60]!r} must be up to 48 of a-z, 0-9 and _, begin with no digit, and not with pg_"
            )
        if parameters.get("sslmode", "prefer") not in TLS_MODES:
            raise ValueError(f"sslmode must be one of {', '.join(TLS_MODES)}")
        return cls(
            unquote(user),
            tuple(_host(unquote(each), port) for each in hosts.split(",")),
            unquote(path),
            schema,
            tuple(sorted(parameters.items())),
        )

    @property
    def places(self) -> str:
        """The hosts and their ports, for people."""
        return ",".join(_place(host, port) for host, port in self.hosts)

    def __str__(self) -> str:
        parameters: dict[str, str] = {"schema": self.schema} | dict(self.tls)
        hosts = self.places
        if self.hosts[0][0].startswith("/"):
            parameters |= {"host": self.hosts[0][0], "port": str(self.hosts[0][1])}
            hosts = ""
        return f"postgresql://{quote(self.user)}@{hosts}/{quote(self.database)}?{urlencode(parameters, safe='/')}"


def _parameters(query: str) -> dict[str, str]:
    try:
        parameters = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        raise ValueError("what follows the '?' is not name=value, with & between them") from None
    unknown = next((name for name in parameters if name not in _PARAMETERS), None)
    if unknown is not None:
        raise ValueError(f"the parameter {unknown[:40]!r} is unknown: there are {', '.join(_PARAMETERS)}")
    return parameters


def _host(text: str, port: int) -> tuple[str, int]:
    if text.startswith("/"):
        return text, port
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError("write each host as host or host:port, with commas between several")
    return found[1].strip("[]"), _port(found[2]) if found[2] else port


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise ValueError(f"the port {text[:10]!r} is not a number from 1 to 65535")
    return int(text)


def _place(host: str, port: int) -> str:
    if host.startswith("/"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
