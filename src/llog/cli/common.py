"""What the command groups share: settings from the top-level options, units as option types, and how results are
shown.
"""

from __future__ import annotations

import asyncio
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

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


class Invocation(msgspec.Struct, frozen=True):
    """The top-level options, kept until a command needs them: `--help` must work however the environment looks."""

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
    """Open the log that the settings name for as long as the operation runs; only with `create` may it be a new one.

    `reads_only` is that of `open_log`.
    """
    from llog.log.opening import opened_log, require_log

    async def opened() -> R:
        settings = invocation.settings()
        if not create:
            require_log(settings)
        note_new = noting_new_log(settings) if create else None
        async with opened_log(settings, reads_only=reads_only) as log:
            if note_new is not None:
                note_new()
            return await operation(log, settings)

    return asyncio.run(opened())


async def partitions_of(log: Log, topic: str | None, partition: int | None = None) -> list[TopicPartition]:
    """The partitions that a command is about: one, all of a topic, or all there are."""
    from llog.log.catalog import Catalog

    catalog = Catalog(log)
    if topic is None:
        if partition is not None:
            raise InvalidArgument("--partition needs a TOPIC")
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
    click.echo(msgspec.json.format(msgspec.json.encode(_whole(value))))


def _whole(value: object) -> object:
    """With the fields that are at their defaults, which stored records leave out and a reader of JSON would miss."""
    if isinstance(value, msgspec.Struct):
        return {name: _whole(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(each) for each in value]
    return value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """A table on a terminal; in a pipe the same columns, never cut to a width nobody asked for."""
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
    """For people: on stderr, so that stdout stays data."""
    click.echo(message, err=True)


def note_new_log(settings: Settings) -> None:
    """Say that opening this log makes it, if it does."""
    noting_new_log(settings)()


def noting_new_log(settings: Settings) -> Callable[[], None]:
    """Return what says, later, that this log is new if there is none now."""
    from llog.log.opening import log_exists

    if log_exists(settings):
        return lambda: None
    return lambda: note(f"llog: this is a new log: metadata in {settings.meta}, blobs in {settings.blobs}")


def progress(description: str, *, total: int | None = None) -> Progress:
    """A bar on stderr that only a terminal gets to see; with one task, whose id is 0."""
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


def shown_time(ms: int | None) -> str:
    if not ms:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
