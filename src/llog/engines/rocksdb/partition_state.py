"""The state of one partition, stored as the value of its counter: u64 last offset (little-endian), then the rest as
MessagePack.
"""

from __future__ import annotations

import msgspec

from llog.errors import InconsistentReadState
from llog.log.engine import Bounds
from llog.log.producers import ProducerState


class PartitionState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A field is never renamed or reused; a new one has a default."""

    last_offset: int = 0
    log_start_offset: int = 1
    append_ms: int = 0
    """The append time of the newest append; it never decreases."""
    timestamp_ms: int = 0
    """The highest timestamp so far."""
    position: int = 0
    """The bytes of all envelopes so far."""
    producers: dict[str, ProducerState] = {}
    evicted_through: int = 0
    compacted_through: int = 0
    """Up to this offset, each key has only its newest record."""
    compacted_records: int = 0
    """The number of records left up to `compacted_through`."""
    has_gaps: bool = False
    """Whether key compaction has removed records."""

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.log_start_offset, self.last_offset + 1)


_decoder = msgspec.msgpack.Decoder(PartitionState)
_encoder = msgspec.msgpack.Encoder()


def encode_state(state: PartitionState) -> bytes:
    return state.last_offset.to_bytes(8, "little") + _encoder.encode(msgspec.structs.replace(state, last_offset=0))


def decode_state(value: bytes, what: str) -> PartitionState:
    """Decode a counter's value; raises `InconsistentReadState` if it is damaged."""
    try:
        rest = _decoder.decode(memoryview(value)[8:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InconsistentReadState(f"the counter of {what} is damaged: {error}") from error
    return msgspec.structs.replace(rest, last_offset=int.from_bytes(value[:8], "little"))
