"""What a broker is and how it is set up, as metrics: who it is, how it batches, and how much it may hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from llog.broker.monitoring import run_info
from llog.config import Settings
from llog.log.log import Log, is_remote
from llog.metrics.families import Family, Sample, gauge

INFO: Final = gauge(
    "llog_broker_info",
    "Always 1. The labels describe the broker; meta and blobs are the schemes of its stores.",
    "version",
    "role",
    "name",
    "meta",
    "blobs",
    across="max",
)
BATCH_BYTES_MAX: Final = gauge(
    "llog_batch_max_bytes", "LLOG_BATCH_MAX_BYTES: the size at which a batch is flushed.", across="max"
)
BATCH_DELAY_MAX: Final = gauge(
    "llog_batch_max_delay_seconds",
    "LLOG_BATCH_MAX_DELAY_MS: how long a request waits for others; 0 where it waits only for the batch before.",
    across="max",
)
BUFFER_BYTES_MAX: Final = gauge(
    "llog_batch_max_buffer_bytes",
    "LLOG_BATCH_MAX_BUFFER_BYTES: the bytes of unanswered requests that are held, by each worker.",
    across="max",
)
INLINE_BYTES_MAX: Final = gauge(
    "llog_inline_max_bytes",
    "LLOG_INLINE_MAX_BYTES: the largest append to a partition that needs no blob.",
    across="max",
)
TAIL_BYTES_MAX: Final = gauge(
    "llog_tail_cache_max_bytes",
    "LLOG_TAIL_CACHE_MAX_BYTES: the bytes of batches that the tail holds, in each worker.",
    across="max",
)
FAMILIES: Final[tuple[Family, ...]] = (
    INFO,
    *run_info.FAMILIES,
    BATCH_BYTES_MAX,
    BATCH_DELAY_MAX,
    BUFFER_BYTES_MAX,
    INLINE_BYTES_MAX,
    TAIL_BYTES_MAX,
)


class Description:
    """The settings of one broker that explain its other metrics, without the addresses of its stores, which may hold
    secrets.
    """

    def __init__(self, log: Log, settings: Settings) -> None:
        self._settings = settings
        self._meta, self._blobs = (url.partition("://")[0] for url in (settings.meta, log.blobs.uri or settings.blobs))
        self.is_patient = settings.batch_max_delay_ms is not None or is_remote(log.blobs.uri)
        """Whether appends that need blobs wait for others, since every blob costs a request."""
        self._run = run_info.parse_run_info(settings.run_info)

    def samples(self) -> Iterator[Sample]:
        about = self._about()
        yield INFO.sample(1, *(about[label] for label in INFO.labels))
        for family, value in self._numbers().items():
            yield family.sample(value)
        yield from run_info.run_samples(self._run)

    def as_json(self) -> dict[str, Any]:
        """Return the sections `broker` and `batch` of the JSON answer, and `run` if this run is described."""
        numbers = {family.name.removeprefix("llog_"): value for family, value in self._numbers().items()}
        return {"broker": self._about(), "batch": numbers} | ({"run": self._run} if self._run else {})

    def _about(self) -> dict[str, str]:
        return {
            "version": package_version(),
            "role": self._settings.role,
            "name": self._settings.client_name,
            "meta": self._meta,
            "blobs": self._blobs,
        }

    def _numbers(self) -> dict[Family, float]:
        settings = self._settings
        return {
            BATCH_BYTES_MAX: settings.batch_max_bytes,
            BATCH_DELAY_MAX: settings.batch_delay_ms / 1000 if self.is_patient else 0,
            BUFFER_BYTES_MAX: settings.batch_max_buffer_bytes,
            INLINE_BYTES_MAX: settings.inline_max_bytes,
            TAIL_BYTES_MAX: settings.tail_cache_max_bytes,
        }


@cache
def package_version() -> str:
    try:
        return version("leaderless-log")
    except PackageNotFoundError:  # a tree that is not installed
        return "unknown"
