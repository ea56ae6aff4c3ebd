"""Cross-origin requests: only the web pages that LLOG_CORS_ORIGINS names may call a broker."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from llog.config import Settings
from llog.errors import ConfigurationError

EXPOSED: Final = ("retry-after", "llog-member", "llog-log-start-offset", "llog-next-offset", "llog-next-fetch-offset")
_PREFLIGHT_S: Final = 600
_ORIGIN: Final = re.compile(r"https?://[^/?#@\s]+")


def cors(settings: Settings, methods: Iterable[str]) -> list[Middleware]:
    """Return the middleware that answers preflight requests for these methods.

    Raises `ConfigurationError` if LLOG_CORS_ORIGINS has something that no browser would send as an origin.
    """
    if settings.cors_origins is None:
        return []
    origins = [each.strip() for each in settings.cors_origins.split(",") if each.strip()]
    for each in origins:
        if each != "*" and not _ORIGIN.fullmatch(each):
            raise ConfigurationError(
                f"LLOG_CORS_ORIGINS has {each[:80]!r}: an origin is http://host:port or https://host, without a "
                "path, or '*' for all"
            )
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=sorted(methods),
            allow_headers=["content-type", "accept", "last-event-id"],
            expose_headers=list(EXPOSED),
            max_age=_PREFLIGHT_S,
        )
    ]
