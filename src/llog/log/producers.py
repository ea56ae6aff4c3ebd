"""The last appends of each producer, by which a partition distinguishes a repeated append from a new one.

A partition remembers a bounded number of producers, each with its last appends. When it forgets a producer, it keeps
the highest end offset of the forgotten ones: an append of an unknown producer that last knew an offset at or below that
one raises `UnknownProducer` and is never silently appended a second time.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from llog.errors import InvalidArgument, OutOfOrderSequence, UnknownProducer

PRODUCERS_MAX = 64
APPENDS_KEPT = 5
PRODUCER_ID_MAX = 200


class RememberedAppend(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One remembered append of a producer."""

    sequence: int
    start_offset: int
    end_offset: int


class ProducerState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last appends of one producer, oldest first, at most `APPENDS_KEPT`: a repeated append gets its offsets
    again.
    """

    last: tuple[RememberedAppend, ...]
    used_ms: int


class Producer(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of one append: an append that is repeated under the same id and sequence appends nothing and returns
    the same offsets.

    `since` is the partition's next offset when the producer last knew it. A `dense` producer's sequences follow one
    another; otherwise they only grow.
    """

    id: str
    sequence: int
    since: int
    dense: bool = True


def check_producer(producer: Producer) -> None:
    if not 1 <= len(producer.id) <= PRODUCER_ID_MAX:
        raise InvalidArgument(f"a producer id has 1 to {PRODUCER_ID_MAX} characters: {producer.id[:40]!r}")
    if producer.sequence < 0 or producer.since < 1:
        raise InvalidArgument(
            f"producer {producer.id}: sequence {producer.sequence} or since {producer.since} is too low"
        )


def find_repeated(
    states: Mapping[str, ProducerState], evicted_through: int, next_offset: int, producer: Producer, what: str
) -> RememberedAppend | None:
    """Return the append that this one repeats, or None if it is the producer's next.

    Raises `OutOfOrderSequence` if it is neither, and `UnknownProducer` if the partition cannot know.
    """
    if producer.since > next_offset:
        raise InvalidArgument(
            f"producer {producer.id} says it began at offset {producer.since} of {what}, which is beyond its next "
            f"offset {next_offset}: was the topic re-created?"
        )
    state = states.get(producer.id)
    if state is None:
        if evicted_through >= producer.since:
            raise UnknownProducer(
                f"{what} no longer remembers producer {producer.id} and cannot know whether it appended its sequence "
                f"{producer.sequence}: look for the records, then start over under a new producer id"
            )
        return None
    found = find_appended(states, producer.id, producer.sequence)
    if found is not None:
        return found
    last = state.last[-1].sequence
    if producer.sequence == last + 1 or (not producer.dense and producer.sequence > last):
        return None
    raise OutOfOrderSequence(
        f"producer {producer.id} sent sequence {producer.sequence} to {what}, after its sequence {last}"
    )


def find_appended(states: Mapping[str, ProducerState], name: str, sequence: int) -> RememberedAppend | None:
    """Return the append that is remembered under this name and sequence, or None."""
    state = states.get(name)
    if state is None:
        return None
    for appended in state.last:
        if appended.sequence == sequence:
            return appended
    return None


def remember(
    states: Mapping[str, ProducerState], evicted_through: int, name: str, appended: RememberedAppend, now_ms: int
) -> tuple[dict[str, ProducerState], int]:
    """Return `states` with this append added and the least recently used producers forgotten, and the highest end
    offset of all forgotten ones.
    """
    old = states.get(name)
    last = (*(old.last if old else ()), appended)[-APPENDS_KEPT:]
    kept = {**states, name: ProducerState(last=last, used_ms=now_ms)}
    while len(kept) > PRODUCERS_MAX:
        victim = min((key for key in kept if key != name), key=lambda key: kept[key].used_ms)
        evicted_through = max(evicted_through, kept.pop(victim).last[-1].end_offset)
    return kept, evicted_through
