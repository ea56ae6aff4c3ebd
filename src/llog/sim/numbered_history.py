"""What must hold of producers that number their records (I8): no record is appended twice while its producer can be
remembered, and the records of one producer are in the order of their sequences.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llog.log.records import Control
from llog.sim.outcome import Violation

NUMBERED: Final = b"numbered|"
"""How the payloads of these producers begin: `numbered|{client}|{epoch}|{sequence}`."""


class _Last(NamedTuple):
    """The last record of a client in a partition."""

    epoch: int
    sequence: int
    offset: int


class NumberedHistory:
    def __init__(self) -> None:
        self._last: dict[tuple[str, str], _Last] = {}

    def commit(self, prefix: str, payload: bytes, offset: int, expired_through: int) -> None:
        """Check a record that is committed at this offset."""
        _, client, epoch_text, sequence_text = payload.decode().split("|")
        epoch, sequence = int(epoch_text), int(sequence_text)
        last = self._last.get((prefix, client))
        self._last[prefix, client] = _Last(epoch, sequence, offset)
        if last is None or last.offset <= expired_through:
            if sequence != 0:
                raise Violation(f"I8: {payload!r} was appended to {prefix}, which does not know its producer")
        elif epoch == last.epoch and sequence <= last.sequence:
            raise Violation(f"I8: {payload!r} was appended to {prefix} a second time, after {last}")
        elif (epoch, sequence) != (last.epoch, last.sequence + 1) and (epoch <= last.epoch or sequence != 0):
            raise Violation(f"I8: {payload!r} was appended to {prefix} after {last}")

    def check_expiry(self, prefix: str, old: Control, new: Control) -> None:
        """Check that only producers below the pending append are forgotten."""
        if new.producers_expired_through < old.producers_expired_through:
            raise Violation(f"I8: producers of {prefix} that were forgotten came back")
        if new.producers_expired_through == old.producers_expired_through:
            return
        if old.pending is not None and new.producers_expired_through >= old.pending.start_offset:
            raise Violation(f"I8: producers of the pending append to {prefix} were forgotten")
