"""The check of the `Host` that a request names (LLOG_BROKER_HOSTS).

By DNS rebinding, the owner of a web page can point the page's name at this machine. The page then calls the broker as
its own origin, and no rule of browsers keeps it from /sql. But such a request names the page's host, which is a name
and never an address: so every address is accepted, and a name only if the broker serves it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llog.broker.http.answers import error_answer
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import ConfigurationError, WrongHost

_ANY: Final = "*"
_LOOPBACK: Final = ("localhost", "*.localhost")
_OPEN_PATHS: Final = ("/health", "/ready", "/metrics")
_KNOWN_MAX: Final = 1024
_HOST: Final = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")
_NAME: Final = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")


def is_open(path: str) -> bool:
    """Return whether the path is answered under any name: monitors and load balancers ask for it."""
    return path in _OPEN_PATHS or path.startswith("/metrics/")


class ServedHosts:
    """The names under which this broker answers, from the settings.

    Raises `ConfigurationError` if LLOG_BROKER_HOSTS has something that is no name.
    """

    def __init__(self, settings: Settings) -> None:
        names = [each.strip().lower().rstrip(".") for each in (settings.broker_hosts or "").split(",") if each.strip()]
        for each in names:
            if each != _ANY and not _is_address(each) and not _NAME.fullmatch(each):
                raise ConfigurationError(
                    f"LLOG_BROKER_HOSTS has {each[:80]!r}: write names as clients do, without http:// and without a "
                    "port (llog.example.com), '*.example.com' for all below one, or '*' for any"
                )
        own = (settings.broker_bind_host, urlsplit(settings.broker_advertised_address or "").hostname or "")
        self.any = _ANY in names
        self._names = frozenset((*_LOOPBACK, *map(str.lower, filter(None, own)), *names))
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))
        self.serves = lru_cache(_KNOWN_MAX)(self._serves)
        """Returns whether the broker answers a request with this Host."""

    def _serves(self, host: str) -> bool:
        if self.any:
            return True
        found = _HOST.fullmatch(host.strip().lower())
        if found is None:
            return False
        address, name = found.groups()
        if address is not None:
            return _is_address(address)
        name = name.removesuffix(".")
        return _is_address(name) or name in self._names or name.endswith(self._suffixes)


class HostCheck:
    """The middleware that refuses requests under other names."""

    def __init__(self, app: ASGIApp, hosts: ServedHosts, metrics: Metrics) -> None:
        self._app = app
        self._hosts = hosts
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = Headers(scope=scope).getlist("host")
        if self._hosts.any or is_open(scope["path"]) or (len(hosts) == 1 and self._hosts.serves(hosts[0])):
            await self._app(scope, receive, send)
            return
        error = WrongHost(
            f"the request's Host is {', '.join(hosts)[:200]!r}, which this broker does not serve: ask it by its "
            "address, or add the name to LLOG_BROKER_HOSTS"
        )
        response = error_answer(error)
        self._metrics.errors[error.code] += 1
        self._metrics.requests["other", response.status_code] += 1
        await response(scope, receive, send)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
