"""Addresses of stores: the parts of a URL, and the rules that several adapters share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from llog.errors import ConfigurationError


class Address(NamedTuple):
    """A store's URL, taken apart: `authority` is a server, bucket or name, `path` a file, directory or prefix."""

    scheme: str
    authority: str
    path: str
    query: str = ""

    @property
    def url(self) -> str:
        """The address in the one form that llog stores and shows: with an absolute path and all defaults."""
        if not self.authority:
            return f"{self.scheme}://{quote(self.path)}"
        query = f"?{self.query}" if self.query else ""
        return (
            f"{self.scheme}://{self.authority}/{self.path}{query}" if self.path else f"{self.scheme}://{self.authority}"
        )

    def below(self, prefix: str) -> Address:
        """Return the address of the part of the store whose names begin with the prefix."""
        return self._replace(path=f"{self.path}/{prefix}" if self.path else prefix) if prefix else self


def split_url(url: str) -> tuple[str, str, str]:
    """Return the scheme, the authority and the path of a URL, without checks."""
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    return scheme, authority, path


def redact(url: str) -> str:
    """Return the URL without its possible secrets: credentials before an '@', and parameters."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{separator}***@{rest.rpartition('@')[2]}" if "@" in rest else f"{scheme}{separator}{rest}"


def refuse_credentials(variable: str, url: str, remedy: str = "leave them out") -> None:
    """Raise `ConfigurationError` if the URL has credentials in it: addresses are shown in errors and logs."""
    if "@" in split_url(url)[1]:
        raise ConfigurationError(f"{variable} is {redact(url)!r} and contains credentials: {remedy}")


def refuse_parameters(variable: str, url: str) -> None:
    """Raise `ConfigurationError` if the URL has parameters."""
    if "?" in url:
        raise ConfigurationError(
            f"{variable} is {url.partition('?')[0]!r} with parameters after a '?': leave them out, and put credentials "
            "into the store's own variables"
        )


def parse_path(variable: str, url: str) -> Address:
    """Return the address of a file or directory on this machine, or raise `ConfigurationError`."""
    scheme, authority, path = split_url(url)
    refuse_credentials(variable, url)
    if authority not in ("", ".") or not path.strip("/"):
        raise ConfigurationError(
            f"{variable} is {url!r}: write {scheme}:///absolute/path or {scheme}://./relative/path"
        )
    return Address(scheme, "", str(Path("." if authority else "/", unquote(path).lstrip("/")).absolute()))
