"""`llog produce`: lines into a topic."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from llog.base.units import format_size
from llog.cli.common import Invocation, note, progress, with_log
from llog.errors import InvalidArgument, LlogError, RecordTooLarge, TopicExists, TopicNotFound

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.engines.port import Group
    from llog.log.log import Log
    from llog.log.records import Topic

_CHUNK_BYTES = 1 << 20
_CHUNKS_AHEAD = 8
_ROOM_SECONDS = 0.2
_LINE_BYTES_MAX = 64 << 20


@click.command(short_help="Append lines from stdin or files to a topic.")
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--key-separator", metavar="TEXT", help="Each line is a key, this, and a value. Without it, lines have no key."
)
@click.option("--partition", type=int, help="Append to this partition instead of choosing one by key or in turn.")
@click.option(
    "--partitions", type=int, default=1, show_default=True, help="If the topic is new: with so many partitions."
)
@click.pass_obj
def produce(
    invocation: Invocation,
    topic: str,
    files: tuple[Path, ...],
    key_separator: str | None,
    partition: int | None,
    partitions: int,
) -> None:
    """Append every line of FILES, or of standard input, to TOPIC, which is created if need be.

    Lines of one partition keep their order. They are appended in batches: when LLOG_BATCH_MAX_BYTES wait, or when the
    first has waited LLOG_BATCH_MAX_DELAY_MS. The summary on stderr counts what is durable; after a failure, too.

    \b
      llog produce logs /var/log/*.log
      printf 'user-1=login\\n' | llog produce events --key-separator = --partitions 4
    """
    if key_separator == "":
        raise InvalidArgument("--key-separator is empty: name the text between key and value")

    async def produced(log: Log, settings: Settings) -> None:
        found = await _topic(log, topic, partitions)
        separator = None if key_separator is None else key_separator.encode()
        await _append(log, settings, _Router(found, separator, partition), files)

    with_log(invocation, produced, create=True)


class _Totals:
    records = 0
    bytes = 0
    blobs = 0


async def _topic(log: Log, name: str, partitions: int) -> Topic:
    from llog.log.catalog import Catalog

    catalog = Catalog(log)
    try:
        return await catalog.get(name)
    except TopicNotFound:
        try:
            return await catalog.create(name, partitions)
        except TopicExists:
            return await catalog.get(name)


async def _append(log: Log, settings: Settings, router: _Router, files: Sequence[Path]) -> None:
    from llog.engines.port import AppendResult
    from llog.engines.routing import EngineAppender
    from llog.log.opening import writer_options

    appender = EngineAppender(log, writer_options(settings))
    totals = _Totals()
    with progress("records appended") as bar:
        try:
            async for lines in line_batches(files, settings):
                results = await appender.append(router.groups(lines))
                for result in results:
                    if isinstance(result, AppendResult):
                        totals.records += result.end_offset - result.start_offset + 1
                failed = next((result for result in results if isinstance(result, LlogError)), None)
                if failed is not None:
                    raise failed
                totals.bytes += sum(map(len, lines))
                totals.blobs += 1
                bar.update(bar.task_ids[0], completed=totals.records)
        finally:
            bar.stop()
            size = format_size(totals.bytes)
            note(f"appended {totals.records} records ({size}) to {router.topic.name} in {totals.blobs} appends")


class _Router:
    """Gives every line its partition: the one asked for, by its key, or in turn from batch to batch."""

    def __init__(self, topic: Topic, separator: bytes | None, partition: int | None) -> None:
        self.topic = topic
        self._separator = separator
        self._partition = partition
        self._turn = 0

    def groups(self, lines: Sequence[bytes]) -> list[Group]:
        import pyarrow as pa

        from llog.batch.columns import Columns
        from llog.batch.partitioning import partitions_for_keys
        from llog.engines.port import Group

        if self._separator is None:
            chosen = self._turn % self.topic.partitions if self._partition is None else self._partition
            self._turn += 1
            columns = Columns(pa.array(lines, pa.binary()), None, None, None, ())
            return [Group(topic=self.topic.name, partition=chosen, records=columns)]
        pairs = [self._split(line) for line in lines]
        keys = pa.array([key for key, _ in pairs], pa.binary())
        values = pa.array([value for _, value in pairs], pa.binary())
        if self._partition is not None:
            columns = Columns(values, keys, None, None, ())
            return [Group(topic=self.topic.name, partition=self._partition, records=columns)]
        partitions = partitions_for_keys(keys, self.topic.partitions)
        groups = []
        for partition in sorted(set(partitions.tolist())):
            mine = pa.array((partitions == partition).nonzero()[0])
            columns = Columns(values.take(mine), keys.take(mine), None, None, ())
            groups.append(Group(topic=self.topic.name, partition=partition, records=columns))
        return groups

    def _split(self, line: bytes) -> tuple[bytes, bytes]:
        assert self._separator is not None
        key, separator, value = line.partition(self._separator)
        if not separator:
            raise InvalidArgument(
                f"the line {line[:60].decode(errors='replace')!r} has no key: {self._separator.decode()!r} is not in it"
            )
        return key, value


async def line_batches(files: Sequence[Path], settings: Settings) -> AsyncIterator[list[bytes]]:
    """Lines, without their ends, in batches that are full or have waited long enough."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
    room = threading.Semaphore(_CHUNKS_AHEAD)

    def read() -> None:
        end: BaseException | None = None
        try:
            for chunk in _chunks(files):
                if not hand_over(chunk):
                    return
        except BaseException as error:  # told to the consumer below
            end = error
        hand_over(end)

    def hand_over(item: bytes | BaseException | None) -> bool:
        """Whether anybody still wants it: after Ctrl-C the loop is closed, or closes while this waits for room."""
        while not room.acquire(timeout=_ROOM_SECONDS):
            if loop.is_closed():
                return False
        try:
            loop.call_soon_threadsafe(chunks.put_nowait, item)
        except RuntimeError:
            return False
        return True

    # A daemon, for nothing can interrupt a read from a terminal or a pipe.
    threading.Thread(target=read, name="llog-produce", daemon=True).start()
    lines: list[bytes] = []
    size, rest = 0, b""
    deadline: float | None = None
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await chunks.get()
                room.release()
        except TimeoutError:
            yield lines
            lines, size, deadline = [], 0, None
            continue
        if isinstance(chunk, BaseException):
            raise chunk
        if chunk is None:
            break
        if len(rest) > _LINE_BYTES_MAX:
            raise RecordTooLarge(f"a line is longer than {format_size(_LINE_BYTES_MAX)}: is the input made of lines?")
        *whole, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
        lines += whole
        size += len(chunk)
        if lines and size >= settings.batch_max_bytes:
            yield lines
            lines, size, deadline = [], 0, None
        elif lines and deadline is None:
            deadline = loop.time() + settings.batch_max_delay_ms / 1000
    if rest:
        lines.append(rest)
    if lines:
        yield lines


def _chunks(files: Sequence[Path]) -> Iterator[bytes]:
    """What can be read, as it comes. A file ends its last line even if it has no line end."""
    if not files:
        with _standard_input() as stream:
            yield from iter(lambda: stream.read(_CHUNK_BYTES), b"")
    for path in files:
        last = b"\n"
        with path.open("rb", buffering=0) as file:
            for last in iter(lambda: file.read(_CHUNK_BYTES), b""):
                yield last
        if not last.endswith(b"\n"):
            yield b"\n"


def _standard_input() -> IO[bytes]:
    """Unbuffered: a read gives what there is, and holds no lock that the interpreter would want at its end."""
    try:
        return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    except io.UnsupportedOperation:
        return sys.stdin.buffer
