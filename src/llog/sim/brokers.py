"""Brokers that append the records of many short-lived producers, which number their records, and what must hold of
them (I8).

A client sends its next appends through any broker, again and again until one answers: also while an earlier attempt is
still under way at a broker that is stalled. A broker joins what arrives together into one append.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from llog.engines.object.writer import Writer
from llog.errors import (
    LlogError,
    OutOfOrderSequence,
    ProducerFenced,
    UnknownProducer,
)
from llog.log.engine import AppendGroup, AppendResult, WriterOptions
from llog.log.log import Log
from llog.log.record_producers import RecordProducer
from llog.model import Record, TopicPartition
from llog.sim.numbered_history import NUMBERED
from llog.sim.outcome import Violation
from llog.sim.process import Process
from llog.sim.roles import STABLE, raise_unexpected

if TYPE_CHECKING:
    from llog.sim.world import World

_CLIENTS_MAX = 6
_ATTEMPTS_MAX = 25


class Sent(NamedTuple):
    """An append that a client repeats until it is answered."""

    producer: RecordProducer
    payloads: tuple[bytes, ...]


class Client(msgspec.Struct, eq=False):
    """A client. It lives for a few appends, and has up to two of them under way."""

    id: str
    tp: TopicPartition
    appends_left: int
    epoch: int = 0
    next_sequence: int = 0
    under_way: list[Sent] = []
    end_offset: int = 0
    """The last offset that was acknowledged in this epoch."""

    def is_done(self) -> bool:
        return not self.appends_left and not self.under_way

    def is_next(self, sent: Sent) -> bool:
        """Return whether everything before this append was acknowledged, and the append was not."""
        return bool(self.under_way) and self.under_way[0] == sent


class Clients:
    """The clients of all brokers; those that are done make room for others."""

    def __init__(self) -> None:
        self.alive: list[Client] = []
        self._number = 0

    def draw(self, world: World, process: Process) -> tuple[Client, Sent]:
        """Let some client send what it has under way, or its next append."""
        draw = process.runtime.random()
        self.alive = [client for client in self.alive if not client.is_done()]
        if len(self.alive) < _CLIENTS_MAX and (not self.alive or draw.random() < 0.3):
            self._number += 1
            tp = TopicPartition(STABLE, draw.randrange(min(2, world.plan.partitions)))
            self.alive.append(Client(f"c{self._number}", tp, draw.randint(1, 8)))
        client = draw.choice(self.alive)
        if client.appends_left and len(client.under_way) < (2 if draw.random() < 0.3 else 1):
            _begin_append(client, draw.randint(1, 3))
        elif draw.random() < 0.02:
            # Another process takes the client's place and gives up what is under way.
            client.epoch, client.next_sequence, client.under_way, client.end_offset = client.epoch + 1, 0, [], 0
            client.appends_left += 1
            _begin_append(client, 1)
        return client, draw.choice(client.under_way)


def _begin_append(client: Client, records: int) -> None:
    producer = RecordProducer(id=client.id, epoch=client.epoch, sequence=client.next_sequence)
    numbers = range(client.next_sequence, client.next_sequence + records)
    payloads = tuple(b"%s%s|%d|%d" % (NUMBERED, client.id.encode(), client.epoch, number) for number in numbers)
    client.under_way.append(Sent(producer, payloads))
    client.next_sequence += records
    client.appends_left -= 1


async def broker(world: World, me: Process, log: Log) -> None:
    """Append for clients, several of them in one call."""
    draw = me.runtime.random()
    writer = Writer(log, WriterOptions(attempts_max=_ATTEMPTS_MAX, inline=world.plan.inline))
    number = 0
    while True:
        await me.runtime.sleep(draw.expovariate(1.5))
        requests = [world.clients.draw(world, me) for _ in range(draw.choice((1, 1, 2, 3, 5)))]
        plain = []
        if draw.random() < 0.2:
            number += 1
            records = [Record(payload=f"{me.name}.plain.{number}".encode())]
            plain = [AppendGroup(topic=STABLE, partition=0, records=records)]
        await _send(world, me, writer, requests, plain)


async def _send(
    world: World, me: Process, writer: Writer, requests: Sequence[tuple[Client, Sent]], plain: Sequence[AppendGroup]
) -> None:
    groups = [
        AppendGroup(
            topic=client.tp.topic,
            partition=client.tp.partition,
            records=[Record(payload=payload) for payload in sent.payloads],
            producer=sent.producer,
        )
        for client, sent in requests
    ]
    next_when_sent = [client.is_next(sent) for client, sent in requests]
    try:
        results = await writer.append([*groups, *plain])
    except LlogError as error:
        results = [error] * (len(groups) + len(plain))
    for (client, sent), was_next, result in zip(requests, next_when_sent, results, strict=False):
        if isinstance(result, AppendResult):
            _acknowledge(world, client, sent, result)
        else:
            _check_refusal(world, client, sent, result, was_next=was_next)
    for result in results[len(groups) :]:
        if isinstance(result, LlogError):
            raise_unexpected(result)


def _acknowledge(world: World, client: Client, sent: Sent, result: AppendResult) -> None:
    if result.end_offset - result.start_offset + 1 != len(sent.payloads):
        raise Violation(f"I3: an append of {len(sent.payloads)} records was answered {result}")
    world.history.acknowledged(client.id, *client.tp, result.start_offset, sent.payloads, repeated=True)
    world.trace.count("numbered appends")
    if result.repeated:
        world.trace.count("repeated numbered appends")
    if sent in client.under_way:
        client.under_way.remove(sent)
        client.end_offset = max(client.end_offset, result.end_offset)


def _check_refusal(world: World, client: Client, sent: Sent, error: LlogError, *, was_next: bool) -> None:
    """Accept a refusal of what is not the client's next append any more, or was not yet, or after it was forgotten."""
    if not isinstance(error, OutOfOrderSequence | UnknownProducer | ProducerFenced):
        raise_unexpected(error)
        return
    if not (was_next and client.is_next(sent)):
        return
    is_forgotten = client.end_offset > 0 and world.history.is_forgotten(client.tp, client.end_offset)
    if isinstance(error, ProducerFenced) or not is_forgotten:
        raise Violation(f"I8: {client.id} was refused its next append {sent.producer}: {error}")
    client.under_way, client.appends_left = [], 0  # It does not know what became of its append, and ends.


async def finish(world: World, me: Process, log: Log) -> None:
    """Let every client learn what became of its appends."""
    writer = Writer(log, WriterOptions(attempts_max=_ATTEMPTS_MAX, inline=world.plan.inline))
    for client in world.clients.alive:
        while client.under_way:
            sent = client.under_way[0]
            await _send(world, me, writer, [(client, sent)], [])
            if sent in client.under_way:
                raise Violation(f"I8: {client.id} cannot learn what became of {sent.producer}")
