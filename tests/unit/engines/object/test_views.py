"""What views keep of many partitions: no more than reads need, within bounds."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import msgspec
import pytest

from llog.engines.object import views as module
from llog.engines.object.reader import Reader
from llog.engines.object.views import Read, View, Views
from llog.engines.object.writer import Writer
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult, WriterOptions
from llog.log.inline import InlineLimits
from llog.log.record_producers import RecordProducer
from llog.model import Record, TopicPartition
from tests.unit.world import World

PARTITIONS = 20
VALUE_BYTES = 3_000
WIDE = [TopicPartition("wide", partition) for partition in range(PARTITIONS)]


@pytest.fixture
async def views(world: World) -> AsyncIterator[Views]:
    """The views of a process on a topic with an inline append in each of its partitions."""
    await Catalog(world.log).create("wide", PARTITIONS)
    await append(world, *WIDE)
    views = Views(world.log, 60_000, Reader(world.log))
    yield views
    await views.close()


def value_of(tp: TopicPartition) -> bytes:
    return random.Random(tp.partition).randbytes(VALUE_BYTES)


async def append(world: World, *tps: TopicPartition, producer: RecordProducer | None = None) -> None:
    limits = InlineLimits(group_bytes_max=16_000, flush_bytes_max=1 << 20)
    writer = Writer(world.log, WriterOptions(inline=limits))
    for tp in tps:
        group = AppendGroup(**tp._asdict(), records=[Record(payload=value_of(tp))], producer=producer)
        (appended,) = await writer.append([group])
        assert isinstance(appended, AppendResult)


async def look(views: Views, *tps: TopicPartition) -> list[View]:
    found = await views.look([Read(tp, 1) for tp in tps], views.now())
    assert all(isinstance(each, View) for each in found.values())
    return [each for each in found.values() if isinstance(each, View)]


def kept_bytes(found: list[View]) -> int:
    return sum(len(msgspec.json.encode(view)) for view in found)


async def test_a_view_has_what_a_read_of_inline_records_needs(world: World, views: Views) -> None:
    (view,) = await look(views, WIDE[3])
    world.meta.counts.count.clear()
    (batch,) = await views.read(WIDE[3], view, 1, 1 << 20)
    assert batch.columns.values.to_pylist() == [value_of(WIDE[3])]
    assert world.meta.counts.count == {"ceiling": 1}


async def test_views_keep_a_bounded_number_of_inline_bytes(
    world: World, views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = 5 * VALUE_BYTES
    monkeypatch.setattr(module, "INLINE_BYTES_MAX", allowed)
    await look(views, *WIDE)
    found = await look(views, *WIDE)
    assert kept_bytes(found) < allowed + 1_000 * PARTITIONS
    assert sum(view.pending is not None for view in found) >= 2, "there is room for some"
    for tp, view in zip(WIDE, found, strict=True):
        (batch,) = await views.read(tp, view, 1, 1 << 20)
        assert batch.columns.values.to_pylist() == [value_of(tp)]


async def test_views_that_are_forgotten_make_room_for_inline_bytes(
    world: World, views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INLINE_BYTES_MAX", 10 * VALUE_BYTES)
    monkeypatch.setattr(module, "VIEWS_MAX", 3)
    for tp in WIDE * 3:
        (view,) = await look(views, tp)
        assert view.pending is not None


async def test_a_view_keeps_nothing_of_producers(world: World, views: Views) -> None:
    await append(world, WIDE[0], producer=RecordProducer(id="a" * 200, sequence=0))
    (view,) = await look(views, WIDE[0])
    assert view.pending is not None
    assert b"a" * 200 not in msgspec.json.encode(view)


async def test_an_append_of_this_process_replaces_the_inline_bytes_of_the_view(world: World, views: Views) -> None:
    (view,) = await look(views, WIDE[0])
    await append(world, WIDE[0])
    views.note_append(view.directory, 0, 3)
    (view,) = await look(views, WIDE[0])
    assert view.bounds is not None
    assert (view.bounds.next_offset, view.pending) == (3, None)
    batches = await views.read(WIDE[0], view, 1, 1 << 20)
    assert sum(batch.columns.count for batch in batches) == 2
