"""Durable local puts: 8 MiB through `FileBlobStore`, against a bare write and fsync."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from llog.stores.files.blobs import FileBlobStore

SIZE = 8 * 1024 * 1024
PARTS = 64


def bare(path: Path, content: bytes) -> float:
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - start


async def put(store: FileBlobStore, name: str, parts: list[memoryview]) -> float:
    start = time.perf_counter()
    await store.put(name, parts)
    return time.perf_counter() - start


async def measure(directory: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each, measured in turns, so that a disk whose speed changes favours neither."""
    content = os.urandom(SIZE)
    step = SIZE // PARTS
    parts = [memoryview(content)[start : start + step] for start in range(0, SIZE, step)]
    store = FileBlobStore(directory / "store")
    await store.put("warm", parts)
    bare_s, put_s = [], []
    for number in range(rounds):
        bare_s.append(bare(directory / f"bare-{number}", content))
        put_s.append(await put(store, f"blob-{number}", parts))
        (directory / f"bare-{number}").unlink()
        await store.delete_many([f"blob-{number}"])
    await store.close()
    return bare_s, put_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--directory", type=Path, default=None, help="a directory on the disk to measure; default: temporary files"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        bare_s, put_s = asyncio.run(measure(Path(directory), arguments.rounds))
    bare_median, put_median = statistics.median(bare_s), statistics.median(put_s)
    print(f"bare write + fsync   median {bare_median * 1000:7.2f} ms   {SIZE / bare_median / 2**20:7.0f} MiB/s")
    print(f"durable blob put     median {put_median * 1000:7.2f} ms   {SIZE / put_median / 2**20:7.0f} MiB/s")
    print(f"ratio (time, put / bare)   {put_median / bare_median:.2f}")


if __name__ == "__main__":
    main()
