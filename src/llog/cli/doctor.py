"""`llog doctor`: checks that the stores behave as llog needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

import click

from llog.cli.common import Invocation, json_option, print_json, print_table, with_log
from llog.errors import BlobExists, BlobNotFound, LlogError, VersionMismatch
from llog.runtime import uuid7

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.log.log import Log
    from llog.stores.blobs import BlobStore
    from llog.stores.meta import MetaStore

SCRATCH = "llog-doctor/"
"""A prefix outside of the log's own names. Everything below it is removed at the end."""
_RIVALS = 8
_SWAPS = 5


class Finding(NamedTuple):
    store: str
    check: str
    ok: bool
    detail: str
    warning: bool = False
    """Whether the check passed, but the store could promise more."""


class _WrongAnswer(Exception):
    """A store answered, but not as it must."""


@click.command(short_help="Check that both stores behave as llog needs.")
@json_option
@click.pass_obj
def doctor(invocation: Invocation, as_json: bool) -> None:
    """Open both stores and try out what llog relies on, with scratch keys and blobs that are removed again.

    Not every store that claims to be compatible is: a blob store that ignores the conditions of a put, or a file system
    without real locks, would lose records. A warning is about a store that does what llog needs, but could promise more
    with other settings. Exit code 1 if a check fails.
    """

    async def examine_stores(log: Log, settings: Settings) -> tuple[Settings, list[Finding]]:
        return settings, await examine(log)

    settings, findings = with_log(invocation, examine_stores, create=True)
    if as_json:
        print_json(
            {"meta": settings.meta, "blobs": settings.blobs, "checks": [finding._asdict() for finding in findings]}
        )
    else:
        click.echo(f"metadata store {settings.meta}\nblob store     {settings.blobs}\n")
        rows = [[each.store, each.check, _result(each), each.detail] for each in findings]
        print_table(["STORE", "CHECK", "RESULT", "DETAIL"], rows)
    if not all(finding.ok for finding in findings):
        click.get_current_context().exit(1)


def _result(finding: Finding) -> str:
    if not finding.ok:
        return "FAILED"
    return "WARNING" if finding.warning else "ok"


async def examine(log: Log) -> list[Finding]:
    """Run every check, one after the other, and return their findings; a failed check stops none of the others."""
    scratch = SCRATCH + uuid7(log.runtime.now_ms(), log.runtime.random())
    checks: list[tuple[str, str, Callable[[], Awaitable[str]]]] = [
        ("meta", "read back what was put", lambda: _meta_read_back(log.meta, f"{scratch}/read")),
        ("meta", "compare and swap", lambda: _meta_swap(log.meta, f"{scratch}/swap")),
        ("meta", "one create wins under contention", lambda: _meta_contention(log.meta, f"{scratch}/race")),
        ("meta", "floor, ceiling and range", lambda: _meta_order(log.meta, f"{scratch}/order/")),
        ("meta", "ordered conditional puts in one call", lambda: _meta_put_many(log.meta, f"{scratch}/many/")),
        ("meta", "watch wakes on a change", lambda: _meta_watch(log.meta, f"{scratch}/watch/")),
        ("blobs", "read back what was put", lambda: _blobs_read_back(log.blobs, f"{scratch}/read")),
        ("blobs", "a second create is refused", lambda: _blobs_create(log.blobs, f"{scratch}/create")),
        ("blobs", "one create wins under contention", lambda: _blobs_contention(log.blobs, f"{scratch}/race")),
        ("blobs", "ranged reads", lambda: _blobs_ranges(log.blobs, f"{scratch}/range")),
        ("blobs", "list right after put", lambda: _blobs_list(log.blobs, f"{scratch}/list/")),
        ("blobs", "delete", lambda: _blobs_delete(log.blobs, f"{scratch}/delete")),
        ("blobs", "its clock is near ours", lambda: _blobs_clock(log, f"{scratch}/clock")),
    ]
    findings = []
    try:
        for store, name, check in checks:
            try:
                findings.append(Finding(store, name, True, await check()))
            except (_WrongAnswer, LlogError) as error:
                findings.append(Finding(store, name, False, f"{error}"))
        findings += await _diagnose_server(log)
    finally:
        await _clean_up(log, scratch + "/")
    return findings


async def _diagnose_server(log: Log) -> list[Finding]:
    """Return what the metadata store reports about its server."""
    from llog.stores.diagnosis import diagnose

    try:
        found = await diagnose(log.meta, log.runtime.now_ms)
    except LlogError as error:
        return [Finding("meta", "its server", False, f"{error}")]
    return [
        Finding("meta", each.check, each.verdict != "failed", each.detail, each.verdict == "warning") for each in found
    ]


async def _clean_up(log: Log, prefix: str) -> None:
    from llog.stores.meta import prefix_end

    try:
        await log.meta.delete_range(prefix, prefix_end(prefix))
        async for page in log.blobs.list(prefix):
            await log.blobs.delete_many([blob.name for blob in page])
    except LlogError:
        pass  # the checks have reported what is wrong


async def _meta_read_back(meta: MetaStore, key: str) -> str:
    version = await meta.put(key, b"value")
    found = await meta.get(key)
    _expect(found is not None and found.value == b"value" and found.version == version, "another value came back")
    return ""


