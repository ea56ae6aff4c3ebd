"""The partitioner: chooses the partitions of records whose client named none.

A record with a key goes to the partition that Kafka's default partitioner chooses for the key. Records without a key
are sticky, as Kafka's are: those of one request stay together, and a partition is kept until it has taken some bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import pyarrow as pa

from llog.batch.partitioning import partitions_for_keys
from llog.broker.http.answers import item_error
from llog.broker.http.forwarding import ItemAnswers
from llog.broker.http.json_records import JsonRecord, bytes_from_json
from llog.broker.metrics import Metrics
from llog.errors import InvalidArgument, LlogError, OutcomeUnknown
from llog.log.records import Topic
from llog.runtime import Runtime

STICKY_BYTES: Final = 16 << 10
"""What a partition takes of records without a key before the next one has its turn; Kafka's default."""
TOPICS_MAX: Final = 10_000
"""Topics that are remembered; beyond it, the one that was looked up first is forgotten."""

FindTopics = Callable[[Collection[str]], Awaitable[dict[str, Topic | LlogError]]]
"""Returns the topic of each name, which is created if it may be, or the error."""


class RecordsItem(Protocol):
    """An item of a request: records for a topic, and the partition that its client named."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int | None: ...

    @property
    def records(self) -> Sequence[str | JsonRecord]: ...

    @property
    def producer_id(self) -> str | None: ...


AnyItem = TypeVar("AnyItem", bound=RecordsItem)
N = TypeVar("N", int, float)
Share = tuple[int, list[int]]
"""A partition, and the indexes of an item's records that go there."""


class Placement(Generic[AnyItem]):
    """The items of a request, split so that each names its partition, and how their answers are put together again."""

    def __init__(self) -> None:
        self.items: list[AnyItem] = []
        self._folds: list[tuple[AnyItem, list[Share] | LlogError | None]] = []
        """Each item of the request with its shares, the error that kept it from having any, or None if it is whole."""

    def keep(self, item: AnyItem) -> None:
        self.items.append(item)
        self._folds.append((item, None))

    def split(self, item: AnyItem, shares: list[Share] | LlogError) -> None:
        self._folds.append((item, shares))
        if isinstance(shares, LlogError):
            return
        for partition, indexes in shares:
            records = item.records if len(shares) == 1 else [item.records[index] for index in indexes]
            self.items.append(msgspec.structs.replace(item, partition=partition, records=records))  # type: ignore[type-var]

    def fold(self, answers: ItemAnswers, metrics: Metrics) -> ItemAnswers:
        """Return one answer for each item of the request, from the answers to the split items.

        An item that named no partition is answered with the partition and the offset, or the error, of each record.
        """
        left = iter(answers)
        return [next(left) if shares is None else _fold(item, shares, left, metrics) for item, shares in self._folds]


class Partitioner:
    """Remembers the partitions of topics for `staleness_ms`: those that are added meanwhile get nothing yet."""

    def __init__(self, find_topics: FindTopics, staleness_ms: int, runtime: Runtime) -> None:
        self._find_topics = find_topics
        self._staleness_s = staleness_ms / 1000
        self._random = runtime.random()
        self._topics: dict[str, tuple[int, float]] = {}
        """The number of partitions of each topic, and when it was looked up."""
        self._sticky: dict[str, tuple[int, int]] = {}
        """The partition of each topic that takes records without a key, and the bytes that it has taken."""

    async def place(self, items: Sequence[AnyItem]) -> Placement[AnyItem]:
        """Return the items, each with a partition: those that name none are split by the partitions of their
        records.
        """
        topics = await self._partitions({item.topic for item in items if item.partition is None})
        placement: Placement[AnyItem] = Placement()
        for item in items:
            if item.partition is not None:
                placement.keep(item)
                continue
            try:
                placement.split(item, self._shares(item, topics[item.topic]))
            except LlogError as error:
                placement.split(item, error)
        return placement

    def forget(self, topic: str) -> None:
        """Look the topic up again before the next record: this process has changed or deleted it."""
        self._topics.pop(topic, None)

    def _shares(self, item: RecordsItem, partitions: int | LlogError) -> list[Share]:
        if isinstance(partitions, LlogError):
            raise partitions
        if item.producer_id is not None:
            raise InvalidArgument(
                f"the records for {item.topic} have the producer_id {item.producer_id[:40]!r}, but no partition: a "
                "producer numbers its records in each partition, so it names the partition"
            )
        keys = [None if isinstance(record, str) else bytes_from_json(record.key) for record in item.records]
        shares: dict[int, list[int]] = {}
        if any(key is not None for key in keys):
            for index, chosen in enumerate(partitions_for_keys(pa.array(keys, pa.binary()), partitions).tolist()):
                shares.setdefault(chosen, []).append(index)
        else:
            shares[-1] = list(range(len(keys)))
        if -1 in shares:
            loose = shares.pop(-1)
            size = sum(_size(item.records[index]) for index in loose)
            own = shares.setdefault(self._sticky_partition(item.topic, partitions, size), [])
            own[:] = sorted(own + loose)
        return sorted(shares.items())

    def _sticky_partition(self, topic: str, partitions: int, size: int) -> int:
        partition, taken = self._sticky.pop(topic, (self._random.randrange(partitions), 0))
        if taken >= STICKY_BYTES:
            partition, taken = partition + 1, 0
        partition %= partitions
        _remember(self._sticky, topic, (partition, taken + size))
        return partition

    async def _partitions(self, names: set[str]) -> dict[str, int | LlogError]:
        now = asyncio.get_running_loop().time()
        found: dict[str, int | LlogError] = {}
        for name in names:
            count, seen_at = self._topics.get(name, (0, 0.0))
            if count and now - seen_at < self._staleness_s:
                found[name] = count
        missing = names - found.keys()
        if missing:
            for name, topic in (await self._find_topics(missing)).items():
                if isinstance(topic, LlogError):
                    found[name] = topic
                else:
                    found[name] = topic.partitions
                    _remember(self._topics, name, (topic.partitions, now))
        return found


def _fold(
    item: RecordsItem, shares: list[Share] | LlogError, left: Iterator[dict[str, Any]], metrics: Metrics
) -> dict[str, Any]:
    if isinstance(shares, LlogError):
        metrics.errors[shares.code] += 1
        return {"topic": item.topic, "error": item_error(shares)}
    answers = [next(left) for _ in shares]
    errors = [answer["error"] for answer in answers if "error" in answer]
    folded: dict[str, Any] = {"topic": item.topic}
    if errors:  # the one that leaves most open goes first
        folded["error"] = next((error for error in errors if error["code"] == OutcomeUnknown.code), errors[0])
    if len(errors) == len(answers):
        return folded
    records: list[dict[str, Any]] = [{}] * len(item.records)
    for (partition, indexes), answer in zip(shares, answers, strict=True):
        for number, index in enumerate(indexes):
            outcome = {"error": answer["error"]} if "error" in answer else {"offset": answer["start_offset"] + number}
            records[index] = {"partition": partition, **outcome}
    return folded | {"records": records}


def _size(record: str | JsonRecord) -> int:
    """Return about as many bytes as the record's value has."""
    if isinstance(record, str):
        return len(record)
    if isinstance(record.base64, bytes):
        return len(record.base64)
    value = record.value
    return len(value) if isinstance(value, str) else len(bytes_from_json(value) or b"")


def _remember(known: dict[str, tuple[int, N]], name: str, value: tuple[int, N]) -> None:
    known.pop(name, None)
    if len(known) >= TOPICS_MAX:
        del known[next(iter(known))]
    known[name] = value
