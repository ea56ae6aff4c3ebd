"""How an object store is asked and what its answers mean: limits, near ranges as one, failures without secrets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

FAILURES = (BaseError, OSError, ValueError)
"""All that obstore raises."""
_TRANSPORT = ("Connect", "Request", "Timeout", "Interrupted", "Decode", "Unknown")
# Where credentials are looked for when none are given: a failure there is not one of the store.
_METADATA_SERVICE = re.compile(
    r"://([^/\s]+/latest/(api/token|meta-data)|169\.254\.|metadata\.google\.internal|[^/\s]+/computeMetadata/)"
)
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "BucketNotFound")


class Limits(NamedTuple):
    """How much at a time, and for how long. A put is one request, whatever its size."""

    puts: int = 16
    others: int = 32
    timeout_s: float = 30.0
    """Of one request, its answer's body included."""
    attempts: int = 6
    backoff_s: float = 0.1
    """Before the second attempt; doubles with each, up to `backoff_s_max`, with jitter."""
    backoff_s_max: float = 5.0
    retry_s: float = 60.0
    """No attempt of a read begins later than this after the first."""
    user_agent: str | None = None
    """What requests call this process; None: what obstore calls itself."""

    def backoff(self, attempt: int) -> float:
        return min(self.backoff_s_max, self.backoff_s * 2.0 ** (attempt - 1))

    def client(self) -> ClientConfig:
        config: ClientConfig = {
            "timeout": timedelta(seconds=self.timeout_s),
            "connect_timeout": timedelta(seconds=min(5.0, self.timeout_s)),
        }
        return config if self.user_agent is None else {**config, "user_agent": self.user_agent}

    def retry(self) -> RetryConfig:
        return {
            "max_retries": self.attempts - 1,
            "retry_timeout": timedelta(seconds=self.retry_s),
            "backoff": {
                "init_backoff": timedelta(seconds=self.backoff_s),
                "max_backoff": timedelta(seconds=self.backoff_s_max),
                "base": 2,
            },
        }


class Place(NamedTuple):
    """Where the blobs are, without credentials."""

    scheme: str
    bucket: str
    prefix: str
    endpoint: str | None
    settings: str
    """What to check when the credentials are refused."""

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    @property
    def described(self) -> str:
        if not self.endpoint:
            return f"bucket {self.bucket!r} ({self.scheme})"
        parts = urlsplit(self.endpoint)
        return f"bucket {self.bucket!r} at {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Failure(NamedTuple):
    """What can be told of a failed request. Never the library's text: addresses in it may be signed."""

    status: int | None
    """HTTP status, or None when there was no answer."""
    code: str
    """The store's own code, or the kind of the transport's failure."""
    is_missing_blob: bool
    is_credentials: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        text = str(error)
        if _METADATA_SERVICE.search(text.partition("\n")[0]):
            return cls(None, "NoCredentials", False, True)
        status = re.search(r"status code: (\d{3})", text)
        code = re.search(r"<Code>(\w+)</Code>", text) or re.search(r"kind: (\w+)", text)
        found = code.group(1) if code else "" if status else type(error).__name__
        return cls(
            int(status.group(1)) if status else None,
            found,
            isinstance(error, FileNotFoundError) and found not in _MISSING_BUCKET,
            isinstance(error, PermissionDeniedError | UnauthenticatedError)
            or (status is not None and status.group(1) in ("401", "403")),
        )

    @property
    def is_refusal(self) -> bool:
        """The store said no, and would say so again."""
        if self.status is None:
            return self.is_credentials
        return 400 <= self.status < 500 and self.status not in (408, 429)

    @property
    def is_sent(self) -> bool:
        """The store may have acted on it."""
        return self.status not in (None, 429) or self.is_lost

    @property
    def is_lost(self) -> bool:
        """Without an answer, or with that of somebody in between: the store may still act on it."""
        if self.status is None:
            return self.code != "Connect" and not self.is_credentials
        return self.status in (408, 502, 504)

    def explain(self, place: Place) -> str:
        where = place.described
        if self.is_credentials:
            told = f"{where} refused the credentials ({self._answer})" if self.status else f"no credentials for {where}"
            return f"{told}: check {place.settings}, and that they may read, write and list there"
        if self.status == 404:
            return f"{where} does not exist ({self._answer}): create it, or correct its name"
        if self.status in (429, 503):
            return f"{where} is overloaded or down ({self._answer}): try again later, with fewer requests at a time"
        if self.status is not None:
            return f"{where} answered {self._answer}: check that it is the right store, and its log"
        if self.code not in _TRANSPORT:
            return f"{where} gave an answer that is against its protocol ({self.code}): check that the address is right"
        return f"{where} cannot be reached ({self.code}): check the address, the network, and that the server runs"

    @property
    def _answer(self) -> str:
        return f"HTTP {self.status} {self.code}".rstrip()


class Run(NamedTuple):
    """Neighbouring ranges, fetched with one request; `members` are their places in what was asked."""

    start: int
    end: int
    members: list[int]


def merged(ranges: Sequence[tuple[int, int]], gap: int) -> list[Run]:
    """Ranges at most `gap` apart become one run; empty ones need no request."""
    runs: list[Run] = []
    for index in sorted((i for i, (_, length) in enumerate(ranges) if length), key=lambda i: ranges[i]):
        offset, length = ranges[index]
        if runs and offset <= runs[-1].end + gap:
            last = runs[-1]
            last.members.append(index)
            runs[-1] = last._replace(end=max(last.end, offset + length))
        else:
            runs.append(Run(offset, offset + length, [index]))
    return runs


def without_none(**settings: str | None) -> dict[str, str]:
    return {key: value for key, value in settings.items() if value is not None}
