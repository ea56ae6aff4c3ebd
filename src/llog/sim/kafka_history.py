"""The checker of groups of Kafka clients, I11: sees every commit at the server, and knows what each member sent.

Each commit carries a name of its own as its metadata, by which it is recognised when it takes effect.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from llog.groups.records import GroupRecord
from llog.kafka.groups.fence import KafkaGroup
from llog.kafka.groups.offsets import Commit
from llog.log.keys import group_prefix, kafka_group_key
from llog.log.records import decode
from llog.model import FIRST_OFFSET, TopicPartition
from llog.sim.outcome import Violation

KAFKA_GROUP: Final = "kafka"
KAFKA_OFFSETS: Final = group_prefix(KAFKA_GROUP)
KAFKA_RECORD: Final = kafka_group_key(KAFKA_GROUP)


class _Sent(NamedTuple):
    tp: TopicPartition
    offset: int
    generation: int
    recorded: int
    """The highest generation that was recorded when the commit was sent."""


class KafkaHistory:
    def __init__(self) -> None:
        self._recorded = 0
        self._brokers: dict[int, str] = {}
        """The broker that began each generation."""
        self._owners: dict[tuple[int, TopicPartition], str] = {}
        self._sent: dict[str, _Sent] = {}
        self._values: dict[TopicPartition, list[str]] = {}
        """The names of the commits that took effect, in their order."""

    # --- what members send and are answered

    def joined(self, broker: str, generation: int) -> None:
        known = self._brokers.setdefault(generation, broker)
        if known != broker:
            raise Violation(f"I11: {known} and {broker} have both begun generation {generation}")
        if generation > self._recorded:
            raise Violation(f"I11: {broker} began generation {generation}, and {self._recorded} is recorded")

    def assigned(self, member: str, generation: int, tp: TopicPartition) -> None:
        known = self._owners.setdefault((generation, tp), member)
        if known != member:
            raise Violation(f"I11: {known} and {member} both have {tp} in generation {generation}")

    def send(self, name: str, tp: TopicPartition, offset: int, generation: int) -> int:
        """Note a commit before it is sent; return the moment, for its answer."""
        self._sent[name] = _Sent(tp, offset, generation, self._recorded)
        return self.moment(tp)

    def moment(self, tp: TopicPartition) -> int:
        """Return how many commits have taken effect."""
        return len(self._values.get(tp, ()))

    def check_stored(self, name: str, since: int) -> None:
        """Check the answer that a commit was stored, which was sent at the moment `since`."""
        if name not in self._values.get(self._sent[name].tp, [])[since:]:
            raise Violation(f"I11: commit {name} was acknowledged, and never took effect")

    def check_fetched(self, tp: TopicPartition, found: Commit | None, since: int) -> None:
        """Check a committed offset that was asked for at the moment `since`: it was the last one since then."""
        values = self._values.get(tp, [])
        possible: list[str | None] = [*values[max(since - 1, 0) :]]
        if since == 0:
            possible.append(None)
        if (None if found is None else found.metadata) not in possible:
            raise Violation(f"I11: {found} was fetched of {tp}, and since then it was one of {possible}")

    # --- changes at the server

    def record_put(self, new: bytes) -> None:
        generation = decode(KafkaGroup, new, KAFKA_RECORD).generation
        if generation < self._recorded:
            raise Violation(f"I11: generation {generation} was recorded after {self._recorded}")
        self._recorded = generation

    def offset_put(self, key: str, new: bytes) -> None:
        topic, _, partition = key.removeprefix(KAFKA_OFFSETS).partition("/")
        record, tp = decode(GroupRecord, new, key), TopicPartition(topic, int(partition))
        sent = self._sent.get(record.metadata)
        if sent is None or (sent.tp, sent.offset) != (tp, record.committed - FIRST_OFFSET):
            raise Violation(f"I11: {record} of {tp} was committed, and {sent} was sent")
        if sent.generation < sent.recorded:
            raise Violation(f"I11: {record.metadata} took effect, sent when {sent.recorded} was recorded: {sent}")
        values = self._values.setdefault(tp, [])
        if values and self._sent[values[-1]].generation > sent.generation:
            raise Violation(f"I11: {sent} replaced {self._sent[values[-1]]}, a commit of a later generation")
        values.append(record.metadata)

    def removed(self, key: str) -> None:
        raise Violation(f"I11: {key} was deleted")
