"""Pins: whoever uses a snapshot keeps its blobs from being collected, by a lease that outlives no crash for long.

A reader pins first and resolves where its records lie after: the collector reads the pins after its last look at the
references, so it sees every pin whose holder may have resolved a reference that is gone by then. Leases, because the
processes that use one snapshot come and go, and none of them lives as long as the snapshot does.
"""

from __future__ import annotations

import msgspec

from llog.errors import InvalidArgument, OutcomeUnknown, VersionMismatch
from llog.log.keys import PINS, pin_key
from llog.log.log import Log
from llog.log.records import Pin, decode, encode
from llog.runtime import uuid7
from llog.stores.meta import ABSENT, scan

LEASE_MS = 120_000
SLACK_MS = LEASE_MS
"""A pin counts this much longer than its holder believes: the holder's clock may be behind."""


async def pin(log: Log, owner: str, lease_ms: int = LEASE_MS) -> str:
    """A new pin's id. Blobs that are referenced from now on stay until it is released or its lease runs out."""
    _check_lease(lease_ms)
    now = log.runtime.now_ms()
    pin_id = uuid7(now, log.runtime.random())
    record = Pin(started_ms=now, expires_ms=now + lease_ms, owner=owner)
    await log.meta.put(pin_key(pin_id), encode(record), expected=ABSENT)
    return pin_id


async def renew(log: Log, pin_id: str, lease_ms: int = LEASE_MS) -> bool:
    """Whether the pin still held and holds on. False: its blobs may be gone already; what was resolved under it is
    void.
    """
    _check_lease(lease_ms)
    while True:
        found = await log.meta.get(pin_key(pin_id))
        if found is None:
            return False
        record = decode(Pin, found.value, found.key)
        now = log.runtime.now_ms()
        if now >= record.expires_ms:
            return False
        longer = msgspec.structs.replace(record, expires_ms=max(record.expires_ms, now + lease_ms))
        try:
            await log.meta.put(found.key, encode(longer), expected=found.version)
        except (VersionMismatch, OutcomeUnknown):
            continue  # renewed by another holder, or released, or by this call after all
        return True


async def release(log: Log, pin_id: str) -> None:
    """Ends the pin for everybody who uses it. Releasing it twice is no error."""
    await log.meta.delete(pin_key(pin_id))


async def alive_pins(log: Log, now_ms: int | None = None) -> list[tuple[str, Pin]]:
    """Every pin that counts, oldest first; those whose lease ran out more than `SLACK_MS` ago are deleted on the way.

    `now_ms` is the present by a clock that is better than this process's; an earlier one spares more.
    """
    if now_ms is None:
        now_ms = log.runtime.now_ms()
    alive = []
    async for found in scan(log.meta, PINS):
        record = decode(Pin, found.value, found.key)
        pin_id = found.key.removeprefix(PINS)
        if now_ms < record.expires_ms + SLACK_MS:
            alive.append((pin_id, record))
            continue
        try:
            await log.meta.delete(found.key, expected=found.version)
        except VersionMismatch:
            alive.append((pin_id, record))  # renewed just now by a holder whose clock is far behind
    return alive


def _check_lease(lease_ms: int) -> None:
    if lease_ms < 1:
        raise InvalidArgument(f"a lease lasts at least 1 ms: {lease_ms}")
