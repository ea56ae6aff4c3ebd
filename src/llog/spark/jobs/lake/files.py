"""The Parquet files that a task writes: by day and partition, near a target size, in the order of the offsets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from llog.base.durable import sync_directory
from llog.batch.columns import HEADERS_TYPE
from llog.config import Settings
from llog.errors import StaleWrite
from llog.spark.fetcher import fetch_ranges
from llog.spark.jobs.lake.decoder import Decode, Decoding, decoded_columns, decoder
from llog.spark.planner import ReadTask
from llog.spark.process import iterate
from llog.spark.schema import to_arrow

ROW_GROUP_BYTES: Final = 32 << 20
"""The size in memory of the rows that are gathered for one file before they are written."""
_BUFFERED_BYTES_MAX: Final = 128 << 20
_OPEN_FILES_MAX: Final = 64
_ERROR: Final = "_error"
PARTITIONED_BY: Final = ("day", "partition")

_Bucket = tuple[int, int]
"""The day, counted from 1970, and the partition."""


class Shape(msgspec.Struct, frozen=True):
    """The columns of the rows."""

    decoding: Decoding | None = None
    headers: bool = False

    @property
    def schema(self) -> pa.Schema:
        fields = [
            pa.field("topic", pa.string()),
            pa.field("partition", pa.int32()),
            pa.field("offset", pa.int64()),
            pa.field("timestamp", pa.timestamp("us", tz="UTC")),
            pa.field("key", pa.binary()),
            pa.field("value", pa.binary()),
        ]
        if self.headers:
            fields.append(pa.field("headers", HEADERS_TYPE))
        if self.decoding is not None:
            fields.append(pa.field(_ERROR, pa.string()))
        fields.append(pa.field("day", pa.date32()))
        return pa.schema([*fields, *decoded_columns(fields, self.decoding)])

    @property
    def log_columns(self) -> tuple[str, ...]:
        """The columns of the log that rows are made from."""
        return ("topic", "partition", "offset", "timestamp", "key", "value", *(("headers",) if self.headers else ()))


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The directory, names and format of the files to write."""

    directory: str
    shape: Shape
    file_bytes: int
    nested: bool = True
    """Whether files go into directories `day=…/partition=…`; otherwise all go into one."""
    suffix: str = ".parquet"
    partitioned_by: tuple[str, ...] = PARTITIONED_BY
    """The columns whose values are the same for a whole file, and which the file does not contain."""


class LakeFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is durable, but not part of a table yet."""

    name: str
    """The path below the layout's directory."""
    day: str
    partition: int
    records: int
    bytes: int
    start_offset: int
    end_offset: int

    @property
    def partition_values(self) -> dict[str, str]:
        return {"day": self.day, "partition": str(self.partition)}


def write_files(task: ReadTask, *, settings: Settings, layout: Layout, fail_on_data_loss: bool) -> list[LakeFile]:
    """Write the records of one task, on an executor."""
    rows = Rows(layout.shape)
    files = _Files(layout)
    batches = iterate(
        settings, lambda log: fetch_ranges(log, task.ranges, pin=task.pin, fail_on_data_loss=fail_on_data_loss)
    )
    for located, batch in batches:
        records = to_arrow(batch, layout.shape.log_columns, located.topic.timestamp_type)
        files.add(rows.convert(records), located.tp.partition)
    return files.finish()


