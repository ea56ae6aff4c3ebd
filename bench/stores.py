"""What the embedded metadata store costs beside bare SQLite on the same disk: `python -m bench.stores`.

Only the ratios carry over to another machine: the rates follow the disk's fsync.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llog.stores.meta import Put, scan
from llog.stores.meta_sqlite import SqliteMetaStore

CALLERS = 64
ALONE_PUTS = 500
PUTS_PER_CALLER = 100
LOOKUPS = 5_000
VALUE = bytes(100)


def bare(path: Path, rows: int, transactions: int) -> float:
    """Conditional updates per second of plain SQLite, so many to a durable transaction."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB, version INTEGER) WITHOUT ROWID")
    connection.executemany("INSERT INTO entries VALUES (?, ?, 0)", ((f"k/{row:05}", VALUE) for row in range(rows)))
    started = time.perf_counter()
    for version in range(transactions):
        connection.execute("BEGIN IMMEDIATE")
        for row in range(rows):
            connection.execute(
                "UPDATE entries SET value = ?, version = ? WHERE key = ? AND version = ?",
                (VALUE, version + 1, f"k/{row:05}", version),
            )
        connection.execute("COMMIT")
    rate = rows * transactions / (time.perf_counter() - started)
    connection.close()
    return rate


async def conditional_puts(store: SqliteMetaStore, callers: int, puts: int) -> tuple[float, float]:
    """Durable conditional puts per second, and commits per put."""

    async def call(caller: int) -> None:
        version = await store.put(f"k/{caller:05}", VALUE)
        for _ in range(puts):
            version = await store.put(f"k/{caller:05}", VALUE, expected=version)

    commits, started = store.commits, time.perf_counter()
    await asyncio.gather(*(call(caller) for caller in range(callers)))
    total = callers * (puts + 1)
    return total / (time.perf_counter() - started), (store.commits - commits) / total


async def lookup_us(call: Callable[[str], Awaitable[object]], keys: int) -> float:
    started = time.perf_counter()
    for lookup in range(LOOKUPS):
        await call(f"i/{lookup * 7919 % keys:020}")
    return (time.perf_counter() - started) / LOOKUPS * 1e6


async def fill(store: SqliteMetaStore, keys: int) -> None:
    for at in range(0, keys, 20_000):
        await store.put_many([Put(f"i/{key:020}", VALUE) for key in range(at, min(keys, at + 20_000))])


async def run(directory: Path) -> Table:
    table = Table("measure", "value", "ratio")

    store = SqliteMetaStore.open(directory / "cas.db")
    alone_bare = bare(directory / "bare-1.db", 1, ALONE_PUTS)
    alone, _ = await conditional_puts(store, 1, ALONE_PUTS)
    many_bare = bare(directory / "bare-64.db", CALLERS, PUTS_PER_CALLER)
    many, commits = await conditional_puts(store, CALLERS, PUTS_PER_CALLER)
    await store.close()
    table.add_row("bare SQLite, 1 row a transaction", f"{alone_bare:,.0f} puts/s", "")
    table.add_row("durable conditional puts, 1 caller", f"{alone:,.0f} puts/s", f"{alone / alone_bare:.2f} of bare")
    table.add_row(f"bare SQLite, {CALLERS} rows a transaction", f"{many_bare:,.0f} puts/s", "")
    table.add_row(
        f"durable conditional puts, {CALLERS} callers",
        f"{many:,.0f} puts/s",
        f"{many / many_bare:.2f} of bare, {many / alone:.1f} of 1 caller",
    )
    table.add_row(f"commits a put, {CALLERS} callers", f"{commits:.4f}", f"1 in {1 / commits:.0f}")

    ceilings: list[float] = []
    for keys in (1_000, 1_000_000):
        store = SqliteMetaStore.open(directory / f"index-{keys}.db")
        started = time.perf_counter()
        await fill(store, keys)
        table.add_row(f"put_many, {keys:,} keys", f"{keys / (time.perf_counter() - started):,.0f} puts/s", "")
        ceilings.append(await lookup_us(store.ceiling, keys))
        ratio = f"{ceilings[-1] / ceilings[0]:.2f} of 1,000 keys" if len(ceilings) > 1 else ""
        table.add_row(f"ceiling, {keys:,} keys", f"{ceilings[-1]:.1f} µs", ratio)
        get = await lookup_us(store.get, keys)
        table.add_row(f"get, {keys:,} keys", f"{get:.1f} µs", f"{get / ceilings[-1]:.2f} of ceiling")
        started = time.perf_counter()
        count = sum([1 async for _ in scan(store, "i/")])
        assert count == keys
        table.add_row(f"scan, {keys:,} keys", f"{time.perf_counter() - started:.3f} s", "")
        await store.close()
    return table


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="llog-bench-") as directory:
        Console().print(asyncio.run(run(Path(directory))))


if __name__ == "__main__":
    main()
