"""The exactly-once sink: a driver that runs batch after batch, and tasks that upload for it in processes of their own.

Every attempt divides its batch anew and marks its records, so that a mix of two attempts would show. A lost or slow
task is run again, and both runs may upload.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from llog.batch.columns import columns_of
from llog.engines.object.sink import SinkUploader, Upload, open_sink, publish
from llog.errors import BlobCollected, LlogError, StaleWrite
from llog.log.log import Log
from llog.model import Record, TopicPartition
from llog.sim.process import Process
from llog.sim.roles import STABLE, raise_unexpected

if TYPE_CHECKING:
    from llog.sim.world import World

SINK = "sink"
_TASK_SECONDS_MAX = 15.0


def batch_size(batch: int) -> int:
    """Return the number of records of a batch, which is the same for every attempt; some batches are empty."""
    return batch * 7 % 6


async def driver(world: World, me: Process, log: Log) -> None:
    """Run batches from the checkpoint on. The checkpoint follows the publication, so a restart may repeat a batch."""
    draw = me.runtime.random()
    attempt = 0
    while True:
        await me.runtime.sleep(draw.expovariate(1.0))
        batch = world.published + 1
        if batch >= world.plan.batches:
            return
        attempt += 1
        try:
            await open_sink(log, SINK)
            uploads = await _run_tasks(world, me, batch, f"{me.name}.{attempt}")
            await publish(log, SINK, batch, uploads)
        except LlogError as error:
            raise_unexpected(error, BlobCollected, StaleWrite)
            continue
        world.published = max(world.published, batch)


async def _run_tasks(world: World, me: Process, batch: int, attempt: str) -> list[Upload]:
    draw = me.runtime.random()
    numbers = list(range(batch_size(batch)))
    tasks = draw.randint(1, 3)
    shares = [share for share in (numbers[part::tasks] for part in range(tasks)) if share]
    return list(await asyncio.gather(*(_upload(world, me, batch, attempt, share) for share in shares)))


async def _upload(world: World, me: Process, batch: int, attempt: str, numbers: list[int]) -> Upload:
    """Run a task, again if it is lost or slow, and return the first upload that is reported."""
    draw = me.runtime.random()
    reported: asyncio.Future[Upload] = asyncio.get_running_loop().create_future()
    shift = draw.randrange(2)
    while True:
        for _ in range(draw.choice((1, 1, 2))):
            world.start_task(lambda task, log: _task(task, log, batch, attempt, numbers, shift, reported))
        done, _ = await asyncio.wait([reported], timeout=_TASK_SECONDS_MAX)
        if done:
            return reported.result()


async def _task(
    me: Process, log: Log, batch: int, attempt: str, numbers: list[int], shift: int, reported: asyncio.Future[Upload]
) -> None:
    groups = []
    for partition in range(2):
        records = [
            Record(payload=f"sink|{SINK}|{batch}|{attempt}|{me.name}|{number}".encode())
            for number in numbers
            if (number + shift) % 2 == partition
        ]
        if records:
            groups.append((TopicPartition(STABLE, partition), columns_of(records)))
    try:
        upload = await SinkUploader(log, SINK).upload(groups)
    except LlogError as error:
        raise_unexpected(error)
        return
    if not reported.done():
        reported.set_result(upload)
