"""Producers that number their records, as Kafka's do: the state that a partition remembers of each, and its judgement
of a repeated, a next or a wrong append.

A producer counts the records that it sends to a partition, from 0 on. An append carries the number of its first record,
its *sequence*; the next append's is that plus the number of records. A higher *epoch* begins the count again and fences
the lower ones. Kafka's clients go on from 2³¹ - 1 to 0; states count on. Such producers may be many and short-lived:
`log/producers.py` has those that number their appends.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from llog.errors import InvalidArgument, OutOfOrderSequence, ProducerFenced, UnknownProducer
from llog.log.producers import APPENDS_KEPT, PRODUCER_ID_MAX

SEQUENCE_MAX: Final = (1 << 53) - 1
"""The highest sequence and epoch: every JSON decoder keeps it exactly."""
_KAFKA_SEQUENCES: Final = 1 << 31
PRODUCER_EXPIRY_MS: Final = 86_400_000
"""How much later than a producer's last append the partition's newest append has to be before the producer is
forgotten.
"""


class ProducerKind(StrEnum):
    """The door through which a producer comes. Producers of different kinds never share a state."""

    HTTP = "http"
    KAFKA = "kafka"


class ProducerName(NamedTuple):
    """Names a producer in a partition: its id, and the door through which it comes."""

    kind: str
    id: str

    @property
    def digest(self) -> str:
        return blake2b(f"{self.kind}/{self.id}".encode(), digest_size=16).hexdigest()


class RecordProducer(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of an append by a producer that numbers its records: `sequence` is the number of the first."""

    kind: ProducerKind = ProducerKind.HTTP
    id: str
    epoch: int = 0
    sequence: int

    @property
    def name(self) -> ProducerName:
        return ProducerName(self.kind.value, self.id)


class RememberedRecords(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive sequences of a producer at consecutive offsets."""

    first_sequence: int
    last_sequence: int
    start_offset: int

    @property
    def end_offset(self) -> int:
        return self.start_offset + self.last_sequence - self.first_sequence


class RecordProducerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a partition remembers of a producer: the last records of its newest epoch, oldest first."""

    epoch: int = 0
    last: tuple[RememberedRecords, ...]
    """At most `APPENDS_KEPT`. Appends that followed one another directly count as one."""
    append_ms: int
    """The partition's highest append time after the producer's last append, from which its expiry counts."""

    @property
    def end_offset(self) -> int:
        return self.last[-1].end_offset


class StoredProducer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A producer's state, as `pending` names it and as it is then stored under a key of its own."""

    kind: str
    id: str
    state: RecordProducerState

    @property
    def name(self) -> ProducerName:
        return ProducerName(self.kind, self.id)


def check_record_producer(producer: RecordProducer, records: int) -> None:
    if not 1 <= len(producer.id) <= PRODUCER_ID_MAX:
        raise InvalidArgument(f"a producer id has 1 to {PRODUCER_ID_MAX} characters: {producer.id[:40]!r}")
    try:
        producer.id.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"producer id {producer.id[:40]!r} is not valid Unicode") from error
    if not 0 <= producer.epoch <= SEQUENCE_MAX:
        raise InvalidArgument(f"producer {producer.id}: epoch {producer.epoch} is not within 0 and {SEQUENCE_MAX}")
    if producer.sequence < 0 or producer.sequence + records - 1 > SEQUENCE_MAX:
        raise InvalidArgument(
            f"producer {producer.id}: the sequences of {records} records from {producer.sequence} on are not within 0 "
            f"and {SEQUENCE_MAX}"
        )


def find_repeated_records(
    state: RecordProducerState | None, producer: RecordProducer, records: int, what: str
) -> int | None:
    """Return the offset of the first record if the partition remembers all of these records; None if they are the
    producer's next.

    Raises `ProducerFenced`, `OutOfOrderSequence` or `UnknownProducer` if they are neither.
    """
    first = _first_sequence(state, producer)
    last = first + records - 1
    if state is None:
        if first == 0:
            return None
        raise UnknownProducer(
            f"{what} does not know producer {producer.id} and cannot know what it appended before its sequence "
            f"{first}: look for its records, then begin at sequence 0 under a new producer id"
        )
    if producer.epoch < state.epoch:
        raise ProducerFenced(
            f"producer {producer.id} sent epoch {producer.epoch} to {what}, which has seen its epoch {state.epoch}: "
            "another process has taken its place"
        )
    if producer.epoch > state.epoch:
        if first == 0:
            return None
        raise OutOfOrderSequence(
            f"producer {producer.id} sent sequence {first} to {what} as the first of its epoch {producer.epoch}: an "
            "epoch begins at sequence 0"
        )
    for known in state.last:
        if known.first_sequence <= first and last <= known.last_sequence:
            return known.start_offset + first - known.first_sequence
    newest = state.last[-1].last_sequence
    if first == newest + 1:
        return None
    raise OutOfOrderSequence(
        f"producer {producer.id} sent sequences {first} to {last} to {what}, after its sequence {newest}: its next is "
        f"{newest + 1}, and it may repeat its last appends, from {state.last[0].first_sequence} on, as they were"
    )


def remember_records(
    state: RecordProducerState | None, producer: RecordProducer, records: int, start_offset: int, append_ms: int
) -> RecordProducerState:
    """Return the producer's state after these records were appended, which are its next."""
    before = state.last if state is not None and state.epoch == producer.epoch else ()
    first = _first_sequence(state, producer)
    appended = RememberedRecords(first, first + records - 1, start_offset)
    if before and before[-1].end_offset + 1 == start_offset:
        appended = RememberedRecords(before[-1].first_sequence, appended.last_sequence, before[-1].start_offset)
        before = before[:-1]
    return RecordProducerState(epoch=producer.epoch, last=(*before, appended)[-APPENDS_KEPT:], append_ms=append_ms)


def _first_sequence(state: RecordProducerState | None, producer: RecordProducer) -> int:
    """Return the number of the first record as states count. Of the numbers that a Kafka client can mean, this is the
    one nearest to its next.
    """
    if state is None or producer.kind is not ProducerKind.KAFKA or producer.epoch != state.epoch:
        return producer.sequence
    ahead = (producer.sequence - state.last[-1].last_sequence - 1) % _KAFKA_SEQUENCES
    if ahead >= _KAFKA_SEQUENCES // 2:
        ahead -= _KAFKA_SEQUENCES
    first = state.last[-1].last_sequence + 1 + ahead
    return producer.sequence if first < 0 else first