class Rows:
    """Converts records of the log to rows of the table."""

    def __init__(self, shape: Shape) -> None:
        self._schema = shape.schema
        self._decode: Decode | None = decoder(shape.decoding) if shape.decoding is not None else None

    def convert(self, records: pa.RecordBatch) -> pa.RecordBatch:
        columns = {name: records.column(name) for name in records.schema.names}
        columns["day"] = pc.floor_temporal(records.column("timestamp"), unit="day").cast(pa.date32())
        arrays = list(columns.values())
        if self._decode is not None:
            decoded, wrong = self._decode(records.column("value"))
            # The raw value stays only if it could not be decoded.
            columns["value"] = pc.if_else(wrong.is_valid(), records.column("value"), pa.scalar(None, pa.binary()))
            columns[_ERROR] = wrong
            own = [columns[name] for name in self._schema.names[: len(columns)]]
            arrays = [*own, *decoded.flatten()]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class _Files:
    """The files of one task. Rows of a day and partition are gathered until they make a row group."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._row_group = min(ROW_GROUP_BYTES, layout.file_bytes)
        self._rows: dict[_Bucket, list[pa.RecordBatch]] = {}
        self._sizes: dict[_Bucket, int] = {}
        self._open: dict[_Bucket, _File] = {}
        self._done: list[LakeFile] = []

    def add(self, rows: pa.RecordBatch, partition: int) -> None:
        days = rows.column("day").cast(pa.int32()).to_numpy()
        for day in np.unique(days).tolist():
            part = rows if days[0] == day and (days == day).all() else rows.filter(pa.array(days == day))
            bucket = day, partition
            self._rows.setdefault(bucket, []).append(part)
            self._sizes[bucket] = self._sizes.get(bucket, 0) + part.nbytes
            if self._sizes[bucket] >= self._row_group:
                self._flush(bucket)
        while sum(self._sizes.values()) > _BUFFERED_BYTES_MAX:
            self._flush(max(self._sizes, key=lambda bucket: self._sizes[bucket]))

    def finish(self) -> list[LakeFile]:
        for bucket in list(self._rows):
            self._flush(bucket)
        for bucket in list(self._open):
            self._close(bucket)
        return self._done

    def _flush(self, bucket: _Bucket) -> None:
        rows = pa.Table.from_batches(self._rows.pop(bucket))
        del self._sizes[bucket]
        file = self._open.pop(bucket, None)
        if file is None:
            if len(self._open) >= _OPEN_FILES_MAX:
                self._close(next(iter(self._open)))
            file = _File(self._layout, bucket)
        self._open[bucket] = file  # at the end of the dict: the file that was not used for longest is closed first
        if file.add(rows) >= self._layout.file_bytes:
            self._close(bucket)

    def _close(self, bucket: _Bucket) -> None:
        self._done.append(self._open.pop(bucket).close())


class _File:
    def __init__(self, layout: Layout, bucket: _Bucket) -> None:
        self._day = str(np.datetime64(bucket[0], "D"))
        self._partition = bucket[1]
        folder = f"day={self._day}/partition={self._partition}/" if layout.nested else ""
        self._name = f"{folder}{uuid4().hex}{layout.suffix}"
        self._path = Path(layout.directory, self._name)
        kept = [field for field in layout.shape.schema if field.name not in layout.partitioned_by]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._path.open("xb")
        except FileNotFoundError as error:
            raise StaleWrite(f"{self._path.parent} was removed: another exporter has committed since") from error
        self._writer = pq.ParquetWriter(self._stream, pa.schema(kept), compression="zstd")
        self._columns = [field.name for field in kept]
        self._records = 0
        self._offsets: list[int] = []

    def add(self, rows: pa.Table) -> int:
        """Write a row group and return the length of the file."""
        self._writer.write_table(rows.select(self._columns), row_group_size=max(1, rows.num_rows))
        self._records += rows.num_rows
        bounds = pc.min_max(rows.column("offset"))
        self._offsets += [bounds["min"].as_py(), bounds["max"].as_py()]
        return self._stream.tell()

    def close(self) -> LakeFile:
        self._writer.close()
        self._stream.flush()
        os.fsync(self._stream.fileno())
        size = self._stream.tell()
        self._stream.close()
        return LakeFile(
            name=self._name,
            day=self._day,
            partition=self._partition,
            records=self._records,
            bytes=size,
            start_offset=min(self._offsets),
            end_offset=max(self._offsets),
        )


def sync_parents(root: Path, files: Sequence[LakeFile]) -> None:
    """Make the names of nested files durable, up to `root`."""
    parents = {parent for file in files for parent in Path(file.name).parents}
    for parent in parents:
        sync_directory(root / parent)
