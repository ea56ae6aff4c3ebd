"""Idempotent producers and a group of consumers of confluent-kafka that go on through every fault."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as Position

from llog.config import Settings
from llog.engines.routing import EngineReader
from llog.history.recorded import RecordedReader
from llog.history.recorder import HistoryRecorder, OpenOperation
from llog.log.opening import opened_log
from llog.model import Record, TopicPartition
from tests.faults.cluster import LIMIT_S, until
from tests.faults.consumption import Consumption
from tests.faults.load import PARTITIONS, TOPIC, Progress

GROUP = "kafka-faults"
MEMBER_SESSION_MS = 6000
_OUTSTANDING_MAX = 200
_PAUSE_S = 0.02
_COMMIT_EVERY = 25
_CLIENT = {
    "topic.metadata.refresh.interval.ms": 1000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "socket.timeout.ms": 10_000,
    "log_level": 0,
}
"""Quicker than by default, so that more happens in a short test. Clients would log every fault."""


class _Actor:
    """A client that works in a thread of its own until it is told to stop; what it raises is kept."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        raise NotImplementedError

    def _work(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self.error = error


class NumberedProducer(_Actor):
    """Sends records that name the producer, the partition and a number which counts on there."""

    def __init__(self, name: str, bootstrap: str, recorder: HistoryRecorder, progress: Progress) -> None:
        super().__init__(name)
        self._recorder = recorder
        self._progress = progress
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "client.id": name,
                "enable.idempotence": True,
                "linger.ms": 2,
                "batch.num.messages": 10,
                "retry.backoff.ms": 50,
                "message.timeout.ms": 1000 * LIMIT_S,
                **_CLIENT,
            }
        )

    def run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            if len(self._producer) < _OUTSTANDING_MAX:
                for partition in range(PARTITIONS):
                    self._send(partition, f"{self.name}/{partition}/{number}".encode())
                number += 1
            self._producer.poll(_PAUSE_S)
        left = self._producer.flush(LIMIT_S)
        assert left == 0, f"{left} records of {self.name} have no delivery report"

    def _send(self, partition: int, value: bytes) -> None:
        operation = self._recorder.append(TopicPartition(TOPIC, partition), [Record(payload=value)])

        def delivered(error: KafkaError | None, message: Message) -> None:
            self._end(operation, error, message)

        self._producer.produce(TOPIC, value, partition=partition, on_delivery=delivered)

    def _end(self, operation: OpenOperation, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._progress.failures[f"{self.name}: {error.name()}"] += 1
            operation.lost(error.name())
            return
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        operation.appended(offset + 1, offset + 1)
        self._progress.appended(partition, offset + 1, 1)


class Member(_Actor):
    """Consumes as a member of the group, and commits what it has processed."""

    def __init__(self, name: str, bootstrap: str, consumption: Consumption, config: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._consumption = consumption
        self._positions: dict[int, int] = {}
        """Of each assigned partition from which a record came: the offset after the last one."""
        self._uncommitted = 0
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "client.id": name,
                "group.id": GROUP,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": MEMBER_SESSION_MS,
                "heartbeat.interval.ms": 500,
                **_CLIENT,
                **config,
            }
        )

    def run(self) -> None:
        self._consumer.subscribe([TOPIC], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        while not self._stopping.is_set():
            message = self._consumer.poll(0.2)
            if message is None:
                self._commit()
                continue
            error = message.error()
            if error is not None:
                self._consumption.failures[f"{self.name}: {error.name()}"] += 1
                continue
            partition, offset, value = message.partition(), message.offset(), message.value()
            assert partition is not None
            assert offset is not None
            assert isinstance(value, bytes)
            self._consumption.read(self.name, partition, offset, value)
            self._positions[partition] = offset + 1
            self._uncommitted += 1
            if self._uncommitted >= _COMMIT_EVERY:
                self._commit()
        self._commit()
        self._consumer.close()

    def _assigned(self, _: Consumer, assigned: list[Position]) -> None:
        self._consumption.assigned(self.name, [each.partition for each in assigned])

    def _revoked(self, _: Consumer, revoked: list[Position]) -> None:
        self._commit()
        self._let_go(revoked)

    def _lost(self, _: Consumer, lost: list[Position]) -> None:
        self._let_go(lost)

    def _let_go(self, gone: Sequence[Position]) -> None:
        self._consumption.revoked(self.name, [each.partition for each in gone])
        for each in gone:
            self._positions.pop(each.partition, None)

    def _commit(self) -> None:
        offsets = dict(self._positions) if self._uncommitted else {}
        self._uncommitted = 0
        if not offsets:
            return
        attempts = self._consumption.committing(self.name, offsets)
        try:
            results = self._consumer.commit(
                offsets=[Position(TOPIC, partition, offset) for partition, offset in offsets.items()],
                asynchronous=False,
            )
        except KafkaException as error:
            self._consumption.failures[f"{self.name}: commit: {error.args[0].name()}"] += 1
            return
        for each in results or ():
            if each.error is None:
                self._consumption.committed(attempts[each.partition])


class KafkaLoad:
    """All producers and members of a test. What one of them raises ends the next wait."""

    def __init__(
        self, bootstrap: str, history: Path, *, members: Sequence[Mapping[str, Any]] = ({}, {}, {}), producers: int = 3
    ) -> None:
        self.progress = Progress()
        self.consumption = Consumption()
        self._bootstrap = bootstrap
        self._recorder = recorder = HistoryRecorder(history)
        self._producers = [
            NumberedProducer(f"producer-{number}", bootstrap, recorder, self.progress) for number in range(producers)
        ]
        self._members: list[Member] = []
        self._configs = members

    async def __aenter__(self) -> KafkaLoad:
        for producer in self._producers:
            producer.start()
        for config in self._configs:
            self.add_member(config)
        return self

    async def __aexit__(self, *_: object) -> None:
        for actor in self._actors:
            actor.stop()
        self._recorder.close()

    @property
    def _actors(self) -> list[_Actor]:
        return [*self._producers, *self._members]

    def add_member(self, config: Mapping[str, Any]) -> Member:
        member = Member(f"member-{len(self._members) + 1}", self._bootstrap, self.consumption, config)
        self._members.append(member)
        member.start()
        return member

    async def end_member(self, index: int) -> None:
        """End a member as a program does that stops; a static one does not leave the group."""
        self._members[index].stop()
        await self.until(lambda: not self._members[index].is_running, "the member ends")

    async def more(self, count: int) -> None:
        """Return when this many more records are acknowledged, and the group has read and committed as many more."""
        acknowledged, read, committed = (each + count for each in self._counts())
        await self.until(lambda: self._counts()[0] >= acknowledged, f"{acknowledged} records are acknowledged")
        await self.until(lambda: self._counts()[1] >= read, f"the group has read {read} records")
        await self.until(lambda: self._counts()[2] >= committed, f"the group has committed {committed} records")

    def _counts(self) -> tuple[int, int, int]:
        return self.progress.acknowledged, self.consumption.records_read, self.consumption.records_committed

    async def finish(self, settings: Settings) -> None:
        """End the producers once all is acknowledged, then the members once they have read and committed everything."""
        for producer in self._producers:
            producer.stop()
        await self.until(lambda: not any(each.is_running for each in self._producers), "the producers end")
        ends = await self._read_everything(settings)
        await self.until(lambda: self.consumption.has_read(ends), "the group has read everything")
        await self.until(lambda: self.consumption.has_committed(ends), "the group has committed everything")
        for member in self._members:
            member.stop()
        await self.until(lambda: not any(each.is_running for each in self._members), "the members end")
        assert not self.consumption.findings, "\n".join(self.consumption.findings[:20])

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            for actor in self._actors:
                if actor.error is not None:
                    raise AssertionError(f"{actor.name} failed") from actor.error
            return condition()

        try:
            await until(holds, what)
        except AssertionError:
            print(self.report())
            raise

    def report(self) -> str:
        failures: Counter[str] = self.progress.failures + self.consumption.failures
        return f"{self._counts()} records are acknowledged, read, committed; {dict(failures)}"

    async def _read_everything(self, settings: Settings) -> dict[int, int]:
        """Read all partitions into the history, and compare with them what the members got; return the end of each."""
        ends: dict[int, int] = {}
        async with opened_log(settings) as log:
            reader = RecordedReader(self._recorder, EngineReader(log))
            for partition in range(PARTITIONS):
                tp = TopicPartition(TOPIC, partition)
                offset, values = 1, list[bytes]()
                while batches := await reader.read(tp, offset, 1 << 20):
                    values += [value for batch in batches for value in batch.columns.values.to_pylist()]
                    offset = batches[-1].end_offset + 1
                _check_order(partition, values)
                self.consumption.compare(partition, values)
                ends[partition] = len(values)
        return ends


def _check_order(partition: int, values: Sequence[bytes]) -> None:
    """The records of each producer are there in the order in which they were sent, none of them twice."""
    newest: dict[str, int] = {}
    for value in values:
        producer, where, number = value.decode().split("/")
        assert int(where) == partition, f"{value!r} is in partition {partition}"
        assert int(number) > newest.get(producer, -1), f"{value!r} comes after number {newest[producer]}"
        newest[producer] = int(number)