async def _meta_swap(meta: MetaStore, key: str) -> str:
    old = latest = await meta.put(key, b"1")
    times = []
    for _ in range(_SWAPS):
        started = time.perf_counter()
        latest = await meta.put(key, b"2", expected=latest)
        times.append(time.perf_counter() - started)
    try:
        await meta.put(key, b"3", expected=old)
    except VersionMismatch:
        return f"{sorted(times)[_SWAPS // 2] * 1000:.1f} ms"
    raise _WrongAnswer("a put with an old version was accepted: appends would overwrite one another")


async def _meta_contention(meta: MetaStore, key: str) -> str:
    from llog.stores.meta import ABSENT

    async def create(rival: int) -> bool:
        try:
            await meta.put(key, str(rival).encode(), expected=ABSENT)
        except VersionMismatch:
            return False
        return True

    won = [rival for rival, created in enumerate(await asyncio.gather(*map(create, range(_RIVALS)))) if created]
    found = await meta.get(key)
    _expect(len(won) == 1, f"{len(won)} of {_RIVALS} rivals created the same key")
    _expect(found is not None and found.value == str(won[0]).encode(), "the stored value is not the winner's")
    return f"{_RIVALS} rivals"


async def _meta_order(meta: MetaStore, prefix: str) -> str:
    from llog.stores.meta import prefix_end

    keys = [f"{prefix}{number:020}" for number in (5, 10, 200)]
    for key in keys:
        await meta.put(key, b"")
    floor, ceiling = await meta.floor(f"{prefix}{9:020}"), await meta.ceiling(f"{prefix}{11:020}")
    _expect(floor is not None and floor.key == keys[0], "floor found another key")
    _expect(ceiling is not None and ceiling.key == keys[2], "ceiling found another key")
    _expect(await meta.keys(prefix, prefix_end(prefix), 10) == keys, "the range is not in order, or not complete")
    return ""


async def _meta_put_many(meta: MetaStore, prefix: str) -> str:
    from llog.stores.meta import ABSENT, Put

    first, second, third = await meta.put_many(
        [Put(prefix + "a", b"1", ABSENT), Put(prefix + "a", b"2", ABSENT), Put(prefix + "b", b"3", ABSENT)]
    )
    _expect(isinstance(second, VersionMismatch), "a put that did not match was accepted")
    _expect(isinstance(first, int) and isinstance(third, int), "a put that matched was refused")
    return ""


async def _meta_watch(meta: MetaStore, prefix: str) -> str:
    changes = meta.watch(prefix)
    await anext(changes)
    await meta.put(prefix + "key", b"")
    try:
        async with asyncio.timeout(10):
            await anext(changes)
    except TimeoutError:
        raise _WrongAnswer("a change was not reported within 10 s: followers would hang") from None
    return ""


async def _blobs_read_back(blobs: BlobStore, name: str) -> str:
    await blobs.put(name, [b"one ", b"two"])
    _expect(bytes(await blobs.get(name)) == b"one two", "other bytes came back")
    return ""


async def _blobs_create(blobs: BlobStore, name: str) -> str:
    await blobs.put(name, [b"first"])
    try:
        await blobs.put(name, [b"second"])
    except BlobExists:
        return ""
    raise _WrongAnswer("a blob was replaced: this store ignores If-None-Match")


async def _blobs_contention(blobs: BlobStore, name: str) -> str:
    async def create(rival: int) -> bool:
        try:
            await blobs.put(name, [str(rival).encode()])
        except BlobExists:
            return False
        return True

    won = [rival for rival, created in enumerate(await asyncio.gather(*map(create, range(_RIVALS)))) if created]
    _expect(len(won) == 1, f"{len(won)} of {_RIVALS} rivals created the same blob")
    _expect(bytes(await blobs.get(name)) == str(won[0]).encode(), "the stored bytes are not the winner's")
    return f"{_RIVALS} rivals"


async def _blobs_ranges(blobs: BlobStore, name: str) -> str:
    data = bytes(range(256)) * 16
    await blobs.put(name, [data])
    _expect(bytes(await blobs.get_range(name, 100, 300)) == data[100:400], "a range gave other bytes")
    ranges = await blobs.get_ranges(name, [(0, 10), (4000, 96)])
    _expect([bytes(each) for each in ranges] == [data[:10], data[4000:]], "several ranges gave other bytes")
    return ""


async def _blobs_list(blobs: BlobStore, prefix: str) -> str:
    names = [f"{prefix}{number}" for number in range(3)]
    for name in names:
        await blobs.put(name, [b"x"])
    listed = [blob.name async for page in blobs.list(prefix) for blob in page]
    _expect(listed == names, f"{len(listed)} of {len(names)} blobs were listed, or in another order")
    return ""


async def _blobs_delete(blobs: BlobStore, name: str) -> str:
    await blobs.put(name, [b"x"])
    await blobs.delete_many([name])
    _expect(await blobs.head(name) is None, "a deleted blob is still there")
    try:
        await blobs.get(name)
    except BlobNotFound:
        return ""
    raise _WrongAnswer("a deleted blob can still be read")


async def _blobs_clock(log: Log, name: str) -> str:
    from llog.stores.diagnosis import SKEW_MS_MAX

    await log.blobs.put(name, [b"x"])
    found = await log.blobs.head(name)
    _expect(found is not None, "a blob that was put is not there")
    assert found is not None
    skew = found.modified_ms - log.runtime.now_ms()
    _expect(abs(skew) <= SKEW_MS_MAX, f"{skew / 1000:.0f} s apart: raise LLOG_COLLECT_GRACE_MS, or set the clock")
    return f"{skew / 1000:+.1f} s"


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _WrongAnswer(otherwise)
