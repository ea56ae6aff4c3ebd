"""The names of topics are found by their ids, also while the catalog cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from llog.errors import LlogError, StoreUnavailable, TopicNotFound
from llog.kafka.topic_ids import TopicIds, UnknownTopicId
from llog.log.catalog import Catalog
from llog.log.records import Topic
from llog.runtime import Runtime

LATER_MS = 10_000


class _Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms


class _Catalog:
    def __init__(self, *topics: Topic) -> None:
        self.all = list(topics)
        self.scans = 0
        self.error: LlogError | None = None

    async def find(self, names: Sequence[str]) -> dict[str, Topic | LlogError]:
        if self.error is not None:
            raise self.error
        by_name = {topic.name: topic for topic in self.all}
        return {name: by_name.get(name, TopicNotFound(name)) for name in names}

    async def topics(self) -> list[Topic]:
        if self.error is not None:
            raise self.error
        self.scans += 1
        return self.all


def _topic(name: str, directory: str) -> Topic:
    return Topic(name=name, partitions=1, directory=directory)


def _ids(catalog: _Catalog, clock: _Clock) -> TopicIds:
    return TopicIds("log", cast(Catalog, catalog), cast(Runtime, clock))


async def test_a_topic_that_was_created_again_is_not_found_by_its_old_id() -> None:
    catalog, clock = _Catalog(_topic("a", "1")), _Clock()
    ids = _ids(catalog, clock)
    old, new = ids.id_of("1"), ids.id_of("2")
    assert await ids.names([old]) == ["a"]
    catalog.all = [_topic("a", "2")]
    clock.ms += LATER_MS
    missing, found = await ids.names([old, new])
    assert isinstance(missing, UnknownTopicId)
    assert found == "a"


async def test_known_names_serve_while_the_catalog_is_away_and_others_get_its_error() -> None:
    catalog, clock = _Catalog(_topic("a", "1")), _Clock()
    ids = _ids(catalog, clock)
    assert await ids.names([ids.id_of("1")]) == ["a"]
    catalog.error = StoreUnavailable("down")
    clock.ms += LATER_MS
    assert await ids.names([ids.id_of("1")]) == ["a"]
    assert await ids.names([ids.id_of("2")]) == [catalog.error]


async def test_ids_that_no_topic_has_do_not_make_the_broker_read_all_topics_each_time() -> None:
    catalog, clock = _Catalog(), _Clock()
    ids = _ids(catalog, clock)
    for _ in range(10):
        (missing,) = await ids.names([ids.id_of("1")])
        assert isinstance(missing, UnknownTopicId)
    assert catalog.scans == 1
