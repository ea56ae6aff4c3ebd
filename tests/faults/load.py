"""Writers and readers that go on through every fault, and record what they asked for and were told."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from llog.config import Settings
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import Contention, LlogError, OutcomeUnknown, StoreUnavailable
from llog.history.recorded import RecordedAppender, RecordedReader
from llog.history.recorded_http import RecordedAsyncBroker
from llog.history.recorder import HistoryRecorder
from llog.log.engine import AppendGroup, AppendResult
from llog.log.opening import opened_log
from llog.log.producers import Producer
from llog.model import Record, TopicPartition
from tests.faults.cluster import Broker, until

TOPIC = "faults"
PARTITIONS = 4
_PASSING = (StoreUnavailable, OutcomeUnknown, Contention)
_PASSING_CODES = {each.code for each in _PASSING}
_REQUEST_S = 10.0
_PAUSE_S = 0.05


class Progress:
    """What is known of the log by its writers; shared by all actors of a test."""

    def __init__(self) -> None:
        self.acknowledged = 0
        """Records."""
        self.ends = [1] * PARTITIONS
        """Of each partition, one above the highest offset that was acknowledged."""
        self.failures: Counter[str] = Counter()
        self.repeated = 0
        """The number of requests whose answer says that they had been appended before."""

    def appended(self, partition: int, end_offset: int, count: int) -> None:
        self.acknowledged += count
        self.ends[partition] = max(self.ends[partition], end_offset + 1)


class Writer:
    """Appends in process as a producer: what has failed is repeated under the same sequence until it is acknowledged.

    Now and then it opens the log anew before it repeats, as a program that was started again does.
    """

    def __init__(
        self, name: str, settings: Settings, recorder: HistoryRecorder, progress: Progress, rng: random.Random
    ) -> None:
        self.name = name
        self.stopping = False
        self._settings = settings
        self._recorder = recorder
        self._progress = progress
        self._rng = rng
        self._sequences = [0] * PARTITIONS
        self._since = [1] * PARTITIONS
        self._payloads: dict[int, list[str]] = {}
        """By partition, what is not acknowledged yet."""

    async def run(self) -> None:
        while not self.stopping or self._payloads:
            try:
                async with opened_log(self._settings) as log:
                    await self._append_to(RecordedAppender(self._recorder, EngineAppender(log)))
            except _PASSING as error:
                self._progress.failures[f"open: {error.code}"] += 1
                await asyncio.sleep(_PAUSE_S)

    async def _append_to(self, appender: RecordedAppender) -> None:
        while not self.stopping or self._payloads:
            if not self._payloads:
                self._choose()
            partitions = list(self._payloads)
            results: Sequence[AppendResult | LlogError]
            try:
                results = await appender.append([self._group(partition) for partition in partitions])
            except _PASSING as error:
                results = [error] * len(partitions)
            for partition, result in zip(partitions, results, strict=True):
                self._settle(partition, result)
            await asyncio.sleep(self._rng.uniform(0, _PAUSE_S))
            if self._payloads and self._rng.random() < 0.2:
                return

    def _choose(self) -> None:
        for partition in self._rng.sample(range(PARTITIONS), self._rng.randint(1, PARTITIONS)):
            start = f"{self.name}/{partition}/{self._sequences[partition]}"
            self._payloads[partition] = [f"{start}/{number}" for number in range(self._rng.randint(1, 4))]

    def _group(self, partition: int) -> AppendGroup:
        records = [Record(payload=payload.encode()) for payload in self._payloads[partition]]
        producer = Producer(id=self.name, sequence=self._sequences[partition], since=self._since[partition])
        return AppendGroup(topic=TOPIC, partition=partition, records=records, producer=producer)

    def _settle(self, partition: int, result: AppendResult | LlogError) -> None:
        if isinstance(result, LlogError):
            if not isinstance(result, _PASSING):
                raise result
            self._progress.failures[f"append: {result.code}"] += 1
            return
        self._progress.appended(partition, result.end_offset, len(self._payloads.pop(partition)))
        self._sequences[partition] += 1
        self._since[partition] = result.end_offset + 1


class BrokerClient:
    """Asks one of the brokers that are up, another one each time."""

    def __init__(self, brokers: Sequence[Broker], recorder: HistoryRecorder, rng: random.Random) -> None:
        self._brokers = brokers
        self._recorder = recorder
        self._rng = rng
        self._client = httpx.AsyncClient(timeout=_REQUEST_S, trust_env=False)

    async def produce(self, items: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return await self._items(lambda broker: broker.produce(items))

    async def consume(self, items: list[dict[str, Any]], max_wait_ms: int) -> list[dict[str, Any]] | None:
        return await self._items(lambda broker: broker.consume(items, max_wait_ms=max_wait_ms))

    async def close(self) -> None:
        await self._client.aclose()

    async def _items(self, ask: Callable[[RecordedAsyncBroker], Any]) -> list[dict[str, Any]] | None:
        """What the answer says of each item; None if there was no answer."""
        up = [broker for broker in self._brokers if broker.address is not None]
        if not up:
            return None
        broker = self._rng.choice(up)
        try:
            answer = await ask(RecordedAsyncBroker(self._recorder, _At(self._client, broker), via=broker.name))
        except httpx.HTTPError:
            return None
        assert answer.status_code in (200, 503), answer.text
        items: list[dict[str, Any]] = answer.json()["topic_partitions"]
        assert all("error" not in item or item["error"]["code"] in _PASSING_CODES for item in items), items
        return items


class _At:
    """A client of one broker, wherever it listens now."""

    def __init__(self, client: httpx.AsyncClient, broker: Broker) -> None:
        self._client = client
        self._address = broker.address

    async def post(self, url: str, *, json: Any) -> httpx.Response:
        return await self._client.post(f"{self._address}{url}", json=json)


class HttpWriter:
    """Produces through the brokers. What was not acknowledged is given up: it is there once or not at all."""

    def __init__(self, name: str, client: BrokerClient, progress: Progress, rng: random.Random) -> None:
        self.name = name
        self.stopping = False
        self._client = client
        self._progress = progress
        self._rng = rng

    async def run(self) -> None:
        number = 0
        while not self.stopping:
            number += 1
            partition = self._rng.randrange(PARTITIONS)
            items = await self._client.produce(
                [{"topic": TOPIC, "partition": partition, "records": [f"{self.name}/{number}"]}]
            )
            if items is None or "error" in items[0]:
                self._progress.failures["produce: " + (items[0]["error"]["code"] if items else "no answer")] += 1
            else:
                self._progress.appended(partition, items[0]["end_offset"], 1)
            await asyncio.sleep(self._rng.uniform(0, _PAUSE_S))


class HttpProducer:
    """Produces through the brokers as producers that live for a few requests: each request is sent, through another
    broker every time, until it is acknowledged. What it holds is then there exactly once.
    """

    def __init__(self, name: str, client: BrokerClient, progress: Progress, rng: random.Random) -> None:
        self.name = name
        self.stopping = False
        self._client = client
        self._progress = progress
        self._rng = rng

    async def run(self) -> None:
        lives = 0
        while not self.stopping:
            lives += 1
            await self._live(f"{self.name}-{lives}")

    async def _live(self, producer: str) -> None:
        sequences = dict.fromkeys(self._rng.sample(range(PARTITIONS), 2), 0)
        for _ in range(self._rng.randint(1, 6)):
            if self.stopping:
                return
            items = [self._item(producer, partition, sequence) for partition, sequence in sequences.items()]
            while items:
                answers = await self._client.produce(items)
                if answers is None:
                    self._progress.failures["produce again: no answer"] += 1
                    await asyncio.sleep(_PAUSE_S)
                    continue
                for item, answer in zip(list(items), answers, strict=True):
                    if "error" in answer:
                        self._progress.failures[f"produce again: {answer['error']['code']}"] += 1
                        continue
                    self._progress.repeated += answer.get("repeated", False)
                    self._progress.appended(item["partition"], answer["end_offset"], len(item["records"]))
                    sequences[item["partition"]] += len(item["records"])
                    items.remove(item)
                await asyncio.sleep(self._rng.uniform(0, _PAUSE_S))

    def _item(self, producer: str, partition: int, sequence: int) -> dict[str, Any]:
        numbers = range(sequence, sequence + self._rng.randint(1, 4))
        records = [f"{producer}/{partition}/{number}" for number in numbers]
        identity = {"producer_id": producer, "sequence": sequence}
        return {"topic": TOPIC, "partition": partition, "records": records, **identity}


class Follower:
    """Reads every partition from its first record on: records come in order, without a gap."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name = name
        self.stopping = False
        self.positions = [1] * PARTITIONS
        self._progress = progress

    def take(self, partition: int, offset: int) -> None:
        assert offset == self.positions[partition], f"{self.name} got {offset} instead of {self.positions[partition]}"
        self.positions[partition] += 1

    def has_all(self) -> bool:
        return all(own >= end for own, end in zip(self.positions, self._progress.ends, strict=True))

    def failed(self, code: str) -> None:
        self._progress.failures[f"read: {code}"] += 1


