"""The exactly-once sink at work: a driver that runs batch after batch, and tasks that upload for it in processes of
their own.

Every attempt cuts its batch anew and marks its records, so that a mix of two attempts would show. A task may be lost or
slow: then it is run again, and both of them may upload.
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
from llog.sim.roles import STABLE, met

if TYPE_CHECKING:
    from llog.sim.world import World

SINK = "sink"
_TASK_SECONDS_MAX = 15.0


def batch_size(batch: int) -> int:
    """How many records a batch has, whoever cuts it: some have none."""
    return batch * 7 % 6


async def driver(world: World, me: Process, log: Log) -> None:
    """Batches from the checkpoint on. It is written after the batch is published, so a restart may repeat one."""
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
            met(error, BlobCollected, StaleWrite)
            continue
        world.published = max(world.published, batch)


async def _run_tasks(world: World, me: Process, batch: int, attempt: str) -> list[Upload]:
    draw = me.runtime.random()
    numbers = list(range(batch_size(batch)))
    tasks = draw.randint(1, 3)
    shares = [share for share in (numbers[part::tasks] for part in range(tasks)) if share]
    return list(await asyncio.gather(*(_upload(world, me, batch, attempt, share) for share in shares)))


async def _upload(world: World, me: Process, batch: int, attempt: str, numbers: list[int]) -> Upload:
    """The upload of the first of this task's runs to report one."""
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
        met(error)
        return
    if not reported.done():
        reported.set_result(upload)
