"""A plain directory of Parquet files, `day=…/partition=…/….parquet`, that any tool reads with a glob.

The directory `_llog/` holds manifests `{n:020}.json`, each put once and never changed, which name the files that they
add and the position after them; and `staging-{n:020}-…/`, where the files of a future commit are written under names
that no glob for Parquet matches. The manifest is the commit; its files are moved to their places after it, if necessary
by the next process that opens the table. Once a manifest exists, its staging directories hold only files that lost the
race, and are removed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec

from llog.base.durable import sync_directory
from llog.errors import BlobExists, ConfigurationError, InconsistentReadState, StaleWrite
from llog.spark.jobs.lake.files import LakeFile, Layout, Shape
from llog.spark.jobs.lake.topic_table import TablePosition
from llog.stores.files.blobs import FileBlobStore

_STAGED: Final = ".staged"
_STAGING: Final = "staging-"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int = 1
    position: TablePosition
    columns: str
    staging: str
    files: list[LakeFile]


class ParquetTable:
    def __init__(self, root: Path, shape: Shape, file_bytes: int) -> None:
        self._root = root
        self._state = root / "_llog"
        self._shape = shape
        self._columns = "\n".join(f"{field.name} {field.type}" for field in shape.schema)
        self._file_bytes = file_bytes
        self._number = -1
        self._staging = ""

    def position(self) -> TablePosition | None:
        names = sorted(path.name for path in self._state.glob("[0-9]*.json"))
        if not names:
            self._number = -1
            return None
        self._number = int(names[-1].removesuffix(".json"))
        manifest = self._manifest(names[-1])
        if manifest.columns != self._columns:
            raise ConfigurationError(
                f"{self._root} has the columns ({', '.join(manifest.columns.splitlines())}), not "
                f"({', '.join(self._columns.splitlines())}): export to another directory, or with the options it "
                "was begun with"
            )
        self._publish(manifest)
        self._clean()
        return manifest.position

    def begin(self) -> Layout:
        self._staging = f"{_STAGING}{self._number + 1:020}-{uuid4().hex}"
        return Layout(
            directory=str(self._state / self._staging),
            shape=self._shape,
            file_bytes=self._file_bytes,
            nested=False,
            suffix=_STAGED,
            partitioned_by=(),  # so that readers that ignore the directories' names have the columns, too
        )

    def commit(self, position: TablePosition, files: Sequence[LakeFile]) -> None:
        manifest = Manifest(position=position, columns=self._columns, staging=self._staging, files=list(files))
        try:
            sync_directory(self._state / self._staging)
            asyncio.run(self._put(f"{self._number + 1:020}.json", msgspec.json.encode(manifest)))
        except (BlobExists, FileNotFoundError) as error:
            shutil.rmtree(self._state / self._staging, ignore_errors=True)
            raise StaleWrite(f"another exporter has committed to {self._root} since: this one stops") from error
        self._number += 1
        self._publish(manifest)
        self._clean()

    def _publish(self, manifest: Manifest) -> None:
        """Move the files of a committed manifest to where readers find them. Several processes may do so at once."""
        directories = {self._root}
        for file in manifest.files:
            staged = self._state / manifest.staging / file.name
            final = self._root / f"day={file.day}" / f"partition={file.partition}" / f"{staged.stem}.parquet"
            if staged.exists():
                final.parent.mkdir(parents=True, exist_ok=True)
                try:
                    staged.rename(final)
                except FileNotFoundError:
                    continue  # another process has just moved it
                directories |= {final.parent, final.parent.parent}
        for directory in directories:
            sync_directory(directory)

    def _clean(self) -> None:
        """Remove the staging directories of past commits. Those of future commits may be in use by another exporter."""
        for path in self._state.glob(f"{_STAGING}*"):
            if int(path.name.split("-")[1]) <= self._number:
                shutil.rmtree(path, ignore_errors=True)

    def _manifest(self, name: str) -> Manifest:
        try:
            return msgspec.json.decode((self._state / name).read_bytes(), type=Manifest)
        except msgspec.DecodeError as error:
            raise InconsistentReadState(f"{self._state / name} is not a manifest: {error}") from error

    async def _put(self, name: str, data: bytes) -> None:
        blobs = FileBlobStore(self._state)
        try:
            await blobs.put(name, [data])
        finally:
            await blobs.close()
