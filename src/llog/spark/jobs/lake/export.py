"""Exports a topic to a table, incrementally and exactly once: `llog pipeline export`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from llog.config import Settings
from llog.errors import ConfigurationError
from llog.spark.jobs.lake.decoder import Decoding
from llog.spark.jobs.lake.files import LakeFile, Layout, Shape, write_files
from llog.spark.jobs.lake.topic_table import (
    Limits,
    Parallel,
    Source,
    TablePosition,
    check_source,
    local_directory,
    planned_step,
    source_of,
    target_of,
)
from llog.spark.process import run

Format = Literal["parquet", "delta", "iceberg"]
FORMATS: Final[tuple[Format, ...]] = ("parquet", "delta", "iceberg")


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    format: Format
    to: str
    name: str | None = None
    file_bytes: int = 128 << 20
    """The approximate size of a file."""
    commit_bytes: int = 4 << 30
    """The approximate number of stored bytes that go into one commit."""
    decoding: Decoding | None = None
    headers: bool = False
    allow_gaps: bool = False


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of what one run added to the table."""

    topic: str
    table: str
    records: int
    files: int
    bytes: int
    commits: int
    seconds: float
    positions: dict[int, int]
    """The next offset of each partition after the run."""


class LakeTable(Protocol):
    """A table of records that stores its position in the topic."""

    def position(self) -> TablePosition | None:
        """Return the current position, on which the next commit is conditional; None if the table is empty."""
        ...

    def begin(self) -> Layout:
        """Return where to write the files of the next commit."""
        ...

    def commit(self, position: TablePosition, files: Sequence[LakeFile]) -> None:
        """Add the files and move the position atomically; raise `StaleWrite` if another exporter has moved it."""
        ...


def export(
    settings: Settings,
    options: ExportOptions,
    parallel: Parallel,
    *,
    committed: Callable[[TablePosition], None] = lambda position: None,
) -> ExportResult:
    """Add the records up to the present end of the topic to the table. `committed` is called after every commit.

    The export may be killed at any point and run again. If two write to one table, one of them raises `StaleWrite`.
    """
    began = time.monotonic()
    source = run(settings, lambda log: source_of(log, options.topic))
    target = run(settings, lambda log: target_of(log, source))
    where, table = open_table(options, source)
    limits = Limits(
        commit_bytes_max=options.commit_bytes, task_bytes_max=options.file_bytes, allow_gaps=options.allow_gaps
    )
    position = table.position()
    if position is not None:
        check_source(where, position, source)
    done: list[LakeFile] = []
    commits = 0
    while True:
        with planned_step(settings, source, position, target, limits) as step:
            if not step.tasks:
                break
            work = partial(
                write_files, settings=settings, layout=table.begin(), fail_on_data_loss=not options.allow_gaps
            )
            files = [file for written in parallel(work, step.tasks) for file in written]
        if files:
            table.commit(step.after, files)
            commits += 1
            committed(step.after)
        done += files
        position = step.after
    return ExportResult(
        topic=options.topic,
        table=where,
        records=sum(file.records for file in done),
        files=len(done),
        bytes=sum(file.bytes for file in done),
        commits=commits,
        seconds=time.monotonic() - began,
        positions={} if position is None else position.offsets,
    )


def open_table(options: ExportOptions, source: Source) -> tuple[str, LakeTable]:
    """Return the name of the table in messages, and the table."""
    if min(options.file_bytes, options.commit_bytes) < 1:
        raise ConfigurationError("the sizes of files and of commits must be at least one byte")
    shape = Shape(options.decoding, options.headers)
    if len({name.lower() for name in shape.schema.names}) < len(shape.schema.names):
        raise ConfigurationError(f"two columns have the same name but for their case: {', '.join(shape.schema.names)}")
    root = local_directory(options.to, "an export")
    if options.format == "iceberg":
        from llog.spark.jobs.lake.iceberg import IcebergTable, table_name

        name = table_name(options.topic, options.name)
        return f"{root} ({name})", IcebergTable(root, name, shape, options.file_bytes)
    root = _table_directory(root, options.name)
    if options.format == "delta":
        from llog.spark.jobs.lake.delta import DeltaTable

        return str(root), DeltaTable(root, source, shape, options.file_bytes)
    from llog.spark.jobs.lake.parquet import ParquetTable

    return str(root), ParquetTable(root, shape, options.file_bytes)


def _table_directory(root: Path, name: str | None) -> Path:
    if name is not None and (not name or "/" in name or name.startswith((".", "_"))):
        raise ConfigurationError(f"--name {name!r} must be the name of a directory, not beginning with '.' or '_'")
    return root if name is None else root / name
