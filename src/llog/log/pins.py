"""Pins: leases that keep the blobs of a snapshot from the collector while readers use the snapshot.

A reader takes a pin before it resolves where its records lie. The collector reads the pins after its last look at the
references, so it sees every pin whose holder may have resolved a reference that has since disappeared. Pins are leases
because the processes that share a snapshot come and go, and none of them need outlive it.
"""

from __future__ import annotations

import msgspec

from llog.errors import InvalidArgument, VersionMismatch
from llog.log.cas import update
from llog.log.keys import PINS, pin_key
from llog.log.log import Log
from llog.log.records import Pin, decode, encode
from llog.runtime import uuid7
from llog.stores.meta import ABSENT, scan

LEASE_MS = 120_000
SLACK_MS = LEASE_MS
"""A pin counts this much longer than its holder believes: the holder's clock may be behind."""


async def pin(log: Log, owner: str, lease_ms: int = LEASE_MS) -> str:
    """Take a pin and return its id. Blobs referenced from now on stay until the pin is released or its lease ends."""
    _check_lease(lease_ms)
    now = log.runtime.now_ms()
    pin_id = uuid7(now, log.runtime.random())
    record = Pin(started_ms=now, expires_ms=now + lease_ms, owner=owner)
    await log.meta.put(pin_key(pin_id), encode(record), expected=ABSENT)
    return pin_id


async def renew(log: Log, pin_id: str, lease_ms: int = LEASE_MS) -> bool:
    """Extend the lease and return True; return False if the pin had ended, and blobs resolved under it may be gone."""
    _check_lease(lease_ms)
    now = log.runtime.now_ms()

    def extend(record: Pin) -> Pin:
        if now >= record.expires_ms:
            return record
        return msgspec.structs.replace(record, expires_ms=max(record.expires_ms, now + lease_ms))

    change = await update(log, pin_key(pin_id), Pin, extend, confirm=True)
    return change is not None and now < change.new.expires_ms


async def release(log: Log, pin_id: str) -> None:
    """End the pin for all its users. Idempotent."""
    await log.meta.delete(pin_key(pin_id))


async def alive_pins(log: Log, now_ms: int | None = None) -> list[tuple[str, Pin]]:
    """Return every pin that counts, oldest first, and delete pins whose lease ended more than `SLACK_MS` ago.

    `now_ms` is the present by a better clock than this process's; an earlier time spares more pins.
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
            alive.append((pin_id, record))  # A holder whose clock is far behind has just renewed it.
    return alive


def _check_lease(lease_ms: int) -> None:
    if lease_ms < 1:
        raise InvalidArgument(f"a lease lasts at least 1 ms: {lease_ms}")
