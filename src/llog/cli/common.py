"""What the commands share: opening the log, option types with units, and the output of tables, JSON and progress."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from llog.base.units import parse_duration_ms, parse_size
from llog.config import Settings
from llog.config.loading import load_settings
from llog.errors import InvalidArgument
from llog.model import TopicPartition

if TYPE_CHECKING:
    from rich.progress import Progress

    from llog.log.log import Log

R = TypeVar("R")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


class Invocation(msgspec.Struct, frozen=True):
    """The top-level options. Settings are loaded when a command needs them, so that `--help` always works."""

    overrides: dict[str, str | None]
    config_file: Path | None

    def settings(self) -> Settings:
        return load_settings(dict(self.overrides), config_file=self.config_file)


def with_log(
    invocation: Invocation,
    operation: Callable[[Log, Settings], Awaitable[R]],
    *,
    create: bool = False,
    reads_only: bool = False,
) -> R:
    """Return the result of `operation` on the log that the settings name.

    Raises `LogNotFound` if the log does not exist, unless `create` allows to create it. `reads_only` is that of
    `open_log`.
    """
    from llog.log.opening import opened_log, require_log

    async def run() -> R:
        settings = invocation.settings()
        if not create:
            require_log(settings)
        note_if_new = new_log_notice(settings) if create else None
        async with opened_log(settings, reads_only=reads_only) as log:
            if note_if_new is not None:
                note_if_new()
            return await operation(log, settings)

    return asyncio.run(run())


async def partitions_of(log: Log, topic: str | None, partition: int | None = None) -> list[TopicPartition]:
    """Return the partitions that a command names: one, all of a topic, or all of the log."""
    from llog.log.catalog import Catalog

    catalog = Catalog(log)
    if topic is None:
        if partition is not None:
            raise InvalidArgument("--partition needs a TOPIC: name one, or leave --partition out")
        return [TopicPartition(each.name, p) for each in await catalog.topics() for p in range(each.partitions)]
    if partition is not None:
        tp = TopicPartition(topic, partition)
        await catalog.directory(tp)
        return [tp]
    return [TopicPartition(topic, p) for p in range((await catalog.get(topic)).partitions)]


class _Unit(click.ParamType[int]):
    def __init__(self, name: str, parse: Callable[[str], int]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return self._parse(value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)


DURATION = _Unit("duration", parse_duration_ms)
SIZE = _Unit("size", parse_size)


def print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(_with_defaults(value))))


def _with_defaults(value: object) -> object:
    """Return the value with all fields of its structs, as stored: stored records leave out those at their defaults."""
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {stored: _with_defaults(getattr(value, name)) for stored, name in names}
    if isinstance(value, dict):
        return {key: _with_defaults(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_defaults(each) for each in value]
    return value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table: folded to the width of a terminal, and at its full width into a pipe or file."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    if sys.stdout.isatty():
        Console(highlight=False).print(table)
        return
    console = Console(file=sys.stdout, width=10_000, highlight=False)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def note(message: str) -> None:
    """Print a message to stderr: stdout is for data."""
    click.echo(message, err=True)


def report(message: str) -> None:
    """Log what a process that goes on has met, in one line."""
    logging.getLogger("llog.service").info("%s", " ".join(message.split()))


def note_new_log(settings: Settings) -> None:
    """Print a notice if the log does not exist yet."""
    new_log_notice(settings)()


def new_log_notice(settings: Settings, log: Callable[[str], None] | None = None) -> Callable[[], None]:
    """Return a function that prints or logs that the log is new, if it does not exist at the time of this call."""
    from llog.log.opening import log_exists

    if log_exists(settings):
        return lambda: None
    message = f"this is a new log: metadata in {settings.meta}, blobs in {settings.blobs}"
    return lambda: note(f"llog: {message}") if log is None else log(message)


def progress(description: str, *, total: int | None = None) -> Progress:
    """Return a progress bar with one task, whose id is 0. It appears on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    counted = MofNCompleteColumn() if total is not None else TextColumn("{task.completed:,.0f}")
    console = Console(file=sys.stderr)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        counted,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    bar.add_task(description, total=total)
    return bar


def format_time(ms: int | None) -> str:
    """Return a time in milliseconds as ISO 8601 in UTC; an empty string for 0 and None."""
    if not ms:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
