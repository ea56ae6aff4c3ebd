"""Table changes become events of the topics that routes name, in the WriteBatch of the changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from llog.batch.columns import concat
from llog.cdc.changes import Change, TableShape
from llog.cdc.events import Op, messages_of
from llog.cdc.message_ids import EPOCH_MS
from llog.cdc.outbox import RocksOutbox, drop_topic
from llog.cdc.router import Router
from llog.cdc.routes import Route
from llog.engines.rocksdb.keys import META, OUTBOX, OUTBOX_PREFIX, meta_key
from llog.engines.rocksdb.logs import RocksLogs
from llog.engines.rocksdb.store import RocksStore
from llog.errors import InvalidArgument, PartitionNotInitialized, TopicNotFound
from llog.log.engine import Batch
from llog.log.records import Topic
from llog.model import TopicPartition, partition_for_key
from tests.unit.world import START_MS, ManualRuntime

SHAPE = TableShape("chat.messages", ("id", "author", "text"), ("id",))
NOW = START_MS + 100_000_000_000


class DuckEvaluator:
    def __init__(self) -> None:
        self.calls = 0

    def select(
        self, table: str, rows: pa.Table, where: str | None, key: str | None
    ) -> tuple[npt.NDArray[np.int64], pa.StringArray | None]:
        self.calls += 1
        numbered = rows.append_column("row number", pa.array(np.arange(rows.num_rows)))
        found = (
            duckdb.connect()
            .register("numbered", numbered)
            .sql(
                f'SELECT "row number", CAST({key or "NULL"} AS VARCHAR) AS key FROM numbered '
                f'WHERE {where or "true"} ORDER BY "row number"'
            )
            .to_arrow_table()
        )
        keys = found.column("key").combine_chunks() if key else None
        return found.column("row number").to_numpy(), keys


class Bench:
    """A store, its logs and a router."""

    def __init__(self, directory: Path) -> None:
        self.runtime = ManualRuntime()
        self.runtime.now = NOW
        self.store = RocksStore.open(directory)
        self.logs = RocksLogs(self.store, self.runtime)
        self.evaluator = DuckEvaluator()
        self.router = Router(self.store, self.runtime, self.evaluator)

    def route(self, **given: Any) -> Route:
        fields: dict[str, Any] = {
            "topic": "app.new",
            "directory": "app.new",
            "engine": "rocksdb",
            "partitions": 1,
            "table": SHAPE.name,
            "op": "INSERT",
        }
        route = Route(**(fields | given))
        if route.engine == "rocksdb" and self.store.get(META, meta_key(route.directory)) is None:
            self.logs.create(route.directory, b"{}")
        with self.store.mutex:
            changes = self.store.changes()
            self.router.routes.put(changes, [route])
            self.store.write(changes, sync=False)
            self.router.routes.reload()
        return route

    def change(self, *changes: Change) -> bool:
        with self.logs.stage() as staged:
            relayed = self.router.add(staged, changes)
            staged.commit(sync=False)
            return relayed

    def messages(self, topic: str = "app.new", partition: int = 0) -> list[dict[str, Any]]:
        start, end = self.logs.bounds(topic, partition)
        if start == end:
            return []
        runs = self.logs.read(topic, partition, start, 1 << 30)
        batch = Batch(TopicPartition(topic, partition), start, concat([columns for _, columns in runs]))
        found: list[dict[str, Any]] = messages_of(batch).to_pylist()
        return found

    def payloads(self, topic: str = "app.new", partition: int = 0) -> list[Any]:
        return [json.loads(each["payload"]) for each in self.messages(topic, partition)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.store.close()


def table(*rows: tuple[int, str | None, str | None]) -> pa.Table:
    schema = pa.schema([("id", pa.int64()), ("author", pa.string()), ("text", pa.string())])
    return pa.Table.from_pylist([dict(zip(SHAPE.columns, row, strict=True)) for row in rows], schema)


def inserted(*rows: tuple[int, str | None, str | None]) -> Change:
    return Change(SHAPE, Op.INSERT, table(*rows))


def test_an_insert_is_an_event_with_the_key_of_its_row(bench: Bench) -> None:
    bench.route()
    assert not bench.change(inserted((7, "ann", "hi"), (8, "bob", "ho")))
    first, second = bench.messages()
    assert (first["key"], json.loads(first["payload"])) == (b"7", {"id": 7})
    assert (first["op"], first["payload_mode"], first["source_table"]) == ("INSERT", "key", "chat.messages")
    assert (first["offset"], second["offset"]) == (1, 2)
    assert second["message_id"] == first["message_id"] + 1
    assert (first["message_id"] >> 22) + EPOCH_MS == int(first["ts"].timestamp() * 1000) == NOW


def test_each_op_has_the_payload_that_its_route_asks_for(bench: Bench) -> None:
    for op in Op:
        for payload in ("key", "full", "diff"):
            bench.route(topic=payload, directory=payload, op=op.name, payload=payload)
    new, old = table((1, "ann", "new")), table((1, "ann", "old"))
    bench.change(inserted((1, "ann", "old")), Change(SHAPE, Op.UPDATE, new, old), Change(SHAPE, Op.DELETE, new))
    key, row = {"id": 1}, {"id": 1, "author": "ann", "text": "new"}
    assert bench.payloads("key") == [key, key, key]
    assert bench.payloads("full") == [row | {"text": "old"}, row, row]
    assert bench.payloads("diff") == [row | {"text": "old"}, {"id": 1, "text": "new"}, key]
    assert [each["op"] for each in bench.messages("diff")] == ["INSERT", "UPDATE", "DELETE"]


def test_an_update_that_changes_nothing_is_an_event_with_the_key(bench: Bench) -> None:
    bench.route(op="UPDATE", payload="diff")
    bench.change(Change(SHAPE, Op.UPDATE, table((1, "ann", "x")), table((1, "ann", "x"))))
    assert bench.payloads() == [{"id": 1}]


def test_a_diff_without_the_old_rows_is_refused_and_leaves_nothing(bench: Bench) -> None:
    bench.route(op="UPDATE", payload="diff")
    assert bench.router.needs_old(SHAPE.name)
    with pytest.raises(InvalidArgument, match="old rows"):
        bench.change(Change(SHAPE, Op.UPDATE, table((1, "ann", "x"))))
    assert bench.messages() == []


def test_where_keeps_the_rows_for_which_it_is_true(bench: Bench) -> None:
    bench.route(where="text LIKE 'h%'", payload="full")
    bench.change(inserted((1, "a", "hi"), (2, "b", None), (3, "c", "no"), (4, "d", "ho")))
    bench.change(inserted((5, "a", "no")))
    assert [each["id"] for each in bench.payloads()] == [1, 4]
    ids = [each["message_id"] for each in bench.messages()]
    assert ids[1] == ids[0] + 1
    assert bench.evaluator.calls == 2


def test_where_sees_the_new_row_of_an_update_and_filters_the_old_alike(bench: Bench) -> None:
    bench.route(op="UPDATE", where="text = 'new'", payload="diff")
    new, old = table((1, "a", "other"), (2, "b", "new")), table((1, "a", "new"), (2, "x", "old"))
    bench.change(Change(SHAPE, Op.UPDATE, new, old))
    assert bench.payloads() == [{"id": 2, "author": "b", "text": "new"}]


def test_rows_go_to_the_partition_of_their_key_in_their_order(bench: Bench) -> None:
    bench.route(partitions=4)
    rows = [(number, "a", "b") for number in range(100)]
    bench.change(inserted(*rows[:60]), inserted(*rows[60:]))
    assert bench.evaluator.calls == 0
    everything = []
    for partition in range(4):
        found = [each["id"] for each in bench.payloads(partition=partition)]
        assert found == [each for each in range(100) if partition_for_key(str(each).encode(), 4) == partition]
        assert found
        everything += bench.messages(partition=partition)
    by_id = sorted(everything, key=lambda each: int(each["message_id"]))
    assert [int(each["key"]) for each in by_id] == list(range(100))


def test_partition_by_chooses_the_partition_and_the_key_stays(bench: Bench) -> None:
    bench.route(partitions=4, partition_by="author", where="id > 1")
    bench.change(inserted((1, "x", "-"), (2, "ann", "-"), (3, "bob", "-"), (4, None, "-"), (5, "ann", "-")))
    for partition in range(4):
        expected = [
            number
            for number, author in ((2, "ann"), (3, "bob"), (4, ""), (5, "ann"))
            if partition_for_key(author.encode(), 4) == partition
        ]
        assert [int(each["key"]) for each in bench.messages(partition=partition)] == expected


def test_a_topic_of_another_engine_gets_its_events_through_the_outbox(bench: Bench) -> None:
    bench.route(topic="far", directory="far", engine="object", partitions=2)
    bench.route()
    assert bench.change(inserted((1, "a", "b"), (2, "a", "b")), inserted((3, "a", "b")))
    assert [each["key"] for each in bench.messages()] == [b"1", b"2", b"3"]
    keys = [key for key, _ in bench.store.below(OUTBOX, OUTBOX_PREFIX)]
    assert len(keys) == 3
    with bench.store.mutex:
        changes = bench.store.changes()
        drop_topic(changes, "far")
        bench.store.write(changes, sync=False)
    assert bench.store.items(OUTBOX, b"", b"~") == []


async def test_outbox_entries_are_in_the_order_of_the_changes_and_as_many_as_fit(bench: Bench) -> None:
    bench.route(topic="far", directory="far", engine="disk", payload="full")
    for number in range(1, 41):
        bench.change(inserted((number, "a", "x" * 1000)))
    outbox = RocksOutbox(bench.store, bench.runtime)
    assert await outbox.partitions() == [("far", 0)]
    assert [each.key for each in await outbox.entries("far", 0, 2, 20, 1 << 20)] == [b"%d" % n for n in range(3, 23)]
    assert len(await outbox.entries("far", 0, 0, 1000, 10_000)) == 9
    assert len(await outbox.entries("far", 0, 0, 1000, 1)) == 1
    assert {each.timestamp_ms for each in await outbox.entries("far", 0, 0, 100, 1 << 20)} == {NOW}


def test_sequences_of_the_outbox_grow_after_changes_that_were_given_up_and_a_restart(
    bench: Bench, tmp_path: Path
) -> None:
    bench.route(topic="far", directory="far", engine="object")
    with bench.logs.stage() as staged:
        bench.router.add(staged, [inserted((1, "a", "b"))])
    bench.change(inserted((2, "a", "b")))
    bench.router = Router(bench.store, bench.runtime, bench.evaluator)
    bench.change(inserted((3, "a", "b")))
    assert [int(key[-20:]) for key, _ in bench.store.below(OUTBOX, OUTBOX_PREFIX)] == [2, 3]


def test_changes_without_a_route_or_rows_cost_no_id(bench: Bench) -> None:
    bench.route(op="DELETE")
    assert bench.router.has_routes(SHAPE.name, Op.DELETE)
    assert not bench.router.has_routes(SHAPE.name, Op.INSERT)
    with bench.logs.stage() as staged:
        bench.router.add(staged, [inserted((1, "a", "b")), Change(SHAPE, Op.DELETE, table())])
        assert len(staged.changes) == 0


def test_a_source_that_is_added_again_replaces_its_route(bench: Bench) -> None:
    bench.route(payload="full")
    newer = bench.route(payload="key", where="id > 1")
    assert bench.router.routes.all() == [newer]
    assert bench.router.routes.of(SHAPE.name, Op.INSERT) == (newer,)


def test_routes_are_dropped_by_source_and_by_topic(bench: Bench) -> None:
    routes = bench.router.routes

    def dropping(drop: Any) -> list[tuple[str, str, str]]:
        with bench.store.mutex:
            changes = bench.store.changes()
            dropped = drop(changes)
            bench.store.write(changes, sync=False)
            routes.reload()
        return [(route.directory, route.table, route.op) for route in dropped]

    for directory in ("a", "a.b", "a~2"):
        for name in ("s.t", "s.u"):
            for op in Op:
                bench.route(directory=directory, table=name, op=op.name)
    assert dropping(lambda changes: routes.drop(changes, "a", "s.t", [Op.UPDATE])) == [("a", "s.t", "UPDATE")]
    assert [route.directory for route in routes.of("s.t", Op.UPDATE)] == ["a.b", "a~2"]
    assert len(dropping(lambda changes: routes.drop(changes, "a", "s.t"))) == 2
    assert len(dropping(lambda changes: routes.drop_topic(changes, "a"))) == 3
    assert {route.directory for route in routes.all()} == {"a.b", "a~2"}


def test_routes_follow_topics_that_grew_and_that_are_gone(bench: Bench) -> None:
    bench.route(directory="app.new", partitions=1)
    bench.route(directory="gone", topic="gone")
    again = Topic(name="gone", partitions=1, incarnation=2, directory="gone~2", engine="rocksdb")
    grown = Topic(name="app.new", partitions=3, directory="app.new", engine="rocksdb")
    with bench.store.mutex:
        changes = bench.store.changes()
        assert bench.router.routes.follow(changes, [grown, again])
        bench.store.write(changes, sync=False)
        bench.router.routes.reload()
    [route] = bench.router.routes.of(SHAPE.name, Op.INSERT)
    assert (route.directory, route.partitions) == ("app.new", 3)
    assert not bench.router.routes.follow(bench.store.changes(), [grown, again])


def test_a_topic_that_was_removed_with_its_routes_gets_no_events_and_others_do(bench: Bench) -> None:
    bench.route(topic="a", directory="a")
    bench.route(topic="b", directory="b")
    bench.logs.remove("a")
    bench.change(inserted((1, "a", "b")))
    assert bench.payloads("b") == [{"id": 1}]
    assert [route.directory for route in bench.router.routes.of(SHAPE.name, Op.INSERT)] == ["b"]


def test_a_route_to_a_topic_that_is_missing_refuses_the_change(bench: Bench) -> None:
    bench.route()
    with bench.store.mutex:
        changes = bench.store.changes()
        changes.delete(META, meta_key("app.new"))
        bench.store.write(changes, sync=False)
    with pytest.raises(PartitionNotInitialized):
        bench.change(inserted((1, "a", "b")))


def test_no_route_is_made_to_a_topic_that_was_just_removed(bench: Bench) -> None:
    route = bench.route()
    bench.logs.remove("app.new")
    with pytest.raises(TopicNotFound):
        bench.router.routes.put(bench.store.changes(), [route])


def test_more_rows_than_one_ms_has_ids_get_ids_of_several(bench: Bench) -> None:
    bench.route()
    bench.change(inserted(*((number, "a", "b") for number in range(5000))))
    ids = [each["message_id"] for each in bench.messages()]
    assert len(set(ids)) == 5000
    assert ids == sorted(ids)
    bench.runtime.now -= 60_000
    bench.router = Router(bench.store, bench.runtime, bench.evaluator)
    bench.change(inserted((5000, "a", "b")))
    assert bench.messages()[-1]["message_id"] > ids[-1]