class HttpReader(Follower):
    """Through the brokers."""

    def __init__(self, name: str, client: BrokerClient, progress: Progress) -> None:
        super().__init__(name, progress)
        self._client = client

    async def run(self) -> None:
        while not self.stopping:
            asked = [
                {"topic": TOPIC, "partition": partition, "fetch_offset": offset}
                for partition, offset in enumerate(self.positions)
            ]
            items = await self._client.consume(asked, max_wait_ms=200)
            if items is None:
                self.failed("no answer")
                await asyncio.sleep(_PAUSE_S)
                continue
            for item in items:
                if "error" in item:
                    self.failed(item["error"]["code"])
                    await asyncio.sleep(_PAUSE_S)
                else:
                    for record in item["records"]:
                        self.take(item["partition"], record["offset"])


class LogReader(Follower):
    """In process."""

    def __init__(self, name: str, settings: Settings, recorder: HistoryRecorder, progress: Progress) -> None:
        super().__init__(name, progress)
        self._settings = settings
        self._recorder = recorder

    async def run(self) -> None:
        while not self.stopping:
            try:
                async with opened_log(self._settings) as log:
                    reader = RecordedReader(self._recorder, EngineReader(log))
                    while not self.stopping:
                        await self._read(reader)
                        await asyncio.sleep(_PAUSE_S)
            except _PASSING as error:
                self.failed(error.code)
                await asyncio.sleep(_PAUSE_S)

    async def _read(self, reader: RecordedReader) -> None:
        for partition in range(PARTITIONS):
            tp = TopicPartition(TOPIC, partition)
            await reader.bounds(tp)
            for batch in await reader.read(tp, self.positions[partition], 1 << 20):
                for offset in range(batch.start_offset, batch.end_offset + 1):
                    self.take(partition, offset)


