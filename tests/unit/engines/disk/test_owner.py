"""Disk topics among processes with directories of their own: each topic is where it was made, and one broker answers
for a directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from llog.config import Settings
from llog.engines.object.collector import Collector
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import LlogError, LogOwned, OwnerUnavailable, TopicExists
from llog.log.catalog import DISK, Catalog
from llog.log.engine import AppendGroup, AppendResult
from llog.log.log import Log
from llog.log.opening import open_log, opened_log
from llog.log.records import Topic
from llog.model import Record, TopicPartition

A, B = "http://a:1", "http://b:1"
TP = TopicPartition("t", 0)


class Machines:
    """Processes on one metadata store, with the directory of the machine that each is on."""

    def __init__(self, root: Path, stack: AsyncExitStack) -> None:
        self._root = root
        self._stack = stack

    def settings(self, machine: str) -> Settings:
        return Settings(data_dir=str(self._root / "data"), segments_dir=str(self._root / machine))

    async def broker(self, machine: str, address: str) -> Log:
        opened = opened_log(self.settings(machine), is_broker=True, address=address)
        return await self._stack.enter_async_context(opened)

    async def program(self, machine: str) -> Log:
        return await self._stack.enter_async_context(opened_log(self.settings(machine)))


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    async with AsyncExitStack() as stack:
        yield Machines(tmp_path, stack)


async def append(log: Log, value: bytes = b"x") -> AppendResult | LlogError:
    (result,) = await EngineAppender(log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=value)])])
    return result


async def refused(call: Awaitable[object], kind: type[LlogError] = LogOwned) -> LlogError:
    with pytest.raises(kind) as found:
        await call
    return found.value


async def test_a_topic_is_used_through_the_broker_of_its_machine(machines: Machines) -> None:
    here, there = await machines.broker("1", A), await machines.broker("2", B)
    await Catalog(here).create("t", engine=DISK)
    assert isinstance(await append(here), AppendResult)
    for log in (there, await machines.program("2")):
        answers = [
            await append(log),
            await refused(EngineReader(log).bounds(TP)),
            await refused(Catalog(log).delete("t")),
            await refused(Catalog(log).add_partitions("t", 2)),
        ]
        assert all(isinstance(each, LogOwned) and each.address == A for each in answers)
    assert (await Catalog(here).get("t")).partitions == 1


async def test_without_a_broker_on_its_machine_a_topic_waits(machines: Machines, tmp_path: Path) -> None:
    async with opened_log(machines.settings("1"), is_broker=True, address=A) as here:
        await Catalog(here).create("t", engine=DISK)
        await append(here)
    there = await machines.broker("2", B)
    await refused(EngineReader(there).bounds(TP), OwnerUnavailable)
    await refused(Catalog(there).delete("t"), OwnerUnavailable)
    (tmp_path / "2" / "t").mkdir(parents=True)  # what a creation that lost its race leaves there is not the topic
    await refused(EngineReader(there).bounds(TP), OwnerUnavailable)
    again = await machines.broker("1", A)
    assert await EngineReader(again).bounds(TP) == (1, 2)


async def test_a_deletion_is_finished_on_the_machine_that_has_the_files(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = await machines.broker("1", A), await machines.broker("2", B)
    await Catalog(here).create("t", engine=DISK)
    with monkeypatch.context() as patched:

        async def fail(*_: object) -> None:
            raise OwnerUnavailable("killed in the middle")

        patched.setattr(Catalog, "_sweep", fail)
        await refused(Catalog(here).delete("t"), OwnerUnavailable)
    assert (tmp_path / "1" / "t").is_dir()
    await Collector(there).collect_once()
    assert (tmp_path / "1" / "t").is_dir(), "another machine has nothing to sweep, and must not say that all is swept"
    await Collector(here).collect_once()
    assert not (tmp_path / "1" / "t").exists()


async def test_two_machines_that_create_a_topic_at_once_make_one(machines: Machines) -> None:
    here, there = await machines.broker("1", A), await machines.broker("2", B)
    made = await asyncio.gather(
        *(Catalog(log).create("t", engine=DISK) for log in (here, there)), return_exceptions=True
    )
    winner = next(log for log, result in zip((here, there), made, strict=True) if isinstance(result, Topic))
    loser = there if winner is here else here
    assert [isinstance(result, TopicExists) for result in made].count(True) == 1
    assert isinstance(await append(winner), AppendResult)
    assert isinstance(await append(loser), LogOwned), "though a directory of that name may be there"


async def test_one_broker_answers_for_a_directory_and_others_read_beside_it(machines: Machines) -> None:
    first, second = await machines.broker("1", A), await machines.broker("1", B)
    await Catalog(first).create("t", engine=DISK)
    await Catalog(first).create("other", engine=DISK)
    assert isinstance(await append(first), AppendResult)
    group = AppendGroup(topic="other", partition=0, records=[Record(payload=b"x")])
    (other,) = await EngineAppender(second).append([group])
    assert isinstance(other, LogOwned), "though nobody has that partition open"
    assert other.address == A
    assert await EngineReader(second).bounds(TP) == (1, 2)


async def test_a_program_of_the_machine_learns_the_address_of_the_broker_that_has_a_partition(
    machines: Machines,
) -> None:
    broker, program = await machines.broker("1", A), await machines.program("1")
    await Catalog(broker).create("t", engine=DISK)
    await append(broker)
    answer = await append(program)
    assert isinstance(answer, LogOwned)
    assert answer.address == A
    assert "POST /produce" in str(answer)


async def test_the_next_process_with_the_directory_owns_it_at_once(machines: Machines) -> None:
    """A killed broker leaves a lease, whose session has not ended; its locks went with it."""
    before = await open_log(machines.settings("1"), is_broker=True, address=A)
    await Catalog(before).create("t", engine=DISK)
    await append(before)
    await before.engines[DISK].close()  # the files only: the session goes on
    after = await machines.broker("1", B)
    assert isinstance(await append(after), AppendResult)
    there = await machines.broker("2", "http://c:1")
    assert isinstance(found := await refused(EngineReader(there).bounds(TP)), LogOwned)
    assert found.address == B
    assert before.owners is not None
    await before.owners.close()
    await before.meta.close()
    await before.blobs.close()
