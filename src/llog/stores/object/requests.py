"""What every request to an object store needs: where the bucket is, and limits."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig


class BucketLocation(NamedTuple):
    """Where the blobs are, without credentials."""

    scheme: str
    bucket: str
    prefix: str
    endpoint: str | None
    credential_settings: str
    """The settings to check if the store refuses the credentials."""

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """Return the blob's name within the bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name

    @property
    def description(self) -> str:
        """The bucket and its server, for messages."""
        if not self.endpoint:
            return f"bucket {self.bucket!r} ({self.scheme})"
        parts = urlsplit(self.endpoint)
        return f"bucket {self.bucket!r} at {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Limits(NamedTuple):
    """How many requests run at a time, and how long they may take. A put is one request, whatever its size."""

    puts: int = 16
    others: int = 32
    timeout_s: float = 30.0
    """The time limit of one request, including the body of its answer."""
    attempts: int = 6
    backoff_s: float = 0.1
    """The pause before the second attempt. It doubles with each attempt, up to `backoff_s_max`, and has jitter."""
    backoff_s_max: float = 5.0
    retry_s: float = 60.0
    """No attempt of a read begins later than this after the first attempt."""
    user_agent: str | None = None
    """The name that requests give for this process; None for the one of obstore."""

    def backoff(self, attempt: int) -> float:
        return min(self.backoff_s_max, self.backoff_s * 2.0 ** (attempt - 1))

    def client_config(self) -> ClientConfig:
        config: ClientConfig = {
            "timeout": timedelta(seconds=self.timeout_s),
            "connect_timeout": timedelta(seconds=min(5.0, self.timeout_s)),
        }
        return config if self.user_agent is None else {**config, "user_agent": self.user_agent}

    def retry_config(self) -> RetryConfig:
        return {
            "max_retries": self.attempts - 1,
            "retry_timeout": timedelta(seconds=self.retry_s),
            "backoff": {
                "init_backoff": timedelta(seconds=self.backoff_s),
                "max_backoff": timedelta(seconds=self.backoff_s_max),
                "base": 2,
            },
        }
