"""`llog produce`: appends lines to a topic."""

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
from llog.errors import InvalidArgument, LlogError, RecordTooLarge

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.log.engine import AppendGroup
    from llog.log.log import Log
    from llog.log.records import Topic

_CHUNK_BYTES = 1 << 20
_CHUNKS_AHEAD = 8
_ROOM_CHECK_SECONDS = 0.2
_LINE_BYTES_MAX = 64 << 20


@click.command(short_help="Append lines of stdin or files to a topic.")
@click.argument("topic")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--key-separator",
    metavar="TEXT",
    help="The text between key and value in each line. Without it, the lines are values without keys.",
)
@click.option("--partition", type=int, help="The partition to append to.  [default: by key, or in turn]")
@click.option(
    "--partitions", type=int, default=1, show_default=True, help="The number of partitions if the topic is new."
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
    """Append every line of FILES, or of standard input, to TOPIC, which is created if it does not exist.

    Lines of one partition keep their order. They are appended in batches: as soon as LLOG_BATCH_MAX_BYTES wait, or the
    first line has waited for LLOG_BATCH_MAX_DELAY_MS. The summary on stderr counts the durable records, also after a
    failure.

    \b
      llog produce logs /var/log/*.log
      printf 'user-1=login\\n' | llog produce events --key-separator = --partitions 4
    """
    if key_separator == "":
        raise InvalidArgument("--key-separator is empty: name the text between key and value")

    from llog.log.catalog import Catalog

    async def append_lines(log: Log, settings: Settings) -> None:
        found = await Catalog(log).get_or_create(topic, partitions)
        separator = None if key_separator is None else key_separator.encode()
        await _append(log, settings, _Router(found, separator, partition), files)

    with_log(invocation, append_lines, create=True)


class _Totals:
    records = 0
    bytes = 0
    appends = 0


async def _append(log: Log, settings: Settings, router: _Router, files: Sequence[Path]) -> None:
    from llog.engines.routing import EngineAppender
    from llog.log.engine import AppendResult
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
                totals.appends += 1
                bar.update(bar.task_ids[0], completed=totals.records)
        finally:
            bar.stop()
            size = format_size(totals.bytes)
            note(f"appended {totals.records} records ({size}) to {router.topic.name} in {totals.appends} appends")


class _Router:
    """Gives every line its partition: the one that was named, else one by its key, else one in turn for each batch."""

    def __init__(self, topic: Topic, separator: bytes | None, partition: int | None) -> None:
        self.topic = topic
        self._separator = separator
        self._partition = partition
        self._turn = 0

    def groups(self, lines: Sequence[bytes]) -> list[AppendGroup]:
        import pyarrow as pa

        from llog.batch.columns import Columns
        from llog.batch.partitioning import partitions_for_keys
        from llog.log.engine import AppendGroup

        if self._separator is None:
            chosen = self._turn % self.topic.partitions if self._partition is None else self._partition
            self._turn += 1
            columns = Columns(pa.array(lines, pa.binary()), None, None, None, ())
            return [AppendGroup(topic=self.topic.name, partition=chosen, records=columns)]
        pairs = [self._split(line) for line in lines]
        keys = pa.array([key for key, _ in pairs], pa.binary())
        values = pa.array([value for _, value in pairs], pa.binary())
        if self._partition is not None:
            columns = Columns(values, keys, None, None, ())
            return [AppendGroup(topic=self.topic.name, partition=self._partition, records=columns)]
        partitions = partitions_for_keys(keys, self.topic.partitions)
        groups = []
        for partition in sorted(set(partitions.tolist())):
            mine = pa.array((partitions == partition).nonzero()[0])
            columns = Columns(values.take(mine), keys.take(mine), None, None, ())
            groups.append(AppendGroup(topic=self.topic.name, partition=partition, records=columns))
        return groups

    def _split(self, line: bytes) -> tuple[bytes, bytes]:
        assert self._separator is not None
        key, separator, value = line.partition(self._separator)
        if not separator:
            raise InvalidArgument(
                f"the line {line[:60].decode(errors='replace')!r} has no key: {self._separator.decode()!r} is not in "
                "it. Correct the line, or --key-separator"
            )
        return key, value


async def line_batches(files: Sequence[Path], settings: Settings) -> AsyncIterator[list[bytes]]:
    """Yield lines, without their ends, in batches that are full or have waited long enough."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
    room = threading.Semaphore(_CHUNKS_AHEAD)

    def read() -> None:
        end: BaseException | None = None
        try:
            for chunk in _chunks(files):
                if not hand_over(chunk):
                    return
        except BaseException as error:  # raised again by the consumer below
            end = error
        hand_over(end)

    def hand_over(item: bytes | BaseException | None) -> bool:
        """Return whether the loop took the item: after Ctrl-C it is closed, or closes while this waits for room."""
        while not room.acquire(timeout=_ROOM_CHECK_SECONDS):
            if loop.is_closed():
                return False
        try:
            loop.call_soon_threadsafe(chunks.put_nowait, item)
        except RuntimeError:
            return False
        return True

    # A daemon, because nothing can interrupt a read from a terminal or a pipe.
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
        *complete, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
        lines += complete
        size += len(chunk)
        if lines and size >= settings.batch_max_bytes:
            yield lines
            lines, size, deadline = [], 0, None
        elif lines and deadline is None:
            deadline = loop.time() + settings.batch_delay_ms / 1000
    if rest:
        lines.append(rest)
    if lines:
        yield lines


def _chunks(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the input as it arrives. The end of a file also ends its last line."""
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
    """Return stdin unbuffered: a read returns what is available, without a lock that the interpreter's exit needs."""
    try:
        return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    except io.UnsupportedOperation:
        return sys.stdin.buffer
