"""How many blobs a broker would put with other settings of its batches, from the rates that it has observed.

Requests arrive at random. The first one after a flush starts the delay, and the flush comes when the delay is over or
enough bytes wait: with `r` requests and `b` bytes in a second, that is once in `delay + 1/r` seconds, or
`b / bytes_max` times in a second if that is more often. Bursts make a broker flush more seldom than that, so the model
only scales what was observed with the present settings.
"""

from __future__ import annotations

import msgspec


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker has observed, per second."""

    requests: float
    bytes: float
    blobs: float
    """The blobs that were put by flushes."""


class FlushSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a batch is flushed: LLOG_BATCH_MAX_DELAY_MS and LLOG_BATCH_MAX_BYTES."""

    delay_s: float
    bytes_max: float


def predict_blobs(rates: Rates, now: FlushSettings, other: FlushSettings) -> float:
    """Return the blobs in a second that the same requests would need with other settings."""
    present = _model(rates, now)
    return rates.blobs * _model(rates, other) / present if present else 0.0


def _model(rates: Rates, settings: FlushSettings) -> float:
    if not rates.requests:
        return 0.0
    by_delay = 1 / (settings.delay_s + 1 / rates.requests)
    return max(by_delay, rates.bytes / settings.bytes_max)