class Load:
    """All writers and readers of a test. What one of them raises ends the next wait."""

    def __init__(self, settings: Settings, brokers: Sequence[Broker], seed: int, history: Path) -> None:
        self.progress = progress = Progress()
        self._recorder = recorder = HistoryRecorder(history)

        def rng(name: str) -> random.Random:
            return random.Random(f"{seed} {name}")

        self._client = client = BrokerClient(brokers, recorder, rng("client"))
        self._writers: list[Writer | HttpWriter | HttpProducer] = [
            *(Writer(name, settings, recorder, progress, rng(name)) for name in ("writer-1", "writer-2")),
            *(HttpWriter(name, client, progress, rng(name)) for name in ("http-writer-1", "http-writer-2")),
            *(HttpProducer(name, client, progress, rng(name)) for name in ("http-producer-1", "http-producer-2")),
        ]
        self._readers: list[HttpReader | LogReader] = [
            *(HttpReader(name, client, progress) for name in ("http-reader-1", "http-reader-2")),
            LogReader("reader", settings, recorder, progress),
        ]
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Load:
        for actor in (*self._writers, *self._readers):
            self._tasks[actor.name] = asyncio.create_task(actor.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._client.close()
        self._recorder.close()

    async def more(self, count: int) -> None:
        """Return when this many more records are acknowledged."""
        wanted = self.progress.acknowledged + count
        await self.until(lambda: self.progress.acknowledged >= wanted, f"{wanted} records are acknowledged")

    async def finish(self) -> None:
        """End the writers, which repeat until all is acknowledged, then the readers once they have everything."""
        for writer in self._writers:
            writer.stopping = True
        await self.until(lambda: all(self._tasks[each.name].done() for each in self._writers), "the writers end")
        await self.until(lambda: all(each.has_all() for each in self._readers), "the readers have everything")
        for reader in self._readers:
            reader.stopping = True
        await self.until(lambda: all(task.done() for task in self._tasks.values()), "the readers end")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            for task in self._tasks.values():
                if task.done():
                    task.result()
            return condition()

        await until(holds, f"{what}; {self.progress.acknowledged} are acknowledged, {dict(self.progress.failures)}")
